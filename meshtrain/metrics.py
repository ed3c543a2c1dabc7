"""What a run measures and where it is written: tokens/s, metrics.jsonl, TensorBoard, W&B, the terminal.

    throughput = Throughput()
    with open_sinks(config.log, run_dir, resume_step=step) as sinks, Progress("auto", total=1000) as progress:
        throughput.add(tokens)  # after every update
        if lap := throughput.lap():  # at a log line
            sinks.write(step, {"loss": loss, "lr": lr, "tokens_per_s": lap.tokens_per_s})

Only process 0 measures for the world: the others pass `enabled=False` and mode `"none"`, and open no file.
"""

import contextlib
import importlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol, Self

from rich import progress as bars
from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.text import Text

from meshtrain.config import LogConfig
from meshtrain.errors import ConfigError
from meshtrain.terminal import Terminal


class Lap(NamedTuple):
    """Rates over the updates since the last lap."""

    tokens_per_s: float
    seconds_per_update: float


class Throughput:
    """Tokens per second between log lines, without compilation, evaluation and checkpoints.

    The first update of the process compiles the step: it starts the clock and is not counted. jax returns from a step
    before the device has run it, so call `add` after the first update, and `lap` at any time, only once their results
    were read.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start: float | None = None  # None before the first update
        self._tokens = self._updates = self._depth = 0
        self._paused = 0.0  # seconds of this lap to leave out

    def add(self, num_tokens: int) -> None:
        """Counts one update of `num_tokens` tokens, all devices together."""
        if self._start is None:
            self._start, self._paused = self._clock(), 0.0
            return
        self._tokens += num_tokens
        self._updates += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time inside out of the rate: evaluation, checkpoints. May be nested."""
        self._depth += 1
        begin = self._clock()
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._paused += self._clock() - begin

    def lap(self) -> Lap | None:
        """The rates since the last lap, and starts the next; None if no update after the first was counted."""
        assert self._depth == 0, "a lap cannot end inside a pause"
        now = self._clock()
        if self._start is None or self._updates == 0:
            return None
        seconds = max(now - self._start - self._paused, 1e-9)
        lap = Lap(self._tokens / seconds, seconds / self._updates)
        self._start, self._tokens, self._updates, self._paused = now, 0, 0, 0.0
        return lap


class Sink(Protocol):
    """Where figures go."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Takes the figures of one step. Scalars of Python, numpy or jax; texts where the sink can show them."""

    def close(self) -> None:
        """Writes what is pending. No write may follow."""


def _plain(value: Any) -> Any:
    """A scalar of numpy or jax as Python's own; float32 values keep every digit."""
    return value.item() if hasattr(value, "item") else value


def _json(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become the texts "nan", "inf" and "-inf"."""
    value = _plain(value)
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


class MetricsLog:
    """`metrics.jsonl`: one JSON object per line, with `step` first and floats that read back bit-equal.

    A torn last line, which a crash can leave, is removed when the file is opened again.

    Args:
        path: the file; its folder must exist.
        resume_step: lines of later steps are removed, for the run will write them again; None keeps all.
        enabled: False touches nothing.
    """

    def __init__(self, path: Path, resume_step: int | None = None, enabled: bool = True) -> None:
        self._file: BinaryIO | None = None
        if enabled:
            if path.exists():
                _repair(path, resume_step)
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends one line."""
        if self._file is not None:
            record = {"step": step} | {key: _json(value) for key, value in values.items()}
            self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Closes the file; more than once is fine."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, with "nan" and "inf" as floats again; a torn last line is left out.

    Raises:
        ConfigError: a line before the last is not a JSON object.
    """
    records = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        record = _record(line)
        if record is not None:
            special = {key: float(v) for key, v in record.items() if v in ("nan", "inf", "-inf")}
            records.append(record | special)
        elif line and number < len(lines):
            raise ConfigError(f"{path}:{number}: not a JSON object; correct or remove the line")
    return records


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _repair(path: Path, resume_step: int | None) -> None:
    """Drops a torn end and lines after `resume_step`: a new file takes the old one's place at once."""

    def stays(line: bytes) -> bool:
        step = (_record(line) or {}).get("step")
        return resume_step is None or not isinstance(step, int) or step <= resume_step

    before = path.read_bytes()
    lines = before.split(b"\n")
    while lines and _record(lines[-1]) is None:
        lines.pop()
    after = b"".join(line + b"\n" for line in lines if stays(line))
    if after != before:
        part = path.with_name(f".{path.name}.part")
        with open(part, "wb") as file:
            file.write(after)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)


