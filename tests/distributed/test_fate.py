"""What becomes of a job when something happens to one of its processes: real processes, each with a fault in one."""

import re
from pathlib import Path

import pytest

from tests.distributed.several import Ended, launch

pytestmark = pytest.mark.slow

LIMITS = ["launch.heartbeat=5", "launch.join=60"]


def reads(ended: Ended, *texts: str) -> None:
    """All texts stand in the last words of the launch, and nobody had to be killed but the culprit."""
    for text in texts:
        assert re.search(text, ended.err), f"no {text!r} in:\n{ended.err}\n{ended.out}"


@pytest.mark.parametrize(
    ("fault", "overrides", "code", "texts"),
    [
        ("divide", [], 1, [r"process 1 ended with exit code 1\n(.*\n)*Traceback", "ZeroDivisionError: a mistake"]),
        ("exhaust_memory", [], 2, ["error: out of memory: RESOURCE_EXHAUSTED", "meshtrain plan"]),
        ("kill", [], 137, ["process 1 was killed by SIGKILL"]),
        ("stop", [], 76, [r"process 1 \(host .*\) has been silent for \d+ s \(launch.heartbeat\), while in '"]),
        ("hang", ["launch.update=4"], 76,
         [r"'update 4' took more than its limit of 4 s; process 1 \(.*has been in 'own work' for"]),
        ("skip_evaluation", ["train.eval_every=3", "launch.update=20", "launch.compile=8"], 76,
         [r"'evaluation at 3' took more than its limit of 8 s; process 1 \(.* has been in 'update 4'"]),
        ("sleep_in_save", ["checkpoint.every=3", "launch.save=6"], 76, ["'save of 3' took more than its limit of 6 s"]),
        ("other_config", [], 2, [r"process 1 \(.*\) has optim.lr=0.5, and process 0 has optim.lr=0.001"]),
        ("come_late", ["launch.join=3"], 76,
         [r"1 of 2 processes did not come within 3 s \(launch.join\): process 1 \(host"]),
        ("other_number", ["launch.join=20"], 2,
         [r"two processes claim the number 0: pid \d+ on host .* and pid \d+ on host"]),
    ],
)  # fmt: skip
def test_a_fault_in_one_ends_all(tmp_path: Path, fault: str, overrides: list[str], code: int, texts: list[str]) -> None:
    ended = launch(tmp_path, *LIMITS, *overrides, fault=fault)
    reads(ended, *texts)
    assert ended.code == code


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_fault_in_process_0_too(tmp_path: Path, culprit: int) -> None:
    ended = launch(tmp_path, *LIMITS, fault="divide", culprit=culprit)
    reads(ended, rf"process {culprit} ended with exit code 1\n(.*\n)*Traceback", "ZeroDivisionError: a mistake in one")
    assert ended.code == 1


@pytest.mark.parametrize("fault", ["leave_late", "come_late"])
def test_seconds_apart_is_fine(tmp_path: Path, fault: str) -> None:
    ended = launch(tmp_path, *LIMITS, fault=fault)
    assert ended.code == 0, ended.err
    assert "run complete" in ended.out


def test_a_proxy_is_gone_around(tmp_path: Path) -> None:
    """gRPC would send what goes to localhost to a proxy too, here one where nobody listens."""
    ended = launch(tmp_path, *LIMITS, "train.steps=2", variables={"http_proxy": "http://127.0.0.1:9", "no_proxy": ""})
    assert ended.code == 0, ended.err
    assert "warning: http_proxy=http://127.0.0.1:9 is set: reaching" in ended.out


def test_a_signal_to_one_stops_all_with_a_checkpoint(tmp_path: Path) -> None:
    ended = launch(tmp_path, *LIMITS, "train.steps=500", fault="terminate")
    assert ended.code == 75, ended.err
    step = int(re.search(r"stopped at update (\d+) of 500", ended.out)[1])
    assert 3 <= step < 400
    assert (tmp_path / "run" / "checkpoints" / str(step)).is_dir()
