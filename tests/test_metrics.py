"""Throughput on a set clock, the JSONL file's bytes, the sinks, the terminal's lines."""

import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from meshtrain.config import LogConfig
from meshtrain.errors import ConfigError
from meshtrain.metrics import (
    MetricsLog,
    Progress,
    Sinks,
    TensorBoardSink,
    Throughput,
    WandbSink,
    duration,
    open_sinks,
    read_metrics,
    si,
)

# ---------------------------------------------------------------- throughput


class Clock:
    """A clock that goes only where it is told."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_throughput_leaves_out_compilation_evaluation_and_checkpoints() -> None:
    clock = Clock()
    throughput = Throughput(clock)
    clock.now += 60  # compilation
    throughput.add(1000)
    assert throughput.lap() is None  # only the first update so far
    for _ in range(4):
        clock.now += 0.5
        throughput.add(1000)
    with throughput.paused():
        clock.now += 30
        with throughput.paused():  # a checkpoint inside an evaluation counts once
            clock.now += 5
    assert throughput.lap() == (2000.0, 0.5)

    assert throughput.lap() is None  # nothing since
    clock.now += 4.0  # the next lap begins at the last one that measured
    throughput.add(1000)
    assert throughput.lap() == (250.0, 4.0)


def test_a_pause_before_the_first_update_does_not_count_later() -> None:
    clock = Clock()
    throughput = Throughput(clock)
    with throughput.paused():
        clock.now += 50
    throughput.add(10)
    clock.now += 2
    throughput.add(10)
    assert throughput.lap() == (5.0, 2.0)


def test_a_failing_evaluation_still_ends_the_pause() -> None:
    clock = Clock()
    throughput = Throughput(clock)
    throughput.add(10)
    with pytest.raises(RuntimeError), throughput.paused():
        clock.now += 50
        raise RuntimeError
    clock.now += 2
    throughput.add(10)
    assert throughput.lap() == (5.0, 2.0)


# ---------------------------------------------------------------- metrics.jsonl


def steps_in(path: Path) -> list[Any]:
    return [record["step"] for record in read_metrics(path)]


def write_steps(path: Path, *steps: int, resume_step: int | None = None) -> None:
    log = MetricsLog(path, resume_step)
    for step in steps:
        log.write(step, {"loss": 1.0 / step})
    log.close()


def test_lines_are_strict_json_with_every_digit(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values = {
        "loss": 0.1 + 0.2,
        "f32": np.float32(0.1),
        "jax": jnp.float32(1 / 3),
        "tokens": np.int64(2**53 + 1),
        "grad_norm": float("nan"),
        "up": jnp.float32(jnp.inf),
        "down": -math.inf,
        "clipped": True,
        "note": "é",
        "eval": None,
    }
    log = MetricsLog(path)
    log.write(7, values)
    log.close()
    (line,) = path.read_text().splitlines()
    assert line.startswith('{"step": 7, "loss": 0.30000000000000004, ') and '"grad_norm": "nan"' in line
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))
    assert record["loss"] == 0.1 + 0.2 and np.float32(record["f32"]) == np.float32(0.1)
    assert np.float32(record["jax"]) == np.float32(1 / 3) and record["tokens"] == 2**53 + 1
    assert (record["up"], record["down"]) == ("inf", "-inf")
    assert (record["clipped"], record["note"], record["eval"]) == (True, "é", None)
    (back,) = read_metrics(path)
    assert math.isnan(back["grad_norm"]) and back["up"] == math.inf and back["down"] == -math.inf


def test_each_line_is_on_disk_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write(1, {"loss": 2.0})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 2.0}\n'
    log.close()
    log.close()


def test_reopening_appends_and_resuming_drops_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 10, 20, 30, 40)
    write_steps(path, 50)
    assert steps_in(path) == [10, 20, 30, 40, 50]
    before = path.read_bytes().splitlines()[:2]
    write_steps(path, 30, resume_step=25)
    assert steps_in(path) == [10, 20, 30]
    assert path.read_bytes().splitlines()[:2] == before  # kept lines are the same bytes
    write_steps(path, resume_step=30)  # the checkpoint's own step stays
    assert steps_in(path) == [10, 20, 30]
    write_steps(path, resume_step=0)
    assert path.read_bytes() == b""
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "torn", [b'{"step": 30, "lo', b"3", b"\0\0\0\0", b"\n\n", b'{"step": 30\n', b'{"step": 30, "loss": 1}x\n{"st']
)
def test_a_torn_end_is_removed(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 10, 20)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    write_steps(path, 30)
    assert path.read_bytes() == whole + b'{"step": 30, "loss": 0.03333333333333333}\n'


def test_a_missing_last_newline_costs_no_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    write_steps(path, 3)
    assert steps_in(path) == [1, 2, 3]


def test_the_old_file_stays_whole_when_the_rewrite_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 10, 20)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        MetricsLog(path, resume_step=10)
    assert path.read_bytes() == before


def test_reading_names_a_broken_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n???\n{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl:2: not a JSON object"):
        read_metrics(path)


# ---------------------------------------------------------------- sinks


def test_other_processes_open_nothing(tmp_path: Path) -> None:
    log = LogConfig(tensorboard=True, wandb_project="p")
    with open_sinks(log, tmp_path, enabled=False) as sinks:
        sinks.write(1, {"loss": 1.0})
    disabled = MetricsLog(tmp_path / "metrics.jsonl", enabled=False)
    disabled.write(1, {"loss": 1.0})
    disabled.close()
    assert list(tmp_path.iterdir()) == []


def test_open_sinks_writes_jsonl_by_default(tmp_path: Path) -> None:
    write_steps(tmp_path / "metrics.jsonl", 10, 20)
    with open_sinks(LogConfig(), tmp_path, resume_step=10) as sinks:
        sinks.write(15, {"loss": 1.5})
    assert steps_in(tmp_path / "metrics.jsonl") == [10, 15]


def test_missing_extras_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"log.tensorboard=true needs .*pip install meshtrain\[tensorboard\]"):
        open_sinks(LogConfig(tensorboard=True), tmp_path)
    with pytest.raises(ConfigError, match=r"log.wandb_project=p needs .*pip install meshtrain\[wandb\]"):
        open_sinks(LogConfig(wandb_project="p"), tmp_path)


def test_tensorboard_gets_numbers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Writer:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            calls.append((args, kwargs))

        def add_scalar(self, *args: Any) -> None:
            calls.append(args)

        def close(self) -> None:
            calls.append("closed")

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=Writer))
    sink = TensorBoardSink(tmp_path, resume_step=4)
    sink.write(5, {"loss": jnp.float32(0.5), "note": "text", "lr": 0.25, "eval": None})
    sink.close()
    assert calls == [((str(tmp_path),), {"purge_step": 5}), ("loss", 0.5, 5), ("lr", 0.25, 5), "closed"]


def test_tensorboard_writes_an_event_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    sink = TensorBoardSink(tmp_path / "tensorboard")
    sink.write(1, {"loss": 0.5})
    sink.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in events.read_bytes()


def test_wandb_draws_over_the_logged_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(
        define_metric=lambda *a, **k: calls.append(("define", a, k)),
        log=lambda values: calls.append(values),
        finish=lambda: calls.append("finished"),
    )

    def init(**kwargs: Any) -> Any:
        calls.append(kwargs)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    sink = WandbSink("proj", "gpt tiny/2", tmp_path, {"seed": 0})
    sink.write(3, {"loss": np.float32(0.5)})
    sink.close()
    assert calls[0] == {
        "project": "proj",
        "name": "gpt tiny/2",
        "id": "gpt-tiny-2",
        "resume": "allow",
        "dir": str(tmp_path),
        "config": {"seed": 0},
    }
    assert calls[1:] == [("define", ("*",), {"step_metric": "step"}), {"step": 3, "loss": 0.5}, "finished"]


def test_every_sink_is_closed_even_when_one_fails() -> None:
    closed: list[str] = []

    class Bad:
        def write(self, step: int, values: Any) -> None: ...

        def close(self) -> None:
            closed.append("bad")
            raise OSError("gone")

    class Good(Bad):
        def close(self) -> None:
            closed.append("good")

    with pytest.raises(OSError, match="gone"), Sinks([Good(), Bad(), Good()]):
        pass
    assert closed == ["good", "bad", "good"]


# ---------------------------------------------------------------- the terminal

FIGURES = {"loss": 5.12345, "lr": 3e-4, "grad_norm": 1.2345, "tokens_per_s": 12345.0, "seconds_per_update": 0.25}


def console(terminal: bool, width: int = 100, **environ: str) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    environ = {"TERM": "xterm"} | environ
    made = Console(
        file=out, force_terminal=terminal, width=width, color_system=None, legacy_windows=False, _environ=environ
    )
    return made, out


@pytest.mark.parametrize(
    ("mode", "terminal", "term", "expected"),
    [
        ("auto", True, "xterm", "live"),
        ("auto", False, "xterm", "plain"),
        ("auto", True, "dumb", "plain"),
        ("plain", True, "xterm", "plain"),
        ("live", False, "xterm", "live"),
        ("none", True, "xterm", "none"),
    ],
)
def test_mode_by_terminal(mode: Any, terminal: bool, term: str, expected: str) -> None:
    made, _ = console(terminal, TERM=term)
    assert Progress(mode, 10, made).mode == expected


def test_plain_lines_are_aligned_and_never_wrapped() -> None:
    made, out = console(False, width=40)
    with Progress("plain", 1000, made) as progress:
        progress.update(1, {"loss": jnp.float32(11.125), "lr": 0.0, "grad_norm": 123456.0})
        progress.update(2)  # no figures, no line
        progress.update(200, FIGURES | {"mfu": 0.4123})
        progress.message("saved step 200 in runs/a [b]")
        progress.message("loss is not finite", warning=True)
        progress.update(1000, FIGURES | {"loss": float("nan"), "tokens_per_s": 1.4e6, "mfu": 0.05, "grad_norm": 1e-5})
    assert out.getvalue().splitlines() == [
        "step    1/1000   0%   loss  11.1250   lr 0.00e+00   grad 1.23e+05       - tok/s",
        "step  200/1000  20%   loss   5.1235   lr 3.00e-04   grad    1.234   12.3k tok/s   mfu 41.2%   3:20 left",
        "saved step 200 in runs/a [b]",
        "warning: loss is not finite",
        "step 1000/1000 100%   loss      nan   lr 3.00e-04   grad 1.00e-05   1.40M tok/s   mfu  5.0%   0:00 left",
    ]


def test_none_prints_nothing() -> None:
    made, out = console(True)
    with Progress("none", 10, made) as progress:
        progress.update(1, FIGURES)
        progress.message("hello")
    assert out.getvalue() == ""


def test_live_shows_bar_figures_and_messages_above() -> None:
    made, out = console(True)
    with Progress("live", 1000, made, clock=lambda: 0.0) as progress:
        progress.update(250, FIGURES | {"mfu": 0.4123})
        progress.message("eval loss [4.2]")
    frames = out.getvalue().split("\x1b[2K")  # rich clears the line before each frame
    after = next(i for i, frame in enumerate(frames) if frame.startswith("eval loss [4.2]"))
    message, bar, figures = frames[after].splitlines()[:3]
    assert message == "eval loss [4.2]"
    assert bar.startswith("step  250/1000 ━━━━━") and bar.rstrip().endswith(" 25%")
    assert figures.rstrip() == "loss 5.1235   lr 3.00e-04   grad 1.234   12.3k tok/s   mfu 41.2%   3:08 left"
    assert out.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_live_starts_where_a_resumed_run_stands() -> None:
    made, out = console(True)
    progress = Progress("live", 1000, made, clock=lambda: 0.0)
    progress.start(500)
    progress.close()
    progress.close()
    assert "step  500/1000" in out.getvalue() and " 0/1000" not in out.getvalue()


def test_live_folds_whole_figures_on_a_narrow_terminal() -> None:
    made, out = console(True, width=60)
    with Progress("live", 1000, made, clock=lambda: 0.0) as progress:
        progress.update(250, FIGURES | {"mfu": 0.4123})
    text = [line.strip() for line in out.getvalue().splitlines()]
    assert "loss 5.1235   lr 3.00e-04   grad 1.234   12.3k tok/s" in text
    assert any(line.startswith("mfu 41.2%") and "3:08 left" in line for line in text)


def test_the_cursor_comes_back_after_an_error() -> None:
    made, out = console(True)
    with pytest.raises(RuntimeError), Progress("live", 10, made, clock=lambda: 0.0):
        raise RuntimeError
    assert out.getvalue().rstrip().endswith("\x1b[?25h")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (987.4, "987"),
        (999.6, "1.00k"),
        (1234.0, "1.23k"),
        (9996.0, "10.0k"),
        (12345.0, "12.3k"),
        (99960.0, "100k"),
        (1.4e6, "1.40M"),
        (7.5e13, "75.0T"),
        (math.inf, "inf"),
    ],
)
def test_si(value: float, text: str) -> None:
    assert si(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03"), (2 * 86400 + 11045, "2d 03:04:05")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
