"""Each process's log file, and the way of its warnings to process 0."""

import logging
from io import StringIO
from pathlib import Path

from meshtrain.logs import process_log
from meshtrain.metrics import Progress, show_logs
from meshtrain.terminal import Terminal


def progress(mode: str) -> tuple[Progress, StringIO]:
    out = StringIO()
    return Progress(mode, 10, Terminal(file=out, width=200)), out  # type: ignore[arg-type]


def read(folder: Path, process_id: int) -> list[str]:
    lines = (folder / f"process-{process_id}.log").read_text().splitlines()
    return [line.split(" ", 2)[2] for line in lines]  # without the time


def test_what_process_0_shows_is_written_once(tmp_path: Path) -> None:
    shown, out = progress("plain")
    with show_logs(shown), process_log(tmp_path, 0, shown):
        shown.message("a line")
        shown.message("odd", warning=True)
        logging.getLogger("meshtrain.part").warning("logged")
        shown.update(5, {"loss": 2.0})
    assert read(tmp_path, 0)[:3] == ["INFO a line", "WARNING odd", "WARNING logged"]
    assert read(tmp_path, 0)[3].startswith("INFO step  5/10")
    assert out.getvalue().splitlines()[:3] == ["a line", "warning: odd", "warning: logged"]


def test_another_process_writes_the_same_and_passes_its_warnings_on(tmp_path: Path) -> None:
    shown, out = progress("none")
    passed: list[str] = []
    with show_logs(shown), process_log(tmp_path, 3, shown, passed.append):
        shown.message("a line")
        logging.getLogger("meshtrain").warning("slow disk")
        logging.getLogger("meshtrain").info("detail")
    assert read(tmp_path, 3) == ["INFO a line", "WARNING slow disk", "INFO detail"]
    assert passed == ["slow disk"] and out.getvalue() == ""


def test_a_second_start_appends(tmp_path: Path) -> None:
    shown, _ = progress("none")
    for text in ("first", "second"):
        with process_log(tmp_path, 0, shown):
            shown.message(text)
    assert read(tmp_path, 0) == ["INFO first", "INFO second"]


def test_a_log_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: object) -> None:
    shown, out = progress("plain")
    with show_logs(shown), process_log(tmp_path / "missing", 0, shown):
        shown.message("the run goes on")
    assert "warning: " in out.getvalue() and "no log file for process 0: No such file" in out.getvalue()
    assert "the run goes on" in out.getvalue()


def test_afterwards_the_logger_is_as_it_was(tmp_path: Path) -> None:
    logger = logging.getLogger("meshtrain")
    before = (logger.level, logger.propagate, list(logger.handlers))
    shown, _ = progress("none")
    with process_log(tmp_path, 1, shown, lambda text: None):
        assert not logger.propagate
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
