"""Cross-entropy: against optax, with padding, masks, values that are not finite, chunks, a vocabulary over `model`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshtrain.errors import ModelError
from meshtrain.losses import chunked_cross_entropy, cross_entropy
from meshtrain.mesh import make_mesh

B, T, V, D = 4, 6, 24, 8
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(B, T, V)).astype(np.float32) * 3
TARGETS = RNG.integers(0, V, (B, T)).astype(np.int32)
WEIGHTS = (RNG.random((B, T)) < 0.6).astype(np.float32)
HIDDEN = RNG.normal(size=(B, T, D)).astype(np.float32)
TABLE = RNG.normal(size=(V, D)).astype(np.float32)


def in_float64(logits: Any, targets: Any, weights: Any) -> tuple[float, np.ndarray]:
    """The loss sum and its gradient by the textbook, in numpy."""
    logits, weights = np.asarray(logits, np.float64), np.asarray(weights, np.float64)
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    softmax = exp / exp.sum(-1, keepdims=True)
    chosen = np.take_along_axis(softmax, np.asarray(targets)[..., None].astype(np.int64), -1)[..., 0]
    one_hot = np.eye(logits.shape[-1])[np.asarray(targets)]
    return float((-np.log(chosen) * weights).sum()), (softmax - one_hot) * weights[..., None]


@partial(jax.jit, static_argnums=3)
def _value_and_grad(logits: Any, targets: Any, weights: Any, vocab_size: int | None) -> Any:
    return jax.value_and_grad(cross_entropy, has_aux=True)(logits, targets, weights, vocab_size)


def loss_and_grad(logits: Any, targets: Any, weights: Any, vocab_size: int | None = None) -> tuple[Any, Any, Any]:
    """`(loss sum, weight sum, gradient by the logits)`."""
    (total, count), grad = _value_and_grad(logits, targets, weights, vocab_size)
    return total, count, np.array(grad)


# ---------------------------------------------------------------- values


def test_it_is_the_cross_entropy() -> None:
    total, count, grad = loss_and_grad(LOGITS, TARGETS, WEIGHTS)
    expected, expected_grad = in_float64(LOGITS, TARGETS, WEIGHTS)
    assert (total.dtype, count.dtype, total.shape, count.shape) == (jnp.float32, jnp.float32, (), ())
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    assert count == WEIGHTS.sum()
    np.testing.assert_allclose(grad, expected_grad, atol=1e-6)


def test_it_agrees_with_optax() -> None:
    total, _, grad = loss_and_grad(LOGITS, TARGETS, WEIGHTS)

    def by_optax(logits: jax.Array) -> jax.Array:
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(TARGETS)) * WEIGHTS)

    expected, expected_grad = jax.jit(jax.value_and_grad(by_optax))(jnp.asarray(LOGITS))
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    np.testing.assert_allclose(grad, expected_grad, atol=1e-6)


def test_large_logits_do_not_overflow() -> None:
    logits = LOGITS * 1e4
    total, _, grad = loss_and_grad(logits, TARGETS, WEIGHTS)
    shifted = np.asarray(logits, np.float64) - logits.max(-1, keepdims=True)
    chosen = np.take_along_axis(shifted, TARGETS[..., None], -1)[..., 0]
    expected = ((np.log(np.exp(shifted).sum(-1)) - chosen) * WEIGHTS).sum()
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    assert np.isfinite(grad).all()


def test_fractional_and_negative_weights_count_as_they_are() -> None:
    weights = RNG.normal(size=(B, T)).astype(np.float32)
    total, count, grad = loss_and_grad(LOGITS, TARGETS, weights)
    expected, expected_grad = in_float64(LOGITS, TARGETS, weights)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    np.testing.assert_allclose(count, weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(grad, expected_grad, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_logits_are_summed_in_float32(dtype: Any) -> None:
    logits = jnp.asarray(LOGITS, dtype)
    total, _, grad = loss_and_grad(logits, TARGETS, WEIGHTS)
    expected, expected_grad = in_float64(logits, TARGETS, WEIGHTS)  # of the rounded logits
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    assert grad.dtype == dtype
    np.testing.assert_allclose(np.asarray(grad, np.float32), expected_grad, atol=4e-3)  # one rounding to bfloat16


def test_the_targets_type_need_not_hold_the_padded_vocabulary() -> None:
    logits = RNG.normal(size=(2, 3, 384)).astype(np.float32)
    targets = np.asarray([[0, 255, 1], [128, 127, 254]])
    expected, _ = in_float64(logits[..., :256], targets, np.ones((2, 3)))
    for dtype in (np.uint8, np.int16, np.uint32):
        total, _, _ = loss_and_grad(logits, targets.astype(dtype), np.ones((2, 3), np.float32), vocab_size=256)
        np.testing.assert_allclose(total, expected, rtol=1e-6, err_msg=str(dtype))


@pytest.mark.parametrize("target", [-1, -100, V, V + 1000])
def test_a_target_outside_the_vocabulary_is_never_a_plausible_loss(target: int) -> None:
    targets = TARGETS.copy()
    targets[0, 0] = target
    for weight, finite in ((1.0, False), (0.0, True)):
        weights = WEIGHTS.copy()
        weights[0, 0] = weight
        total, _, grad = loss_and_grad(LOGITS, targets, weights)
        assert np.isfinite(total) == finite
        if finite:
            masked = np.where(weights > 0, targets, 0)
            np.testing.assert_allclose(total, in_float64(LOGITS, masked, weights)[0], rtol=1e-6)
            np.testing.assert_allclose(grad, in_float64(LOGITS, masked, weights)[1], atol=1e-6)


# ---------------------------------------------------------------- padding of the vocabulary


def test_padding_is_never_chosen_and_gets_no_gradient() -> None:
    real = 19
    logits = LOGITS.copy()
    logits[..., real:] = 50.0  # were it not masked, it would win
    targets = TARGETS % real
    total, _, grad = loss_and_grad(logits, targets, WEIGHTS, vocab_size=real)
    expected, expected_grad = in_float64(logits[..., :real], targets, WEIGHTS)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    np.testing.assert_allclose(grad[..., :real], expected_grad, atol=1e-6)
    assert (grad[..., real:] == 0).all()


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
def test_padding_may_hold_anything(junk: float) -> None:
    real = 19
    logits = LOGITS.copy()
    logits[..., real:] = junk
    total, _, grad = loss_and_grad(logits, TARGETS % real, WEIGHTS, vocab_size=real)
    np.testing.assert_allclose(total, in_float64(logits[..., :real], TARGETS % real, WEIGHTS)[0], rtol=1e-6)
    assert np.isfinite(grad).all() and (grad[..., real:] == 0).all()


def test_padded_rows_of_a_tied_table_get_no_gradient() -> None:
    grad = jax.jit(jax.grad(lambda table: chunked_cross_entropy(HIDDEN, table, TARGETS % 19, WEIGHTS, 19, 2)[0]))(TABLE)
    assert (np.asarray(grad)[19:] == 0).all() and (np.abs(np.asarray(grad)[:19]).sum(-1) > 0).all()


def test_a_vocabulary_without_padding_says_the_same_either_way() -> None:
    assert float(loss_and_grad(LOGITS, TARGETS, WEIGHTS, V)[0]) == float(loss_and_grad(LOGITS, TARGETS, WEIGHTS)[0])


# ---------------------------------------------------------------- masks


def test_one_counted_token_moves_its_own_logits_only() -> None:
    weights = np.zeros((B, T), np.float32)
    weights[2, 3] = 1
    total, count, grad = loss_and_grad(LOGITS, TARGETS, weights)
    assert count == 1
    assert (np.abs(grad[2, 3]) > 0).all()
    grad[2, 3] = 0
    assert (grad == 0).all()
    np.testing.assert_allclose(total, in_float64(LOGITS, TARGETS, weights)[0], rtol=1e-6)


@pytest.mark.parametrize("vocab_size", [None, 19])
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 3e38])
def test_tokens_that_do_not_count_may_hold_anything(junk: float, vocab_size: int | None) -> None:
    """Their loss is not finite, and 0 times its gradient would be NaN."""
    targets = TARGETS % (vocab_size or V)
    logits = np.where(WEIGHTS[..., None] > 0, LOGITS, junk).astype(np.float32)
    total, count, grad = loss_and_grad(logits, targets, WEIGHTS, vocab_size)
    expected = loss_and_grad(LOGITS, targets, WEIGHTS, vocab_size)
    assert (float(total), float(count)) == (float(expected[0]), float(expected[1]))
    np.testing.assert_array_equal(grad, expected[2])
    logits[0, 0] = np.where(np.arange(V) % 2 == 0, junk, 0)  # some of one token's only
    weights = WEIGHTS.copy()
    weights[0, 0] = 0
    assert np.isfinite(loss_and_grad(logits, targets, weights, vocab_size)[2]).all()


def test_a_counted_token_that_is_not_finite_shows() -> None:
    logits, weights = LOGITS.copy(), WEIGHTS.copy()
    logits[0, 0, 0], weights[0, 0] = np.nan, 1
    assert np.isnan(loss_and_grad(logits, TARGETS, weights)[0])


def test_logits_that_a_model_has_masked_itself() -> None:
    logits = LOGITS.copy()
    logits[..., 5] = -np.inf
    targets = np.where(TARGETS == 5, 6, TARGETS)
    total, _, grad = loss_and_grad(logits, targets, WEIGHTS)
    np.testing.assert_allclose(total, in_float64(logits, targets, WEIGHTS)[0], rtol=1e-6)
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("logits", [LOGITS, np.full_like(LOGITS, np.nan)])
def test_a_batch_without_a_counted_token_is_zero(logits: np.ndarray) -> None:
    total, count, grad = loss_and_grad(logits, TARGETS, np.zeros((B, T), np.float32))
    assert (float(total), float(count)) == (0.0, 0.0)
    assert (grad == 0).all()


def test_sums_of_parts_add_up_where_means_would_not() -> None:
    whole = loss_and_grad(LOGITS, TARGETS, WEIGHTS)
    parts = [loss_and_grad(*(x[i : i + 1] for x in (LOGITS, TARGETS, WEIGHTS))) for i in range(B)]
    np.testing.assert_allclose(sum(float(part[0]) for part in parts), whole[0], rtol=1e-6)
    assert sum(float(part[1]) for part in parts) == float(whole[1])
    assert len({float(part[1]) for part in parts}) > 1  # the parts do have unequal counts


# ---------------------------------------------------------------- chunks


@pytest.mark.parametrize(("num_chunks", "vocab_size"), [(1, 19), (2, None), (3, 19), (6, 19)])
def test_chunks_change_nothing(num_chunks: int, vocab_size: int | None) -> None:
    targets = jnp.asarray(TARGETS % (vocab_size or V))

    def whole(hidden: jax.Array, table: jax.Array) -> Any:
        return cross_entropy(hidden @ table.T, targets, jnp.asarray(WEIGHTS), vocab_size)

    def chunked(hidden: jax.Array, table: jax.Array) -> Any:
        return chunked_cross_entropy(hidden, table, targets, jnp.asarray(WEIGHTS), vocab_size, num_chunks)

    results = [jax.jit(jax.value_and_grad(fn, (0, 1), has_aux=True))(HIDDEN, TABLE) for fn in (whole, chunked)]
    (expected, count), grads = results[0]
    (total, chunked_count), chunked_grads = results[1]
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    assert chunked_count == count
    for grad, expected_grad in zip(chunked_grads, grads, strict=True):
        np.testing.assert_allclose(grad, expected_grad, atol=1e-5, rtol=1e-6)


def test_only_one_chunks_logits_exist_at_once() -> None:
    def shapes(num_chunks: int) -> set[tuple[int, ...]]:
        jaxpr = jax.make_jaxpr(
            jax.grad(lambda h: chunked_cross_entropy(h, TABLE, TARGETS, WEIGHTS, None, num_chunks)[0])
        )(HIDDEN)
        return {var.aval.shape for var in _all_vars(jaxpr.jaxpr)}

    assert (B, T, V) in shapes(1)
    assert (B, T // 3, V) in shapes(3)
    assert not [shape for shape in shapes(3) if np.prod(shape) >= B * T * V]


def _all_vars(jaxpr: Any) -> Any:
    for equation in jaxpr.eqns:
        yield from equation.outvars
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _all_vars(inner)


@pytest.mark.parametrize("num_chunks", [0, -1, 4, 7])
def test_chunks_that_do_not_divide_the_sequence_are_refused(num_chunks: int) -> None:
    with pytest.raises(ModelError, match=rf"num_chunks={num_chunks} does not divide the sequence length 6"):
        chunked_cross_entropy(HIDDEN, TABLE, TARGETS, WEIGHTS, None, num_chunks)


# ---------------------------------------------------------------- a vocabulary over `model`


@pytest.mark.parametrize(("num_chunks", "vocab_size"), [(1, None), (2, 19)])
def test_a_vocabulary_over_model_is_the_same(num_chunks: int, vocab_size: int | None) -> None:
    mesh = make_mesh(4, 2)

    def loss(hidden: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array) -> Any:
        return chunked_cross_entropy(hidden, table, targets, weights, vocab_size, num_chunks)

    grad = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    arrays = HIDDEN, TABLE, TARGETS % (vocab_size or V), WEIGHTS
    specs = P("data"), P("model", None), P("data"), P("data")
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    with jax.set_mesh(mesh):
        (total, count), grads = grad(*placed)
    (expected, expected_count), expected_grads = grad(*arrays)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    assert float(count) == float(expected_count)
    for got, want in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-6)


def test_logits_cut_over_the_vocabulary_are_not_gathered() -> None:
    """Megatron's vocabulary-parallel loss: each device keeps its slice, and a few numbers per token cross."""
    mesh = make_mesh(1, 2, jax.devices()[:2])
    cut = jax.device_put(LOGITS, NamedSharding(mesh, P(None, None, "model")))
    whole = [jax.device_put(x, NamedSharding(mesh, P())) for x in (TARGETS, WEIGHTS)]
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(lambda x, t, w: cross_entropy(x, t, w, 19)[0])).lower(cut, *whole).compile()
    text = compiled.as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text and "all-to-all" not in text
    assert compiled.output_shardings.is_equivalent_to(cut.sharding, 3)
