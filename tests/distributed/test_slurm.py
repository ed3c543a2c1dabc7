"""Jobs on a real SLURM of four nodes: the rendered script, layouts, batches, signals, losses, steps side by side."""

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from meshtrain.config import load
from meshtrain.metrics import read_metrics
from meshtrain.trainer import build, train
from tests.distributed import records
from tests.distributed.several import SMALL, losses
from tests.distributed.slurm_cluster import Cluster, named_nodes, need_slurm

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]

NODES = ["--nodes", "4", "--gpus-per-node", "0"]
MESHTRAIN = [sys.executable, "-m", "meshtrain.cli"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    need_slurm()
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    with named_nodes():
        try:
            made.start()
            yield made
        finally:
            made.stop()


def submit(cluster: Cluster, folder: Path, *words: str) -> str:
    """Submits a training; its job number."""
    done = cluster.run(*MESHTRAIN, "slurm", "-", *NODES, "--submit", "devices=8", *SMALL, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return re.search(r"^job +(\d+)", done.stdout)[1]


def log(folder: Path, name: str = "run") -> str:
    (path,) = folder.glob(f"{name}-*.log")
    return path.read_text()


@pytest.mark.parametrize("model", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_losses_equal_those_of_one_process(cluster: Cluster, tmp_path: Path, stage: int, model: int) -> None:
    layout = [f"zero.stage={stage}", f"mesh.model={model}", "train.steps=4"]
    job = submit(cluster, tmp_path, *layout)
    train(load(None, [*SMALL, *layout, f"run.dir={tmp_path}/one", "log.progress=none"]))
    assert cluster.wait(job) == "COMPLETED", log(tmp_path)
    assert "process 0 of 4 on 4 nodes: SLURM job" in log(tmp_path) and "uses 2 of 8 devices" in log(tmp_path)
    np.testing.assert_allclose(losses(tmp_path / "runs"), losses(tmp_path / "one"), rtol=1e-6, atol=0)


def test_batches_are_equal_record_by_record(cluster: Cluster, tmp_path: Path) -> None:
    overrides = [*SMALL, "devices=8", "mesh.model=2"]
    script = str(Path(records.__file__))
    done = cluster.run("srun", "-N4", "-n4", sys.executable, script, str(tmp_path), *overrides)
    assert done.returncode == 0, done.stderr
    batches = build(load(None, overrides)).batches
    for index in range(records.NUM_BATCHES):
        expected = batches.rows(index)
        seen: dict[str, set[int]] = {}
        for process in range(4):
            with np.load(tmp_path / f"{index}-{process}.npz") as found:
                for key, rows in found.items():
                    name, first = key.split()
                    np.testing.assert_array_equal(rows, expected[name][int(first) : int(first) + len(rows)])
                    seen.setdefault(name, set()).update(range(int(first), int(first) + len(rows)))
        assert set(map(frozenset, seen.values())) == {frozenset(range(16))}  # none is missing


def test_a_signal_requeues_the_job_which_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, "--requeue", "train.steps=40", "checkpoint.every=0")
    wait_for(tmp_path, "step 10/40")
    assert cluster.run("scancel", "--signal=TERM", job).returncode == 0
    wait_for(tmp_path, "resumed  from step")
    assert cluster.wait(job) == "COMPLETED", log(tmp_path)
    text = log(tmp_path)
    stopped = int(re.search(r"stopped at update (\d+) of 40", text)[1])
    assert "stopped with a checkpoint" in text and f"resumed  from step {stopped}" in text
    steps = [record["step"] for record in read_metrics(tmp_path / "runs/run/metrics.jsonl") if "loss" in record]
    assert steps == list(range(1, 41))


def test_a_lost_process_is_named_and_tried_again(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, "--requeue", "train.steps=400", "checkpoint.every=4", "launch.heartbeat=5")
    wait_for(tmp_path, "step   9/400")
    victim = process_of(job, "2")
    os.kill(victim, 9)
    wait_for(tmp_path, "for the 1. time in this job")
    wait_for(tmp_path, "resumed  from step")
    assert cluster.run("scancel", job).returncode == 0
    cluster.wait(job)
    text = log(tmp_path)
    assert re.search(rf"error: process 2 \(host .*, pid {victim}\) was lost while in '", text)
    assert "a process was lost (exit code 137)" in text


def test_a_mistake_is_not_tried_again(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, "--requeue", "data.source=text", "data.paths=[nowhere]")
    assert cluster.wait(job) == "FAILED"
    assert "nowhere" in log(tmp_path) and "failed with exit code 2" in log(tmp_path)


def test_two_steps_of_one_job_run_side_by_side(cluster: Cluster, tmp_path: Path) -> None:
    one = " ".join(f"'{word}'" for word in [*MESHTRAIN, "train", "-", *SMALL, "devices=2", f"run.dir={tmp_path}"])
    steps = [f"srun -N2 -n2 --overlap {one} run.name={name} &" for name in ("a", "b")]
    (tmp_path / "job").write_text("\n".join(["#!/bin/sh", *steps, "wait"]))
    done = cluster.run("sbatch", "--wait", "--parsable", "-N2", f"--output={tmp_path}/out", str(tmp_path / "job"))
    text = (tmp_path / "out").read_text()
    assert done.returncode == 0, text
    assert text.count("run complete: 6 updates") == 2
    job = done.stdout.strip()
    assert f"SLURM job {job}.0" in text and f"SLURM job {job}.1" in text


def wait_for(folder: Path, text: str, seconds: float = 120) -> None:
    """Waits until the job's log says something."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if any(text in path.read_text() for path in folder.glob("run-*.log")):
            return
        time.sleep(0.3)
    raise AssertionError(f"no {text!r} in:\n{log(folder)}")


def process_of(job: str, task: str) -> int:
    """The pid of a task of a job."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = dict(pair.split("=", 1) for pair in environ.read_text().split("\0") if "=" in pair)
            is_python = "python" in (environ.parent / "cmdline").read_text().split("\0")[0]
        except OSError:
            continue  # it has ended
        if is_python and variables.get("SLURM_JOB_ID") == job and variables.get("SLURM_PROCID") == task:
            return int(environ.parent.name)
    raise AssertionError(f"no task {task} of job {job}")
