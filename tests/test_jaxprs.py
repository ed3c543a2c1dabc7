"""However a model reads a parameter, it gets the whole one or an error, never a shard."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshtrain import UserError, from_linen, from_nnx
from tests.tiny_lms import D, X, gradients, initial, make_engine, with_params

pytestmark = pytest.mark.slow

# Each takes a parameter [D, D] and x [b, D], and returns [b, ?]
WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "brackets": lambda w, x: x @ w[...],
    "value": lambda w, x: x @ w.value,
    "get_value": lambda w, x: x @ w.get_value(),
    "row": lambda w, x: x * w[0],
    "element": lambda w, x: x * w[1, 2],
    "rows": lambda w, x: x[:, :4] @ w[:4],
    "plus": lambda w, x: x @ (w + 1),
    "reflected": lambda w, x: x @ (2 * w),
    "matmul": lambda w, x: x @ w,
    "negative": lambda w, x: x @ -w,
    "jnp.dot": lambda w, x: jnp.dot(x, w),
    "jnp.einsum": lambda w, x: jnp.einsum("bi,ij->bj", x, w),
    "jnp.asarray": lambda w, x: x @ jnp.asarray(w),
    "jax.jit": lambda w, x: jax.jit(jnp.matmul)(x, w),
    "jax.vmap": lambda w, x: jax.vmap(lambda row: row @ w)(x),
    "jax.checkpoint": lambda w, x: jax.checkpoint(lambda x: jnp.sin(x @ w))(x),
    "nnx.jit": lambda w, x: nnx.jit(lambda w, x: x @ w)(w, x),
    "nnx.remat": lambda w, x: nnx.remat(lambda w, x: jnp.sin(x @ w))(w, x),
    "iter": lambda w, x: x * sum(w),
    "len": lambda w, x: x @ w[...] * len(w),
    "bool": lambda w, x: x @ w[...] if w else x,
    "shape": lambda w, x: x @ w[...] * w.shape[0],
    "ndim": lambda w, x: x @ w[...] * w.ndim,
    "size": lambda w, x: x @ w[...] * w.size,
    "dtype": lambda w, x: x.astype(w.dtype) @ w[...],
    "T": lambda w, x: x @ w.T,
    "sum": lambda w, x: x * w.sum(),
    "astype": lambda w, x: x @ w.astype(jnp.float32),
    "reshape": lambda w, x: x @ w.reshape(D * D)[:D],
    "at": lambda w, x: x @ w.at[0].set(1.0),
    "copy": lambda w, x: x @ w.copy()[...],
    "set_value": lambda w, x: (w.set_value(w * 2), x @ w)[1],
    "new Param": lambda w, x: x @ nnx.Param(w * 2),
    "twice": lambda w, x: x @ w[...] + jnp.sin(x @ w[...]),
    "inner gradient": lambda w, x: x * jax.grad(lambda w: jnp.sum(w**3))(w[...])[0],
    "jax.lax.scan": lambda w, x: jax.lax.scan(lambda x, w: (x + jnp.sin(w[...]), None), x, w)[0],
    "jax.lax.cond": lambda w, x: x @ jax.lax.cond(jnp.ones(3)[0] > 0, lambda w: w[...], lambda w: w * 2, w),
    "nnx.vmap": lambda w, x: x @ nnx.vmap(lambda w: jnp.sin(w[...]))(w),
    "vmap and whole": lambda w, x: x @ nnx.vmap(lambda w: jnp.sin(w[...]))(w) + x @ w,
    "layers of a tree": lambda w, x: x * jax.tree.map(lambda leaf: leaf[1], w)[...],
    "leaves of the state": lambda w, x: x * sum(jnp.sum(p[...]) for p in jax.tree.leaves([w], is_leaf=is_variable)),
}


def is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


class Ways(nnx.Module):
    """One parameter for each way of reading one: a wrong gradient names the way."""

    def __init__(self, ways: dict[str, Callable[[Any, Any], Any]], *, rngs: nnx.Rngs) -> None:
        self.ways = ways
        self.params = nnx.Dict({name: nnx.Param(jax.random.normal(rngs.params(), (D, D))) for name in ways})

    def loss(self, batch: Any) -> tuple[jax.Array, jax.Array]:
        parts = [jnp.mean(way(self.params[name], batch["x"]) ** 2, -1) for name, way in self.ways.items()]
        return jnp.sum(sum(parts)), jnp.asarray(batch["x"].shape[0], jnp.float32)


@functools.cache
def gradients_of_ways(stage: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """By way: the gradient in the step, and by plain jax."""
    model = from_nnx(lambda rngs: Ways(WAYS, rngs=rngs), Ways.loss)
    params = initial(model, X)

    def mean(params: Any) -> Any:
        loss_sum, weight = with_params(Ways(WAYS, rngs=nnx.Rngs(0)), params).loss(X)
        return loss_sum / weight

    return gradients(make_engine(model, X, stage), params, X)[1], jax.jit(jax.grad(mean))(params)


@pytest.mark.filterwarnings("ignore:'.value' access:DeprecationWarning")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_may_be_read_in_any_way(way: str, stage: int) -> None:
    grads, expected = gradients_of_ways(stage)
    scale = np.abs(expected[f"params/{way}"]).max()
    np.testing.assert_allclose(grads[f"params/{way}"], expected[f"params/{way}"], rtol=1e-5, atol=1e-6 * scale)


LOUD: dict[str, tuple[Callable[[Any, Any], Any], type[Exception], str]] = {
    "tree of the parameter": (
        lambda w, x: x * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(w)),
        UserError,
        "passes parameter 'params/tree of the parameter' to 'integer_pow' without reading it",
    ),
    "tree map": (lambda w, x: x @ jax.tree.map(jnp.sin, w)[...], UserError, "to 'sin' without reading it"),
    "in a scan": (
        lambda w, x: jax.lax.scan(lambda x, w: (x + jax.tree.leaves(w)[0] ** 2, None), x, w)[0],
        UserError,
        "to 'integer_pow' without reading it",
    ),
    "in a branch": (
        lambda w, x: x * jax.lax.cond(x[0, 0] > 0, lambda w: jax.tree.leaves(w)[0].sum(), lambda w: 0.0, w),
        UserError,
        "to 'reduce_sum' without reading it",
    ),
    "in a loop": (
        lambda w, x: jax.lax.fori_loop(0, 2, lambda i, x: x * jax.tree.leaves(w)[0].sum(), x),
        UserError,
        "to 'reduce_sum' without reading it",
    ),
    "mapped over dim 1": (
        lambda w, x: x @ nnx.vmap(lambda w: jnp.tile(w, 2), in_axes=1)(w).T[:D],
        UserError,
        "'params/mapped over dim 1' that is not the first: stack layers along axis 0",
    ),
    "mapped over dim 1 of a jit": (
        lambda w, x: x @ nnx.vmap(nnx.jit(lambda w: jnp.tile(w, 2)), in_axes=1)(w).T[:D],
        UserError,
        "'params/mapped over dim 1 of a jit' that is not the first",
    ),
    "scanned over dim 1": (
        lambda w, x: x + nnx.scan(lambda s, w: (s + w[...], None), in_axes=(nnx.Carry, 1))(jnp.zeros(D), w)[0],
        UserError,
        "'params/scanned over dim 1' that is not the first",
    ),
    "raw value": (lambda w, x: x @ w.get_raw_value(), TypeError, "unsupported operand"),
    "item assignment": (lambda w, x: (w.__setitem__(0, 0.0), x @ w)[1], TypeError, "does not support item assignment"),
}


@pytest.mark.parametrize("way", LOUD)
def test_a_shard_is_never_used_in_silence(way: str) -> None:
    read, error, message = LOUD[way]
    model = from_nnx(lambda rngs: Ways({way: read}, rngs=rngs), Ways.loss)
    with pytest.raises(error, match=message):
        make_engine(model, X, 3)


def test_a_linen_models_raw_variables_are_never_used_in_silence() -> None:
    def loss(model: Any, batch: Any) -> Any:
        fit = jnp.sum(model(batch["x"]) ** 2)
        return fit + sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(model.variables)), jnp.float32(1.0)

    model = from_linen(nn.Dense(D), loss)
    with pytest.raises(UserError, match="passes parameter 'bias' to 'integer_pow' without reading it"):
        make_engine(model, X, 3)
