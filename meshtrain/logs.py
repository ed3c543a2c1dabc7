"""Each process's own log file, and the way of its warnings to process 0."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from meshtrain.metrics import Progress

FORMAT = "%(asctime)s %(levelname)s %(message)s"


@contextlib.contextmanager
def process_log(
    directory: Path, process_id: int, progress: Progress, pass_on: Callable[[str], None] | None = None
) -> Iterator[None]:
    """While inside, what this process shows and what meshtrain logs goes to `process-<id>.log` too.

    The file is appended to: a run that was resumed has one log. Where it cannot be written the run goes on without.

    Args:
        pass_on: of a process that shows nothing: where its warnings go.
    """
    logger = logging.getLogger("meshtrain")
    level, propagate = logger.level, logger.propagate
    handlers: list[logging.Handler] = [] if pass_on is None else [_Passing(pass_on)]
    try:
        file = logging.FileHandler(directory / f"process-{process_id}.log", encoding="utf-8")
    except OSError as error:
        logger.warning("%s: no log file for process %d: %s", directory, process_id, error.strerror)
    else:
        file.setFormatter(logging.Formatter(FORMAT))
        handlers.append(file)
        progress.copy = lambda text, warning: file.handle(_record(text, logging.WARNING if warning else logging.INFO))
    logger.setLevel(logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    if pass_on is not None:
        logger.propagate = False
    try:
        yield
    finally:
        progress.copy = lambda text, warning: None
        logger.setLevel(level)
        logger.propagate = propagate
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


def _record(text: str, level: int) -> logging.LogRecord:
    return logging.makeLogRecord({"msg": text, "levelno": level, "levelname": logging.getLevelName(level)})


class _Passing(logging.Handler):
    """Hands warnings on, without time and level."""

    def __init__(self, take: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        self._take(record.getMessage())
