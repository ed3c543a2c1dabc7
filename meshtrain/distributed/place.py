"""Which process of a job this one is, by its environment: explicit settings > SLURM > Open MPI > one process."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Literal

from meshtrain.distributed.nodelist import expand_node_list
from meshtrain.errors import LaunchError

Mode = Literal["auto", "required", "off"]
Environment = Mapping[str, str]

COORDINATOR = "MESHTRAIN_COORDINATOR"
NUM_PROCESSES = "MESHTRAIN_NUM_PROCESSES"
PROCESS_ID = "MESHTRAIN_PROCESS_ID"
LOCAL_ID = "MESHTRAIN_LOCAL_ID"
NUM_LOCAL = "MESHTRAIN_NUM_LOCAL"
JOB = "MESHTRAIN_JOB"

FIRST_PORT, NUM_PORTS = 20000, 12000  # below the ports that Linux hands out by itself, from 32768
STEPS_PER_JOB = 37  # ports between those of two jobs in a row
SLURM_STEP = (
    *("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
)


@dataclasses.dataclass(frozen=True)
class Place:
    """One process's place in its job.

    Attributes:
        process_id, num_processes: its number, from 0, and how many there are.
        local_id, num_local: the same among those of its host.
        hosts: of each process, in the order of their numbers; "" where not known.
        coordinator: name or address of process 0's host.
        port: where process 0 listens.
        job: what tells this job from others, such as "slurm 123.0".
        source: "flags", "SLURM", "Open MPI" or "one process".
        why: what was found, in words.
        warnings: what is odd about it, a line each.
    """

    process_id: int
    num_processes: int
    local_id: int
    num_local: int
    hosts: tuple[str, ...]
    coordinator: str
    port: int
    job: str
    source: str
    why: str
    warnings: tuple[str, ...] = ()


def find_place(environment: Environment, *, mode: Mode = "auto", port: int = 0) -> Place:
    """Finds this process's place.

    Args:
        environment: of this process.
        mode: "off" looks at nothing; "required" refuses to be one process because nothing was found.
        port: of process 0; 0 takes the one in `MESHTRAIN_COORDINATOR`, or a function of the job.

    Raises:
        LaunchError: what is there contradicts itself or is not complete; the text names each variable.
    """
    if mode == "off":
        return _alone("one process: launch.distributed=off")
    if PROCESS_ID in environment or NUM_PROCESSES in environment:
        return _with_port(_from_flags(environment), port, environment)
    place = _innermost(_from_slurm(environment), _from_open_mpi(environment))
    if place is None or place.source == "one process":
        place = place or _alone("one process: neither MESHTRAIN_PROCESS_ID, SLURM nor Open MPI says otherwise")
        if mode == "required":
            raise LaunchError(f"launch.distributed=required, and {'; '.join(place.warnings) or place.why}")
        return place
    return _with_port(place, port, environment)


def _innermost(slurm: Place | None, open_mpi: Place | None) -> Place | None:
    """SLURM's, but where mpirun has started other processes inside its job."""
    if open_mpi is None or slurm is None:
        return slurm or open_mpi
    if slurm.num_processes == open_mpi.num_processes:
        return slurm
    text = (
        f"Open MPI started {open_mpi.num_processes} processes, and SLURM's step has {slurm.num_processes}: going by "
        "Open MPI, which started this process"
    )
    return dataclasses.replace(open_mpi, warnings=(text,))


def _alone(why: str, *warnings: str) -> Place:
    return Place(0, 1, 0, 1, ("",), "localhost", 0, "", "one process", why, warnings)


def _with_port(place: Place, port: int, environment: Environment) -> Place:
    """Where process 0 listens: as it is set, or else a function of the job, so that all know it without asking."""
    host, own_port = _address(environment[COORDINATOR]) if COORDINATOR in environment else (place.coordinator, 0)
    return dataclasses.replace(place, coordinator=host, port=port or own_port or place.port or job_port(place.job))


