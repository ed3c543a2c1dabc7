"""The training state, and where each array of it rests."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshtrain.adapters import Batch, Model
from meshtrain.layout import Layout
from meshtrain.precision import LossScale, Precision


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step reads and writes: logical arrays, whatever the mesh and the ZeRO stage.

    Attributes:
        step: int32 scalar, updates tried so far (those skipped for a non-finite gradient included).
        params: float32 master weights by path.
        opt_state: the optax state.
        loss_scale: float16's dynamic loss scale; 1 for the other types.
    """

    step: jax.Array
    params: dict[str, jax.Array]
    opt_state: Any
    loss_scale: LossScale


def state_shardings(state: TrainState, layout: Layout) -> TrainState:
    """The sharding of every array of a state: optimizer state rests as the parameter that it belongs to.

    An array belongs to a parameter if a key of its path is the parameter's: optax mirrors the dict of parameters.

    Args:
        state: abstract or real.
    """

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        owner = next((key.key for key in path if getattr(key, "key", None) in layout.leaves), None)
        return NamedSharding(layout.mesh, P() if owner is None else layout.spec_like(owner, leaf.shape))

    return jax.tree_util.tree_map_with_path(sharding, state)


def abstract_state(
    model: Model, layout: Layout, optimizer: optax.GradientTransformation, precision: Precision, batch: Batch
) -> TrainState:
    """The state's shapes, dtypes and shardings, without computing it: what a checkpoint is restored into."""
    shapes = jax.eval_shape(_make(model, optimizer, precision, batch, seed=0))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(shapes, layout),
    )


def init_state(
    model: Model,
    layout: Layout,
    optimizer: optax.GradientTransformation,
    precision: Precision,
    batch: Batch,
    seed: int,
) -> TrainState:
    """A new state, each array made right where it rests. The same bits on every mesh and stage.

    Args:
        batch: arrays or `ShapeDtypeStruct`s, for their shapes.
        seed: of the initial parameters.
    """
    make = _make(model, optimizer, precision, batch, seed)
    shardings = state_shardings(jax.eval_shape(make), layout)
    return jax.jit(make, out_shardings=shardings)()


def _make(
    model: Model, optimizer: optax.GradientTransformation, precision: Precision, batch: Batch, seed: int
) -> Callable[[], TrainState]:
    def make() -> TrainState:
        # The key is made in here: nothing may be computed where the devices exist on paper only.
        params = model.init(jax.random.key(seed), batch)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), LossScale.start(precision))

    return make


def state_bytes_per_device(state: Any) -> int:
    """Bytes that one device holds of a state or of a part of one (abstract or real, with shardings)."""
    return sum(
        int(jnp.dtype(leaf.dtype).itemsize) * _num_elements(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(state)
    )


def _num_elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
