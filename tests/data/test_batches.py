"""Batch = f(data, seed, step): each record once an epoch, whatever the sharding; and the padded validation set."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshtrain.data.batches import Batches, EvalBatches, count_records, to_global
from meshtrain.errors import ConfigError, DataError


def _batches(num_records: int, global_batch: int, seed: int = 0, seq_len: int = 4, extra: int = 0) -> Batches:
    return Batches(np.arange(num_records * seq_len + 1 + extra), seq_len, global_batch, seed)


def _mesh(*sizes: int, names: tuple[str, ...] = ("data", "model")) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(sizes))


# ---------------------------------------------------------------- records


def test_windows_and_targets() -> None:
    batches = Batches(np.arange(100, 111), seq_len=3, global_batch=3, seed=5)
    assert (batches.num_records, batches.num_unused_tokens, batches.num_tokens_per_batch) == (3, 1, 9)
    batch = batches.rows(0)
    order = np.argsort(batches.record_ids(0))
    np.testing.assert_array_equal(batch["tokens"][order], [[100, 101, 102], [103, 104, 105], [106, 107, 108]])
    np.testing.assert_array_equal(batch["targets"][order], [[101, 102, 103], [104, 105, 106], [107, 108, 109]])
    np.testing.assert_array_equal(batch["weights"], np.ones((3, 3)))
    assert {name: array.dtype for name, array in batch.items()} == {
        "tokens": np.int32,
        "targets": np.int32,
        "weights": np.float32,
    }
    for name, array in batch.items():
        assert batches.abstract[name].shape == array.shape and batches.abstract[name].dtype == array.dtype


@given(num_tokens=st.integers(2, 400), seq_len=st.integers(1, 60))
@settings(deadline=None, max_examples=60)
def test_each_token_but_the_first_is_a_target_once_an_epoch(num_tokens: int, seq_len: int) -> None:
    if num_tokens < seq_len + 1:
        with pytest.raises(DataError, match=rf"{num_tokens} tokens .* needs {seq_len + 1}:"):
            Batches(np.arange(num_tokens), seq_len, 1, 0)
        return
    batches = Batches(np.arange(num_tokens), seq_len, (num_tokens - 1) // seq_len, 0)
    targets = np.sort(batches.rows(0)["targets"].ravel())
    np.testing.assert_array_equal(targets, np.arange(1, num_tokens - batches.num_unused_tokens))
    assert 0 <= batches.num_unused_tokens < seq_len


def test_record_counts_at_the_edges() -> None:
    assert [count_records(num, 4) for num in (5, 8, 9, 12, 13)] == [1, 1, 2, 2, 3]
    with pytest.raises(DataError, match=r"train holds 4 tokens and one record of data.seq_len=4 needs 5"):
        count_records(4, 4, "train")


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64, ">u2", "<u4"])
def test_token_types(dtype: Any) -> None:
    tokens = np.arange(17).astype(dtype)
    batch = Batches(tokens, 4, 4, 0).rows(0)
    np.testing.assert_array_equal(np.sort(batch["tokens"].ravel()), np.arange(16))


@pytest.mark.parametrize("bad", [2**31, -1, 2**32 + 5])
def test_ids_that_int32_cannot_hold_are_refused_not_wrapped(bad: int) -> None:
    tokens = np.array([0, 1, 2, bad, 4], np.int64)
    with pytest.raises(DataError, match="record 1 holds a token id outside"):
        Batches(tokens, 2, 2, 0).rows(0)


@pytest.mark.parametrize("tokens", [np.zeros((4, 4), np.int32), np.zeros(10, np.float32), np.zeros(10, bool)])
def test_other_arrays_are_refused(tokens: np.ndarray) -> None:
    with pytest.raises(DataError, match="1-D integer"):
        Batches(tokens, 2, 2, 0)


# ---------------------------------------------------------------- order


@given(
    num_records=st.integers(1, 60),
    global_batch=st.integers(1, 80),
    seed=st.integers(0, 2**32 - 1),
    steps=st.integers(1, 9),
)
@settings(deadline=None, max_examples=60)
def test_nothing_is_dropped_or_repeated_across_epochs(
    num_records: int, global_batch: int, seed: int, steps: int
) -> None:
    batches = _batches(num_records, global_batch, seed)
    ids = np.concatenate([batches.record_ids(step) for step in range(steps)])
    assert len(ids) == steps * global_batch
    for start in range(0, len(ids), num_records):
        epoch = ids[start : start + num_records]
        assert len(np.unique(epoch)) == len(epoch)
        assert 0 <= epoch.min() <= epoch.max() < num_records


def test_a_partial_last_batch_is_filled_from_the_next_epoch() -> None:
    """grain #953: 34 records, batch 16. Two epochs are 4.25 batches; no record is lost with any number of shards."""
    batches = _batches(34, 16)
    whole = np.concatenate([batches.record_ids(step) for step in range(17)])  # 8 epochs exactly
    np.testing.assert_array_equal(np.sort(whole.reshape(8, 34), axis=1), np.tile(np.arange(34), (8, 1)))
    for num_shards in (1, 2, 4, 8, 16):
        rows = np.split(np.arange(16), num_shards)
        parts = [np.concatenate([batches.record_ids(step, part) for part in rows]) for step in range(17)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_any_sharding_of_the_rows_gives_the_same_batch(num_shards: int) -> None:
    """torchtitan #811: saved with 4 data shards, resumed with 2 or 8, no record is lost or read twice."""
    batches = _batches(23, 8, seed=9)
    for step in (0, 2, 1000):
        whole = batches.rows(step)
        size = 8 // num_shards
        parts = [batches.rows(step, slice(start, start + size)) for start in range(0, 8, size)]
        for name, array in whole.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array)


