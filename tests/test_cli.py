"""The command line: what it prints, how it ends, and that a mistake is one line."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

import meshtrain
from meshtrain import cli
from meshtrain.config import Config, fields, load
from meshtrain.trainer import Result

MICRO = """
model:
  overrides: {num_layers: 1, dim: 16, num_heads: 2, vocab_multiple: 32}
data: {source: tokens, paths: [tokens.npy], seq_len: 8, vocab_size: 32}
train: {steps: 2, global_batch: 8, eval_batches: 1, log_every: 1}
checkpoint: {every: 1}
log: {progress: plain}
"""


BIGRAM = """
import dataclasses
from flax import nnx
from jax.sharding import PartitionSpec as P

@dataclasses.dataclass(frozen=True)
class Sizes:
    vocab_size: int = 32

class Bigram(nnx.Module):
    presets = {"tiny": Sizes()}
    rules = [("embedding", P("model", None)), ("kernel", P())]

    def __init__(self, sizes, *, rngs):
        self.embed = nnx.Embed(sizes.vocab_size, 16, rngs=rngs)
        self.out = nnx.Linear(16, sizes.vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        return self.out(self.embed(tokens))
"""
TRAIN = "train", "micro.yaml", "model={target: bigram:Bigram, overrides: {}}", "optim.clip_norm=null"  # compiles fast


def write_micro(folder: Path, text: str = MICRO) -> None:
    """A config of a few thousand weights, `micro.yaml`, a model of the user's own beside it, and tokens to train on."""
    (folder / "micro.yaml").write_text(text)
    (folder / "bigram.py").write_text(BIGRAM)
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, 32, 4000).astype(np.uint8))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the micro config in it."""
    write_micro(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line: `(exit code, standard output, standard error)`."""

    def run(*args: str) -> tuple[int, str, str]:
        try:
            code = cli.main(args)
        except SystemExit as stop:  # argparse's way out
            code = int(stop.code or 0)
        return code, *capsys.readouterr()

    return run


# ---------------------------------------------------------------- showing


COMMANDS = ("train", "layout", "lint", "plan", "prove", "config")


def test_help_names_the_commands(run: Any) -> None:
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert all(f"\n    {name} " in out for name in COMMANDS)
    for name in COMMANDS:
        code, out, err = run(name, "--help")
        assert (code, err) == (0, "")
        assert "CONFIG" in out and "key=value" in out


def test_version(run: Any) -> None:
    assert run("--version") == (0, f"meshtrain {meshtrain.__version__}\n", "")


def test_config_shows_every_field(run: Any) -> None:
    code, out, err = run("config")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    for key, _, _, text in fields():
        assert text in rows[key], key  # also those with [brackets]
    assert rows["optim.lr"].split()[1] == "0.001"
    assert rows["optim.decay_steps"].split()[1] == "null"
    assert rows["run.name"].split()[1] == '""'
    assert rows["log.tensorboard"].split()[1] == "false"
    assert "(uint8 | uint16 | uint32 | null)" in rows["data.dtype"]
    assert "(list[tuple[str, bool]] | null)" in rows["optim.decay_rules"]


def test_config_resolves_a_file(run: Any, folder: Path) -> None:
    code, out, err = run("config", "micro.yaml", "optim.lr=1e-4", "mesh.model=2")
    assert (code, err) == (0, "")
    (folder / "micro.yaml").write_text(out)  # what it prints is itself a config
    config = load("micro.yaml")
    assert config == load("micro.yaml", ["optim.lr=1e-4", "mesh.model=2"])
    assert (config.optim.lr, config.mesh.model, config.run.name) == (1e-4, 2, "micro")
    assert config.model.overrides["dim"] == 16


