"""Predicted beside measured: `meshtrain plan --here` runs a few steps on the GPUs of this machine.

The peak is the allocator's, from the first array of the state to the end of the last step.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from rich import box
from rich.table import Table

from meshtrain.config import Config
from meshtrain.engine import Engine
from meshtrain.errors import PlanError
from meshtrain.layout import show_bytes
from meshtrain.mesh import claim_gpu_memory, make_mesh
from meshtrain.plan.facts import Cluster, Facts
from meshtrain.plan.gpus import CARDS
from meshtrain.target import load_target
from meshtrain.trainer import make_engine

STEPS = 3


@dataclasses.dataclass(frozen=True)
class Measured:
    """A few steps on real devices.

    Attributes:
        peak_bytes: the largest of any device.
        step_s: the fastest step after the first.
    """

    peak_bytes: int
    step_s: float


def local_cluster(name: str | None = None) -> Cluster:
    """The GPUs of this machine.

    Args:
        name: what to call their kind, where the user has described it; None: they must be of `CARDS`.

    Raises:
        PlanError: there are none, or they are of a kind that is not known.
    """
    claim_gpu_memory()
    devices = jax.local_devices()
    if devices[0].platform not in ("gpu", "cuda"):
        raise PlanError(
            f"--here runs the step on this machine's GPUs, and jax found {len(devices)} {devices[0].platform} "
            "device(s): install meshtrain[cuda13] on a machine with a GPU, or plan for one with --gpu"
        )
    kind = devices[0].device_kind
    name = name or next((name for name, card in CARDS.items() if card.name == kind), None)
    if name is None:
        raise PlanError(f"no figures are known for this machine's {kind}: describe it in a file, --gpu-file FILE")
    return Cluster(name, 1, len(devices))


def measure(config: Config, peak: Callable[[Sequence[jax.Device]], int] | None = None) -> Measured:
    """Runs `STEPS` steps of the config on this machine's devices, on random tokens.

    Args:
        peak: bytes that were in use at most, of any of the devices; None: as the allocator says.
    """
    target = load_target(config)
    engine = make_engine(config, target, make_mesh(config.mesh.data, config.mesh.model, jax.local_devices()))
    state, seconds = engine.init(), []
    batch = engine.shard(_random_batch(engine, getattr(target.sizes, "vocab_size", 2)))
    for _ in range(STEPS):
        began = time.perf_counter()
        state, metrics = engine.step(state, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - began)
    return Measured((peak or allocator_peak)(list(engine.mesh.devices.flat)), min(seconds[1:]))


def allocator_peak(devices: Sequence[jax.Device]) -> int:
    """Bytes in use at most.

    Raises:
        PlanError: the devices do not count them.
    """
    found = [device.memory_stats() for device in devices]
    if not all(found):
        raise PlanError(f"{devices[0].device_kind} devices do not count the memory that is in use")
    return max(int(stats["peak_bytes_in_use"]) for stats in found)


def _random_batch(engine: Engine, vocab_size: int) -> Any:
    draws = np.random.default_rng(0)

    def draw(leaf: Any) -> Any:
        if np.issubdtype(leaf.dtype, np.integer):
            return draws.integers(0, vocab_size, leaf.shape).astype(leaf.dtype)
        return np.ones(leaf.shape, leaf.dtype)

    return jax.tree.map(draw, engine.batch)


def table(facts: Facts, measured: Measured, step_s: float) -> Table:
    """Predicted beside measured.

    Args:
        step_s: estimated.
    """
    table = Table(title="Predicted and measured", box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("", "predicted", "measured", "measured / predicted"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    ratio = measured.peak_bytes / facts.peak_bytes
    table.add_row("peak memory", show_bytes(facts.peak_bytes), show_bytes(measured.peak_bytes), f"{ratio:.3f}")
    table.add_row(
        "step", f"{1e3 * step_s:.1f} ms, at least", f"{1e3 * measured.step_s:.1f} ms", f"{measured.step_s / step_s:.2f}"
    )
    return table