def test_resuming_on_another_mesh_goes_on_with_the_unseen_records() -> None:
    batches = _batches(24, 8, seed=4)
    seen = np.concatenate([batches.record_ids(0, part) for part in np.split(np.arange(8), 4)])
    for num_shards in (1, 2, 8):
        parts = np.split(np.arange(8), num_shards)
        rest = np.concatenate([batches.record_ids(step, part) for step in (1, 2) for part in parts])
        assert sorted([*seen, *rest]) == list(range(24))


def test_rows_by_number() -> None:
    batches = _batches(50, 8)
    np.testing.assert_array_equal(batches.record_ids(3, np.array([5, 1])), batches.record_ids(3)[[5, 1]])
    np.testing.assert_array_equal(batches.rows(3, np.array([5, 1]))["tokens"], batches.rows(3)["tokens"][[5, 1]])
    assert batches.rows(3, slice(0, 0))["tokens"].shape == (0, 4)


def test_seed_and_data_decide_the_order_and_nothing_else() -> None:
    first, again, other = _batches(1000, 32, seed=1), _batches(1000, 32, seed=1), _batches(1000, 32, seed=2)
    np.testing.assert_array_equal(first.record_ids(5), again.record_ids(5))
    assert not np.array_equal(first.record_ids(5), other.record_ids(5))
    assert not np.array_equal(first.record_ids(5), first.record_ids(6))


def test_another_global_batch_cuts_the_same_sequence_of_records() -> None:
    small, large = _batches(40, 4), _batches(40, 12)
    np.testing.assert_array_equal(np.concatenate([small.record_ids(step) for step in (3, 4, 5)]), large.record_ids(1))


def test_late_steps_are_exact() -> None:
    batches = _batches(7, 4096)
    ids = batches.record_ids(10**12)
    first = -(10**12 * 4096) % 7  # rows up to the next epoch's start
    np.testing.assert_array_equal(np.sort(ids[first : first + 7]), np.arange(7))


# ---------------------------------------------------------------- evaluation


def test_the_validation_set_is_fixed_and_in_order() -> None:
    val = EvalBatches(np.arange(41), seq_len=4, global_batch=3, max_batches=2)
    assert (val.num_records, val.num_batches) == (6, 2)
    assert [val.record_ids(step).tolist() for step in range(2)] == [[0, 1, 2], [3, 4, 5]]
    np.testing.assert_array_equal(val.rows(1)["tokens"], np.arange(12, 24).reshape(3, 4))
    assert val.rows(1)["weights"].min() == 1


def test_a_short_validation_set_is_padded_with_weight_0() -> None:
    val = EvalBatches(np.arange(7, 48), seq_len=4, global_batch=4, max_batches=99)
    assert (val.num_records, val.num_batches) == (10, 3)
    assert val.record_ids(2).tolist() == [8, 9, -1, -1]
    batch = val.rows(2)
    assert batch["weights"].tolist() == [[1.0] * 4] * 2 + [[0.0] * 4] * 2
    assert batch["tokens"][2:].max() == 0 and batch["targets"][2:].max() == 0
    assert val.abstract["weights"].shape == batch["weights"].shape


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
@pytest.mark.parametrize("num_records", [1, 7, 8, 9, 16, 17])
def test_the_weighted_mean_counts_each_record_once(num_records: int, num_shards: int) -> None:
    """accelerate #1674, trl #7010: 9 examples on 4 devices have mean 5, and 9 are counted."""
    tokens = np.repeat(np.arange(1, num_records + 1), 3)  # record r holds targets r + 1, r + 1, r + 2 at seq_len 3
    val = EvalBatches(np.append(tokens, num_records + 1), seq_len=3, global_batch=8, max_batches=99)
    total = count = 0.0
    for step in range(val.num_batches):
        for rows in np.split(np.arange(8), num_shards):
            batch = val.rows(step, rows)
            total += float((batch["tokens"] * batch["weights"]).sum())
            count += float(batch["weights"].sum())
    assert count == 3 * num_records
    assert total / count == (num_records + 1) / 2