def test_config_of_long_values_is_not_broken_over_lines(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    rule = "[a-z]+/" * 20 + "kernel"
    _, out, _ = run("config", "-", f"model.rules=[['{rule}', [null, model]]]", "run.name='[bold]x'")
    assert yaml.safe_load(out)["model"]["rules"] == [[rule, [None, "model"]]]
    assert yaml.safe_load(out)["run"]["name"] == "[bold]x"


def test_layout_shows_where_parameters_lie(run: Any, folder: Path) -> None:
    code, out, err = run("layout", "micro.yaml", "mesh.model=2")
    assert (code, err) == (0, "")
    assert "Layout on data=4 x model=2, ZeRO stage 1: 3," in out.splitlines()[0]
    (row,) = [line for line in out.splitlines() if "wte/embedding" in line.split()[:1]]
    assert row.split()[1:] == ["32", "x", "16", "wte/embedding", "model", "-", "model", "data", "256", "B"]
    assert not (folder / "runs").exists()  # it only shows


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("train", "missing.yaml"), "missing.yaml: cannot be read: No such file or directory"),
        (("layout", "."), ".: cannot be read: Is a directory"),
        (("config", "micro.yaml", "train.stpes=3"), "unknown key 'train.stpes'; did you mean 'train.steps'?"),
        (("train", "micro.yaml", "optim.lr='1e-3'"), "optim.lr: input should be a valid number, got '1e-3'"),
        (("train", "micro.yaml", "verbose"), "'verbose' is not of the form key=value"),
        (
            ("train", "train.steps=3"),
            "'train.steps=3' is an override, and comes after the config file: CONFIG train.steps=3, or "
            "- train.steps=3 for the defaults",
        ),
        (("config", "train.steps=3"), "'train.steps=3' is an override"),
        (("train", "micro.yaml", "mesh.model=3"), "mesh of model=3 cannot be made of 8 devices: choose one of [1, 2"),
        (("layout", "micro.yaml", "mesh.data=3"), "needs 3 devices, and there are 8"),
        (("train", "micro.yaml", "devices=3"), "devices=3: 3 virtual CPU devices cannot be made"),
        (("layout", "micro.yaml", "mesh.model=4"), "which axis 'model' of size 4 does not divide"),  # 2 heads
        (("train", "micro.yaml", "model.target=nowhere:GPT"), "there is no module 'nowhere' here"),
        (("train", "micro.yaml", "data.paths=[no.npy]"), "no.npy"),
        (("train", "micro.yaml", "data.vocab_size=16"), "vocab_size"),
        (("train", "micro.yaml", "train.global_batch=4"), "4"),  # on 8 devices
        (("train", "micro.yaml", "run.name=../x"), "run.name"),
        (("train", "micro.yaml", "run.name=123"), """(YAML reads it so; in quotes it is text: run.name='"123"')"""),
        (("train", "micro.yaml", "train.global_batch=504"), "more than the"),
        (("train", "micro.yaml", "model.rules=[['[', []]]"), "rule '[' is not a regular expression"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_on_standard_error(run: Any, folder: Path, args: tuple[str, ...], expected: str) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err
    assert expected in err
    assert not (folder / "runs").exists()


def test_brackets_in_a_message_survive(run: Any) -> None:
    assert "unknown key 'train.[red]x'" in run("config", "-", "train.[red]x=1")[2]


@pytest.mark.parametrize("args", [(), ("nope",), ("train",), ("layout",), ("train", "--fast")])
def test_a_wrong_command_line_shows_its_usage(run: Any, args: tuple[str, ...]) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.startswith("usage: meshtrain") and "error: " in err.splitlines()[-1]
    assert not err.endswith("key=value\n")  # which is never required


def test_a_file_with_an_equals_sign_is_a_file(run: Any, folder: Path) -> None:
    write_micro(folder)
    (folder / "micro.yaml").rename(folder / "lr=0.1.yaml")
    code, out, _ = run("config", "lr=0.1.yaml")
    assert code == 0 and yaml.safe_load(out)["run"]["name"] == "lr=0.1"


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore"),
            "allocating 9 bytes",
        ),
        (OSError(errno.ENOSPC, "No space left on device", "runs/x"), "runs/x: No space left on device"),
    ],
)
def test_a_machine_that_is_too_small_is_no_bug(
    run: Any, monkeypatch: pytest.MonkeyPatch, failure: Exception, message: str
) -> None:
    def too_large(config: Config) -> Result:
        raise failure

    monkeypatch.setattr(cli, "train", too_large)
    code, out, err = run("train", "micro.yaml")
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def test_a_run_that_stopped_before_its_first_update_names_no_checkpoint(run: Any, monkeypatch: Any) -> None:
    result = Result("stopped", 0, math.nan, math.nan, math.nan, 3.4, None, Path("runs/micro"), signal.SIGTERM)
    monkeypatch.setattr(cli, "train", lambda config: result)
    code, out, _ = run("train", "micro.yaml")
    assert code == 75 and "checkpoints/" not in out and "nothing to save" in out


