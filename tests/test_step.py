"""The training step: what the loss divides by, what an overflow leaves, what randomness depends on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshtrain import Precision, from_function, initialize, make_mesh
from meshtrain.errors import ConfigError
from meshtrain.step import check_batch
from tests.tiny_gpt import SIZES, host, make_batch, make_engine

pytestmark = pytest.mark.xdist_group("step")  # one worker: its tests share what they compute

DROPOUT = dataclasses.replace(SIZES, dropout=0.2)


def linear_engine(data: int, num_microbatches: int, batch: dict, stage: int = 1, **rest):
    """A model whose loss and gradient are sums that can be done by head: loss = sum(w * x * weight)."""

    def loss(params, batch, key):
        return jnp.sum(params["w"].astype(jnp.float32) * batch["x"] * batch["weights"]), jnp.sum(batch["weights"])

    rest.setdefault("optimizer", optax.sgd(1.0))
    return initialize(
        from_function(lambda key: {"w": jnp.ones((8,))}, loss),
        batch,
        mesh=make_mesh(data, 1, jax.devices()[:data]),
        rules=[(".*", ())],
        stage=stage,
        num_microbatches=num_microbatches,
        **rest,
    )


def test_ranks_with_unequal_token_counts() -> None:
    """(loss sum, tokens) = (2, 1) and (90, 9) on two ranks is 92 / 10, not the mean of 2 and 10."""
    x = np.zeros((2, 8), np.float32)
    x[0, 0] = 2
    x[1, 0] = 90 / 9
    weights = np.zeros((2, 8), np.float32)
    weights[0, 0] = 1
    batch = {"x": np.repeat(x[:, None], 9, 1), "weights": np.zeros((2, 9, 8), np.float32)}
    batch["weights"][0, 0, 0] = 1
    batch["weights"][1, :, 0] = 1
    engine = linear_engine(2, 1, batch)
    state, metrics = engine.step(engine.init(), batch)
    assert float(metrics["loss"]) == pytest.approx(9.2, rel=1e-6)
    assert float(metrics["tokens"]) == 10
    assert np.asarray(state.params["w"])[0] == pytest.approx(1 - 9.2, rel=1e-6)  # the gradient follows


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_microbatches_with_unequal_token_counts(stage: int) -> None:
    """11 and 101 target tokens in two microbatches: the same update as in one."""
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(2, 128, 8)).astype(np.float32), "weights": np.zeros((2, 128, 8), np.float32)}
    batch["weights"][0, :11, 0] = 1
    batch["weights"][1, :101, 0] = 1
    results = []
    for num_microbatches in (1, 2):
        engine = linear_engine(1, num_microbatches, batch, stage)
        state, metrics = engine.step(engine.init(), batch)
        results.append((float(metrics["loss"]), float(metrics["grad_norm"]), np.asarray(state.params["w"])))
        assert float(metrics["tokens"]) == 112
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-6)
    np.testing.assert_allclose(results[0][2], results[1][2], rtol=1e-6)


def test_all_masked_batch_changes_nothing_but_the_step() -> None:
    engine = make_engine(4, 2, 2, 2)
    batch = make_batch() | {"weights": np.zeros_like(make_batch()["weights"])}
    state = engine.init()
    before = host(state.params)
    state, metrics = engine.step(state, batch)
    assert float(metrics["loss"]) == 0
    assert float(metrics["grad_norm"]) == 0
    for path, value in host(state.params).items():
        if "wte" not in path:  # weight decay alone moves it
            np.testing.assert_allclose(value, before[path], rtol=1e-3)
    assert all(np.isfinite(value).all() for value in host(state.params).values())


def test_one_masked_shard_is_no_nan() -> None:
    engine = make_engine(4, 2, 3, 1)
    batch = make_batch()
    batch["weights"][:8] = 0  # all that the first data shard has
    _, metrics = engine.step(engine.init(), batch)
    assert np.isfinite(float(metrics["loss"]))
    assert float(metrics["skipped"]) == 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nan_on_one_shard_skips_the_update_everywhere(stage: int) -> None:
    batch = {"x": np.ones((8, 8), np.float32), "weights": np.ones((8, 8), np.float32)}
    engine = linear_engine(8, 1, batch, stage, optimizer=optax.adam(0.1))
    state, _ = engine.step(engine.init(), batch)
    before = host(state)
    bad = {"x": batch["x"].copy(), "weights": batch["weights"]}
    bad["x"][5, 3] = np.nan
    state, metrics = engine.step(state, bad)
    assert float(metrics["skipped"]) == 1
    after = host(state)
    kept = [jax.tree.leaves((state.params, state.opt_state)) for state in (before, after)]
    for old, new in zip(*kept, strict=True):
        assert old.tobytes() == new.tobytes()
    assert int(after.step) == int(before.step) + 1
    state, metrics = engine.step(state, batch)
    assert float(metrics["skipped"]) == 0
    assert not np.array_equal(host(state.params)["w"], before.params["w"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_overflow_halves_the_scale_and_it_comes_back(stage: int) -> None:
    precision = Precision.make("float16", loss_scale=2.0**15, window=2)
    batch = {"x": np.ones((4, 8), np.float32), "weights": np.ones((4, 8), np.float32)}

    def loss(params, batch, key):
        x = params["w"] * batch["x"].astype(params["w"].dtype)  # float16: its gradient overflows at 65504
        return jnp.sum(x.astype(jnp.float32) * batch["weights"]), jnp.sum(batch["weights"])

    engine = initialize(
        from_function(lambda key: {"w": jnp.ones((8,))}, loss),
        batch,
        mesh=make_mesh(4, 1, jax.devices()[:4]),
        rules=[(".*", ())],
        optimizer=optax.sgd(0.1),
        stage=stage,
        precision=precision,
    )
    state = engine.init()
    huge = batch | {"x": np.full((4, 8), 6e4, np.float32)}
    scales, skipped = [], []
    for given in (batch, huge, huge, batch, batch, batch, batch):
        state, metrics = engine.step(state, given)
        scales.append(float(metrics["loss_scale"]))
        skipped.append(float(metrics["skipped"]))
    # seeds of 2**15 / 32 per token: 6e4 * 2**10 overflows, so both huge updates are skipped, and two good ones double
    assert skipped == [0, 1, 1, 0, 0, 0, 0]
    assert scales == [2.0**15, 2.0**15, 2.0**14, 2.0**13, 2.0**13, 2.0**14, 2.0**14]
    assert np.isfinite(host(state.params)["w"]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("compute", "tolerance"), [("bfloat16", 2e-2), ("float16", 4e-3)])
def test_16_bit_stages_agree(compute: str, tolerance: float) -> None:
    """Stages differ in the order of 16-bit sums only; the tolerance is a few units in the last place of the type."""
    histories = []
    for stage in (0, 1, 2, 3):
        engine = make_engine(4, 2, stage, 2, precision=Precision.make(compute))
        state, history = engine.init(), []
        for i in range(6):
            state, metrics = engine.step(state, make_batch(i))
            history.append(float(metrics["loss"]))
        assert all(leaf.dtype == jnp.float32 for leaf in state.params.values())
        histories.append(history)
    for history in histories[1:]:
        np.testing.assert_allclose(history, histories[0], rtol=tolerance)


@functools.cache
def dropout_losses(data: int, model: int, stage: int, remat: str = "none") -> tuple[float, ...]:
    engine = make_engine(data, model, stage, sizes=dataclasses.replace(DROPOUT, remat=remat))
    state, losses = engine.init(), []
    for i in range(3):
        state, metrics = engine.step(state, make_batch(i))
        losses.append(float(metrics["loss"]))
    return tuple(losses)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "stage"), [(1, 2), (1, 3), (2, 0), (4, 3)])
def test_dropout_depends_on_the_data_size_alone(model: int, stage: int) -> None:
    np.testing.assert_allclose(dropout_losses(2, model, stage), dropout_losses(2, 1, 0), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_repeats_the_dropout_mask(remat: str) -> None:
    np.testing.assert_allclose(dropout_losses(2, 2, 1, remat), dropout_losses(2, 2, 1), rtol=1e-6)


def test_dropout_differs_by_step_microbatch_and_data_index() -> None:
    """Four copies of one record, of which one counts: without independent masks, all would have the same loss."""
    engine = make_engine(2, 1, 1, 2, sizes=DROPOUT, optimizer=optax.sgd(0.0), batch=4)
    copies = {name: np.repeat(value[:1], 4, axis=0) for name, value in make_batch(batch=4).items()}
    state, losses = engine.init(), []
    for step, row in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 3)):  # row: data index row // 2, microbatch row % 2
        batch = copies | {"weights": copies["weights"] * (np.arange(4) == row)[:, None].astype(np.float32)}
        at_step = dataclasses.replace(state, step=jnp.full_like(state.step, step))
        state, metrics = engine.step(at_step, batch)
        losses.append(float(metrics["loss"]))
    assert len({round(loss, 4) for loss in losses}) == 5, losses


def test_evaluation_has_no_dropout_and_counts_tokens() -> None:
    with_dropout = make_engine(4, 2, 3, sizes=DROPOUT)
    without = make_engine(1, 1, 0)
    batch = make_batch()
    sums = with_dropout.evaluate(with_dropout.init(), batch)
    expected = without.evaluate(without.init(), batch)
    assert float(sums[0]) == pytest.approx(float(expected[0]), rel=1e-5)
    assert float(sums[1]) == batch["weights"].sum()


def test_padded_vocabulary_rows_are_never_touched() -> None:
    """Vocabulary 61 in a table of 64 rows, cut over 2: the 3 padding rows get no gradient."""
    engine = make_engine(2, 2, 2, optimizer=optax.sgd(1.0))
    state = engine.init()
    before = host(state.params)["wte/embedding"]
    state, _ = engine.step(state, make_batch())
    after = host(state.params)["wte/embedding"]
    assert before.shape[0] == 64
    np.testing.assert_array_equal(after[61:], before[61:])
    assert (after[:61] != before[:61]).any(axis=1).all()


@pytest.mark.slow
def test_vocabulary_257_on_two_model_shards() -> None:
    sizes = dataclasses.replace(SIZES, vocab_size=257, vocab_multiple=128)
    histories = []
    for data, model in ((1, 1), (1, 2)):
        engine = make_engine(data, model, 0, sizes=sizes)
        state, history = engine.init(), []
        assert engine.layout.leaves["wte/embedding"].shape[0] == 384
        for i in range(50):
            state, metrics = engine.step(state, make_batch(i, sizes=sizes))
            history.append(float(metrics["loss"]))
        histories.append(history)
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("size", "num_microbatches", "message"),
    [
        (6, 1, r"6 records cannot be cut over data=4 x 1 microbatches = 4 equal parts: use 4 or 8"),
        (1, 1, r"use 4 records \(the least is 4\)"),
        (8, 4, r"data=4 x 4 microbatches = 16 equal parts: use 16 records"),
    ],
)
def test_a_batch_that_cannot_be_cut(size: int, num_microbatches: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_batch({"x": np.zeros((size, 3))}, num_microbatches, make_mesh(4, 2))


def test_the_donated_state_is_reused() -> None:
    engine = make_engine(4, 2, 2)
    state = engine.init()
    pointers = {leaf.addressable_shards[0].data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.params)}
    new, _ = engine.step(state, make_batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    again = {leaf.addressable_shards[0].data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(new.params)}
    assert len(pointers & again) > len(pointers) / 2


def test_a_loss_that_is_not_finite_skips_the_update_though_its_gradient_is() -> None:
    """A target outside the vocabulary makes the loss NaN, and no gradient."""
    engine = make_engine(2, 2, 2)
    batch = make_batch()
    batch["targets"] = np.where(np.arange(SIZES.seq_len) == 0, -100, batch["targets"])
    state = engine.init()
    before = host(state.params)
    state, metrics = engine.step(state, batch)
    assert float(metrics["skipped"]) == 1
    for path, value in host(state.params).items():
        np.testing.assert_array_equal(value, before[path])
