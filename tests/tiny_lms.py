"""Language models of a few thousand weights, written with stock modules three ways, their rules, and what checks them.

Shapes: B batch, T sequence, D model width, H heads, V vocabulary, L layers.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from meshtrain import Engine, Model, cross_entropy, from_function, from_linen, from_nnx, initialize, make_mesh
from meshtrain.step import make_gradients
from meshtrain.zero import from_view, to_view

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


# ---------------------------------------------------------------- checks

X = {"x": np.random.default_rng(0).normal(size=(B, D)).astype(np.float32)}


def make_engine(
    model: Model, batch: Any, stage: int, mesh: tuple[int, int] = (4, 2), rules: Any = ((".*", P()),), **rest: Any
) -> Engine:
    """A model on the first devices of the machine, with an optimizer that compiles fast."""
    made = make_mesh(*mesh, jax.devices()[: mesh[0] * mesh[1]])
    return initialize(model, batch, mesh=made, rules=rules, optimizer=optax.sgd(0.1, momentum=0.9), stage=stage, **rest)


def gradients(engine: Engine, params: Any, batch: Any) -> tuple[float, dict[str, np.ndarray]]:
    """Mean loss and its gradients by path, from the engine's own step."""
    local = make_gradients(engine.model, engine.zero, engine.step_config)

    def mean(params: Any, batch: Any) -> Any:
        loss_sum, tokens, grads = local(to_view(params, engine.layout), batch, jnp.zeros((), jnp.int32), 1.0)
        return loss_sum / tokens, {path: grad / tokens for path, grad in from_view(grads, engine.layout).items()}

    with jax.set_mesh(engine.mesh):
        placed = jax.device_put(params, engine.layout.shardings())
        loss, grads = jax.jit(mean)(placed, engine.shard(batch))
    return float(loss), {path: np.asarray(grad) for path, grad in grads.items()}


def initial(model: Model, batch: Any) -> dict[str, np.ndarray]:
    """The initial parameters by path."""
    params = jax.jit(lambda key: model.init(key, batch))(jax.random.key(0))
    return {path: np.asarray(value) for path, value in params.items()}


def assert_close(grads: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """The same gradients, up to float32 sums in another order."""
    assert grads.keys() == expected.keys()
    largest = max(np.abs(value).max() for value in expected.values())
    for path, value in expected.items():
        # float32 sums in another order: an error of a part of the whole gradient, not of an element near zero
        np.testing.assert_allclose(grads[path], value, rtol=1e-5, atol=1e-6 * largest, err_msg=path)
