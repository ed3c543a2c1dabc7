"""A GPT of a few thousand weights on any mesh, and the same training by hand: one device, nothing of meshtrain."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from meshtrain import Engine, Precision, from_nnx, initialize, make_mesh
from models.gpt import GPT, GPTConfig

SIZES = GPTConfig(num_layers=2, dim=32, num_heads=8, vocab_size=61, seq_len=16, vocab_multiple=64)
BATCH = 32  # divides into 4 microbatches on each of 8 data shards


def make_batch(seed: int = 0, batch: int = BATCH, sizes: GPTConfig = SIZES) -> dict[str, np.ndarray]:
    """Random tokens, padded on the right to very unequal lengths (1 to seq_len), so that a mean of means is wrong."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, sizes.vocab_size, (batch, sizes.seq_len + 1)).astype(np.int32)
    lengths = np.minimum(rng.geometric(0.15, batch), sizes.seq_len)
    lengths[0], lengths[-1] = sizes.seq_len, 1
    weights = (np.arange(sizes.seq_len) < lengths[:, None]).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def make_optimizer() -> optax.GradientTransformation:
    """AdamW behind a clip that bites."""
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(3e-3, weight_decay=0.1))


def make_engine(
    data: int,
    model: int,
    stage: int,
    num_microbatches: int = 1,
    sizes: GPTConfig = SIZES,
    optimizer: Any = None,
    batch: int = BATCH,
    **rest: Any,
) -> Engine:
    """The tiny GPT on `data * model` of the virtual devices."""
    precision: Precision = rest.pop("precision", Precision())
    sizes = dataclasses.replace(sizes, dtype=precision.compute.name)
    return initialize(
        from_nnx(lambda rngs: GPT(sizes, rngs=rngs), GPT.loss),
        make_batch(batch=batch, sizes=sizes),
        mesh=make_mesh(data, model, jax.devices()[: data * model]),
        rules=GPT.rules,
        optimizer=optimizer or make_optimizer(),
        stage=stage,
        num_microbatches=num_microbatches,
        precision=precision,
        **rest,
    )


def host(arrays: Any) -> Any:
    """A tree of arrays as numpy, whatever their sharding."""
    return jax.tree.map(np.asarray, arrays)


class ByHand:
    """The same model and optimizer with nothing of meshtrain: `jax.grad` of the mean loss on one device."""

    def __init__(self, sizes: GPTConfig = SIZES, seed: int = 0) -> None:
        self.graph, state = nnx.split(GPT(sizes, rngs=nnx.Rngs(params=jax.random.key(seed))))
        self.state = state
        self.optimizer = make_optimizer()

    def mean_loss(self, state: Any, batch: Any) -> jax.Array:
        """Mean loss per token."""
        loss_sum, tokens = nnx.merge(self.graph, state).loss(batch)
        return loss_sum / tokens

    def gradients(self, batch: Any) -> dict[str, np.ndarray]:
        """Gradient of the mean loss by path."""
        grads = jax.jit(jax.grad(self.mean_loss))(self.state, batch)
        return {"/".join(map(str, path)): np.asarray(var.get_value()) for path, var in nnx.to_flat_state(grads)}

    def train(self, steps: int) -> list[tuple[float, float]]:
        """(loss, gradient norm before clipping) of each update; update i is of `make_batch(i)`."""

        @jax.jit
        def step(state: Any, opt_state: Any, batch: Any) -> Any:
            loss, grads = jax.value_and_grad(self.mean_loss)(state, batch)
            updates, opt_state = self.optimizer.update(grads, opt_state, state)
            return optax.apply_updates(state, updates), opt_state, loss, optax.tree.norm(grads)

        state, history = self.state, []
        opt_state = self.optimizer.init(state)
        for i in range(steps):
            state, opt_state, loss, norm = step(state, opt_state, jax.tree.map(jnp.asarray, make_batch(i)))
            history.append((float(loss), float(norm)))
        return history
