"""Starting: devices per process, what must be equal, what is refused before jax starts."""

from pathlib import Path
from typing import Any

import pytest

from meshtrain.config import Config, load
from meshtrain.distributed.place import Place
from meshtrain.distributed.start import check_devices, common_facts, num_virtual_devices, start
from meshtrain.errors import LaunchError, MeshError
from meshtrain.trainer import train
from tests.distributed.several import SMALL, launch, losses


def place(num: int = 1, source: str = "flags") -> Place:
    return Place(0, num, 0, num, ("here",) * num, "here", 1, "job", source, "")


def config(*overrides: str) -> Config:
    return load(None, overrides)


@pytest.mark.parametrize(
    ("devices", "num", "own", "expected"),
    [(0, 1, "", 0), (8, 1, "", 8), (8, 4, "", 2), (0, 4, "2", 2), (8, 4, "2", 2), (0, 4, "", 0)],
)
def test_virtual_devices_are_shared_out(devices: int, num: int, own: str, expected: int) -> None:
    env = {"MESHTRAIN_DEVICES": own} if own else {}
    assert num_virtual_devices(config(f"devices={devices}"), place(num), env) == expected


@pytest.mark.parametrize(
    ("devices", "num", "own", "text"),
    [
        (8, 3, "", "devices=8 virtual devices cannot be shared out equally to 3 processes"),
        (8, 4, "4", "devices=8 gives each of 4 processes 2, and MESHTRAIN_DEVICES=4: leave one of the two out"),
        (0, 4, "two", "MESHTRAIN_DEVICES=two must be a number of virtual CPU devices"),
    ],
)
def test_virtual_devices_that_do_not_fit(devices: int, num: int, own: str, text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        num_virtual_devices(config(f"devices={devices}"), place(num), {"MESHTRAIN_DEVICES": own} if own else {})


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "num", "source", "text"),
    [
        (["launch.platform=gpu"], 4, 1, "flags", r"sees 4 GPUs, and jax runs on the CPU.*launch.platform=cpu"),
        ([], 4, 2, "SLURM", "sees 4 GPUs, and jax runs on the CPU"),
        (["launch.devices_per_process=2"], 0, 1, "flags", r"has 8 devices \(cpu\), and launch.devices_per_process=2"),
    ],
)
def test_other_devices_than_expected_are_refused(
    overrides: list[str], num_gpus: int, num: int, source: str, text: str
) -> None:
    with pytest.raises(LaunchError, match=text):
        check_devices(config(*overrides), place(num, source), num_gpus)


def test_gpus_that_jax_does_not_use_are_a_warning_on_a_laptop() -> None:
    (warning,) = check_devices(config(), place(), 1)
    assert "sees 1 GPUs, and jax runs on the CPU: pip install 'meshtrain[cuda13]'" in warning
    assert check_devices(config("launch.devices_per_process=8"), place(), 0) == []


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, r"launch.platform=gpu, and host .* shows this process 0 GPUs"),
        ({"JAX_PLATFORMS": "cpu"}, "launch.platform=gpu, and JAX_PLATFORMS=cpu keeps jax from them"),
    ],
)
def test_gpus_that_are_asked_for_and_not_there(env: dict[str, str], text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        start(config("launch.platform=gpu"), environment=dict(env))


def test_more_tasks_than_gpus_are_refused_before_anything_starts() -> None:
    env = {"MESHTRAIN_COORDINATOR": "localhost:1", "MESHTRAIN_NUM_PROCESSES": "8", "MESHTRAIN_PROCESS_ID": "6",
           "MESHTRAIN_LOCAL_ID": "6", "MESHTRAIN_NUM_LOCAL": "8", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}  # fmt: skip
    with pytest.raises(LaunchError, match="8 tasks on host localhost, and 4 visible GPUs"):
        start(config(), environment=env)


def test_gpu_processes_get_the_flags_that_hide_communication() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "0", "XLA_FLAGS": "--xla_dump_to=x"}
    start(config(), environment=env)
    assert env["XLA_FLAGS"] == "--xla_dump_to=x --xla_gpu_enable_latency_hiding_scheduler=true"
    mine = "--xla_gpu_enable_latency_hiding_scheduler=false"
    env = {"CUDA_VISIBLE_DEVICES": "0", "XLA_FLAGS": mine}
    start(config(), environment=env)
    assert env["XLA_FLAGS"] == mine  # the user's own wins


def test_what_must_be_equal_names_versions_config_and_directory(tmp_path: Path) -> None:
    facts = common_facts(config(f"run.dir={tmp_path}", "optim.lr=0.25"))
    assert facts["optim.lr"] == 0.25 and facts["run directory"] == str(tmp_path / "run")
    assert {"meshtrain", "jax", "jaxlib", "flax", "optax", "python", "train.steps", "mesh.model"} <= facts.keys()


def test_one_process_is_a_world_of_one() -> None:
    with start(config(), environment={}) as world:
        world.agree("anything", {"a": 1})
        assert world.gather("facts", {"a": 1}) == [{"a": 1}]
        with world.limit("short", 5.0):
            pass
        assert world.is_main and world.may_step(0)
        world.flag.signum = 15
        assert not world.may_step(1)
        assert "one process" in world.describe()


@pytest.mark.slow
@pytest.mark.parametrize("num", [2, 4])
def test_several_processes_train_as_one_does(tmp_path: Path, num: int) -> None:
    layout: list[Any] = ["mesh.model=2", "zero.stage=3"]
    ended = launch(tmp_path / "several", *layout, num=num, devices=8 // num)
    assert ended.code == 0, ended.err
    train(load(None, [*SMALL, *layout, f"run.dir={tmp_path}/one", "log.progress=none"]))
    assert losses(tmp_path / "several") == pytest.approx(losses(tmp_path / "one"), rel=1e-6, abs=0)
    logs = sorted(path.name for path in (tmp_path / "several/run/logs").iterdir())
    assert logs == [f"process-{i}.log" for i in range(num)]
    assert all("step 6/6" in path.read_text() for path in (tmp_path / "several/run/logs").iterdir())


def test_a_mesh_that_does_not_fit_is_refused_as_before(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="mesh of model=3"):
        train(config(f"run.dir={tmp_path}", "mesh.model=3"))