def job_port(job: str) -> int:
    """A port in [20000, 32000). Two steps of one SLURM job never have the same."""
    kind, _, number = job.partition(" ")
    job_id, _, step = number.partition(".")
    if kind == "slurm" and job_id.isdecimal() and step.isdecimal():
        return FIRST_PORT + (int(job_id) * STEPS_PER_JOB + int(step)) % NUM_PORTS
    return FIRST_PORT + int(hashlib.sha256(job.encode()).hexdigest()[:8], 16) % NUM_PORTS


def _address(text: str) -> tuple[str, int]:
    """`HOST`, `HOST:PORT`, `[IPV6]` or `[IPV6]:PORT`."""
    host, colon, port = text.rpartition(":")
    if text.endswith("]") or not colon or (":" in host and not host.endswith("]")):
        host, port = text, "0"  # without a port; a bare IPv6 address too
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise LaunchError(f"{COORDINATOR}={text} must be HOST:PORT, and [ADDRESS]:PORT for IPv6")
    return host, int(port)


# ------------------------------------------------------------ explicit


def _from_flags(env: Environment) -> Place:
    missing = [name for name in (PROCESS_ID, NUM_PROCESSES, COORDINATOR) if name not in env]
    count = _number(env, NUM_PROCESSES) if NUM_PROCESSES in env else 0
    if count == 1 and PROCESS_ID in env and _number(env, PROCESS_ID) == 0:
        return _alone(f"one process: {NUM_PROCESSES}=1")
    if missing:
        there = [name for name in (PROCESS_ID, NUM_PROCESSES) if name in env]
        raise LaunchError(f"{' and '.join(there)} set, and {' and '.join(missing)} not: set all three, or none")
    own = _number(env, PROCESS_ID)
    if not 0 <= own < count:
        raise LaunchError(f"{PROCESS_ID}={own} must be below {NUM_PROCESSES}={count}: processes are numbered from 0")
    if (LOCAL_ID in env) != (NUM_LOCAL in env):
        raise LaunchError(f"{LOCAL_ID} and {NUM_LOCAL} go together: set both, or none for one process per host")
    local, num_local = (_number(env, LOCAL_ID), _number(env, NUM_LOCAL)) if LOCAL_ID in env else (0, 1)
    if not 0 <= local < num_local:
        raise LaunchError(f"{LOCAL_ID}={local} must be below {NUM_LOCAL}={num_local}: they are numbered from 0")
    host, port = _address(env[COORDINATOR])
    hosts = (host,) * count if num_local == count else (host,) + ("",) * (count - 1)
    why = f"process {own} of {count}: {PROCESS_ID} and {NUM_PROCESSES} are set"
    job = env.get(JOB, f"{env[COORDINATOR]} x {count}")
    return Place(own, count, local, num_local, hosts, host, port, job, "flags", why)


# ------------------------------------------------------------ SLURM


def _from_slurm(env: Environment) -> Place | None:
    if "SLURM_JOB_ID" not in env:
        return None
    missing = [name for name in SLURM_STEP if name not in env]
    claimed = env.get("SLURM_PROCID", "0")
    if missing and ("SLURM_STEP_ID" in env or claimed != "0"):
        raise LaunchError(
            f"this is task {claimed} of a SLURM step, and {', '.join(missing)} are not set: pass the SLURM_ variables "
            "on to the container or shell that runs this, or set launch.distributed=off"
        )
    if missing:
        where = f"inside SLURM job {env['SLURM_JOB_ID']}"
        return _alone(
            f"one process: {where}, but not started by srun",
            f"{where}, but not a task of it ({', '.join(missing)} are not set): running as one process; srun before "
            "the command starts one per task",
        )
    own, count, local = (_number(env, f"SLURM_{name}") for name in ("PROCID", "STEP_NUM_TASKS", "LOCALID"))
    node = _number(env, "SLURM_NODEID")
    names = expand_node_list(env["SLURM_STEP_NODELIST"])
    tasks = tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])
    if len(tasks) != len(names) or sum(tasks) != count or not (0 <= node < len(names) and 0 <= own < count):
        raise LaunchError(
            f"SLURM's variables contradict each other: task {own} of {count} on node number {node}, {len(names)} names "
            f"in SLURM_STEP_NODELIST={env['SLURM_STEP_NODELIST']}, and SLURM_STEP_TASKS_PER_NODE="
            f"{env['SLURM_STEP_TASKS_PER_NODE']}"
        )
    hosts = task_hosts(names, tasks, env.get("SLURM_DISTRIBUTION", ""))
    if hosts[own] != names[node]:  # a distribution of the user's own
        hosts = (names[0], *("" for _ in range(count - 1)))
        hosts = (*hosts[:own], names[node], *hosts[own + 1 :])
    job = f"slurm {env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"
    nodes = f"{len(names)} node{'s' * (len(names) > 1)}"
    why = f"process {own} of {count} on {nodes}: SLURM job {job.removeprefix('slurm ')}"
    return Place(own, count, local, tasks[node], hosts, names[0], 0, job, "SLURM", why)


