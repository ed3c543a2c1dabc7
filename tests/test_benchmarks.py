"""The benchmarks run from top to bottom, and their figures make sense."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_step_overhead_compares_steps_that_compute_the_same(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "step_overhead.py"), "--quick", "--json", str(found)]
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for heading in ("by hand: ", "stage 0", "stage 3", "compilation cache"):
        assert heading in run.stdout
    figures = json.loads(found.read_text())
    (layout,) = figures["layouts"]
    assert layout["layout"] == "1x1"
    assert layout["variant"] in layout["pilot"] and layout["pilot"][layout["variant"]] == min(layout["pilot"].values())
    assert 0 <= layout["loss_difference"] <= 1e-5
    rows = {row["name"]: row for row in layout["rows"]}
    assert list(rows) == ["by hand", "by hand, again", "stage 0", "stage 3"]
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["seconds"] / rows["by hand"]["seconds"])
        assert 0 < row["low"] <= row["high"] < math.inf and 0 < row["seconds"] < 60
    empty, filled = figures["startup"]
    assert (empty["cache"], filled["cache"]) == ("empty", "filled")
    assert 0 < filled["seconds"] < 120 and 0 < empty["seconds"] < 120


@pytest.mark.slow
def test_startup_measures_each_part(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "startup.py"), "--processes", "2", "--json", str(found)]
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    first, second = json.loads(found.read_text())
    assert (first["processes"], first["start"], second["start"]) == (2, "first", "second")
    for row in (first, second):
        parts = [row[name] for name in ("import", "join", "devices and data", "restore", "first update")]
        assert all(0 <= part < 120 for part in parts) and max(parts) <= row["all"] <= sum(parts) + 1
    assert "| 2 | second |" in run.stdout


@pytest.mark.slow
def test_step_overhead_refuses_to_compare_steps_that_differ() -> None:
    """The guard that makes the figures mean something, run on two candidates that do not compute the same."""
    code = """
import step_overhead as bench
def candidate(factor):
    return bench.Candidate(lambda state, batch: (state * factor, state), lambda: 1.0, float)
assert bench.compare_losses({"a": candidate(0.5), "b": candidate(0.5)}, {}) == 0
bench.compare_losses({"a": candidate(0.5), "b": candidate(0.5001)}, {})
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert "AssertionError: 'b' computes something else: losses [1.0, 0.5001, " in run.stderr
