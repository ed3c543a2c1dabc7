"""The training step and the evaluation step."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshtrain.activations import Placed, placed
from meshtrain.adapters import Batch, LossSum, Model
from meshtrain.errors import ConfigError
from meshtrain.mesh import batch_axes, batch_spec, manual_axes, num_batch_shards, sum_axes
from meshtrain.optim import global_norm
from meshtrain.state import TrainState, state_shardings
from meshtrain.zero import Arrays, Zero, batch_sum, from_view, to_view

Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What a step needs to know beside the model, the ZeRO flow and the optimizer.

    Attributes:
        num_microbatches: parts that each device cuts its batch into; they are computed one after the other.
        seed: of everything random in the step (dropout).
        regather: recompute all but matrix products in the backward pass. For ZeRO-3 of a model without remat of its
            own: what is kept for the backward pass then holds no gathered weight.
        activations: activation rules by name, see `meshtrain.activations`.
    """

    num_microbatches: int = 1
    seed: int = 0
    regather: bool = False
    activations: Placed = dataclasses.field(default_factory=dict)


def make_train_step(
    model: Model, zero: Zero, optimizer: optax.GradientTransformation, config: StepConfig
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The training step, to be jitted: `(state, global batch) -> (next state, metrics)`.

    Gradients are sums of token losses over microbatches and data shards, divided once by the global token count. A loss
    or gradient that is not finite leaves parameters and optimizer state as they were, to the bit.

    Metrics (scalars): loss (mean per token), grad_norm (global, before clipping), tokens, loss_scale, skipped.
    """
    local_gradients = make_gradients(model, zero, config)
    layout, precision = zero.layout, zero.precision

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        unit = state.loss_scale.scale * _power_of_two_below(batch)
        views = to_view(state.params, layout)
        loss_sum, tokens, grads = local_gradients(views, batch, state.step, unit)

        divisor = unit * jnp.maximum(tokens, 1.0)
        grads = {path: grad / divisor for path, grad in from_view(grads, layout).items()}
        grad_norm = global_norm(grads)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss_sum)

        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        updated = TrainState(state.step, params, opt_state, state.loss_scale)
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state)
        scale = state.loss_scale.next(finite, precision)
        metrics = {
            "loss": loss_sum / jnp.maximum(tokens, 1.0),
            "grad_norm": grad_norm,
            "tokens": tokens,
            "loss_scale": state.loss_scale.scale,
            "skipped": 1.0 - finite,
        }
        return dataclasses.replace(kept, step=state.step + 1, loss_scale=scale), metrics

    return train_step


def make_gradients(
    model: Model, zero: Zero, config: StepConfig
) -> Callable[[Arrays, Batch, jax.Array, jax.Array], tuple[jax.Array, jax.Array, Arrays]]:
    """`(parameter views, global batch, step, unit) -> (loss sum, token count, gradients of unit * loss sum)`.

    Gradients come back as views of the storage layout, float32, summed over the batch axes.
    """
    mesh = zero.layout.mesh
    loss_fn = model.loss
    if config.regather:
        loss_fn = jax.checkpoint(model.loss, policy=jax.checkpoint_policies.dots_saveable)

    def local_gradients(
        shards: Arrays, batch: Batch, step: jax.Array, unit: jax.Array
    ) -> tuple[jax.Array, jax.Array, Arrays]:
        whole = zero.gather_early(shards)
        by = zero.differentiated(shards, whole)

        def loss(by: Arrays, batch: Batch, key: jax.Array) -> tuple[jax.Array, LossSum]:
            with placed(config.activations):
                loss_sum, tokens = loss_fn(zero.weights(by, whole), batch, key)
            return loss_sum * unit, (loss_sum, tokens)

        def accumulate(total: Any, microbatch: tuple[Batch, jax.Array]) -> tuple[Any, None]:
            (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(by, *microbatch)
            return jax.tree.map(jnp.add, total, (sums, grads)), None

        keys = _microbatch_keys(config, step, batch_axes(mesh))
        microbatches = _cut(batch, config.num_microbatches)
        if config.num_microbatches == 1:
            (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(by, _first(microbatches), keys[0])
        else:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), by)
            start = ((jnp.zeros(()), jnp.zeros(())), zeros)
            (sums, grads), _ = jax.lax.scan(accumulate, start, (microbatches, keys))
        loss_sum, tokens = batch_sum(sums, sum_axes(mesh))
        return loss_sum, tokens, zero.reduce_late(grads)

    shard_specs = {path: leaf.manual_spec for path, leaf in zero.layout.leaves.items()}
    return jax.shard_map(
        local_gradients,
        mesh=mesh,
        in_specs=(shard_specs, batch_spec(mesh), P(), P()),
        out_specs=(P(), P(), shard_specs),
        axis_names=manual_axes(mesh),
        check_vma=False,
    )


def make_eval_step(model: Model, zero: Zero, config: StepConfig) -> Callable[[Arrays, Batch], LossSum]:
    """The evaluation step, to be jitted: `(parameters, global batch) -> (loss sum, token count)`, no dropout."""
    layout, mesh = zero.layout, zero.layout.mesh

    def local_loss(shards: Arrays, batch: Batch) -> LossSum:
        whole = zero.gather_early(shards)
        with placed(config.activations):
            sums = model.loss(zero.weights(zero.differentiated(shards, whole), whole), batch, None)
        return batch_sum(sums, sum_axes(mesh))

    shard_specs = {path: leaf.manual_spec for path, leaf in layout.leaves.items()}
    mapped = jax.shard_map(
        local_loss,
        mesh=mesh,
        in_specs=(shard_specs, batch_spec(mesh)),
        out_specs=(P(), P()),
        axis_names=manual_axes(mesh),
        check_vma=False,
    )
    return lambda params, batch: mapped(to_view(params, layout), batch)


def jit_train_step(
    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]], state: TrainState, zero: Zero
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Jits a training step: the state's memory is reused, and the next state rests as `state_shardings` says.

    Args:
        state: abstract or real, for its structure.
    """
    mesh = zero.layout.mesh
    replicated = NamedSharding(mesh, P())
    return jax.jit(step, donate_argnums=0, out_shardings=(state_shardings(state, zero.layout), replicated))


def check_batch(batch: Batch, num_microbatches: int, mesh: jax.sharding.Mesh) -> None:
    """Checks that a global batch can be cut into microbatches on every data shard.

    Raises:
        ConfigError: with both numbers and the nearest sizes that work.
    """
    if num_microbatches < 1:
        raise ConfigError(f"num_microbatches={num_microbatches} must be at least 1")
    parts = num_microbatches * num_batch_shards(mesh)
    sizes = {leaf.shape[0] if leaf.shape else 0 for leaf in jax.tree.leaves(batch)}
    if not sizes:
        raise ConfigError("a batch must hold at least one array [batch, ...], and this one holds none")
    if len(sizes) != 1:
        raise ConfigError(f"the arrays of a batch must agree in their first dim, got sizes {sorted(sizes)}")
    size = sizes.pop()
    if size == 0 or size % parts:
        below, above = size // parts * parts, -(-size // parts) * parts or parts
        near = f"{above}" if below in (0, above) else f"{below} or {above}"
        raise ConfigError(
            f"a global batch of {size} records cannot be cut over data={num_batch_shards(mesh)} x "
            f"{num_microbatches} microbatches = {parts} equal parts: use {near} records (the least is {parts})"
        )


def _power_of_two_below(batch: Batch) -> float:
    """1 / (a power of two near the number of elements of a batch): keeps sums of token losses in the range of 16-bit
    gradients. It divides out again, exactly."""
    largest = max(math.prod(leaf.shape) for leaf in jax.tree.leaves(batch))
    return 2.0 ** -math.floor(math.log2(max(largest, 1)))


def _microbatch_keys(config: StepConfig, step: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Keys `[num_microbatches]` = f(seed, step, microbatch, data index), whatever the model axis and the stage."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), 1), step)
    key = jax.random.fold_in(key, jax.lax.axis_index(axes))
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(config.num_microbatches))


def _cut(batch: Batch, parts: int) -> Batch:
    """Arrays [b, ...] as [parts, b / parts, ...]."""
    return jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), batch)


def _first(batch: Batch) -> Batch:
    return jax.tree.map(lambda x: x[0], batch)
