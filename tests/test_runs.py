"""The run directory: who may have it, what may be resumed in it."""

import json
import logging
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from meshtrain import runs
from meshtrain.config import Config, load
from meshtrain.errors import ConfigError, UserError
from meshtrain.runs import compare_configs, open_run, read_state, safe_name

NO_JOB: dict[str, str] = {}


def make_config(tmp_path: Path, *overrides: str) -> Config:
    return load(None, [f"run.dir={tmp_path}", "run.name=a", *overrides])


def record(path: Path, **changes: Any) -> None:
    """Edits `run.json` as another process would have written it."""
    state = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(state | changes))


def snapshot(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_new_run_has_its_places_and_its_record(tmp_path: Path) -> None:
    config = make_config(tmp_path, "train.steps=70")
    with open_run(config, environment=NO_JOB) as run:
        assert run.path == tmp_path / "a"
        assert run.checkpoints.is_dir()
        assert run.logs.is_dir()
        assert (run.checkpoints, run.logs) == (run.path / "checkpoints", run.path / "logs")
        assert (run.metrics_path, run.config_path) == (run.path / "metrics.jsonl", run.path / "config.yaml")
        assert load(run.config_path) == config
        assert (run.resumed, run.changed) == (False, [])
        run.update(7)
        state = read_state(run.path)
        assert state is not None
        assert (state.state, state.step, state.steps, state.pid, state.job) == ("running", 7, 70, os.getpid(), "")
        assert state.started <= state.updated
    state = read_state(run.path)
    assert state is not None
    assert (state.state, state.step) == ("complete", 7)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/abs", "../x", "a\0b", "a\nb", "a\\b", "x" * 201])
def test_a_name_that_could_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="run.name"):
        safe_name(name)
    config = make_config(tmp_path)
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    with pytest.raises(ConfigError):
        open_run(config)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["gpt_tiny", "a b", "..a", "run-1.2", "é"])
def test_other_names_are_kept(name: str) -> None:
    assert safe_name(name) == name


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file")
    with pytest.raises(UserError, match="/a: cannot be used as a run directory"):
        open_run(make_config(tmp_path))


def test_many_processes_make_one_directory_at_the_same_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for i in range(25):
            config = make_config(tmp_path, f"run.name=r{i}")
            found = list(pool.map(lambda _, c=config: open_run(c, owner=False).path, range(8)))
            assert set(found) == {tmp_path / f"r{i}"}


def test_a_process_that_is_not_the_owner_writes_nothing(tmp_path: Path) -> None:
    with open_run(make_config(tmp_path), owner=False) as run:
        run.update(3)
    assert sorted(os.listdir(run.path)) == ["checkpoints", "logs"]


def try_to_open(directory: str) -> str:
    try:
        open_run(load(None, [f"run.dir={directory}", "run.name=a"]))
    except UserError as error:
        return str(error)
    return ""


def test_of_two_processes_the_second_is_refused_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "HEARTBEAT_SECONDS", 3600.0)  # the first run writes nothing in between
    job = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "1234", "SLURM_ARRAY_TASK_ID": "2"}
    run = open_run(make_config(tmp_path), environment=job)
    run.metrics_path.write_text("{}\n")
    before = snapshot(run.path)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        message = pool.submit(try_to_open, str(tmp_path)).result()
    assert f"pid {os.getpid()}, job 1234_2" in message
    assert f"host {socket.gethostname()}" in message
    assert snapshot(run.path) == before
    run.finish("complete")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(try_to_open, str(tmp_path)).result() == ""


def test_of_many_at_once_one_takes_the_directory(tmp_path: Path) -> None:
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        messages = list(pool.map(try_to_open, [str(tmp_path)] * 3))
    # A worker may have served two calls; its own second one is refused as well.
    assert sorted(message == "" for message in messages) == [False, False, True]


@pytest.mark.parametrize("state", ["complete", "preempted", "failed"])
def test_a_run_that_said_how_it_ended_can_be_opened_again(tmp_path: Path, state: runs.State) -> None:
    run = open_run(make_config(tmp_path))
    run.update(5)
    run.finish(state)
    run.finish("failed")  # only the first counts
    found = read_state(run.path)
    assert found is not None
    assert found.state == state
    with open_run(make_config(tmp_path)) as again:
        assert again.resumed
        found = read_state(run.path)
        assert found is not None
        assert (found.state, found.step) == ("running", 5)


