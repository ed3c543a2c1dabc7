"""What a GPU's memory holds at the peak of a compiled step.

State and batch are known to the byte, from their shardings. Of the rest the compiler says which buffers are alive at
the peak (`buffers.py`), and which jax operation made each; what a buffer *is* follows from that operation's name and
the buffer's dims, so the split of the temporaries is an estimate. Their sum is the compiler's.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from meshtrain.engine import Engine
from meshtrain.layout import LeafLayout
from meshtrain.plan.buffers import Buffer
from meshtrain.plan.facts import MemoryPart
from meshtrain.rules import num_shards
from meshtrain.state import TrainState, state_bytes_per_device
from meshtrain.zero import GATHER, REDUCE

Dims = tuple[int, ...]

WEIGHTS, GRADIENTS, ACTIVATIONS, TEMPORARIES = "gathered weights", "gradients", "activations", "temporaries"


def state_parts(state: TrainState) -> dict[str, int]:
    """Bytes of one device at rest: "parameters", "optimizer state", "other"."""
    held = {
        "parameters": state_bytes_per_device(state.params),
        "optimizer state": state_bytes_per_device(state.opt_state),
        "other": state_bytes_per_device((state.step, state.loss_scale)),
    }
    assert sum(held.values()) == state_bytes_per_device(state), "a part of the state is not counted"
    return held


def memory_parts(engine: Engine, stats: Any, buffers: Iterable[Buffer] | None) -> tuple[MemoryPart, ...]:
    """The parts of the peak, which add up to what the compiler allocates: arguments, temporaries and new outputs.

    Args:
        stats: `compiled.memory_analysis()`.
        buffers: the temporaries alive at the peak; None where the compiler did not tell, and they stay in one.
    """
    state = state_parts(engine.abstract_state())
    parts = [MemoryPart(name, size, False) for name, size in state.items()]
    parts.append(MemoryPart("batch", stats.argument_size_in_bytes - sum(state.values()), False))
    rest = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    if buffers is not None:
        names = _Names(engine)
        sums: Counter[str] = Counter()
        for buffer in buffers:
            sums[names.part_of(buffer)] += buffer.bytes
        split = {name: sums[name] for name in (WEIGHTS, GRADIENTS, ACTIVATIONS) if sums[name]}
        parts += [MemoryPart(name, size, True) for name, size in split.items()]
        rest -= sum(split.values())
    return (*parts, MemoryPart(TEMPORARIES, rest, buffers is not None))


class _Names:
    """Tells what a buffer is. The dims that a parameter may have on one device are known; so is the depth of stacks."""

    def __init__(self, engine: Engine) -> None:
        leaves = engine.layout.leaves.values()
        mesh = engine.mesh.shape
        self.compute = jax.numpy.dtype(engine.zero.precision.compute)
        self.whole = {dims for leaf in leaves for dims in _variants(_shard(leaf, leaf.compute_spec, mesh), leaf)}
        self.shards = {dims for leaf in leaves for dims in _variants(_shard(leaf, leaf.storage_spec, mesh), leaf)}
        self.depths = {leaf.shape[0] for leaf in leaves if leaf.num_stacked}

    def part_of(self, buffer: Buffer) -> str:
        """One of the four parts that are no state."""
        path = buffer.op_name.split("/")
        dims = _sorted(buffer.dims)
        is_backward = any(word.startswith("transpose(") for word in path)
        is_forward = not is_backward and any(word.startswith("jvp(") for word in path)
        if REDUCE in buffer.op_name:
            return GRADIENTS
        if GATHER in buffer.op_name:
            return WEIGHTS
        if len(dims) > 1 and (dims in self.whole or dims in self.shards):
            # Zeros of this shape are where gradients add up. Of what the backward pass makes, only a slice is a weight:
            # the layer that it reads again.
            is_read = path[-1] == "dynamic_slice" if is_backward else path[-1] != "broadcast_in_dim"
            is_weight = dims in self.whole and buffer.dtype == _HLO_TYPES.get(self.compute.name) and is_read
            return WEIGHTS if is_weight else GRADIENTS
        is_stacked = bool(buffer.dims) and buffer.dims[0] in self.depths and len(buffer.dims) > 2
        return ACTIVATIONS if is_forward or (is_stacked and not is_backward) else TEMPORARIES


_HLO_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def _variants(shape: Dims, leaf: LeafLayout) -> set[Dims]:
    """A stack and one layer of it, with the dims in any order."""
    return {_sorted(shape), _sorted(shape[leaf.num_stacked :])}


def _sorted(shape: Dims) -> Dims:
    return tuple(sorted(size for size in shape if size != 1))


def _shard(leaf: LeafLayout, spec: Iterable[Any], mesh: Mapping[str, int]) -> Dims:
    cuts = [num_shards(entry, mesh) for entry in spec]
    return tuple(size // cut for size, cut in zip(leaf.shape, cuts, strict=True))
