"""Cross-entropy over a vocabulary that may be cut over `model`.

Every loss here returns `(sum of token losses, sum of token weights)`, both float32 scalars, never a mean: means of
parts with unequal token counts do not add up, sums do. The step divides once, by the global count.

Shapes: B batch, T sequence, V vocabulary (padded), D model width.
"""

import jax
import jax.numpy as jnp

from meshtrain.errors import ModelError

LossSum = tuple[jax.Array, jax.Array]


def cross_entropy(
    logits_BTV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array, vocab_size: int | None = None
) -> LossSum:
    """Token-weighted cross-entropy in float32.

    Written as a compare and a sum over V, so that with V cut over `model` each device works on its own slice and three
    numbers per token are reduced: Megatron's vocabulary-parallel loss (Shoeybi et al. 2019, section 3).

    Args:
        logits_BTV: any float type.
        targets_BT: int, in [0, vocab_size); the loss of a token that counts and lies outside [0, V) is NaN.
        weights_BT: 0 leaves a token out, whatever its logits and its target are.
        vocab_size: ids from here on are padding and are never chosen; None: no padding.
    """
    weights_BT, targets_BT = weights_BT.astype(jnp.float32), targets_BT.astype(jnp.int32)
    # Before the loss, not after it: 0 times the gradient of logits that are not finite is NaN.
    logits_BTV = jnp.where(weights_BT[..., None] != 0, logits_BTV.astype(jnp.float32), 0.0)
    ids_V = jnp.arange(logits_BTV.shape[-1], dtype=jnp.int32)
    if vocab_size is not None and vocab_size < logits_BTV.shape[-1]:
        logits_BTV = jnp.where(ids_V < vocab_size, logits_BTV, jnp.finfo(jnp.float32).min)
    normalizer_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    known_BT = (targets_BT >= 0) & (targets_BT < logits_BTV.shape[-1])
    chosen_BT = jnp.sum(jnp.where(ids_V == targets_BT[..., None], logits_BTV, 0.0), axis=-1)
    losses_BT = jnp.where(known_BT, normalizer_BT - chosen_BT, jnp.nan)
    losses_BT = jnp.where(weights_BT != 0, losses_BT * weights_BT, 0.0)
    return jnp.sum(losses_BT), jnp.sum(weights_BT)


def chunked_cross_entropy(
    hidden_BTD: jax.Array,
    table_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    vocab_size: int | None = None,
    num_chunks: int = 1,
) -> LossSum:
    """Cross-entropy of `hidden @ table.T`, a chunk of the sequence at a time.

    Only one chunk's logits exist at once: the backward pass computes them again. With V much larger than D, the whole
    float32 logits would be the largest array of the step.

    Args:
        num_chunks: a divisor of T.

    Raises:
        ModelError: it is not.
    """
    if num_chunks < 1 or hidden_BTD.shape[1] % num_chunks:
        raise ModelError(f"num_chunks={num_chunks} does not divide the sequence length {hidden_BTD.shape[1]}")

    def loss(hidden_BTD: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array) -> LossSum:
        logits_BTV = jnp.einsum("btd,vd->btv", hidden_BTD, table_VD)
        return cross_entropy(logits_BTV, targets_BT, weights_BT, vocab_size)

    if num_chunks == 1:
        whole: LossSum = loss(hidden_BTD, targets_BT, weights_BT)
        return whole

    def chunked(x: jax.Array) -> jax.Array:
        batch, seq = x.shape[:2]
        return x.reshape(batch, num_chunks, seq // num_chunks, *x.shape[2:]).swapaxes(0, 1)

    def add(total: LossSum, chunk: tuple[jax.Array, ...]) -> tuple[LossSum, None]:
        part = jax.checkpoint(loss)(*chunk)
        return (total[0] + part[0], total[1] + part[1]), None

    zero = (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
    total: LossSum
    total, _ = jax.lax.scan(add, zero, (chunked(hidden_BTD), chunked(targets_BT), chunked(weights_BT)))
    return total
