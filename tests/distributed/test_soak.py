"""Many starts, and many processes. A few here; `make test-soak` sets MESHTRAIN_SOAK and runs them all."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshtrain.launch.local import Launch, environments
from tests.distributed.several import environment, launch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("soak")]

SOAK = bool(os.environ.get("MESHTRAIN_SOAK"))
CYCLES = 100 if SOAK else 3
# Starts everything that a training starts, meets in one collective, and ends.
CYCLE = """
import jax
from jax.experimental import multihost_utils
from meshtrain.config import load
from meshtrain.distributed.start import start
with start(load(None, ["launch.join=60", "launch.heartbeat=10"])) as world:
    assert jax.process_count() == 4
    world.agree("step", {"hash": 1})
    assert float(multihost_utils.process_allgather(jax.numpy.float32(world.place.process_id)).sum()) == 6
"""


def test_starting_and_stopping_leaves_nothing_behind() -> None:
    for cycle in range(CYCLES):
        envs = [env | {"CYCLE_MARK": f"{os.getpid()}"} for env in environments(4, 1, environment())]
        assert Launch([sys.executable, "-c", CYCLE], 4, envs).run() == 0, f"cycle {cycle}"
        port = int(envs[0]["MESHTRAIN_COORDINATOR"].rpartition(":")[2])
        socket.create_server(("", port)).close()  # it is free again
        left = [path for path in Path("/proc").glob("[0-9]*/environ") if f"CYCLE_MARK={os.getpid()}" in text(path)]
        assert left == [], f"cycle {cycle}"


def text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""  # it has ended


@pytest.mark.skipif(not SOAK, reason="takes minutes: make test-soak")
@pytest.mark.parametrize("layout", [["zero.stage=3"], ["mesh.model=2", "zero.stage=1"]])
def test_sixteen_processes_train(tmp_path: Path, layout: list[str]) -> None:
    ended = launch(tmp_path, *layout, "launch.join=600", num=16, timeout=900)
    assert ended.code == 0, ended.err
    assert "run complete: 6 updates" in ended.out
    assert len(list((tmp_path / "run" / "logs").iterdir())) == 16
    assert subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True).stdout == b""
