"""Attention against a softmax written out, and the choice of its kernel."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshtrain.attention import Kernel, attention
from meshtrain.errors import ModelError
from meshtrain.mesh import make_mesh

B, T, H, K = 2, 7, 4, 8


def qkv(kv_heads: int = H, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random queries [B, T, H, K], keys and values [B, T, kv_heads, K]."""
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=(B, T, heads, K)).astype(dtype) for heads in (H, kv_heads, kv_heads))  # type: ignore[return-value]


def by_hand(q: Any, k: Any, v: Any, causal: bool) -> np.ndarray:
    """softmax(q k^T / sqrt(head_dim)) v in float64, a head at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for batch in range(q.shape[0]):
        for head in range(q.shape[2]):
            kv_head = head // (q.shape[2] // k.shape[2])  # consecutive heads share one
            scores = q[batch, :, head] @ k[batch, :, kv_head].T / np.sqrt(q.shape[-1])
            if causal:
                scores[np.triu_indices(len(scores), 1)] = -np.inf
            exp = np.exp(scores - scores.max(-1, keepdims=True))
            out[batch, :, head] = exp / exp.sum(-1, keepdims=True) @ v[batch, :, kv_head]
    return out


jitted = jax.jit(attention, static_argnames=("causal", "kernel"))


@pytest.mark.parametrize(
    ("kernel", "causal", "kv_heads"),
    [("auto", True, 4), ("auto", True, 2), ("auto", False, 1), ("xla", False, 4), ("xla", True, 1)],
)
def test_it_is_softmax_attention(kernel: Kernel, causal: bool, kv_heads: int) -> None:
    q, k, v = qkv(kv_heads)
    out = jitted(q, k, v, causal=causal, kernel=kernel)
    assert out.shape == (B, T, H, K)
    np.testing.assert_allclose(out, by_hand(q, k, v, causal), atol=1e-6)


def test_it_is_causal_unless_told_otherwise() -> None:
    q, k, v = qkv()
    np.testing.assert_array_equal(jitted(q, k, v), jitted(q, k, v, causal=True))
    later = v.copy()
    later[:, 5:] += 100
    np.testing.assert_array_equal(jitted(q, k, v)[:, :5], jitted(q, k, later)[:, :5])
    assert (np.asarray(jitted(q, k, v, causal=False)) != np.asarray(jitted(q, k, later, causal=False))).all()
    np.testing.assert_allclose(jitted(q, k, v)[:, 0], v[:, 0], atol=1e-6)  # the first position sees itself alone


def test_bfloat16_stays_bfloat16() -> None:
    q, k, v = qkv(dtype=jnp.bfloat16)
    out = jitted(q, k, v)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), by_hand(q, k, v, True), atol=0.02)


def test_heads_over_model_give_the_same_values_and_gradients() -> None:
    mesh = make_mesh(4, 2)
    arrays = qkv(kv_heads=2)
    heads = NamedSharding(mesh, P(None, None, "model", None))

    @jax.jit
    def both(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v), jax.grad(lambda *x: jnp.sum(attention(*x) ** 2), (0, 1, 2))(q, k, v)

    with jax.set_mesh(mesh):
        out, grads = both(*(jax.device_put(x, heads) for x in arrays))
    np.testing.assert_allclose(out, by_hand(*arrays, True), atol=1e-6)
    assert out.sharding.shard_shape(out.shape) == (B, T, H // 2, K)  # no head left its device
    for grad, expected in zip(grads, both(*arrays)[1], strict=True):
        np.testing.assert_allclose(grad, expected, atol=1e-5)


# ---------------------------------------------------------------- the kernel


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The kernels that are asked for, and for how many heads, on what says it is a GPU."""
    asked: list[tuple[str, int]] = []

    def attend(q: Any, k: Any, v: Any, *, is_causal: bool, implementation: str) -> Any:
        asked.append((implementation, q.shape[2]))
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    monkeypatch.setattr(sys.modules["meshtrain.attention"], "_platform", lambda: "gpu")
    return asked


@pytest.mark.parametrize(
    ("dtype", "head_dim", "kernel"),
    [
        (jnp.bfloat16, 128, "cudnn"),
        (jnp.float16, 64, "cudnn"),
        (jnp.float32, 64, "xla"),
        (jnp.bfloat16, 136, "xla"),
    ],
)
def test_auto_takes_cudnn_on_a_gpu_where_it_applies(
    kernels: list[tuple[str, int]], dtype: Any, head_dim: int, kernel: str
) -> None:
    x = jnp.zeros((1, 4, 2, head_dim), dtype)
    attention(x, x, x)
    assert kernels == [(kernel, 2)]


def test_the_xla_kernel_can_be_forced(kernels: list[tuple[str, int]]) -> None:
    x = jnp.zeros((1, 4, 2, 64), jnp.bfloat16)
    attention(x, x, x, kernel="xla")
    assert kernels == [("xla", 2)]


def test_cudnn_attends_inside_a_manual_model_axis(kernels: list[tuple[str, int]]) -> None:
    """The kernel sees the heads of one device, and all of them where there is no mesh."""
    x = jnp.zeros((8, 4, 2, 64), jnp.bfloat16)
    attention(x, x, x)
    mesh = make_mesh(4, 2)
    cut = jax.device_put(x, NamedSharding(mesh, P("data", None, "model", None)))
    with jax.set_mesh(mesh):
        out = jax.jit(attention)(cut, cut, cut)
    assert kernels == [("cudnn", 2), ("cudnn", 1)]
    assert out.sharding.shard_shape(out.shape) == (2, 4, 1, 64)  # and the batch stays cut over `data`


def test_auto_on_a_cpu_is_xla() -> None:
    x = jnp.zeros((1, 4, 2, 64), jnp.bfloat16)
    assert "cudnn" not in str(jax.make_jaxpr(attention)(x, x, x))


@pytest.mark.parametrize(
    ("kernel", "kv_heads", "expected"),
    [
        ("flash", 4, "attention: kernel='flash' is unknown; choose one of auto, xla, cudnn"),
        ("cudnn", 4, "attention: kernel='cudnn' needs a GPU, a 16-bit type and head_dim <= 128; here they are cpu, "),
        ("auto", 3, "attention: 3 kv heads do not divide 4 heads"),
    ],
)  # fmt: skip
def test_what_no_kernel_takes_is_refused(kernel: Any, kv_heads: int, expected: str) -> None:
    with pytest.raises(ModelError) as caught:
        attention(*qkv(kv_heads), kernel=kernel)
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)


def test_float16_runs_where_xla_has_no_such_product() -> None:
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 8, 4, 16), jnp.float16) for i in range(3))
    got, grad = jax.value_and_grad(lambda q: attention(q, k, v).astype(jnp.float32).sum())(q)
    expected = attention(*(x.astype(jnp.float32) for x in (q, k, v))).sum()
    assert attention(q, k, v).dtype == grad.dtype == jnp.float16
    assert float(got) == pytest.approx(float(expected), abs=0.5)
