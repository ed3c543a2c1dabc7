"""`meshtrain train` with one fault in one process of the job: `faulty.py FAULT PROCESS [CONFIG key=value...]`."""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from meshtrain import cli, trainer
from meshtrain.checkpoint import Checkpointer
from meshtrain.trainer import Loop

AT = 3  # the update after which it happens


def main() -> int:
    fault, culprit, *arguments = sys.argv[1:]
    if os.environ["MESHTRAIN_PROCESS_ID"] == culprit:
        arguments += FAULTS[fault]() or []
    return cli.main(["train", "-", *arguments])


def after_update(call: Callable[[], Any]) -> None:
    original = Loop._after

    def replaced(self: Loop, step: int, state: Any) -> None:
        if step == AT:
            call()
        original(self, step, state)

    Loop._after = replaced  # type: ignore[method-assign]


def divide() -> None:
    def fail() -> None:
        raise ZeroDivisionError("a mistake in one process")

    after_update(fail)


def exhaust_memory() -> None:
    def fail() -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes")

    after_update(fail)


def kill() -> None:
    after_update(lambda: os.kill(os.getpid(), signal.SIGKILL))


def stop() -> None:
    after_update(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def hang() -> None:
    after_update(lambda: time.sleep(120))


def terminate() -> None:
    """As a scheduler does, to one process alone."""
    after_update(lambda: os.kill(os.getpid(), signal.SIGTERM))


def skip_evaluation() -> None:
    Loop._evaluate = lambda self, step, state: None  # type: ignore[method-assign]


def sleep_in_save() -> None:
    Checkpointer.save = lambda self, *args: time.sleep(120)  # type: ignore[method-assign, assignment]


def leave_late() -> None:
    original = trainer._finish

    def late(*args: Any) -> Any:
        time.sleep(3)
        return original(*args)

    trainer._finish = late


def come_late() -> None:
    time.sleep(6)


def stay_away() -> None:
    time.sleep(120)


def other_config() -> list[str]:
    return ["optim.lr=0.5"]


def other_number() -> None:
    os.environ["MESHTRAIN_PROCESS_ID"] = "0"


def nothing() -> None:
    pass


FAULTS: dict[str, Callable[[], list[str] | None]] = {
    call.__name__: call
    for call in (
        *(divide, exhaust_memory, kill, stop, hang, terminate, skip_evaluation, sleep_in_save, leave_late, come_late),
        *(stay_away, other_config, other_number, nothing),
    )
}

if __name__ == "__main__":
    sys.exit(main())
