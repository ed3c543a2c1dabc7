"""Prepares batches ahead of the step in one background thread.

    with prefetch(lambda step: to_global(batches, step, sharding), start=state_step, ahead=2) as prepared:
        for step, batch in prepared:
            ...

A batch is a function of its step, so what was prepared and not used is lost without harm: the next run starts at the
step that it has reached, whatever `ahead` was.
"""

import contextlib
import dataclasses
import itertools
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class _End:
    """The last thing the thread sends: no more steps, or why it stopped."""

    error: BaseException | None


def _produce(
    make: Callable[[int], T],
    steps: Iterable[int],
    prepared: "queue.SimpleQueue[tuple[int, T] | _End]",
    slots: threading.Semaphore,
    stopped: threading.Event,
) -> None:
    error = None
    try:
        for step in steps:
            slots.acquire()  # before the work, so that never more than `ahead` batches hold memory
            if stopped.is_set():
                break
            prepared.put((step, make(step)))
    except BaseException as problem:
        error = problem
    prepared.put(_End(error))


def _consume(
    prepared: "queue.SimpleQueue[tuple[int, T] | _End]", slots: threading.Semaphore
) -> Generator[tuple[int, T], None, None]:
    while not isinstance(item := prepared.get(), _End):
        slots.release()
        yield item
    if item.error is not None:
        raise item.error


@contextlib.contextmanager
def prefetch(
    make: Callable[[int], T], start: int = 0, stop: int | None = None, ahead: int = 2
) -> Iterator[Iterator[tuple[int, T]]]:
    """Iterates over `(step, make(step))` for `step` in `[start, stop)`, in order.

    Leaving the `with` block ends the thread, also after a `break` or an error, once the `make` that may be running
    returns. The iterator ends then.

    Args:
        make: prepares a step's batch; it runs in the thread, so it must not wait for other processes.
        start: the first step.
        stop: the step after the last; None goes on for ever.
        ahead: batches that may be prepared and not yet used; 0 calls `make` when the batch is asked for, in no thread.

    Raises:
        Exception: what `make(step)` raised, when that step's batch is asked for.
    """
    assert ahead >= 0, "ahead counts batches"
    steps = itertools.count(start) if stop is None else range(start, stop)
    if ahead == 0:
        with contextlib.closing((step, make(step)) for step in steps) as batches:
            yield batches
        return
    prepared: queue.SimpleQueue[tuple[int, T] | _End] = queue.SimpleQueue()
    slots, stopped = threading.Semaphore(ahead), threading.Event()
    thread = threading.Thread(
        target=_produce, args=(make, steps, prepared, slots, stopped), name="meshtrain-prefetch", daemon=True
    )
    thread.start()
    try:
        with contextlib.closing(_consume(prepared, slots)) as batches:
            yield batches
    finally:
        stopped.set()
        slots.release()
        thread.join()
