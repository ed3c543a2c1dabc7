"""Each process's own log file, and the way of its warnings to process 0."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LOGGER = "meshtrain"


@contextlib.contextmanager
def process_log(directory: Path, process_id: int, warn: Callable[[str], None]) -> Iterator[logging.Logger]:
    """While inside, what meshtrain logs goes to `process-<id>.log` too, and its warnings to `warn`.

    The file is appended to: a run that was resumed has one log. Where it cannot be written the run goes on without.
    """
    logger = logging.getLogger(LOGGER)
    handlers: list[logging.Handler] = [_Passing(warn)]
    try:
        handlers.append(logging.FileHandler(directory / f"process-{process_id}.log", encoding="utf-8"))
    except OSError as error:
        warn(f"{directory}: no log file for process {process_id}: {error.strerror}")
    level = logger.level
    logger.setLevel(logging.INFO)
    for handler in handlers:
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
    try:
        yield logger
    finally:
        logger.setLevel(level)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


class _Passing(logging.Handler):
    """Hands warnings on, without time and level."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._warn = warn

    def emit(self, record: logging.LogRecord) -> None:
        self._warn(record.getMessage())