def test_an_exception_is_recorded_as_failed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), open_run(make_config(tmp_path)) as run:
        raise ZeroDivisionError
    state = read_state(run.path)
    assert state is not None
    assert state.state == "failed"


def abandon(tmp_path: Path) -> Path:
    """A directory whose record says running, as after a kill."""
    run = open_run(make_config(tmp_path), environment=NO_JOB)
    run.finish("complete")
    record(run.path, state="running", step=6)
    return run.path


def test_a_killed_owner_is_recognised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = abandon(tmp_path)
    record(path, pid=(pid := dead_pid()), process="")
    with caplog.at_level(logging.WARNING), open_run(make_config(tmp_path)) as run:
        assert run.resumed
    assert f"pid {pid}, which ended without saying so at step 6" in caplog.text


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_pid_that_was_given_to_another_process_is_not_the_owner(tmp_path: Path) -> None:
    path = abandon(tmp_path)
    with pytest.raises(UserError, match="its process is running"):
        open_run(make_config(tmp_path))
    start = json.loads((path / "run.json").read_text())["process"]
    record(path, process=str(int(start) - 1))
    open_run(make_config(tmp_path)).finish("complete")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_an_ended_process_that_nobody_collected_is_not_alive(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    path = abandon(tmp_path)
    record(path, pid=child.pid, process=runs._process_start(child.pid))
    with pytest.raises(UserError, match=f"pid {child.pid}"):
        open_run(make_config(tmp_path))
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and still in the process table
    assert runs._exists(child.pid)
    open_run(make_config(tmp_path)).finish("complete")
    child.wait()


@pytest.mark.parametrize("place", [{"host": "node07"}, {"machine": "another boot or container of this name"}])
def test_an_owner_whose_process_cannot_be_seen_counts_by_its_heartbeat(tmp_path: Path, place: dict[str, str]) -> None:
    path = abandon(tmp_path)
    record(path, **place, pid=dead_pid(), updated=(datetime.now(UTC) - timedelta(seconds=20)).isoformat())
    with pytest.raises(UserError, match=r"host .*, pid .*; its last heartbeat is 2\d s old, and it is dead after 60 s"):
        open_run(make_config(tmp_path))
    record(path, updated=(datetime.now(UTC) - timedelta(seconds=61)).isoformat())
    open_run(make_config(tmp_path)).finish("complete")


def test_the_owner_beats_without_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "HEARTBEAT_SECONDS", 0.01)
    run = open_run(make_config(tmp_path))
    first = read_state(run.path)
    assert first is not None
    for _ in range(1000):
        if (now := read_state(run.path)) is not None and now.updated > first.updated:
            break
        time.sleep(0.01)
    run.finish("complete")
    assert now is not None
    assert now.updated > first.updated


def test_a_run_that_lost_its_directory_stops_writing(tmp_path: Path) -> None:
    run = open_run(make_config(tmp_path))
    record(run.path, token="another", host="node07", pid=9)
    before = snapshot(run.path)
    with pytest.raises(UserError, match="taken over by host node07, pid 9"):
        run.update(8)
    with pytest.raises(UserError, match="taken over"):
        run.finish("complete")
    assert snapshot(run.path) == before


def test_a_record_that_is_none_is_named(tmp_path: Path) -> None:
    path = abandon(tmp_path)
    (path / "run.json").write_text("{}")
    with pytest.raises(UserError, match="run.json: not a run's state"):
        open_run(make_config(tmp_path))