class TensorBoardSink:
    """TensorBoard event files, by tensorboardX (which needs no TensorFlow).

    Args:
        directory: where the event files go.
        resume_step: TensorBoard hides events after it that an earlier process wrote; None hides none.

    Raises:
        ConfigError: tensorboardX is not installed.
    """

    def __init__(self, directory: Path, resume_step: int | None = None) -> None:
        module = _import_extra("tensorboardX", "tensorboard", "log.tensorboard=true")
        purge = None if resume_step is None else resume_step + 1
        self._writer = module.SummaryWriter(str(directory), purge_step=purge)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds a scalar per number; texts are left out."""
        for key, value in values.items():
            if isinstance(_plain(value), int | float):
                self._writer.add_scalar(key, _plain(value), step)

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


class WandbSink:
    """A Weights & Biases run.

    Figures are drawn over the logged `step`, not over W&B's own counter, which refuses to go back on a resume.

    Args:
        project: the project's name.
        name: the run's name and id: the same name resumes the same run.
        directory: where W&B keeps its files.
        config: shown with the run.

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(self, project: str, name: str, directory: Path, config: Mapping[str, Any] | None = None) -> None:
        module = _import_extra("wandb", "wandb", f"log.wandb_project={project}")
        run_id = re.sub(r"[^A-Za-z0-9_-]", "-", name)  # W&B takes no other characters in an id
        self._run = module.init(
            project=project, name=name, id=run_id, resume="allow", dir=str(directory), config=dict(config or {})
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Logs the figures and their step."""
        self._run.log({"step": step} | {key: _plain(value) for key, value in values.items()})

    def close(self) -> None:
        """Uploads what is pending and ends the run."""
        self._run.finish()


def _import_extra(module: str, extra: str, wanted_by: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"{wanted_by} needs {module}: pip install meshtrain[{extra}]") from None


class Sinks:
    """Several sinks as one, closed together at the end of a `with` block."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Hands the figures of one step to every sink."""
        for sink in self._sinks:
            sink.write(step, values)

    def close(self) -> None:
        """Closes every sink, also when one fails."""
        with contextlib.ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_sinks(
    log: LogConfig,
    run_dir: Path,
    *,
    resume_step: int | None = None,
    enabled: bool = True,
    config: Mapping[str, Any] | None = None,
) -> Sinks:
    """`run_dir/metrics.jsonl`, and TensorBoard under `run_dir/tensorboard` and W&B where `log` asks for them.

    Args:
        log: the `log` section.
        run_dir: the run's directory; it must exist, and its name is the run's name and id in W&B.
        resume_step: the step of the checkpoint that the run goes on from: what was logged after it is removed.
        enabled: False, for every process but one, opens nothing.
        config: shown by W&B.

    Raises:
        ConfigError: the package behind an asked-for sink is not installed.
    """
    if not enabled:
        return Sinks([])
    sinks: list[Sink] = [MetricsLog(run_dir / "metrics.jsonl", resume_step)]
    if log.tensorboard:
        sinks.append(TensorBoardSink(run_dir / "tensorboard", resume_step))
    if log.wandb_project:
        sinks.append(WandbSink(log.wandb_project, run_dir.name, run_dir, config))
    return Sinks(sinks)


def si(value: float) -> str:
    """Three digits and a unit: 987, 12.3k, 4.56M."""
    if not math.isfinite(value):
        return str(value)
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * factor:
            scaled = value / factor
            digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
            return f"{scaled:.{digits}f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """1:23, 4:05:06 or 2d 03:04:05."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d {h:02}:{m:02}:{s:02}"
    return f"{h}:{m:02}:{s:02}" if h else f"{m}:{s:02}"


def _number(value: float, digits: int) -> str:
    """Fixed point where that tells something, else an exponent."""
    if value == 0 or not math.isfinite(value) or 10.0**-digits <= abs(value) < 1e4:
        return f"{value:.{digits}f}"
    return f"{value:.2e}"


# key of a record, label, unit, width, how to write it
_FIELDS: tuple[tuple[str, str, str, int, Callable[[float], str]], ...] = (
    ("loss", "loss", "", 8, lambda v: _number(v, 4)),
    ("lr", "lr", "", 8, lambda v: f"{v:.2e}"),
    ("grad_norm", "grad", "", 8, lambda v: _number(v, 3)),
    ("tokens_per_s", "", "tok/s", 5, si),
    ("mfu", "mfu", "", 5, lambda v: f"{100 * v:.1f}%"),
)


def _figures(values: Mapping[str, Any], seconds_left: float | None, pad: bool) -> list[str]:
    """The figures of a log step; MFU is left out where it is not known, others show as "-". `pad` aligns lines."""
    parts = []
    for key, label, unit, width, write in _FIELDS:
        value = _plain(values.get(key))
        if value is None and key == "mfu":
            continue
        text = "-" if value is None else write(float(value))
        parts.append(" ".join(word for word in (label, text.rjust(width) if pad else text, unit) if word))
    if seconds_left is not None:
        parts.append(f"{duration(seconds_left)} left")
    return parts


class _Bar(bars.Progress):
    """rich's bar with a line of figures under it."""

    figures: Sequence[str] = ()

    def get_renderables(self) -> Iterator[RenderableType]:
        """The bar, then the figures."""
        yield from super().get_renderables()
        texts = [Text(figure) for figure in self.figures]
        for text in texts:
            text.highlight_regex(r"[a-z/]{2,}", "dim")  # the labels
        yield Columns(texts, padding=(0, 3))


Mode = Literal["auto", "live", "plain", "none"]


class Progress:
    """What the user sees of a run: a live bar on a terminal, a line per log step in a pipe or a job's log, or nothing.

    Args:
        mode: `log.progress`; "auto" is "live" on a terminal and "plain" elsewhere.
        total: updates in the whole run.
        console: where to; by default standard output.
        clock: seconds, for the bar's refresh.
    """

    def __init__(
        self, mode: Mode, total: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or Terminal()
        if mode == "auto":
            mode = "live" if self._console.is_terminal and not self._console.is_dumb_terminal else "plain"
        self.mode: Mode = mode  # no longer "auto"
        self.copy: Callable[[str, bool], object] = lambda text, warning: None  # gets each line too, in every mode
        self._total = total
        self._seconds_per_update: float | None = None
        self._bar: _Bar | None = None
        self._clock = clock

    def start(self, step: int = 0) -> None:
        """Shows the bar, with `step` updates already done."""
        if self.mode != "live" or self._bar is not None:
            return
        bar = bars.BarColumn(bar_width=None, complete_style="cyan", finished_style="green")
        columns = (bars.TextColumn("[bold]step"), bars.MofNCompleteColumn(), bar, bars.TaskProgressColumn())
        self._bar = _Bar(*columns, console=self._console, get_time=self._clock, expand=True)
        self._bar.add_task("train", total=self._total, completed=step)
        self._bar.start()

    def update(self, step: int, values: Mapping[str, Any] | None = None) -> None:
        """Moves on to `step` updates done.

        Args:
            step: 1 after the first update.
            values: the figures of a log step, keyed as in metrics.jsonl, and `seconds_per_update` for the time left;
                None, between log steps, only moves the bar.
        """
        if values is not None:
            self._seconds_per_update = values.get("seconds_per_update", self._seconds_per_update)
        left = None if self._seconds_per_update is None else (self._total - step) * self._seconds_per_update
        if self._bar is not None:
            if values is not None:
                self._bar.figures = _figures(values, left, pad=False)
            self._bar.update(bars.TaskID(0), completed=step, refresh=values is not None)
        if values is None:
            return
        count = f"step {step:>{len(str(self._total))}}/{self._total} {100 * step / self._total:3.0f}%"
        line = "   ".join([count, *_figures(values, left, pad=True)])
        self.copy(line, False)
        if self.mode == "plain":
            self._line(line)

    def message(self, text: str, *, warning: bool = False) -> None:
        """Prints a line (an evaluation's result, a checkpoint saved, a warning), above the bar if there is one."""
        self.copy(text, warning)
        self.show(text, warning=warning)

    def show(self, text: str, *, warning: bool = False) -> None:
        """Prints a line that is logged elsewhere already."""
        if self.mode != "none":
            self._line(f"warning: {text}" if warning else text, "yellow" if warning else "")

    def _line(self, text: str, style: str = "") -> None:
        # In a log a line stays one line, whatever width rich assumes there; brackets in it are no markup.
        self._console.print(Text(text, style=style), soft_wrap=self._bar is None)
        self._console.file.flush()

    def close(self) -> None:
        """Leaves the bar as it stands; more than once is fine."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _ShownLog(logging.Handler):
    """Turns log records into messages of a `Progress`."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        """Shows one record."""
        self._progress.show(record.getMessage(), warning=record.levelno >= logging.WARNING)


@contextlib.contextmanager
def show_logs(progress: Progress) -> Iterator[None]:
    """While inside, what meshtrain's own modules log is shown as messages, above the bar, and nowhere a second time.

    With mode "none" nothing is taken over: the records go where the process's own logging sends them.
    """
    if progress.mode == "none":
        yield
        return
    logger, handler = logging.getLogger("meshtrain"), _ShownLog(progress)
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False  # the libraries below install a handler that prints bare lines into the bar
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(handler)