def test_the_number_of_eval_batches_is_the_same_for_all_processes() -> None:
    """t5x #741: nothing local goes into it, so two processes never have 5 and 6 batches; past the end is a bug."""
    val = EvalBatches(np.arange(41), seq_len=4, global_batch=2, max_batches=99)
    assert val.num_batches == 5
    with pytest.raises(AssertionError, match="5 batches"):
        val.record_ids(5)


def test_eval_needs_a_record() -> None:
    with pytest.raises(DataError, match=r"4 tokens .* needs 5"):
        EvalBatches(np.arange(4), seq_len=4, global_batch=2, max_batches=1)
    with pytest.raises(ConfigError, match="max_batches=0"):
        EvalBatches(np.arange(9), seq_len=4, global_batch=2, max_batches=0)


# ---------------------------------------------------------------- global arrays


class _Counting:
    """Passes rows on and keeps which were read."""

    def __init__(self, batches: Batches | EvalBatches) -> None:
        self.batches, self.abstract, self.read = batches, batches.abstract, []  # type: ignore[var-annotated]

    def rows(self, step: int, rows: slice) -> dict[str, np.ndarray]:
        self.read.append((rows.start, rows.stop))
        return self.batches.rows(step, rows)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 8), (2, 4), (4, 2), (8, 1)])
def test_global_arrays_equal_the_batch_on_every_mesh(sizes: tuple[int, int]) -> None:
    batches = _batches(50, 8)
    reader = _Counting(batches)
    sharding = NamedSharding(_mesh(*sizes), P("data"))
    arrays = to_global(reader, 6, sharding)
    for name, expected in batches.rows(6).items():
        assert arrays[name].sharding == sharding and arrays[name].dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(arrays[name]), expected)
    size = 8 // sizes[0]  # each row is read once, although `model` devices share it and a batch has three arrays
    assert sorted(reader.read) == [(start, start + size) for start in range(0, 8, size)]


def test_global_arrays_with_more_batch_axes_and_a_cut_sequence() -> None:
    batches = _batches(50, 8)
    mesh = _mesh(2, 2, 2, names=("replica", "data", "seq"))
    arrays = to_global(batches, 1, NamedSharding(mesh, P(("replica", "data"), "seq")))
    np.testing.assert_array_equal(np.asarray(arrays["targets"]), batches.rows(1)["targets"])
    assert arrays["targets"].addressable_shards[0].data.shape == (2, 2)


def test_only_the_rows_of_local_devices_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process's devices are not addressable: its rows are not asked for."""
    sharding = NamedSharding(_mesh(4, 2), P("data"))

    def make_array(shape: Any, sharding: NamedSharding, callback: Any, dtype: Any) -> np.ndarray:
        index_of = sharding.devices_indices_map(shape)
        parts = [callback(index) for device, index in index_of.items() if device.id < 4]  # as if 4 of 8 were local
        return np.concatenate(parts[::2]).astype(dtype)  # devices that differ along `model` hold the same

    monkeypatch.setattr(jax, "make_array_from_callback", make_array)
    reader = _Counting(_batches(50, 8))
    arrays = to_global(reader, 0, sharding)
    assert reader.read == [(0, 2), (2, 4)]
    np.testing.assert_array_equal(arrays["tokens"], reader.batches.rows(0, slice(0, 4))["tokens"])


def test_a_batch_that_cannot_be_cut_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"global_batch=1 .* 8 equal parts .*\['data'\]: the least batch is 8"):
        to_global(_batches(50, 1), 0, NamedSharding(_mesh(8, 1), P("data")))


def test_the_padded_mean_on_devices() -> None:
    val = EvalBatches(np.append(np.repeat(np.arange(1, 10), 2), 10), seq_len=2, global_batch=8, max_batches=9)
    sharding = NamedSharding(_mesh(4, 2), P("data"))
    sums = np.zeros(2)
    for step in range(val.num_batches):
        batch = to_global(val, step, sharding)
        sums += [float((batch["tokens"] * batch["weights"]).sum()), float(batch["weights"].sum())]
    assert sums.tolist() == [2 * 45.0, 18.0]
