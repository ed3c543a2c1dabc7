"""Training from a config: the loop's figures, checkpoints, resuming on another layout, signals."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from meshtrain.checkpoint import Checkpointer
from meshtrain.config import Config, load
from meshtrain.errors import ConfigError, DataError, TrainingError, UserError
from meshtrain.metrics import read_metrics
from meshtrain.trainer import build, evaluate, stop_on_signal, train
from tests.tiny_gpt import host, make_batch, make_engine

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("trainer")]  # one worker: its tests share what they compute

SMALL = [
    "model.overrides={num_layers: 2, dim: 32, num_heads: 8, unroll: 1}",
    "data.seq_len=32",
    "train.global_batch=16",
    "train.eval_batches=2",
    "train.log_every=1",
    "log.progress=none",
]


def make_config(folder: Path, *overrides: str) -> Config:
    return load(None, [f"run.dir={folder}", *SMALL, *overrides])


def losses(folder: Path, name: str = "run") -> dict[int, str]:
    """Loss by step, as hex, of every logged update."""
    records = read_metrics(folder / name / "metrics.jsonl")
    return {record["step"]: float(record["loss"]).hex() for record in records if "loss" in record}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight updates in one go, on 4x2 at stage 3."""
    folder = tmp_path_factory.mktemp("unbroken")
    train(make_config(folder, "train.steps=8", "mesh.model=2", "zero.stage=3", "checkpoint.every=4"))
    return folder


def test_a_run_leaves_config_figures_and_checkpoints(unbroken: Path) -> None:
    run = unbroken / "run"
    assert load(run / "config.yaml").mesh.model == 2
    assert Checkpointer(run / "checkpoints", 3).steps() == [4, 8]
    assert json.loads((run / "run.json").read_text())["state"] == "complete"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 9))
    assert {"lr", "grad_norm", "tokens", "loss_scale", "skipped", "clipped"} <= steps[0].keys()
    assert all(record["tokens"] == 16 * 32 for record in steps)
    assert steps[0]["lr"] == pytest.approx(1e-3)  # update 0 uses schedule(0)
    assert [record["step"] for record in records if "val_loss" in record] == [8]
    assert steps[0]["loss"] == pytest.approx(math.log(256), rel=0.05)


def test_the_global_norm_is_logged_before_clipping(tmp_path: Path) -> None:
    train(make_config(tmp_path, "train.steps=2", "optim.clip_norm=0.01"))
    records = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in r]
    assert all(record["grad_norm"] > 0.01 and record["clipped"] for record in records)


def test_the_rate_moves_once_per_update_not_per_microbatch(tmp_path: Path) -> None:
    """Two updates of two microbatches: two entries, schedule(0) and schedule(1), and a warm-up of two updates."""
    train(make_config(tmp_path, "train.steps=2", "train.microbatches=2", "optim.warmup_steps=2", "optim.lr=0.5"))
    records = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in r]
    assert [record["lr"] for record in records] == [0.0, 0.25]
    assert [record["tokens"] for record in records] == [16 * 32] * 2


def test_resuming_on_the_same_layout_repeats_the_losses_to_the_bit(unbroken: Path, tmp_path: Path) -> None:
    shared = ["train.steps=8", "mesh.model=2", "zero.stage=3"]
    first = make_config(tmp_path, *shared, "checkpoint.every=0")
    with Stopper(tmp_path / "run" / "metrics.jsonl", at_step=4):
        stopped = train(first)
    assert stopped.outcome == "stopped"
    assert stopped.signum == signal.SIGTERM
    assert 4 <= stopped.step < 8
    result = train(first)
    assert (result.outcome, result.step) == ("complete", 8)
    assert losses(tmp_path) == losses(unbroken)


class Stopper:
    """Sends this process SIGTERM once the metrics file has a step."""

    def __init__(self, path: Path, at_step: int) -> None:
        self.path, self.at_step = path, at_step

    def __enter__(self) -> None:
        code = (
            "import os, signal, sys, time\n"
            "path, step, pid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])\n"
            "deadline = time.time() + 120\n"
            "while time.time() < deadline:\n"
            "    if os.path.exists(path) and open(path).read().count('\"loss\"') >= step:\n"
            "        os.kill(pid, signal.SIGTERM)\n"
            "        break\n"
            "    time.sleep(0.001)\n"
        )
        # Slow enough between updates for the watcher to see each: the loop waits for the metrics file's write.
        self.process = subprocess.Popen([sys.executable, "-c", code, self.path, str(self.at_step), str(os.getpid())])

    def __exit__(self, *error: object) -> None:
        self.process.wait(timeout=120)


@pytest.mark.parametrize(("model", "stage"), [(4, 1), (2, 3), (1, 0)])
def test_resuming_on_another_layout(unbroken: Path, tmp_path: Path, model: int, stage: int) -> None:
    """From step 4 of a 4x2 run at stage 3; the rest of the losses agree to 1e-5."""
    source, run = unbroken / "run", tmp_path / "run"
    subprocess.run(["cp", "-r", source, run], check=True)
    subprocess.run(["rm", "-r", run / "checkpoints" / "8"], check=True)
    result = train(make_config(tmp_path, "train.steps=8", f"mesh.model={model}", f"zero.stage={stage}"))
    assert result.step == 8
    expected, got = losses(unbroken), losses(tmp_path)
    assert got.keys() == expected.keys()
    for step in range(5, 9):
        assert float.fromhex(got[step]) == pytest.approx(float.fromhex(expected[step]), rel=1e-5)
    if (model, stage) == (2, 3):
        assert got == expected


