"""A real SLURM of four nodes on this machine: a controller and four node daemons, with their own keys and ports."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshtrain.distributed.hub import free_port
from tests.distributed.several import environment

PROGRAMS = ("slurmctld", "slurmd", "munged", "mungekey", "srun", "sbatch", "scontrol", "shellcheck")
NODES = tuple(f"node0{i}" for i in range(1, 5))
HOSTS = Path("/etc/hosts")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=5
SchedulerParameters=sched_interval=1,batch_sched_delay=0
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing() -> list[str]:
    """What this machine lacks to run a SLURM."""
    lacks = [program for program in PROGRAMS if shutil.which(program) is None]
    return lacks + ([] if os.geteuid() == 0 else ["root"])


def need_slurm() -> None:
    """Skips a test where SLURM is missing, loudly (`tests/conftest.py`); where it must be there, as in CI, it fails."""
    if lacks := missing():
        text = f"no SLURM on this machine ({', '.join(lacks)}): apt-get install slurm-wlm munge shellcheck, as root"
        if os.environ.get("MESHTRAIN_REQUIRE_SLURM"):
            pytest.fail(text)
        pytest.skip(text)


class Cluster:
    """The running daemons, and commands to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = environment() | {"SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons: list[subprocess.Popen[bytes]] = []

    def run(self, *command: str, cwd: Path | None = None, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        """Runs a command against this cluster."""
        return subprocess.run(command, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=timeout)

    def wait(self, job: str, states: str = "COMPLETED,FAILED,CANCELLED,TIMEOUT,NODE_FAIL", seconds: float = 240) -> str:
        """Waits until a job is in one of some states; which."""
        ends = time.monotonic() + seconds
        state = ""
        while time.monotonic() < ends:
            shown = self.run("scontrol", "show", "job", job).stdout
            state = next((word[9:] for word in shown.split() if word.startswith("JobState=")), "")
            if state in states.split(","):
                return state
            time.sleep(0.3)
        raise AssertionError(f"job {job} is still {state} after {seconds} s; {self.run('squeue').stdout}")

    def start(self) -> None:
        """Starts the daemons and waits for the nodes."""
        ports = [free_port() for _ in range(len(NODES) + 1)]
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4"
            for node, port in zip(NODES, ports[1:], strict=True)
        ]
        text = CONF.format(host=host, port=ports[0], folder=self.folder, nodes="\n".join(nodes))
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "state").mkdir()
        munge = [f"--{name}={self.folder}/munge.{name.removesuffix('-file')}" for name in
                 ("socket", "key-file", "pid-file", "seed-file", "log-file")]  # fmt: skip
        subprocess.run(["mungekey", "--create", f"--keyfile={self.folder}/munge.key"], check=True)
        self._daemon("munged", "--foreground", "--force", *munge)
        self._daemon("slurmctld", "-D")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        ends = time.monotonic() + 60
        while self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() != str(len(NODES)):
            if time.monotonic() > ends:
                logs = [path.read_text(errors="replace")[-2000:] for path in sorted(self.folder.glob("*.log"))]
                raise AssertionError("the nodes do not come up:\n" + "\n".join(logs))
            time.sleep(0.3)

    def _daemon(self, *command: str) -> None:
        with (self.folder / f"out.{len(self.daemons)}").open("wb") as out:
            self.daemons.append(subprocess.Popen(command, env=self.env, stdout=out, stderr=out, start_new_session=True))
        time.sleep(0.3)

    def stop(self) -> None:
        """Ends every job and every daemon."""
        self.run("scancel", "--state=RUNNING")
        self.run("scancel", "--state=PENDING")
        time.sleep(1)
        for daemon in reversed(self.daemons):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()


@contextlib.contextmanager
def named_nodes() -> Iterator[None]:
    """The nodes' names resolve while inside: a cluster's name service does that."""
    before = HOSTS.read_text()
    HOSTS.write_text(before + "".join(f"127.0.0.1 {node}\n" for node in NODES if node not in before))
    try:
        yield
    finally:
        HOSTS.write_text(before)
