"""GPT as in GPT-2 (Radford et al. 2019) and Megatron-LM (Shoeybi et al. 2019): learned positions, pre-LayerNorm, GELU,
biases, tied embedding.

Plain single-device Flax code: it knows no mesh and no collective. `RULES` beside it say what `model` cuts.

Shapes: B batch, T sequence, D model width, H heads, K head dim, F = 4 D, V vocabulary (padded), L layers.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from meshtrain.activations import name
from meshtrain.attention import Kernel, attention
from meshtrain.errors import ModelError
from meshtrain.losses import LossSum, chunked_cross_entropy

RULES: tuple[tuple[str, P], ...] = (
    (r"attn/qkv/kernel", P(None, None, "model", None)),  # column parallel: heads
    (r"attn/qkv/bias", P(None, "model", None)),
    (r"attn/out/kernel", P("model", None, None)),  # row parallel: its output is summed over `model`
    (r"mlp/up/kernel", P(None, "model")),
    (r"mlp/up/bias", P("model")),
    (r"mlp/down/kernel", P("model", None)),
    (r"wte/embedding", P("model", None)),  # vocabulary parallel, for the lookup and (tied) the logits
    (r"(attn|mlp)/bias", P()),  # of the branch's output: added once, after the sum over `model`
    (r"ln_[12f]/(scale|bias)", P()),
    (r"wpe/embedding", P()),
)


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT. `vocab_size` ids are real; the table is padded to a multiple of `vocab_multiple`.

    The multiple does not depend on the mesh, so a checkpoint fits every mesh whose model axis divides it.
    """

    num_layers: int
    dim: int
    num_heads: int
    vocab_size: int = 50257
    seq_len: int = 1024
    vocab_multiple: int = 128
    dropout: float = 0.0
    unroll: int = 1  # layers per iteration of the scan: more is faster for small models, and slower to compile
    loss_chunks: int = 1  # parts of the sequence whose logits are computed one after the other
    dtype: str = "float32"
    remat: Literal["none", "dots", "full"] = "none"
    kernel: Kernel = "auto"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "dropout" and isinstance(value, int) and value < 1:
                raise ModelError(f"GPT: {field.name}={value} must be at least 1")
        if self.dim % self.num_heads:
            raise ModelError(f"GPT: num_heads={self.num_heads} does not divide dim={self.dim}")
        if self.seq_len % self.loss_chunks:
            raise ModelError(f"GPT: loss_chunks={self.loss_chunks} does not divide seq_len={self.seq_len}")
        if not 0 <= self.dropout < 1:
            raise ModelError(f"GPT: dropout={self.dropout} must lie in [0, 1)")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


def _gpt(dim: int, num_layers: int, num_heads: int, **rest: Any) -> GPTConfig:
    return GPTConfig(num_layers=num_layers, dim=dim, num_heads=num_heads, **rest)


PRESETS = {
    "tiny": _gpt(128, 4, 4, vocab_size=256, seq_len=256, unroll=4),
    "small-bytes": _gpt(384, 6, 6, vocab_size=256, seq_len=512, unroll=6),
    "gpt2-small": _gpt(768, 12, 12),  # Radford et al. 2019, table 2
    "gpt2-medium": _gpt(1024, 24, 16),
    "gpt2-large": _gpt(1280, 36, 20),
    "gpt2-xl": _gpt(1600, 48, 25),
    "zero-8b": _gpt(3072, 72, 24),  # ZeRO, Rajbhandari et al. 2020, appendix
    "zero-13b": _gpt(4096, 62, 32),
    "zero-40b": _gpt(6144, 88, 32),
    "zero-60b": _gpt(8192, 75, 32),
    "zero-100b": _gpt(8192, 125, 64),
    "zero-170b": _gpt(8192, 212, 64),
    "gpt3-175b": _gpt(12288, 96, 96, seq_len=2048),  # Brown et al. 2020, table 2.1
    "1t": _gpt(25600, 128, 200, seq_len=2048),
}


class Attention(nnx.Module):
    """Causal self-attention. q, k and v are a dim of their own in one kernel [D, 3, H, K]: a split moves nothing."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        heads, head_dim = config.num_heads, config.dim // config.num_heads
        self.kernel: Kernel = config.kernel
        self.qkv = nnx.LinearGeneral(
            config.dim, (3, heads, head_dim), kernel_init=_normal(), dtype=jnp.dtype(config.dtype), rngs=rngs
        )
        self.out = nnx.LinearGeneral(
            (heads, head_dim), config.dim, axis=(-2, -1), use_bias=False, kernel_init=_residual_init(config),
            dtype=jnp.dtype(config.dtype), rngs=rngs,
        )  # fmt: skip
        self.bias = nnx.Param(jnp.zeros(config.dim))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]"""
        qkv_BT3HK = self.qkv(x_BTD)
        q_BTHK, k_BTHK, v_BTHK = (qkv_BT3HK[:, :, i] for i in range(3))
        out_BTD = self.out(attention(q_BTHK, k_BTHK, v_BTHK, kernel=self.kernel))
        return _add_bias(name(out_BTD, "branch_out"), self.bias)


