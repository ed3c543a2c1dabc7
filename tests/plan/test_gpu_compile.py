"""The step compiled for GPUs, on a machine without one: what only the GPU compiler does with it."""

import functools
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the plan extra: pip install meshtrain[plan]"
)
LAYERS, ACTIVATION = 4, 16 // 2 * 128 * 256 * 2  # [batch, seq, d] of one data shard, bf16


@functools.cache
def collectives_on_h100(data: int, model: int, stage: int) -> list[dict]:
    script = Path(__file__).with_name("gpu_step.py")
    command = [sys.executable, script, str(data), str(model), str(stage)]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment())
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def clean_environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": root, "HOME": "/tmp"}  # noqa: S108


@needs_plugin
@pytest.mark.slow
def test_sequence_parallelism_is_megatrons() -> None:
    """Per layer two gathers and two reduce-scatters forward, the same backward (Korthikanti et al. 2022, figure 5)."""
    found = collectives_on_h100(2, 4, 1)
    in_layers = [c for c in found if c["axis"] == "model" and c["in_loop"] and c["bytes"] >= ACTIVATION]
    assert {c["op"] for c in in_layers} == {"all-gather", "reduce-scatter"}
    assert {c["dtype"] for c in in_layers} == {"bf16"}
    for op in ("all-gather", "reduce-scatter"):
        assert sum(c["bytes"] // ACTIVATION * c["count"] for c in in_layers if c["op"] == op) == 4 * LAYERS


@needs_plugin
@pytest.mark.slow
def test_weights_cross_data_in_bf16_and_gradients_in_float32() -> None:
    found = [c for c in collectives_on_h100(2, 4, 1) if c["axis"] == "data" and c["bytes"] > 1000]
    assert {(c["op"], c["dtype"]) for c in found} == {("all-gather", "bf16"), ("reduce-scatter", "f32")}
    sent = {op: sum(c["bytes"] * c["count"] for c in found if c["op"] == op) for op in ("all-gather", "reduce-scatter")}
    assert sent["reduce-scatter"] == 2 * sent["all-gather"]  # the same elements, of 4 bytes instead of 2
