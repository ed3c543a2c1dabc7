"""What the doctor says of a made-up cluster, and of this machine."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from meshtrain import doctor
from meshtrain.cli import main
from meshtrain.mesh import make_mesh

HEALTHY: dict[str, Any] = {
    "task": 0, "visible": 8, "used": 8, "device": "NVIDIA H100", "coordinator": "10.0.0.1", "proxies": {}, "clock": 1e9,
    "versions": {"jax": "0.10.2", "python": "3.11"}, "write": 1e9, "write_error": "", "shared": True,
}  # fmt: skip


def report(process: int, **changes: Any) -> dict[str, Any]:
    host = f"gpu{process}"
    return HEALTHY | {"process": process, "host": host, "node": host, "addresses": [f"10.0.0.{process}"]} | changes


def test_nothing_is_wrong_with_a_healthy_cluster() -> None:
    assert doctor.find_problems([report(i) for i in range(4)]) == []


@pytest.mark.parametrize(
    ("changes", "who", "what"),
    [
        ({"write_error": "/runs: Read-only", "write": 0.0}, "process 2 (gpu2)", "cannot be written: /runs: Read-only"),
        ({"shared": False}, "process 2 (gpu2)", "the run directory is not the one of process 0"),
        ({"write": 7e6}, "process 2 (gpu2)", "it writes 7 MB/s to the run directory"),
        ({"clock": 1e9 - 8}, "process 2 (gpu2)", "the clock is -8.0 s from process 0's"),
        ({"used": 4, "visible": 4}, "process 2 (gpu2)", "4 devices are used, and 8 elsewhere"),
        ({"used": 4}, "process 2 (gpu2)", "4 of the 8 visible GPUs are used"),
        ({"device": "NVIDIA A100"}, "", "devices of several kinds: NVIDIA A100, NVIDIA H100"),
        ({"device": "cpu", "used": 8}, "process 2 (gpu2)", "8 GPUs are visible, and jax runs on the CPU"),
        ({"versions": {"jax": "0.12", "python": "3.11"}}, "process 2 (gpu2)", "jax 0.12, and 0.10.2 in process 0"),
        ({"addresses": ["127.0.1.1"]}, "process 2 (gpu2)", "the host's own name resolves to 127.0.1.1"),
    ],
)  # fmt: skip
def test_each_problem_is_found_with_who_has_it_and_a_cure(changes: dict[str, Any], who: str, what: str) -> None:
    problems = doctor.find_problems([report(0), report(1), report(2, **changes), report(3)])
    assert any(problem.who == who and what in problem.what and problem.cure for problem in problems), problems


def test_many_processes_with_one_problem_are_one_problem() -> None:
    (problem,) = doctor.find_problems([report(0), *(report(i, shared=False) for i in range(1, 20))])
    assert problem.who == "process 1, 2, 3, 4, 5, 6, 7, 8, ... (gpu1, gpu10, gpu11, gpu12, ...)"


def test_processes_of_one_host_share_its_gpus() -> None:
    shared = [report(i, host="gpu0", node="gpu0", used=4) for i in range(2)]
    assert doctor.find_problems(shared) == []
    (problem,) = doctor.find_problems([report(i, host="gpu0", node="gpu0", used=1) for i in range(2)])
    assert problem.what == "2 of the 8 visible GPUs are used"


def test_a_directory_is_written_and_left_as_it_was(tmp_path: Path) -> None:
    with doctor.mark(tmp_path, "token", make=True):
        seen = doctor.look_at_directory(tmp_path, "token")
    assert seen["write"] > 0 and not seen["write_error"] and seen["shared"]
    assert list(tmp_path.iterdir()) == []
    assert not doctor.look_at_directory(tmp_path, "token")["shared"]


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    seen = doctor.look_at_directory(tmp_path / "file" / "runs", "token")
    assert seen["write"] == 0.0 and "Not a directory" in seen["write_error"]


def test_the_timed_all_reduce_counts_as_nccl_does() -> None:
    data, model = doctor.time_axes(make_mesh(2, 4))
    assert (data.axis, data.size, model.axis, model.size) == ("data", 2, "model", 4)
    assert data.bus_bandwidth == pytest.approx(doctor.CPU_BYTES / data.seconds)
    assert model.bus_bandwidth == pytest.approx(1.5 * doctor.CPU_BYTES / model.seconds)
    assert doctor.time_axes(make_mesh(8, 1))[0].axis == "data"


class Device:
    """Of a made-up process."""

    def __init__(self, process_index: int) -> None:
        self.process_index = process_index


def made_up(owners: list[list[int]]) -> Any:
    mesh = make_mesh(2, 4)
    devices = np.array([[Device(owner) for owner in row] for row in owners], dtype=object)
    return type("Mesh", (), {"devices": devices, "axis_names": mesh.axis_names, "shape": mesh.shape})()


def test_where_each_process_lies_in_the_mesh() -> None:
    assert doctor.positions(made_up([[0, 0, 1, 1], [2, 2, 2, 2]])) == {
        0: "data 0, model 0-1",
        1: "data 0, model 2-3",
        2: "data 1, model 0-3",
    }


def test_a_model_axis_over_several_hosts_is_a_problem() -> None:
    mesh = made_up([[0, 0, 1, 1], [2, 2, 2, 2]])
    assert doctor.mesh_problems(mesh, ["a", "a", "b"]) == []
    (problem,) = doctor.mesh_problems(mesh, ["a", "b", "c"])
    assert problem.what == "the model axis of 4 devices spans 2 hosts"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", f"run.dir={tmp_path}", "mesh.model=2"]) == 0
    out = capsys.readouterr().out
    assert "data=4 x model=2" in out and "all-reduce" in out and "nothing is wrong" in out
    assert f"jax {jax.__version__}" in out


def test_the_command_with_a_mesh_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "-", f"run.dir={tmp_path}", "mesh.model=3"]) == 1
    out = capsys.readouterr().out
    assert "a mesh of model=3 cannot be made of 8 devices" in out and "1 problem" in out


def test_gpus_that_are_asked_for_and_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["doctor", "-", f"run.dir={tmp_path}", "launch.platform=gpu"]) == 1
    assert "shows this process 0 GPUs" in capsys.readouterr().out
