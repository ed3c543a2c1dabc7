"""Runs a small training in several processes, through `meshtrain launch`."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from meshtrain.metrics import read_metrics

FAULTY = Path(__file__).parent / "faulty.py"
ROOT = Path(__file__).parent.parent.parent
SMALL = [
    "model.overrides={num_layers: 2, dim: 32, num_heads: 8, unroll: 1}",
    *("data.seq_len=32", "train.global_batch=16", "train.eval_batches=2", "train.log_every=1", "train.steps=6"),
]


@dataclass
class Ended:
    """How a launch ended; `seconds` from its start."""

    code: int
    out: str
    err: str
    seconds: float


def environment() -> dict[str, str]:
    """Of the tests' own process, without its eight virtual devices."""
    flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
    return os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}


def launch(
    folder: Path,
    *overrides: str,
    num: int = 2,
    devices: int = 1,
    fault: str = "",
    culprit: int = 1,
    variables: dict[str, str] | None = None,
    timeout: float = 240,
) -> Ended:
    """Trains in `num` processes; with a fault in one of them if there is one."""
    what = [sys.executable, str(FAULTY), fault, str(culprit)] if fault else ["train", "-"]
    own = ["launch", "-n", str(num), "--devices-per-process", str(devices), "--", *what]
    return meshtrain(*own, f"run.dir={folder}", *SMALL, *overrides, timeout=timeout, **(variables or {}))


def losses(folder: Path) -> list[float]:
    """Of each update of the run in a folder."""
    return [record["loss"] for record in read_metrics(folder / "run/metrics.jsonl") if "loss" in record]


def meshtrain(*arguments: str, timeout: float = 240, **variables: str) -> Ended:
    """Runs the command line in a process of its own."""
    start = time.monotonic()
    command = [sys.executable, "-m", "meshtrain_command", *arguments]
    run = subprocess.run(command, env=environment() | variables, capture_output=True, text=True, timeout=timeout)
    return Ended(run.returncode, run.stdout, run.stderr, time.monotonic() - start)