def test_a_section_given_whole_keeps_the_files_other_keys(run: Any) -> None:
    _, out, _ = run("config", "micro.yaml", "train={steps: 7}")
    assert yaml.safe_load(out)["train"]["steps"] == 7
    assert yaml.safe_load(out)["train"]["global_batch"] == 8


@pytest.mark.parametrize("words", [("--strict", "mesh.model=2"), ("mesh.model=2", "--strict")])
def test_overrides_may_stand_before_and_after_options(words: tuple[str, ...]) -> None:
    args = cli._parse(["lint", "micro.yaml", "zero.stage=2", *words])
    assert args.overrides == ["zero.stage=2", "mesh.model=2"] and args.strict


def test_a_bug_is_not_passed_off_as_a_mistake(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: Config) -> Result:
        raise ValueError("a bug")

    monkeypatch.setattr(cli, "train", broken)
    with pytest.raises(ValueError, match="a bug"):
        run("train", "micro.yaml")


def test_a_model_of_the_users_own_lies_beside_the_config(run: Any, folder: Path) -> None:
    (folder / "my_own_model.py").write_text("from models.gpt import GPT as Mine\n")
    code, out, _ = run("layout", "micro.yaml", "model.target=my_own_model:Mine")
    assert code == 0 and "wte/embedding" in out


# ---------------------------------------------------------------- exit codes


@pytest.mark.parametrize(
    ("outcome", "signum", "code"),
    [
        ("complete", 0, 0),
        ("already complete", 0, 0),
        ("stopped", signal.SIGTERM, 75),
        ("stopped", signal.SIGINT, 130),
    ],
)
def test_the_exit_code_says_how_it_ended(
    run: Any, monkeypatch: pytest.MonkeyPatch, outcome: Any, signum: int, code: int
) -> None:
    result = Result(outcome, 1, 3.0, math.nan, math.nan, 3.4, None, Path("runs/micro"), signum)
    monkeypatch.setattr(cli, "train", lambda config: result)
    exit_code, out, err = run("train", "micro.yaml", "log.progress=none")
    assert (exit_code, out, err) == (code, "", "")
    exit_code, out, err = run("train", "micro.yaml")
    assert (exit_code, err) == (code, "")
    assert ("the same command: it resumes here" in out) == (outcome == "stopped")
    assert "nan" not in out