@pytest.mark.parametrize(("data", "model", "stage"), [(2, 4, 1), (1, 1, 0), (8, 1, 2)])
def test_a_checkpoint_holds_the_same_bytes_on_every_layout(tmp_path: Path, data: int, model: int, stage: int) -> None:
    before = make_engine(4, 2, 3)
    state = before.init()
    for i in range(3):
        state, _ = before.step(state, make_batch(i))
    after = make_engine(data, model, stage)
    with Checkpointer(tmp_path, 1) as checkpoints:
        checkpoints.save(3, state, {})
        checkpoints.wait()
        restored = checkpoints.restore(3, after.abstract_state())
    saved_leaves, leaves = jax.tree.leaves(host(state)), jax.tree.leaves(host(restored))
    assert len(saved_leaves) == len(leaves)
    for saved, loaded in zip(saved_leaves, leaves, strict=True):
        assert saved.tobytes() == loaded.tobytes()
    _, expected = before.step(state, make_batch(3))
    _, metrics = after.step(restored, make_batch(3))
    assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(float(expected["grad_norm"]), rel=1e-5)


def test_a_complete_run_says_so_and_can_be_extended(unbroken: Path, tmp_path: Path) -> None:
    subprocess.run(["cp", "-r", unbroken / "run", tmp_path / "run"], check=True)
    shared = ["mesh.model=2", "zero.stage=3"]
    result = train(make_config(tmp_path, "train.steps=8", *shared))
    assert (result.outcome, result.step) == ("already complete", 8)
    assert not math.isnan(result.val_loss)
    extended = train(make_config(tmp_path, "train.steps=10", *shared))
    assert (extended.outcome, extended.step) == ("complete", 10)
    assert sorted(losses(tmp_path)) == list(range(1, 11))


def test_other_data_is_refused(unbroken: Path, tmp_path: Path) -> None:
    subprocess.run(["cp", "-r", unbroken / "run", tmp_path / "run"], check=True)
    with pytest.raises(ConfigError, match=r"run\.seed: 0 -> 1"):
        train(make_config(tmp_path, "train.steps=8", "mesh.model=2", "run.seed=1"))


def test_the_last_step_is_saved_off_the_interval(tmp_path: Path) -> None:
    train(make_config(tmp_path, "train.steps=3", "checkpoint.every=2"))
    assert Checkpointer(tmp_path / "run" / "checkpoints", 3).steps() == [2, 3]


def test_evaluation_does_not_depend_on_the_layout(tmp_path: Path) -> None:
    values = []
    for overrides in (["mesh.model=1", "zero.stage=0"], ["mesh.model=4", "zero.stage=3"]):
        job = build(make_config(tmp_path, *overrides))
        values.append(evaluate(job, job.engine.init()))
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert values[0] == pytest.approx(math.log(256), rel=0.05)


def test_a_source_without_validation(tmp_path: Path) -> None:
    result = train(make_config(tmp_path, "train.steps=2", "data.val_fraction=0"))
    assert math.isnan(result.val_loss)


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["train.global_batch=6"], ConfigError, r"6 records .*data=8"),
        (["model.overrides={num_heads: 6, dim: 48}", "mesh.model=4"], UserError, r"heads|size 6.*'model' of size 4"),
        (["mesh.model=3"], UserError, "cannot be made of 8 devices"),
        (["data.source=text"], DataError, "paths"),
        (["data.source=text", "data.paths=[/nowhere/*.txt]"], DataError, "/nowhere"),
        (["model.preset=tinny"], ConfigError, "did you mean 'tiny'"),
    ],
)
def test_mistakes_are_named_before_anything_is_computed(
    tmp_path: Path, overrides: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train(make_config(tmp_path, *overrides))
    assert not (tmp_path / "run").exists()


def test_a_run_that_only_skips_updates_stops(tmp_path: Path) -> None:
    """A rate that overflows the weights: the first update makes them infinite, all others are skipped."""
    config = make_config(tmp_path, "train.steps=50", "train.max_skipped=3", "optim.lr=1e38", "checkpoint.every=1")
    with pytest.raises(TrainingError, match="updates 2 to 4 were all skipped"):
        train(config)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "failed"


def test_the_handler_only_sets_a_flag_and_is_put_back() -> None:
    seen = []
    previous = signal.signal(signal.SIGTERM, lambda *_: seen.append("old"))
    try:
        with stop_on_signal() as flag:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            assert flag.signum == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert seen == ["old"]
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_the_second_interrupt_ends_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), stop_on_signal():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_16_bit_training_learns(tmp_path: Path, precision: str) -> None:
    train(make_config(tmp_path, "train.steps=40", f"precision.compute={precision}", "zero.stage=2", "optim.lr=0.01"))
    history = [float.fromhex(value) for value in losses(tmp_path).values()]
    assert np.mean(history[-5:]) < history[0] - 1.0
