"""`meshtrain launch`: one log, the first failure last and whole, and nothing left running. With small programs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshtrain.cli import main
from meshtrain.errors import LaunchError
from meshtrain.launch import local
from meshtrain.launch.local import Launch, environments

ID = "import os, sys, time, signal; id = int(os.environ['MESHTRAIN_PROCESS_ID'])\n"


def launch(program: str, num: int = 3) -> int:
    return Launch([sys.executable, "-c", ID + program], num, environments(num)).run()


def test_each_process_knows_its_place(capfd: pytest.CaptureFixture[str]) -> None:
    names = ["PROCESS_ID", "NUM_PROCESSES", "LOCAL_ID", "NUM_LOCAL", "DEVICES"]
    program = f"print(*(os.environ.get('MESHTRAIN_' + name) for name in {names}))"
    code = Launch([sys.executable, "-c", ID + program], 3, environments(3, devices=2)).run()
    assert code == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [f"[{i}] {i} 3 {i} 3 2" for i in range(3)]


def test_the_processes_of_one_launch_meet_in_one_place() -> None:
    first, second = environments(2), environments(2)
    assert first[0]["MESHTRAIN_COORDINATOR"] == first[1]["MESHTRAIN_COORDINATOR"]
    assert first[0]["MESHTRAIN_COORDINATOR"] != second[0]["MESHTRAIN_COORDINATOR"]
    assert "MESHTRAIN_DEVICES" not in first[0]


def test_the_first_failure_comes_last_and_whole(capfd: pytest.CaptureFixture[str]) -> None:
    program = """
if id == 1:
    raise ZeroDivisionError("its own mistake")
time.sleep(1)
print(f"error: process 1 (host here, pid 7) failed: ZeroDivisionError", file=sys.stderr)
sys.exit(1)
"""
    assert launch(program) == 1
    err = capfd.readouterr().err
    assert err.startswith("process 1 ended with exit code 1\nTraceback (most recent call last):\n")
    assert err.endswith("ZeroDivisionError: its own mistake\n")


def test_the_process_that_the_others_name_is_the_first_failure(capfd: pytest.CaptureFixture[str]) -> None:
    """Who hears of a failure may end sooner than who had it."""
    program = """
if id == 2:
    time.sleep(1)
    print("the cause", file=sys.stderr)
    sys.exit(9)
print(f"error: process 2 (host here, pid 7) failed: the cause", file=sys.stderr)
sys.exit(9)
"""
    assert launch(program) == 9
    assert capfd.readouterr().err == "process 2 ended with exit code 9\nthe cause\n"


def test_a_process_that_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("os.kill(os.getpid(), signal.SIGKILL) if id == 1 else sys.exit(76)") == 128 + signal.SIGKILL
    assert "process 1 was killed by SIGKILL" in capfd.readouterr().err


def test_who_does_not_end_with_the_others_is_killed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "END_SECONDS", 1.0)
    begun = time.monotonic()
    assert launch("sys.exit(5) if id == 0 else time.sleep(100)") == 5
    assert time.monotonic() - begun < 10
    err = capfd.readouterr().err
    assert (
        "process 1 did not end when the others did, and is killed" in err and "process 0 ended with exit code 5" in err
    )


def test_what_a_process_has_started_ends_with_it(tmp_path: Path) -> None:
    program = f"""
import subprocess
child = subprocess.Popen(["sleep", "100"])
open({str(tmp_path)!r} + f"/{{id}}", "w").write(str(child.pid))
"""
    assert launch(program) == 0
    for path in tmp_path.iterdir():
        assert not running(int(path.read_text()))


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("code", [75, 130])
def test_stopped_with_a_checkpoint_is_no_failure(capfd: pytest.CaptureFixture[str], code: int) -> None:
    assert launch(f"time.sleep(0.5 * id); sys.exit({code})") == code
    assert capfd.readouterr().err == ""


def test_what_gloo_says_is_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("print('[Gloo] Rank 0 is connected to 1 peer ranks.'); print('seen')", num=1) == 0
    assert capfd.readouterr().out == "[0] seen\n"


SCRIPT = """
import os, signal, sys, time
def handle(signum, frame):
    print("saving", flush=True)
    time.sleep(float(sys.argv[1]))
    sys.exit(130)
signal.signal(signal.SIGINT, handle)
print("ready", flush=True)
time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.parametrize("twice", [False, True])
def test_ctrl_c_goes_to_each_and_a_second_one_ends_them(tmp_path: Path, twice: bool) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    inner = [sys.executable, str(tmp_path / "script.py"), "60" if twice else "0.5"]
    command = [sys.executable, "-m", "meshtrain_command", "launch", "-n", "2", "--", *inner]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        assert sorted(lines) == ["[0] ready\n", "[1] ready\n"]
        process.send_signal(signal.SIGINT)
        lines = [process.stdout.readline() for _ in range(2)]
        assert sorted(lines) == ["[0] saving\n", "[1] saving\n"]
        begun = time.monotonic()
        if twice:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert time.monotonic() - begun < 15
    assert process.returncode == (128 + signal.SIGKILL if twice else 130)
    left = subprocess.run(["pgrep", "-f", str(tmp_path / "script.py")], capture_output=True, text=True)
    assert left.stdout == ""


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-n", "2"], "what is to be launched"),
        (["-n", "2", "--"], "what is to be launched"),
        (["-n", "0", "--", "train", "-"], "must be 1 or more"),
        (["-n", "2", "--devices-per-process", "0", "--", "train", "-"], "must be 1 or more"),
        (["-n", "1", "--", "/no/such/program"], "'/no/such/program' cannot be started: No such file"),
    ],
)
def test_mistakes(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *words]) == 2
    assert text in capsys.readouterr().err


def test_a_program_that_cannot_be_started() -> None:
    with pytest.raises(LaunchError, match="cannot be started"):
        Launch(["/no/such/program"], 1, environments(1)).run()
