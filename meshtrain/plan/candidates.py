"""Layouts to try for a model on a cluster, and what each costs at least, by formulas and without compiling.

The formulas are those of Megatron-LM (Shoeybi et al. 2019, section 3) and ZeRO (Rajbhandari et al. 2020, section 7).
State bytes are exact, from the layout. The rest is a lower bound of memory and an order of speed, good enough to say
what is not worth a compile.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, Literal, get_args

import numpy as np
from jax.sharding import AbstractMesh, AxisType

from meshtrain.adapters import abstract_params, probe
from meshtrain.config import Config
from meshtrain.data import abstract_batch
from meshtrain.engine import param_shapes
from meshtrain.errors import UserError
from meshtrain.flops import flops_per_token
from meshtrain.layout import Layout, make_layout
from meshtrain.mesh import DATA, MODEL
from meshtrain.optim import make_optimizer
from meshtrain.plan.facts import Cluster, Facts, MemoryPart
from meshtrain.plan.gpus import Card
from meshtrain.plan.hlo import Collective
from meshtrain.state import abstract_state, state_bytes_per_device
from meshtrain.step import check_batch
from meshtrain.target import Target, load_target
from meshtrain.trainer import make_precision

Remat = Literal["none", "dots", "full"]
REMATS: tuple[Remat, ...] = get_args(Remat)  # from the most memory to the least
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
# What the backward pass of a layer needs beside its input, at least, in units of the residual stream, cut over `model`.
# A GPT keeps 8 with "dots" (q, k, v, the attention's output, the MLP's 4) and 17 with "none" (Korthikanti et al.
# 2022, table 2, attention scores left out); models with grouped queries or a narrower MLP keep less.
_SAVED_IN_LAYER: dict[Remat, int] = {"none": 10, "dots": 6, "full": 0}


@dataclasses.dataclass(frozen=True, order=True)
class Candidate:
    """One layout: everything that the search chooses."""

    data: int
    model: int
    stage: int
    microbatches: int
    remat: Remat
    sequence_parallel: bool

    def apply(self, config: Config) -> Config:
        """The config with this layout in it."""
        return config.model_copy(
            update={
                "devices": 0,
                "mesh": config.mesh.model_copy(update={"data": self.data, "model": self.model}),
                "zero": config.zero.model_copy(update={"stage": self.stage}),
                "train": config.train.model_copy(
                    update={
                        "microbatches": self.microbatches,
                        "remat": self.remat,
                        "sequence_parallel": self.sequence_parallel,
                    }
                ),
            }
        )

    def overrides(self) -> list[str]:
        """The same as `key=value` words of the command line."""
        return [
            f"mesh.data={self.data}", f"mesh.model={self.model}", f"zero.stage={self.stage}",
            f"train.microbatches={self.microbatches}", f"train.remat={self.remat}",
            f"train.sequence_parallel={str(self.sequence_parallel).lower()}",
        ]  # fmt: skip

    @property
    def mesh(self) -> str:
        """Its mesh, data times model."""
        return f"{self.data} x {self.model}"

    def needs_no_less_than(self, other: "Candidate") -> bool:
        """Whether it takes at least the memory of `other`: the same mesh, and nothing in it saves more."""
        # Several microbatches accumulate whole gradients in float32 at stages 0 and 1; one keeps the compute type.
        accumulates = other.stage <= 1 and other.microbatches > 1 and self.microbatches == 1
        return (
            (self.data, self.model) == (other.data, other.model)
            and self.stage <= other.stage
            and self.microbatches <= other.microbatches
            and REMATS.index(self.remat) <= REMATS.index(other.remat)
            and self.sequence_parallel <= other.sequence_parallel
            and not accumulates
        )

    def __str__(self) -> str:
        words = [f"{self.mesh} stage {self.stage}", f"{self.microbatches} microbatch{'es' * (self.microbatches > 1)}"]
        words.append(f"remat {self.remat}")
        return ", ".join(words + ["sequence parallel"] * self.sequence_parallel)


@dataclasses.dataclass(frozen=True)
class Shape:
    """One mesh shape: whether the model can be laid out on it, and the layouts to try.

    Attributes:
        problem: why it cannot; empty if it can.
        state_bytes: at rest on one device: at stage 0, and at the others.
        layout: of stage 1; None where there is a problem.
        sizes: of the model, as its class takes them.
    """

    data: int
    model: int
    problem: str
    state_bytes: tuple[int, int]
    layout: Layout | None
    sizes: Any


def mesh_shapes(config: Config, cluster: Cluster) -> Iterator[Shape]:
    """Every way to cut the cluster's GPUs into data and model, tried on the model's rules and the global batch.

    Raises:
        UserError: the config names no model that can be built.
    """
    target = load_target(config)
    batch = abstract_batch(config.train.global_batch, config.data.seq_len)
    params = abstract_params(target.model, batch)
    stacked = probe(target.model, params, batch).num_stacked
    for model in _divisors(cluster.num_gpus):
        data = cluster.num_gpus // model
        # Shapes and shardings need no devices. Nothing is computed on this mesh.
        mesh: Any = AbstractMesh((data, model), (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))
        try:
            check_batch(batch, 1, mesh)
            whole, cut = (make_layout(params, target.rules, mesh, stage, stacked) for stage in (0, 1))
        except UserError as error:
            yield Shape(data, model, str(error), (0, 0), None, target.sizes)
        else:
            state_bytes = _state_bytes(config, target, whole), _state_bytes(config, target, cut)
            yield Shape(data, model, "", state_bytes, cut, target.sizes)


def _state_bytes(config: Config, target: Target, layout: Layout) -> int:
    stacked = {path: leaf.num_stacked for path, leaf in layout.leaves.items()}
    optimizer = make_optimizer(config.optim, config.train.steps, param_shapes(layout), stacked)
    batch = abstract_batch(config.train.global_batch, config.data.seq_len)
    return state_bytes_per_device(abstract_state(target.model, layout, optimizer, make_precision(config), batch))


def candidates(config: Config, shape: Shape) -> Iterator[Candidate]:
    """The layouts to try on one mesh shape; none where it has a problem."""
    if shape.layout is None:
        return
    per_shard = config.train.global_batch // shape.data
    powers = [2**i for i in range(per_shard.bit_length()) if per_shard % 2**i == 0]
    remats = REMATS if hasattr(shape.sizes, "remat") else (config.train.remat,)
    can_cut = shape.model > 1 and config.data.seq_len % shape.model == 0
    for stage in (0, 1, 2, 3) if shape.data > 1 else (1,):
        for microbatches in powers:
            for remat in remats:
                for sequence_parallel in (False, True) if can_cut else (False,):
                    yield Candidate(shape.data, shape.model, stage, microbatches, remat, sequence_parallel)


def rough_facts(candidate: Candidate, config: Config, shape: Shape, cluster: Cluster, card: Card) -> Facts:
    """What compiling the candidate would tell, by formulas: `peak_bytes` is at least that, `flops` about that.

    Args:
        shape: of the candidate's mesh, without a problem.
    """
    assert shape.layout is not None, "only a shape that works has candidates"
    work = _Work(candidate, config, shape.layout, shape.sizes)
    state = shape.state_bytes[candidate.stage > 0]
    memory = (
        MemoryPart("state", state, False),
        MemoryPart("gathered weights", work.gathered_bytes, True),
        MemoryPart("gradients", work.gradient_bytes, True),
        MemoryPart("activations", work.saved_bytes, True),
    )
    peak = sum(part.bytes for part in memory)
    tokens = config.train.global_batch * config.data.seq_len
    return Facts(
        cluster=cluster,
        platform="cuda",
        mesh={DATA: candidate.data, MODEL: candidate.model},
        stage=candidate.stage,
        microbatches=candidate.microbatches,
        compute=config.precision.compute,
        tokens=tokens,
        params=shape.layout.num_params,
        shard_params=work.shard_params,
        state={"parameters": state // 3, "optimizer state": state - state // 3},
        memory=memory,
        peak_bytes=peak,
        card_bytes=card.usable_bytes,
        compile_seconds=0.0,
        flops=work.model_flops * (4 / 3 if candidate.remat == "full" else 1.0),
        model_flops=work.model_flops,
        collectives=(*work.data_collectives(), *work.model_collectives()),
        weight_shapes={path: leaf.shape for path, leaf in shape.layout.leaves.items()},
    )


@dataclasses.dataclass(frozen=True)
class _Work:
    """The formulas, for one device."""

    candidate: Candidate
    config: Config
    layout: Layout
    model_sizes: Any

    @property
    def _sizes(self) -> tuple[int, int]:
        """Layers and width of the residual stream; (0, 0) where the model does not say."""
        layers, dim = getattr(self.model_sizes, "num_layers", 0), getattr(self.model_sizes, "dim", 0)
        return (layers, dim) if isinstance(layers, int) and isinstance(dim, int) else (0, 0)

    @property
    def _itemsize(self) -> int:
        return _ITEMSIZE[self.config.precision.compute]

    @property
    def _reduce_bytes(self) -> int:
        return 4 if self.config.precision.reduce == "float32" else self._itemsize

    @functools.cached_property
    def shard_params(self) -> int:
        """Elements of the weights that one device computes with."""
        return sum(map(self.layout.compute_size, self.layout.leaves.values()))

    @functools.cached_property
    def _stacked(self) -> int:
        """The same of the layers that the model scans over."""
        return sum(self.layout.compute_size(leaf) for leaf in self.layout.leaves.values() if leaf.num_stacked)

    @property
    def _residual(self) -> int:
        """Bytes of the residual stream in one microbatch: [batch, seq, d]."""
        batch = self.config.train.global_batch // self.candidate.data // self.candidate.microbatches
        return batch * self.config.data.seq_len * self._sizes[1] * self._itemsize

    @property
    def gathered_bytes(self) -> int:
        """Weights in the compute type, beside the state; at stage 3 a layer at a time, which is left out here."""
        rest_as_used = self.config.precision.compute == "float32" and (
            self.candidate.stage == 0 or self.candidate.data == 1
        )
        return 0 if self.candidate.stage == 3 or rest_as_used else self.shard_params * self._itemsize

    @property
    def gradient_bytes(self) -> int:
        """All gradients at the end of the backward pass."""
        if self.candidate.stage >= 2:
            return 4 * self.shard_params // self.candidate.data
        if self.candidate.microbatches == 1:
            return self.shard_params * self._itemsize
        return self.shard_params * 4 + self._stacked * self._itemsize  # a scan over layers gives all of theirs at once

    @property
    def saved_bytes(self) -> int:
        """Kept for the backward pass: each layer's input and, without full remat, something of its inside."""
        model = self.candidate.model
        kept = 1 / (model if self.candidate.sequence_parallel else 1) + _SAVED_IN_LAYER[self.candidate.remat] / model
        return int(self._sizes[0] * self._residual * kept)

    @property
    def model_flops(self) -> float:
        """By PaLM's formula; a parameter of two dims or more counts as a matrix."""
        leaves = self.layout.leaves.values()
        matrices = sum(math.prod(leaf.shape) for leaf in leaves if len(leaf.shape) - leaf.num_stacked >= 2)
        layers, dim = self._sizes
        tokens = self.config.train.global_batch * self.config.data.seq_len
        per_token = flops_per_token(matrices, layers, dim, self.config.data.seq_len)
        return per_token * tokens / (self.candidate.data * self.candidate.model)

    def data_collectives(self) -> Iterator[Collective]:
        """The table at the top of `meshtrain.zero`."""
        if self.candidate.data == 1:
            return
        repeats, stage = self.candidate.microbatches, self.candidate.stage
        if stage == 0:
            yield self._collective("all-reduce", DATA, 1, self.shard_params * self._reduce_bytes)
            return
        gathers = 2 * repeats if stage == 3 else 1
        yield self._collective("all-gather", DATA, gathers, self.shard_params * self._itemsize)
        reductions = repeats if stage >= 2 else 1
        yield self._collective("reduce-scatter", DATA, reductions, self.shard_params * self._reduce_bytes)

    def model_collectives(self) -> Iterator[Collective]:
        """Two sums of the residual stream per layer and pass; sequence parallelism moves the same in two halves."""
        if self.candidate.model == 1 or not self._residual:
            return
        passes = 3 if self.candidate.remat == "full" else 2
        count = 2 * passes * self._sizes[0] * self.candidate.microbatches
        yield self._collective("all-reduce", MODEL, count, self._residual)

    def _collective(self, op: str, axis: str, count: int, size: int) -> Collective:
        group = self.candidate.data if axis == DATA else self.candidate.model
        return Collective(op, axis, group, count, size, size // self._itemsize, "", False, False, "", "")


def _divisors(count: int) -> list[int]:
    return [int(n) for n in np.flatnonzero(count % np.arange(1, count + 1) == 0) + 1]