class MLP(nnx.Module):
    """Two linear layers with a GELU between."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        dtype = jnp.dtype(config.dtype)
        self.up = nnx.Linear(config.dim, 4 * config.dim, kernel_init=_normal(), dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(
            4 * config.dim, config.dim, use_bias=False, kernel_init=_residual_init(config), dtype=dtype, rngs=rngs
        )
        self.bias = nnx.Param(jnp.zeros(config.dim))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]"""
        h_BTF = jax.nn.gelu(self.up(x_BTD), approximate=True)
        return _add_bias(name(self.down(h_BTF), "branch_out"), self.bias)


class Block(nnx.Module):
    """One pre-LayerNorm transformer layer."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        dtype = jnp.dtype(config.dtype)
        self.ln_1 = nnx.LayerNorm(config.dim, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.attn = Attention(config, rngs=rngs)
        self.ln_2 = nnx.LayerNorm(config.dim, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs) if config.dropout else None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]"""
        x_BTD = self._residual(x_BTD, self.attn(name(self.ln_1(x_BTD), "branch_in")))
        return self._residual(x_BTD, self.mlp(name(self.ln_2(x_BTD), "branch_in")))

    def _residual(self, x_BTD: jax.Array, update_BTD: jax.Array) -> jax.Array:
        if self.dropout is not None:
            update_BTD = self.dropout(update_BTD)
        return name(x_BTD + update_BTD, "residual")


class GPT(nnx.Module):
    """The whole model. `rules` and `presets` are what a config's `model.target` is expected to have."""

    rules: ClassVar[tuple[tuple[str, P], ...]] = RULES
    presets: ClassVar[dict[str, GPTConfig]] = PRESETS

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        dtype = jnp.dtype(config.dtype)
        self.config = config
        self.wte = nnx.Embed(config.padded_vocab_size, config.dim, embedding_init=_normal(), dtype=dtype, rngs=rngs)
        self.wpe = nnx.Embed(config.seq_len, config.dim, embedding_init=_normal(0.01), dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs) if config.dropout else None
        self.blocks = nnx.vmap(lambda rngs: Block(config, rngs=rngs))(rngs.split(config.num_layers))
        self.ln_f = nnx.LayerNorm(config.dim, epsilon=1e-5, dtype=dtype, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Logits [B, T, V] of int tokens [B, T]; those of padding ids are never the largest."""
        table_VD = self.wte.embedding[...].astype(self.config.dtype)
        logits_BTV = jnp.einsum("btd,vd->btv", self._hidden(tokens_BT, table_VD), table_VD)
        real_V = jnp.arange(table_VD.shape[0]) < self.config.vocab_size
        return jnp.where(real_V, logits_BTV, jnp.finfo(logits_BTV.dtype).min)

    def loss(self, batch: dict[str, jax.Array]) -> LossSum:
        """`(sum of token losses, sum of token weights)` of {tokens, targets, weights}, each [B, T]."""
        # Read once: each read of a weight is a gather under ZeRO-3, and the lookup and the logits share this one.
        table_VD = self.wte.embedding[...].astype(self.config.dtype)
        hidden_BTD = self._hidden(batch["tokens"], table_VD)
        return chunked_cross_entropy(
            hidden_BTD, table_VD, batch["targets"], batch["weights"], self.config.vocab_size, self.config.loss_chunks
        )

    def _hidden(self, tokens_BT: jax.Array, table_VD: jax.Array) -> jax.Array:
        """The residual stream after the last norm, [B, T, D]."""
        x_BTD = name(jnp.take(table_VD, tokens_BT, axis=0), "branch_out")
        x_BTD = x_BTD + self.wpe.embedding[...][: tokens_BT.shape[1]].astype(x_BTD.dtype)
        if self.dropout is not None:
            x_BTD = self.dropout(x_BTD)
        x_BTD = name(x_BTD, "residual")
        run = _rematerialized(self.config.remat)
        scan = nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry, unroll=self.config.unroll)
        x_BTD = scan(self.blocks, x_BTD)
        return name(self.ln_f(x_BTD), "branch_in")


def _add_bias(x_BTD: jax.Array, bias: nnx.Param[jax.Array]) -> jax.Array:
    """Adds a row-parallel branch's bias outside of the layer: what is summed over `model` may be cut right away."""
    return x_BTD + bias[...].astype(x_BTD.dtype)


def _rematerialized(remat: str) -> Any:
    """A block's call, with what the backward pass computes again: nothing, all but matrix products, or everything."""

    def run(block: Block, x_BTD: jax.Array) -> jax.Array:
        return block(x_BTD)

    if remat == "none":
        return run
    policies = jax.checkpoint_policies
    return nnx.remat(run, policy=policies.dots_saveable if remat == "dots" else policies.nothing_saveable)


def _normal(stddev: float = 0.02) -> Any:
    return nnx.initializers.normal(stddev)


def _residual_init(config: GPTConfig) -> Any:
    """GPT-2 scales the layers that write to the residual stream by 1 / sqrt(number of such layers)."""
    return _normal(0.02 / (2 * config.num_layers) ** 0.5)
