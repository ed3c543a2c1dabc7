"""The record order is a bijection for every size, epoch and seed, and looks like a random one."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshtrain.data.permute import hash64, mix64, permute

SEEDS = st.integers(0, 2**32 - 1)


def _order(num: int, epoch: int, seed: int) -> np.ndarray:
    return permute(np.arange(num), np.full(num, epoch), num, seed)


@given(num=st.integers(1, 3000), epoch=st.integers(0, 2**40), seed=SEEDS)
@example(num=1, epoch=0, seed=0)
@example(num=16, epoch=0, seed=0)
@example(num=17, epoch=0, seed=0)
@example(num=1024, epoch=1, seed=2**32 - 1)
@example(num=1025, epoch=1, seed=2**32 - 1)
@settings(deadline=None, max_examples=80)
def test_each_epoch_is_a_bijection(num: int, epoch: int, seed: int) -> None:
    np.testing.assert_array_equal(np.sort(_order(num, epoch, seed)), np.arange(num))


@given(num=st.integers(2**40, 2**61), seed=SEEDS, positions=st.lists(st.floats(0, 0.999), min_size=2, max_size=50))
@settings(deadline=None, max_examples=30)
def test_huge_corpora_need_no_array_of_their_length(num: int, seed: int, positions: list[float]) -> None:
    index = np.unique([int(share * num) for share in positions])
    records = permute(index, np.zeros_like(index), num, seed)
    assert records.dtype == np.int64
    assert len(np.unique(records)) == len(index)
    assert 0 <= records.min() <= records.max() < num


@given(num=st.integers(1, 500), seed=SEEDS, epochs=st.lists(st.integers(0, 5), min_size=1, max_size=40))
@settings(deadline=None, max_examples=30)
def test_a_position_does_not_depend_on_the_others_asked_for(num: int, seed: int, epochs: list[int]) -> None:
    epoch = np.array(epochs)
    index = np.arange(len(epochs)) % num
    together = permute(index, epoch, num, seed)
    alone = [_order(num, int(e), seed)[i] for e, i in zip(epoch, index, strict=True)]
    np.testing.assert_array_equal(together, alone)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [_order(1000, epoch, seed) for epoch, seed in [(0, 0), (1, 0), (0, 1), (1, 1)]]
    for number, order in enumerate(orders):
        for other in [np.arange(1000), *orders[:number]]:
            assert np.mean(order == other) < 0.01  # a random order agrees with another in one place of 1000


@pytest.mark.parametrize("num", [2, 3, 5, 16, 34, 100])
def test_every_record_comes_to_every_place_equally_often(num: int) -> None:
    """Chi-square of the place x record counts; they are fixed numbers, so the test cannot fail by chance."""
    num_epochs = 8000 if num < 50 else 2500
    index, epoch = np.tile(np.arange(num), num_epochs), np.repeat(np.arange(num_epochs), num)
    records = permute(index, epoch, num, seed=3)
    counts = np.zeros((num, num))
    np.add.at(counts, (index, records), 1)
    expected = num_epochs / num
    chi_square, freedom = ((counts - expected) ** 2 / expected).sum(), (num - 1) ** 2
    assert abs(chi_square - freedom) < 4 * np.sqrt(2 * freedom)


def test_neighbours_do_not_stay_together() -> None:
    order = _order(10_000, 0, 0)
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.001  # 2 in 10,000 for a random order


def test_the_order_never_changes() -> None:
    """Golden values: another order would make resumed runs see records twice."""
    assert mix64(np.array([0x9E3779B97F4A7C15], np.uint64))[0] == 0xE220A8397B1DCDAF  # SplitMix64's first word, seed 0
    assert _order(10, 0, 0).tolist() == [6, 1, 7, 8, 5, 3, 4, 2, 0, 9]
    assert _order(10, 1, 7).tolist() == [9, 8, 3, 1, 7, 0, 2, 6, 4, 5]


def test_hash_depends_on_order_and_number_of_parts() -> None:
    values = {int(hash64(*parts)) for parts in [(0,), (0, 0), (1, 2), (2, 1), (3,), (1, 2, 0)]}
    assert len(values) == 6
    np.testing.assert_array_equal(hash64(5, np.arange(3)), [hash64(5, number) for number in range(3)])


def test_positions_outside_the_epoch_are_refused() -> None:
    with pytest.raises(AssertionError, match="positions"):
        permute(np.array([3]), np.array([0]), 3, 0)
