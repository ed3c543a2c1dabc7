"""Models as a user would write them, right and wrong, for `meshtrain prove` to judge.

Shapes: B batch, T sequence, D width, F hidden width, V vocabulary.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from meshtrain import cross_entropy, name


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Integer fields alone are known to `prove`."""

    width: int = 16
    hidden: int = 24
    vocab_size: int = 8
    seq_len: int = 8


RULES = [
    ("up/kernel", P(None, "model")),
    ("up/bias", P("model")),
    ("down/kernel", P("model", None)),
    ("embed/embedding", P("model", None)),
    (".*", P()),
]


class Right(nnx.Module):
    """Embedding, one MLP layer over the running mean of the sequence, tied logits."""

    rules = RULES
    presets = {"tiny": Sizes(), "wide": Sizes(width=96, hidden=384, seq_len=64)}  # noqa: RUF012

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(sizes.vocab_size, sizes.width, rngs=rngs)
        self.up = nnx.Linear(sizes.width, sizes.hidden, rngs=rngs)
        self.down = nnx.Linear(sizes.hidden, sizes.width, rngs=rngs)
        self.norm = nnx.LayerNorm(sizes.width, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """[B, T] -> [B, T, V]"""
        x_BTD = name(self.embed(tokens_BT), "residual")
        x_BTD = jnp.cumsum(x_BTD, axis=1) / jnp.arange(1, 1 + x_BTD.shape[1])[:, None]
        return self.embed.attend(self.norm(x_BTD + self.branch(x_BTD)))

    def branch(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x_BTD)))

    def loss(self, batch: Any) -> tuple[jax.Array, jax.Array]:
        return cross_entropy(self(batch["tokens"]), batch["targets"], batch["weights"])


class NoSumOverModel(Right):
    """Its own row-parallel product, without the sum over `model`."""

    def branch(self, x_BTD: jax.Array) -> jax.Array:
        h_BTF = jax.nn.gelu(self.up(x_BTD))
        kernel, bias = self.down.kernel[...], self.down.bias[...]
        if "model" not in jax.sharding.get_abstract_mesh().axis_names:
            return h_BTF @ kernel + bias
        specs = P(None, None, "model"), P("model", None)
        product = jax.shard_map(
            lambda h, w: h @ w, in_specs=specs, out_specs=P(), axis_names={"model"}, check_vma=False
        )
        return product(h_BTF, kernel) + bias


class LocalWidth(Right):
    """Scales by a width that it takes to be cut over `model`, though the model it is given is whole."""

    def branch(self, x_BTD: jax.Array) -> jax.Array:
        parts = dict(jax.sharding.get_abstract_mesh().shape).get("model", 1)
        return super().branch(x_BTD) * (self.up.kernel.shape[-1] / parts) ** -0.5


class MeanOfMeans(Right):
    """Divides by the tokens of its own part of the batch."""

    def loss(self, batch: Any) -> tuple[jax.Array, jax.Array]:
        loss_sum, tokens = super().loss(batch)
        return loss_sum / tokens, jnp.ones(())


class PenaltyPerPart(Right):
    """Adds a penalty on a weight once to each part of the batch, so that it counts as often as there are parts."""

    def loss(self, batch: Any) -> tuple[jax.Array, jax.Array]:
        loss_sum, tokens = super().loss(batch)
        return loss_sum + 0.1 * jnp.sum(jnp.square(self.norm.bias[...])), tokens


class OverTheBatch(Right):
    """Centers its activations over the rows that it sees."""

    def branch(self, x_BTD: jax.Array) -> jax.Array:
        return super().branch(x_BTD - x_BTD.mean(0))


class Random(Right):
    """Draws noise while it trains, which no field of its sizes switches off."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs) -> None:
        super().__init__(sizes, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def branch(self, x_BTD: jax.Array) -> jax.Array:
        return self.dropout(super().branch(x_BTD))


class Idle(Right):
    """Has a parameter that nothing reads."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs) -> None:
        super().__init__(sizes, rngs=rngs)
        self.idle = nnx.Linear(sizes.width, 8, use_bias=False, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class StockSizes(Sizes):
    num_layers: int = 2
    num_heads: int = 2


class Stock(nnx.Module):
    """Stock attention, layers in a list. A key's bias has no gradient but rounding: softmax does not see it."""

    rules = [  # noqa: RUF012
        ("(query|key|value)/kernel", P(None, "model", None)),
        ("(query|key|value)/bias", P("model", None)),
        ("out/kernel", P("model", None, None)),
        (".*", P()),
    ]
    presets = {"tiny": StockSizes(), "deep": StockSizes(width=96, num_layers=7, num_heads=12)}  # noqa: RUF012

    def __init__(self, sizes: StockSizes, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(sizes.vocab_size, sizes.width, rngs=rngs)
        heads = sizes.num_heads
        layers = [nnx.MultiHeadAttention(heads, sizes.width, decode=False, rngs=rngs) for _ in range(sizes.num_layers)]
        self.layers = nnx.List(layers)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """[B, T] -> [B, T, V]"""
        x_BTD = self.embed(tokens_BT)
        for layer in self.layers:
            x_BTD = x_BTD + layer(x_BTD, mask=nnx.make_causal_mask(tokens_BT))
        return self.embed.attend(x_BTD)


class Linen(nn.Module):
    """Much the same in linen."""

    sizes: Sizes

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """[B, T] -> [B, T, V]"""
        embed = nn.Embed(self.sizes.vocab_size, self.sizes.width, name="embed")
        x_BTD = embed(tokens_BT)
        h_BTF = nn.gelu(nn.Dense(self.sizes.hidden, name="up")(x_BTD))
        return embed.attend(nn.LayerNorm(name="norm")(x_BTD + nn.Dense(self.sizes.width, name="down")(h_BTF)))


Linen.rules = RULES  # a linen module is a dataclass: annotations in it would be fields
Linen.presets = Right.presets