def test_suggested_commands_can_be_copied(run: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on one line whatever the width, a key once, and started the way that this one was."""
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/meshtrain").touch()
    result = Result("complete", 2, 3.0, 2.9, 100.0, 3.4, None, Path("runs/micro"), num_averaged=2)
    monkeypatch.setattr(cli, "train", lambda config: result)
    monkeypatch.setattr(sys, "argv", [".venv/bin/meshtrain"])
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = run("train", "micro.yaml", "train.steps=2", "optim.lr=1e-2", "zero.stage=1")
    commands = [line.split(None, 2)[2] for line in out.splitlines() if line.startswith(("extend it", "try next"))]
    start = ".venv/bin/meshtrain train micro.yaml"
    assert commands == [
        f"{start} train.steps=4 optim.lr=1e-2 zero.stage=1",
        f"{start} train.steps=2 optim.lr=1e-2 zero.stage=3 run.name=tp devices=8 mesh.model=2",
    ]
    assert "mean of the last 2 updates" in " ".join(out.replace("│", " ").split())


def test_an_interrupt_is_130(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config: Config) -> Result:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "train", interrupted)
    assert run("train", "micro.yaml") == (130, "", "")


# ---------------------------------------------------------------- training


def test_train_completes_once_and_can_be_extended(run: Any, folder: Path) -> None:
    def figures(name: str) -> dict[int, float]:
        lines = (folder / "runs/micro/metrics.jsonl").read_text().splitlines()
        return {record["step"]: record[name] for record in map(json.loads, lines) if name in record}

    def checkpoints() -> set[str]:
        return {path.name for path in (folder / "runs/micro/checkpoints").iterdir()}

    code, out, err = run(*TRAIN)
    assert (code, err) == (0, "")
    assert "run complete: 2 updates" in out and "validation loss" in out and "resumed" not in out
    first = figures("loss")
    assert set(first) == {1, 2} and checkpoints() >= {"1", "2"}
    assert abs(first[1] - math.log(32)) < 0.5  # a new model guesses about uniformly

    code, out, err = run(*TRAIN)
    assert (code, err) == (0, "")
    assert "this run is complete already: 2 updates" in out
    assert figures("loss") == first  # nothing was trained

    code, out, err = run(*TRAIN, "train.steps=3", "mesh.model=2")
    assert (code, err) == (0, "")
    assert "resumed  from step 2" in out and "changed  mesh.model: 1 -> 2" in out and "run complete: 3 updates" in out
    assert set(figures("loss")) == {1, 2, 3} and figures("loss") | first == figures("loss")
    assert "3" in checkpoints()

    code, out, err = run(*TRAIN, "train.steps=4", "optim.lr=1")
    assert (code, out) == (2, "") and err.startswith("error: ") and "optim.lr" in err


# ---------------------------------------------------------------- processes


def spawn(folder: Path, *args: str) -> subprocess.Popen[str]:
    """`meshtrain` in a process of its own, with one CPU device."""
    env = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "meshtrain.cli", *args]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)


def test_a_mistake_in_a_process_of_its_own(folder: Path) -> None:
    with spawn(folder, "train", "micro.yaml", "zero.stage=7") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert err == "error: micro.yaml + overrides: zero.stage: input should be less than or equal to 3, got 7\n"


@pytest.mark.parametrize("command", ["config", "layout"])  # of which one prints through rich, the other plainly
def test_a_reader_that_goes_away_is_no_error(folder: Path, command: str) -> None:
    with spawn(folder, command, "micro.yaml") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 128 + signal.SIGPIPE
    assert err == ""


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_training_as_it_ends_other_programs(folder: Path) -> None:
    with spawn(folder, *TRAIN, "train.steps=10000") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_same_command_goes_on(folder: Path, signum: int, code: int) -> None:
    command = *TRAIN, "train.steps=300", "checkpoint.every=0"

    def steps(lines: Iterator[str] | list[str]) -> Iterator[int]:
        yield from (int(line.split()[1].split("/")[0]) for line in lines if line.startswith("step "))

    with spawn(folder, *command) as process:
        assert process.stdout is not None
        assert next(steps(process.stdout)) == 1
        process.send_signal(signum)
        out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "Traceback" not in err
    path = folder / "runs/micro"
    (saved,) = (int(child.name) for child in (path / "checkpoints").iterdir() if child.name.isdigit())
    assert 1 <= saved < 300
    assert f"stopped at update {saved} of 300; the state is saved" in out
    assert json.loads((path / "run.json").read_text())["state"] == "preempted"

    with spawn(folder, *command) as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert f"resumed  from step {saved}" in out and "run complete: 300 updates" in out
    assert next(steps(out.splitlines())) == saved + 1
    assert json.loads((path / "run.json").read_text())["state"] == "complete"
    records = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    assert [record["step"] for record in records if "loss" in record] == list(range(1, 301))  # none lost, none twice
