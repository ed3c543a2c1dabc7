"""The rendered sbatch script: what stands in it, what is refused, and what shellcheck says."""

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from meshtrain.cli import main
from meshtrain.config import load
from meshtrain.errors import LaunchError
from meshtrain.launch.slurm import add_arguments, make_script, seconds

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = str(ROOT / "examples" / "gpt_tiny.yaml")


def render(*words: str, overrides: tuple[str, ...] = ()) -> str:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    add_arguments(parser)
    args = parser.parse_args([EXAMPLE, *words])
    args.overrides = list(overrides)
    return make_script(load(EXAMPLE, [word.replace("%a", "0") for word in overrides]), args).render()


GPU = ("--nodes", "4", "--gpus-per-node", "8")
VARIANTS = [
    GPU,
    (*GPU, "--tasks-per-node", "8"),
    (*GPU, "--requeue", "--time", "1-00:00:00", "--partition", "gpu", "--account", "lab"),
    (*GPU, "--array", "0-3", "--requeue"),
    (*GPU, "--container", "/images/train.sif"),
    (*GPU, "--container", "nvcr.io#nvidia/jax:25.10-py3"),
    ("--nodes", "2", "--gpus-per-node", "0", "--sbatch=--qos=high"),
]


@pytest.mark.parametrize("words", VARIANTS)
def test_bash_and_shellcheck_have_nothing_to_say(tmp_path: Path, words: tuple[str, ...]) -> None:
    overrides = ("optim.lr=0.00%a1", "run.name=a-%a") if "--array" in words else ("data.seq_len=64",)
    path = tmp_path / "job"
    path.write_text(render(*words, overrides=overrides))
    subprocess.run(["bash", "-n", str(path)], check=True)
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, "--norc", "--enable=all", "--exclude=SC2248,SC2250", str(path)],
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("words", VARIANTS)
def test_every_option_is_explained(words: tuple[str, ...]) -> None:
    lines = render(*words).splitlines()
    options = [index for index, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert len(options) >= 6
    for index in options:
        assert lines[index - 1].startswith("# ") and lines[index - 1].endswith(".")


def test_what_is_asked_for_stands_there() -> None:
    text = render(*GPU, "--time", "12:00:00", "--partition", "gpu", "--account", "lab", "--signal", "600", "--requeue",
                  "--sbatch=--qos=high", overrides=("data.seq_len=64",))  # fmt: skip
    for option in ("nodes=4", "ntasks-per-node=1", "gpus-per-node=8", "time=12:00:00", "partition=gpu", "account=lab",
                   "signal=TERM@600", "requeue", "qos=high", "open-mode=append", "job-name=gpt_tiny"):  # fmt: skip
        assert f"#SBATCH --{option}\n" in text
    assert "data.seq_len=64" in text and "launch.distributed=required launch.platform=gpu" in text


def test_cpus_alone_and_no_requeue() -> None:
    text = render("--nodes", "2", "--gpus-per-node", "0")
    assert "gpus-per-node" not in text and "launch.platform" not in text and "scontrol" not in text
    assert "#SBATCH --no-requeue" in text and "submit this script again to go on" in text


def test_an_array_has_a_run_for_each_number() -> None:
    text = render(*GPU, "--array", "0-3", overrides=("optim.lr=0.00%a1",))
    assert 'optim.lr=0.00"$SLURM_ARRAY_TASK_ID"1' in text and 'run.name=gpt_tiny-"$SLURM_ARRAY_TASK_ID"' in text
    assert "#SBATCH --output=gpt_tiny-%A_%a.log" in text


def test_words_are_quoted() -> None:
    text = render(*GPU, overrides=("model.overrides={dim: 32, num_heads: 8}",))
    assert "'model.overrides={dim: 32, num_heads: 8}'" in text


@pytest.mark.parametrize(
    ("words", "overrides", "text"),
    [
        (("--nodes", "0", "--gpus-per-node", "8"), (), "must be 1 or more"),
        (
            (*GPU, "--tasks-per-node", "3"),
            (),
            "--tasks-per-node 3 processes cannot share --gpus-per-node 8 GPUs equally",
        ),
        ((*GPU, "--tasks-per-node", "16"), (), "--tasks-per-node 16 processes cannot share --gpus-per-node 8 GPUs"),
        (GPU, ("devices=8",), "devices=8 makes virtual CPU devices"),
        ((*GPU, "--time", "soon"), (), "--time soon must be MINUTES"),
        ((*GPU, "--time", "00:04:00"), (), "--time 00:04:00 is no longer than the 300 s of --signal"),
        ((*GPU, "--array", "a-b"), (), "--array a-b must be numbers and ranges"),
        (GPU, ("run.name=x%a",), "stands for the number in an array: add --array"),
        ((*GPU, "--partition", "a b"), (), "--partition 'a b' must be a name"),
        ((*GPU, "--sbatch=qos"), (), "--sbatch 'qos' must be an option of sbatch"),
        (GPU, ("mesh.model=64",), "the mesh model=64 does not fit 32 devices"),
        (GPU, ("mesh.data=8",), "the mesh data=8 x model=1 does not fit 32 devices"),
    ],
)
def test_what_does_not_fit_is_refused(words: tuple[str, ...], overrides: tuple[str, ...], text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        render(*words, overrides=overrides)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("time", "expected"),
    [("30", 1800), ("30:20", 1820), ("2:00:00", 7200), ("1-12", 129600), ("1-00:30", 88200), ("1-00:00:01", 86401)],
)
def test_time_limits(time: str, expected: int) -> None:
    assert seconds(time) == expected


def test_the_command_prints_or_writes_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", EXAMPLE, *GPU]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("#!/usr/bin/env bash\n") and printed.endswith("exit $code\n")
    assert main(["slurm", EXAMPLE, *GPU, "-o", str(tmp_path / "job")]) == 0
    assert (tmp_path / "job").read_text() == printed


def test_submitting_where_there_is_no_sbatch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["slurm", EXAMPLE, *GPU, "-o", str(tmp_path / "job"), "--submit"]) == 2
    assert "is written, but sbatch is not on PATH" in capsys.readouterr().err


def test_without_scontrol_the_script_still_ends_with_75(tmp_path: Path) -> None:
    """A container may lack it: the run is saved, and one warning says what to do."""
    path = tmp_path / "job"
    path.write_text(render(*GPU, "--requeue"))
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 75\n")
    (tmp_path / "srun").chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None
    env = {"PATH": str(tmp_path), "SLURM_JOB_ID": "7"}
    done = subprocess.run([bash, str(path)], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 75
    assert (
        "stopped with a checkpoint" in done.stdout
        and done.stderr.count("warning: scontrol could not queue 7 again") == 1
    )


def test_a_lost_process_is_tried_again_three_times(tmp_path: Path) -> None:
    path = tmp_path / "job"
    path.write_text(render(*GPU, "--requeue").replace("sleep 60", "echo requeued"))
    for name, body in {"srun": "exit 137", "scontrol": "exit 0", "cat": 'exec /bin/cat "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None
    env = {"PATH": str(tmp_path), "SLURM_JOB_ID": "7"}
    runs = [subprocess.run([bash, str(path)], env=env, cwd=tmp_path, capture_output=True, text=True) for _ in range(4)]
    assert [run.returncode for run in runs] == [137] * 4
    assert ["requeued" in run.stdout for run in runs] == [True, True, True, False]
