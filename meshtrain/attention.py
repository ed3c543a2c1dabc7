"""Attention: picks the kernel, and makes the ones that the compiler cannot partition fit a mesh.

cuDNN's fused kernel asserts in the compiler under a partly automatic mesh, so `model` is made manual around it: heads
are independent, and each device attends with its own.
"""

from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from meshtrain.errors import ModelError
from meshtrain.mesh import MODEL

Kernel = Literal["auto", "xla", "cudnn"]
MAX_CUDNN_HEAD_DIM = 128


def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = True, kernel: Kernel = "auto") -> jax.Array:
    """Scaled dot-product attention.

    Args:
        q: [batch, seq, heads, head_dim]; k and v: [batch, seq, kv_heads, head_dim], kv_heads a divisor of heads.
        causal: a position sees itself and those before it.
        kernel: "auto" takes cuDNN's on GPUs where it applies (16-bit types, head_dim <= 128), else XLA's.

    Returns:
        [batch, seq, heads, head_dim]

    Raises:
        ModelError: kv_heads does not divide heads; the kernel is unknown, or cannot take these operands.
    """
    _check(q, k, kernel)
    if kernel == "auto":
        kernel = "cudnn" if _cudnn_applies(q) else "xla"
    if kernel == "xla" and _platform() == "cpu" and q.dtype != jnp.bfloat16:
        return _attend_in_float32(q, k, v, causal)
    attend = partial(jax.nn.dot_product_attention, is_causal=causal, implementation=kernel)
    mesh = jax.sharding.get_abstract_mesh()
    if kernel == "xla" or mesh.empty or MODEL not in mesh.axis_names:
        return attend(q, k, v)
    heads = P(None, None, MODEL, None)
    over_heads = jax.shard_map(
        attend, in_specs=(heads, heads, heads), out_specs=heads, axis_names={MODEL}, check_vma=False
    )
    return over_heads(q, k, v)


def _attend_in_float32(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    """Attention for CPUs, which have no float16 products with float32 sums.

    For float32, `jax.nn`'s own makes the step of a small GPT 5 % slower: it scales the scores instead of the queries.
    """
    wide_q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores_BHTS = jnp.einsum("bthk,bshk->bhts", wide_q * q.shape[-1] ** -0.5, k)
    if causal:
        past_TS = jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
        scores_BHTS = jnp.where(past_TS, scores_BHTS, jnp.finfo(jnp.float32).min)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores_BHTS, axis=-1), v).astype(q.dtype)


def _check(q: jax.Array, k: jax.Array, kernel: str) -> None:
    if kernel not in get_args(Kernel):
        raise ModelError(f"attention: kernel='{kernel}' is unknown; choose one of {', '.join(get_args(Kernel))}")
    if q.shape[2] % k.shape[2]:
        raise ModelError(f"attention: {k.shape[2]} kv heads do not divide {q.shape[2]} heads")
    if kernel == "cudnn" and not _cudnn_applies(q):
        raise ModelError(
            f"attention: kernel='cudnn' needs a GPU, a 16-bit type and head_dim <= {MAX_CUDNN_HEAD_DIM}; here they are "
            f"{_platform()}, {q.dtype} and {q.shape[-1]}: 'auto' takes it where it applies"
        )


def _cudnn_applies(q: jax.Array) -> bool:
    """Whether the program being traced is for GPUs, and the kernel takes these operands."""
    return _platform() == "gpu" and q.dtype.itemsize == 2 and q.shape[-1] <= MAX_CUDNN_HEAD_DIM


def _platform() -> str:
    """The platform of the mesh in use, whose devices may not be here; without a mesh, jax's default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = str(jax.default_backend() if device is None else device.platform)
    return "gpu" if platform in ("cuda", "rocm") else platform
