"""Language models of a few thousand weights, written with stock modules three ways, and rules for them.

Shapes: B batch, T sequence, D model width, H heads, V vocabulary, L layers.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from meshtrain import Model, cross_entropy, from_function, from_linen, from_nnx

B, T, D, H, F, V, L = 16, 8, 16, 4, 32, 32, 2

RULES = [
    (r"(query|key|value)/kernel", P(None, "model", None)),
    (r"(query|key|value)/bias", P("model", None)),
    (r"out/kernel", P("model", None, None)),
    (r"up/kernel", P(None, "model")),
    (r"up/bias", P("model")),
    (r"down/kernel", P("model", None)),
    (r"embed(/embedding)?", P("model", None)),
    (r".*", P()),
]


def make_batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Random tokens of unequal lengths, so that a mean of means is not the mean."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, (B, T + 1)).astype(np.int32)
    lengths = rng.integers(1, T + 1, B)
    weights = (np.arange(T) < lengths[:, None]).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def lm_loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The loss of a module that maps tokens [B, T] to logits [B, T, V]."""
    return cross_entropy(model(batch["tokens"]), batch["targets"], batch["weights"])


# ---------------------------------------------------------------- nnx


class NnxBlock(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(H, D, decode=False, rngs=rngs)
        self.up = nnx.Linear(D, F, rngs=rngs)
        self.down = nnx.Linear(F, D, rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.dropout(self.down(jax.nn.gelu(self.up(x))))


class NnxLM(nnx.Module):
    """Layers in a list, or stacked, scanned and rematerialized; embedding and logits share one table."""

    def __init__(self, *, stacked: bool, rngs: nnx.Rngs) -> None:
        self.stacked = stacked
        self.embed = nnx.Embed(V, D, rngs=rngs)
        if stacked:
            self.blocks = nnx.vmap(lambda rngs: NnxBlock(rngs=rngs))(rngs.split(L))
        else:
            self.blocks = nnx.List([NnxBlock(rngs=rngs) for _ in range(L)])
        self.norm = nnx.RMSNorm(D, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        if self.stacked:
            run = nnx.remat(lambda block, x: block(x))
            x = nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        else:
            for block in self.blocks:
                x = block(x)
        return self.embed.attend(self.norm(x))


# ---------------------------------------------------------------- linen


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(H, name="attention")(nn.LayerNorm()(x), mask=mask)
        up = nn.gelu(nn.Dense(F, name="up")(x))
        return x + nn.Dense(D, name="down")(up), None


class LinenLM(nn.Module):
    stacked: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(V, D, name="embed")
        x = embed(tokens)
        if self.stacked:
            axes: Any = {"params": 0}
            blocks = nn.scan(nn.remat(LinenBlock), variable_axes=axes, split_rngs={"params": True}, length=L)
            x, _ = blocks(name="blocks")(x, None)
        else:
            for i in range(L):
                x, _ = LinenBlock(name=f"block_{i}")(x)
        return embed.attend(nn.RMSNorm()(x))


# ---------------------------------------------------------------- a plain function


def init_function(key: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(key, 4)

    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape) / shape[-2] ** 0.5

    layers = {"qkv": normal(keys[0], L, D, 3 * D), "up": normal(keys[1], L, D, F), "down": normal(keys[2], L, F, D)}
    return {"embed": normal(keys[3], V, D), "layers": layers, "scale": jnp.ones(D)}


def function_loss(params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        q, k, v = jnp.split(x @ w["qkv"], 3, axis=-1)
        heads = (*x.shape[:2], H, D // H)
        x = x + jax.nn.dot_product_attention(*(y.reshape(heads) for y in (q, k, v)), is_causal=True).reshape(x.shape)
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer), params["embed"][batch["tokens"]], params["layers"])
    return cross_entropy((x * params["scale"]) @ params["embed"].T, batch["targets"], batch["weights"])


FUNCTION_RULES = [("up", P(None, "model")), ("down", P("model", None)), ("embed", P("model", None)), (".*", P())]

# By kind: the model as meshtrain takes it, and its rules
KINDS: dict[str, tuple[Callable[[], Model], list[tuple[str, P]]]] = {
    "nnx": (lambda: from_nnx(lambda rngs: NnxLM(stacked=False, rngs=rngs), lm_loss), RULES),
    "nnx-scan": (lambda: from_nnx(lambda rngs: NnxLM(stacked=True, rngs=rngs), lm_loss), RULES),
    "linen": (lambda: from_linen(LinenLM(stacked=False), lm_loss), RULES),
    "linen-scan": (lambda: from_linen(LinenLM(stacked=True), lm_loss), RULES),
    "function": (lambda: from_function(init_function, function_loss), FUNCTION_RULES),
}


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """`{"a/b": x}` as `{"a": {"b": x}}`."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        node = nested
        *parents, last = path.split("/")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return nested


def plain_loss(kind: str, params: dict[str, jax.Array], batch: Any) -> jax.Array:
    """The mean loss per token of the same model by its framework's own calls: nothing of an adapter."""
    if kind.startswith("nnx"):
        module = NnxLM(stacked=kind == "nnx-scan", rngs=nnx.Rngs(0))
        loss_sum, tokens = lm_loss(with_params(module, params), batch)
    elif kind.startswith("linen"):
        module = LinenLM(stacked=kind == "linen-scan")
        loss_sum, tokens = lm_loss(lambda x: module.apply({"params": nest(params)}, x), batch)
    else:
        loss_sum, tokens = function_loss(nest(params), batch, None)
    return loss_sum / tokens


def with_params(module: Any, params: dict[str, jax.Array]) -> Any:
    """An nnx module with the given values, by path."""
    graph, state, rest = nnx.split(module, nnx.Param, ...)
    flat = [(path, var.replace(params["/".join(map(str, path))])) for path, var in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat), rest)
