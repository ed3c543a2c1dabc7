"""Number formats and the dynamic loss scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.precision import MAX_LOSS_SCALE, LossScale, Precision

HALF = Precision.make("float16", window=3)
GOOD, BAD = jnp.asarray(True), jnp.asarray(False)


def scales(start: float, updates: str, precision: Precision = HALF) -> list[float]:
    """The scale after each update: `+` has finite gradients, `-` an overflow."""
    state = LossScale(jnp.asarray(start, jnp.float32), jnp.zeros((), jnp.int32))
    seen = []
    for update in updates:
        state = state.next(GOOD if update == "+" else BAD, precision)
        seen.append(float(state.scale))
    return seen


def test_names_become_dtypes() -> None:
    precision = Precision.make("bfloat16", "compute", 8.0, 5)
    assert precision == Precision(np.dtype(jnp.bfloat16), np.dtype(jnp.bfloat16), 8.0, 5)
    assert Precision.make("bfloat16").reduce == np.dtype("float32")
    assert Precision.make() == Precision()
    assert hash(Precision.make("bfloat16")) == hash(Precision.make("bfloat16"))


@pytest.mark.parametrize(("compute", "scaled"), [("float32", False), ("bfloat16", False), ("float16", True)])
def test_only_float16_scales_its_loss(compute: str, scaled: bool) -> None:
    precision = Precision.make(compute, loss_scale=64.0)
    assert precision.scales_loss is scaled
    start = LossScale.start(precision)
    assert (float(start.scale), start.scale.dtype) == (64.0 if scaled else 1.0, jnp.float32)
    assert (int(start.good_steps), start.good_steps.dtype) == (0, jnp.int32)


def test_it_halves_after_an_overflow_and_comes_back() -> None:
    assert scales(16, "-") == [8]
    assert scales(16, "--+++") == [8, 4, 4, 4, 8]
    assert scales(16, "++++++") == [16, 16, 32, 32, 32, 64]


def test_an_overflow_starts_the_count_again() -> None:
    assert scales(16, "++-++") == [16, 16, 8, 8, 8]
    assert scales(16, "++-+++") == [16, 16, 8, 8, 8, 16]
    assert scales(16, "+-") == [16, 8]
    state = LossScale(jnp.asarray(16.0), jnp.asarray(2, jnp.int32))
    assert int(state.next(BAD, HALF).good_steps) == 0
    assert int(state.next(GOOD, HALF).good_steps) == 0  # it has doubled
    assert int(LossScale.start(HALF).next(GOOD, HALF).good_steps) == 1


def test_a_window_of_one_doubles_each_time() -> None:
    assert scales(2, "++-+", Precision.make("float16", window=1)) == [4, 8, 4, 8]


def test_it_stays_within_its_bounds_and_leaves_them_again() -> None:
    assert scales(4, "------") == [2, 1, 1, 1, 1, 1]
    assert scales(1, "-+++") == [1, 1, 1, 2]
    assert MAX_LOSS_SCALE == 2.0**24
    assert scales(MAX_LOSS_SCALE, "+++-") == [MAX_LOSS_SCALE] * 3 + [MAX_LOSS_SCALE / 2]


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_it_never_changes_outside_float16(compute: str) -> None:
    precision = Precision.make(compute, window=1)
    state = LossScale.start(precision)
    for finite in (GOOD, BAD, GOOD, GOOD, BAD):
        state = state.next(finite, precision)
        assert (float(state.scale), int(state.good_steps)) == (1.0, 0)


def test_it_is_the_same_under_jit() -> None:
    step = jax.jit(lambda state, finite: state.next(finite, HALF))
    state = plain = LossScale.start(HALF)
    for update in "+++--+-++++":
        finite = GOOD if update == "+" else BAD
        state, plain = step(state, finite), plain.next(finite, HALF)
        assert (float(state.scale), int(state.good_steps)) == (float(plain.scale), int(plain.good_steps))
        assert (state.scale.dtype, state.good_steps.dtype) == (jnp.float32, jnp.int32)  # a scan's carry keeps its types