def tasks_per_node(text: str) -> tuple[int, ...]:
    """SLURM's `2(x3),1` as `(2, 2, 2, 1)`.

    Raises:
        LaunchError: it is no such list.
    """
    tasks: list[int] = []
    for part in text.split(","):
        number, _, times = part.removesuffix(")").partition("(x")
        if not number.isdecimal() or not (times or "1").isdecimal():
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE={text} must be a list such as 2(x3),1")
        tasks += [int(number)] * int(times or 1)
    return tuple(tasks)


def task_hosts(names: tuple[str, ...], tasks: tuple[int, ...], distribution: str = "") -> tuple[str, ...]:
    """The host of each task: node by node, or with `cyclic` a task of each node in turn."""
    if not distribution.startswith("cyclic"):
        return tuple(name for name, count in zip(names, tasks, strict=True) for _ in range(count))
    turns = range(max(tasks))
    return tuple(name for turn in turns for name, count in zip(names, tasks, strict=True) if turn < count)


# ------------------------------------------------------------ Open MPI


def _from_open_mpi(env: Environment) -> Place | None:
    if "OMPI_COMM_WORLD_SIZE" not in env or "OMPI_COMM_WORLD_RANK" not in env:
        return None
    own, count = _number(env, "OMPI_COMM_WORLD_RANK"), _number(env, "OMPI_COMM_WORLD_SIZE")
    local = _number(env, "OMPI_COMM_WORLD_LOCAL_RANK") if "OMPI_COMM_WORLD_LOCAL_RANK" in env else 0
    num_local = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE") if "OMPI_COMM_WORLD_LOCAL_SIZE" in env else 1
    if num_local == count:
        host = "localhost"
    elif COORDINATOR in env:
        host, _ = _address(env[COORDINATOR])
    else:
        host = _mpirun_host(env.get("OMPI_MCA_orte_hnp_uri", ""))
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri")
    job = f"mpi {next((env[name] for name in names if env.get(name)), '')}"
    hosts = (host,) * count if num_local == count else (host,) + ("",) * (count - 1)
    why = f"process {own} of {count}: Open MPI"
    return Place(own, count, local, num_local, hosts, host, 0, job, "Open MPI", why)


def _mpirun_host(uri: str) -> str:
    """Where mpirun runs, by `1234.0;tcp://10.0.0.1,10.1.0.1:5678`: process 0 does too, unless it was told otherwise."""
    _, _, rest = uri.partition("://")
    host = rest.partition(",")[0].partition(":")[0]
    if not host:
        raise LaunchError(
            f"started by Open MPI on several hosts, which does not say where process 0 runs: set "
            f"{COORDINATOR}=HOST:PORT, with mpirun -x"
        )
    return host


def _number(env: Environment, name: str) -> int:
    if not env[name].strip().isdecimal():
        raise LaunchError(f"{name}={env[name]} must be a number")
    return int(env[name])
