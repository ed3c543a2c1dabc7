"""ZeRO (Rajbhandari et al. 2020): what crosses the data axis, and when. This file decides all of it.

Everything here runs inside the step's `jax.shard_map`, in which `data` is manual: arrays are this device's part, and
each collective is written out. Psi is the number of parameters, M the number of microbatches.

    stage | weights                            | gradients                                   | volume in Psi
    ------|------------------------------------|---------------------------------------------|--------------
      0   | rest whole                         | all-reduced once, at the end                | 2
      1   | gathered once, at the start        | reduce-scattered once, at the end           | 1 + 1
      2   | gathered once, at the start        | reduce-scattered where each is produced     | 1 + M
      3   | gathered where each is read, in the| reduce-scattered by the transpose of        | 2M + M
          | forward and the backward pass      | that gather                                 |

For stages 1 to 3 the state rests in one and the same layout (`layout.py`): the stage chooses a flow, not a format.
Weights are gathered in `precision.compute`, gradients reduced in `precision.reduce` and accumulated in float32.

The flow, in the order of a step: `gather_early` -> `differentiated` -> `weights` (what the model reads) -> the
gradients of the loss -> `reduce_late`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import PartitionSpec as P

from meshtrain.layout import Layout, LeafLayout
from meshtrain.mesh import DATA, MODEL, sum_axes
from meshtrain.precision import Precision

Arrays = dict[str, jax.Array]
T = TypeVar("T")  # a pytree of arrays
GATHER, REDUCE = "gather_weights", "reduce_gradients"  # what `plan` reads in a compiled program, and a profiler shows
_LARGE_LAYER = 1 << 22  # elements of a layer's weight, from which on it is gathered by itself: 8 MiB in bf16


# ---------------------------------------------------------------- the flow


@dataclasses.dataclass(frozen=True)
class Zero:
    """The flow of one ZeRO stage."""

    layout: Layout
    precision: Precision

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.layout.stage

    def gather_early(self, shards: Arrays) -> Arrays:
        """Weights that stay whole for the step: all of them at stages 0 to 2, none at stage 3. In the compute type."""
        if self.stage == 3:
            return {}
        whole = {path: self._whole(shard, self.layout.leaves[path]) for path, shard in shards.items()}
        specs = {path: self.layout.leaves[path].compute_spec for path in whole}
        return jax.lax.with_sharding_constraint(whole, specs)

    def differentiated(self, shards: Arrays, whole: Arrays) -> Arrays:
        """What the loss is differentiated by: whole weights (stages 0 and 1) or shards (stages 2 and 3)."""
        return whole if self.stage <= 1 else shards

    def weights(self, by: Arrays, whole: Arrays) -> dict[str, "jax.Array | Weight"]:
        """What the model reads in place of its parameters, as a function of what is differentiated."""
        if self.stage <= 1:
            return dict(by)
        if self.stage == 2:
            return {path: self._weight(shard, whole[path], path) for path, shard in by.items()}
        return {path: self._weight(shard, None, path) for path, shard in by.items()}

    def reduce_late(self, grads: Arrays) -> Arrays:
        """Sums over the batch axes what is still local: everything at stages 0 and 1, else what rests replicated."""
        return {path: self._reduce_late(grad, self.layout.leaves[path]) for path, grad in grads.items()}

    def _whole(self, shard: jax.Array, leaf: LeafLayout) -> jax.Array:
        cast = shard.astype(self.precision.compute)
        if leaf.zero_dim is None:
            return cast
        by_layer = leaf.num_stacked and math.prod(leaf.shape[leaf.num_stacked :]) >= _LARGE_LAYER
        return gather_layers(cast, leaf) if by_layer else all_gather(cast, leaf)

    def _weight(self, shard: jax.Array, whole: jax.Array | None, path: str) -> "Weight":
        leaf = self.layout.leaves[path]
        if leaf.zero_dim is None:
            return Replicated(shard, self.precision)
        if whole is not None:
            return Gathered(whole, shard, leaf, self.precision, self._other_axes)
        return Sharded(shard, leaf, self.precision, self._other_axes)

    def _reduce_late(self, grad: jax.Array, leaf: LeafLayout) -> jax.Array:
        if leaf.zero_dim is None:
            return all_reduce(grad.astype(self.precision.reduce), leaf, sum_axes(self.layout.mesh)).astype(jnp.float32)
        if self.stage <= 1:
            return reduce_grad(grad, leaf, self.precision, self._other_axes)
        return grad

    @property
    def _other_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in sum_axes(self.layout.mesh) if axis != DATA)


# ---------------------------------------------------------------- what a model reads


class Weight:
    """Stands for a parameter inside the step; the model adapter calls `read` where the model reads the parameter."""

    def read(self) -> jax.Array:
        """The whole weight, in the compute type."""
        raise NotImplementedError


def _static() -> dict[str, bool]:
    return {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Replicated(Weight):
    """A weight that no dim of could be cut: read as it rests, its gradient summed at the end of the step."""

    value: jax.Array
    precision: Precision = dataclasses.field(metadata=_static())

    def read(self) -> jax.Array:
        """The weight in the compute type; its gradient stays local."""
        return self.value.astype(self.precision.compute)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gathered(Weight):
    """Stage 2: a weight already whole, beside the shard that its gradient belongs to."""

    whole: jax.Array
    shard: jax.Array
    leaf: LeafLayout = dataclasses.field(metadata=_static())
    precision: Precision = dataclasses.field(metadata=_static())
    other_axes: tuple[str, ...] = dataclasses.field(metadata=_static())

    def read(self) -> jax.Array:
        """The whole weight; the backward pass reduce-scatters its gradient right there, into the shard's."""
        return _attach(jax.lax.stop_gradient(self.whole), self.shard, self.leaf, self.precision, self.other_axes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sharded(Weight):
    """Stage 3: a weight that gathers itself where it is read."""

    shard: jax.Array
    leaf: LeafLayout = dataclasses.field(metadata=_static())
    precision: Precision = dataclasses.field(metadata=_static())
    other_axes: tuple[str, ...] = dataclasses.field(metadata=_static())

    def read(self) -> jax.Array:
        """Gathers; the transpose reduce-scatters the gradient."""
        return _gather(self.shard, self.leaf, self.precision, self.other_axes)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _attach(
    whole: jax.Array, shard: jax.Array, leaf: LeafLayout, precision: Precision, other_axes: tuple[str, ...]
) -> jax.Array:
    return whole


def _attach_bwd(
    leaf: LeafLayout, precision: Precision, other_axes: tuple[str, ...], _: None, grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros_like(grad), reduce_grad(grad, leaf, precision, other_axes)


_attach.defvjp(lambda whole, shard, *static: (whole, None), _attach_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(shard: jax.Array, leaf: LeafLayout, precision: Precision, other_axes: tuple[str, ...]) -> jax.Array:
    return all_gather(shard.astype(precision.compute), leaf)


def _gather_bwd(
    leaf: LeafLayout, precision: Precision, other_axes: tuple[str, ...], _: None, grad: jax.Array
) -> tuple[jax.Array]:
    return (reduce_grad(grad, leaf, precision, other_axes),)


_gather.defvjp(lambda shard, *static: (_gather(shard, *static), None), _gather_bwd)


# ---------------------------------------------------------------- the collectives
# Each runs with `model` manual too, in a nested shard_map: an operand of a manual collective that is still cut over an
# automatic axis would be replicated over that axis first (a 101B model's weights grew 16 times).


@jax.named_scope(GATHER)
def all_gather(shard: jax.Array, leaf: LeafLayout, dims_in_order: bool = False) -> jax.Array:
    """The whole weight of a shard, in the shard's dtype. Leading dims may have been stripped by a scan.

    Args:
        dims_in_order: whether the result lies in memory as its shape says, whatever its readers would like.
    """

    def local(x: jax.Array) -> jax.Array:
        dim = x.ndim + _zero_dim(leaf)
        whole = jax.lax.all_gather(x, DATA, axis=dim, tiled=True)
        whole = jnp.squeeze(whole, dim - 1) if leaf.num_model_shards > 1 else whole
        return with_layout_constraint(whole, MemoryLayout(tuple(range(whole.ndim)))) if dims_in_order else whole

    return _over_model(local, shard, leaf.view_spec, leaf.compute_spec)


@jax.named_scope(GATHER)
def gather_layers(shards: jax.Array, leaf: LeafLayout) -> jax.Array:
    """The same for a stack of layers `[layers, ...]`, one layer after the other.

    A collective on GPUs leaves the dim that it gathers outermost in memory, and the scan over layers wants the layers
    there. Gathered at once the whole stack is copied into that order, and both copies are held: 53 instead of 30 GB
    for 13B parameters. Here the copy is of a layer. The order must be said, or the copy is put off to after the loop.
    """
    return jax.lax.map(lambda shard: all_gather(shard, leaf, dims_in_order=True), shards)


def reduce_scatter(whole: jax.Array, leaf: LeafLayout) -> jax.Array:
    """Sums a whole array over `data`, each device keeping its shard. The transpose of `all_gather`."""

    def local(x: jax.Array) -> jax.Array:
        dim = x.ndim + _zero_dim(leaf)
        shard = jax.lax.psum_scatter(x, DATA, scatter_dimension=dim, tiled=True)
        return jnp.expand_dims(shard, dim) if leaf.num_model_shards > 1 else shard

    return _over_model(local, whole, leaf.compute_spec, leaf.view_spec)


@jax.named_scope(REDUCE)
def reduce_grad(grad: jax.Array, leaf: LeafLayout, precision: Precision, other_axes: tuple[str, ...]) -> jax.Array:
    """A whole local gradient, reduced in `precision.reduce` to this device's float32 shard."""
    shard = reduce_scatter(grad.astype(precision.reduce), leaf)
    if other_axes:  # replicas last, when only a shard is left to sum
        shard = _over_model(lambda x: jax.lax.psum(x, other_axes), shard, leaf.view_spec, leaf.view_spec)
    return shard.astype(jnp.float32)


@jax.named_scope(REDUCE)
def all_reduce(grad: jax.Array, leaf: LeafLayout, axes: tuple[str, ...]) -> jax.Array:
    """Sums a whole array over manual axes, given the ones of more than one device."""
    if not axes:
        return grad
    return _over_model(lambda x: jax.lax.psum(x, axes), grad, leaf.compute_spec, leaf.compute_spec)


def batch_sum(values: T, axes: tuple[str, ...]) -> T:
    """Sums scalars over manual axes, given the ones of more than one device (XLA rejects a sum over no device)."""
    return jax.lax.psum(values, axes) if axes else values


def _zero_dim(leaf: LeafLayout) -> int:
    assert leaf.zero_dim is not None, f"{leaf.path} rests replicated"
    return leaf.zero_dim


def _over_model(fn: Callable[[jax.Array], jax.Array], x: jax.Array, in_spec: P, out_spec: P) -> jax.Array:
    stripped = len(in_spec) - x.ndim
    specs = P(*in_spec[stripped:]), P(*out_spec[stripped:])
    return jax.shard_map(fn, in_specs=specs[0], out_specs=specs[1], axis_names={MODEL}, check_vma=False)(x)


def to_view(arrays: Mapping[str, jax.Array], layout: Layout) -> Arrays:
    """Logical arrays in the shape in which they enter the step (`LeafLayout.view_shape`). Moves no data."""
    return {path: x.reshape(layout.leaves[path].view_shape) for path, x in arrays.items()}


def from_view(arrays: Mapping[str, jax.Array], layout: Layout) -> Arrays:
    """The inverse of `to_view`, with the storage layout said again so that the compiler keeps it."""
    logical = {path: x.reshape(layout.leaves[path].shape) for path, x in arrays.items()}
    return jax.lax.with_sharding_constraint(logical, layout.shardings())
