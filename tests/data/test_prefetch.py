"""One thread ahead of the consumer: order, limits, errors, and an end in every case."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from meshtrain.data.batches import Batches
from meshtrain.data.prefetch import prefetch

AHEAD = pytest.mark.parametrize("ahead", [0, 1, 2, 5])


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "meshtrain-prefetch"]


def _recorder(made: list[int]) -> Callable[[int], int]:
    def make(step: int) -> int:
        made.append(step)
        return step * 10

    return make


@AHEAD
def test_steps_come_in_order_and_end(ahead: int) -> None:
    with prefetch(lambda step: step * 10, start=3, stop=7, ahead=ahead) as batches:
        assert list(batches) == [(3, 30), (4, 40), (5, 50), (6, 60)]
        assert list(batches) == []
    assert not _threads()


@AHEAD
def test_an_early_break_ends_the_thread(ahead: int) -> None:
    with prefetch(lambda step: step, ahead=ahead) as batches:
        for step, _ in batches:
            if step == 3:
                break
    assert not _threads()
    assert next(batches, None) is None


@AHEAD
def test_not_consuming_at_all_ends_the_thread(ahead: int) -> None:
    with prefetch(lambda step: step, ahead=ahead):
        pass
    assert not _threads()


@AHEAD
def test_an_error_of_the_consumer_ends_the_thread(ahead: int) -> None:
    with pytest.raises(KeyError), prefetch(lambda step: step, ahead=ahead) as batches:
        next(batches)
        raise KeyError("consumer")
    assert not _threads()


@AHEAD
def test_an_error_is_raised_at_its_own_step_and_after_the_good_ones(ahead: int) -> None:
    def make(step: int) -> int:
        if step == 2:
            raise OSError("disk gone at step 2")
        return step

    seen = []
    with pytest.raises(OSError, match="disk gone at step 2"), prefetch(make, ahead=ahead) as batches:
        for step, _ in batches:
            seen.append(step)
    assert seen == [0, 1]
    assert not _threads()


def test_an_error_for_a_step_that_is_never_reached_does_not_matter() -> None:
    failed = threading.Event()

    def make(step: int) -> int:
        if step == 2:
            failed.set()
            raise OSError
        return step

    with prefetch(make, ahead=4) as batches:
        assert next(batches) == (0, 0)
        assert failed.wait(10)
    assert not _threads()


@pytest.mark.parametrize("ahead", [1, 3])
def test_it_prepares_that_many_ahead_and_no_more(ahead: int) -> None:
    made: list[int] = []
    full = threading.Semaphore(0)

    def make(step: int) -> int:
        made.append(step)
        full.release()
        return step

    with prefetch(make, ahead=ahead) as batches:
        for num_used in range(3):
            for _ in range(ahead if num_used == 0 else 1):
                assert full.acquire(timeout=10)  # prepared while the consumer does something else
            assert not full.acquire(timeout=0.02)
            assert made == list(range(num_used + ahead))
            next(batches)


def test_none_ahead_works_in_the_consumers_thread_and_only_when_asked() -> None:
    made: list[int] = []
    with prefetch(_recorder(made), start=5, ahead=0) as batches:
        assert made == [] and not _threads()
        assert next(batches) == (5, 50)
        assert made == [5]


def test_it_waits_for_a_batch_in_the_making() -> None:
    started, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def make(step: int) -> int:
        started.set()
        assert may_end.wait(10)
        ended.set()
        return step

    with prefetch(make, ahead=2):
        assert started.wait(10)
        may_end.set()
    assert ended.is_set() and not _threads()


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_prepared_but_unused_batches_do_not_count_on_resume(ahead: int) -> None:
    """accelerate #2823: 7 steps with 4 batches ahead, then resume at 7, is one run without a break."""
    batches = Batches(np.arange(34 * 4 + 1), seq_len=4, global_batch=5, seed=1)
    whole = [batches.record_ids(step).tolist() for step in range(12)]
    parts = []
    for start, stop in [(0, 7), (7, 12)]:
        with prefetch(lambda step: batches.record_ids(step).tolist(), start=start, ahead=ahead) as prepared:
            for step, ids in prepared:
                parts.append(ids)
                if step == stop - 1:
                    break
    assert parts == whole