@pytest.mark.parametrize(
    "override",
    [
        *("model.preset=small", "model.overrides={num_layers: 3}", "data.seq_len=128", "data.vocab_size=512"),
        *("run.seed=1", "optim.name=sgd", "optim.lr=0.5", "optim.schedule=linear", "optim.moment_dtype=bfloat16"),
        *("precision.compute=bfloat16", "precision.reduce=compute", "train.global_batch=64", "train.steps=999"),
    ],
)
def test_what_changes_the_mathematics_is_refused(tmp_path: Path, override: str) -> None:
    refused, changed = compare_configs(make_config(tmp_path), make_config(tmp_path, override))
    key = override.partition("=")[0]
    assert changed == []
    (line,) = refused
    assert line.startswith(f"{key}: ")
    assert " -> " in line


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("mesh.model=2", "mesh.model: 1 -> 2"),
        ("zero.stage=3", "zero.stage: 1 -> 3"),
        ("devices=8", "devices: 0 -> 8"),
        ("data.prefetch=0", "data.prefetch: 2 -> 0"),
        ("train.microbatches=4", "train.microbatches: 1 -> 4"),
        ("train.log_every=1", "train.log_every: 10 -> 1"),
        ("checkpoint.keep=1", "checkpoint.keep: 3 -> 1"),
        ("log.tensorboard=true", "log.tensorboard: False -> True"),
        ("train.steps=2000", "train.steps: 1000 -> 2000 (the cosine schedule stretches over them)"),
    ],
)
def test_what_does_not_is_reported(tmp_path: Path, override: str, line: str) -> None:
    assert compare_configs(make_config(tmp_path), make_config(tmp_path, override)) == ([], [line])


def test_more_steps_at_a_constant_rate_stretch_nothing(tmp_path: Path) -> None:
    old = make_config(tmp_path, "optim.schedule=constant")
    new = make_config(tmp_path, "optim.schedule=constant", "train.steps=2000")
    assert compare_configs(old, new) == ([], ["train.steps: 1000 -> 2000"])


def test_equal_configs_have_no_differences(tmp_path: Path) -> None:
    assert compare_configs(make_config(tmp_path), make_config(tmp_path)) == ([], [])


def test_another_config_in_a_run_with_progress_is_refused_by_key(tmp_path: Path) -> None:
    run = open_run(make_config(tmp_path))
    (run.checkpoints / "10").mkdir()
    run.finish("complete")
    before = snapshot(run.path)
    other = make_config(tmp_path, "model.preset=small", "run.seed=5", "mesh.model=2")
    with pytest.raises(ConfigError, match=r"\(run.seed: 0 -> 5; model.preset: tiny -> small\)"):
        open_run(other)
    with pytest.raises(ConfigError, match="run.seed"):
        open_run(other, owner=False, allow=["model.preset"])
    assert snapshot(run.path) == before
    with open_run(other, allow=["model.preset", "run.seed"]) as again:
        assert again.changed == ["mesh.model: 1 -> 2", "run.seed: 0 -> 5", "model.preset: tiny -> small"]
        again.record_config(other)
    assert load(again.config_path) == other


def test_a_run_that_did_nothing_yet_takes_any_config(tmp_path: Path) -> None:
    open_run(make_config(tmp_path)).finish("failed")
    other = make_config(tmp_path, "model.preset=small")
    with open_run(other) as run:
        assert (run.resumed, run.changed) == (False, [])
        assert load(run.config_path) == other


def test_progress_without_a_config_is_refused(tmp_path: Path) -> None:
    path = abandon(tmp_path)
    record(path, state="complete")
    (path / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"config.yaml is missing"):
        open_run(make_config(tmp_path))


@pytest.mark.parametrize(
    ("environment", "job"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "88"}, "88"),
        ({"SLURM_JOB_ID": "90", "SLURM_ARRAY_JOB_ID": "88", "SLURM_ARRAY_TASK_ID": "0"}, "88_0"),
    ],
)
def test_the_job_is_named_as_it_is_requeued(environment: dict[str, str], job: str) -> None:
    assert runs._job(environment) == job


def test_a_resumed_runs_config_is_replaced_only_when_it_is_said(tmp_path: Path) -> None:
    """A resume that fails on the way must leave what says how the checkpoints were made."""
    with open_run(make_config(tmp_path)) as run:
        run.update(3)
    before = run.config_path.read_text()
    with pytest.raises(RuntimeError), open_run(make_config(tmp_path, "mesh.model=2")) as run:
        raise RuntimeError("the restore failed")
    assert run.config_path.read_text() == before
    with open_run(make_config(tmp_path, "mesh.model=2")) as run:
        run.record_config(make_config(tmp_path, "mesh.model=2"))
    assert load(run.config_path).mesh.model == 2
