"""`meshtrain doctor [CONFIG]`: what each process sees, how fast they reach each other, and what is wrong with it.

Runs alone, or under srun or `meshtrain launch` with the processes of the job that is to come. Each check is a function
from what the processes report to problems, so that it can be called, and tested, with a made-up cluster.
"""

import contextlib
import importlib.metadata
import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshtrain.config import Config
from meshtrain.distributed.gpus import visible_gpus
from meshtrain.distributed.proxy import PROXIES
from meshtrain.distributed.start import World, start
from meshtrain.errors import LaunchError, MeshError
from meshtrain.mesh import MODEL, make_mesh
from meshtrain.terminal import wide_terminal

Report = Mapping[str, Any]

MAX_SKEW = 2.0  # seconds between two clocks: logs mislead, and a lock looks older than it is
SLOW_DISK = 50e6  # bytes per second: a checkpoint of 7B parameters with Adam, 84 GB, would take half an hour
DISK_BYTES = 32 << 20
GPU_BYTES, CPU_BYTES = 256 << 20, 4 << 20  # of each device in the timed all-reduce
NUM_TIMED = 5


@dataclass(frozen=True)
class Problem:
    """Something that is wrong, and its cure.

    Attributes:
        who: the processes that have it, as text; "" for the job.
    """

    who: str
    what: str
    cure: str


@dataclass(frozen=True)
class AxisTime:
    """An all-reduce along one mesh axis.

    Attributes:
        size: devices of the axis.
        seconds: the median of `NUM_TIMED`.
        bus_bandwidth: bytes per second that each device's link carries: 2 (n - 1) / n of the buffer, as NCCL counts.
    """

    axis: str
    size: int
    num_bytes: int
    seconds: float
    bus_bandwidth: float


# ------------------------------------------------------------ what a process sees


def look(world: World, run_root: Path, token: str) -> dict[str, Any]:
    """What this process sees, as JSON."""
    place, env = world.place, os.environ
    devices = jax.local_devices()
    return {
        "process": place.process_id,
        "host": socket.gethostname(),
        "node": place.hosts[place.process_id] if place.source == "SLURM" else socket.gethostname(),
        "task": place.local_id,
        "visible": visible_gpus(env),
        "used": len(devices),
        "device": devices[0].device_kind,
        "addresses": own_addresses(),
        "coordinator": world.address,
        "proxies": {name: env[name] for name in PROXIES if env.get(name)},
        "clock": time.time(),
        "versions": versions(),
        **look_at_directory(run_root, token),
    }


def own_addresses() -> list[str]:
    """This host's name as it resolves here."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        return sorted({str(each[4][0]) for each in found})
    return []


def versions() -> dict[str, str]:
    """Of what must be equal everywhere, and of the driver's side where there is one."""
    names = ("meshtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
    found = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}
    backend = jax.devices()[0].client.platform_version.splitlines()[0]
    return found | {"backend": backend}


def look_at_directory(root: Path, token: str) -> dict[str, Any]:
    """Whether run directories can be made here, how fast they are, and whether process 0's mark is seen."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=root, prefix=".doctor-") as file:
            data = os.urandom(DISK_BYTES)  # which no file system compresses
            begun = time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            speed = DISK_BYTES / (time.perf_counter() - begun)
    except OSError as error:
        return {"write": 0.0, "write_error": f"{root}: {error.strerror}", "shared": (root / token).exists()}
    return {"write": speed, "write_error": "", "shared": (root / token).exists()}


@contextlib.contextmanager
def mark(root: Path, token: str, *, make: bool) -> Iterator[None]:
    """While inside, a file of process 0 lies in the run directory, for the others to see."""
    path = root / token
    if make:
        with contextlib.suppress(OSError):
            root.mkdir(parents=True, exist_ok=True)
            path.touch()
    try:
        yield
    finally:
        if make:
            path.unlink(missing_ok=True)


# ------------------------------------------------------------ what is wrong


def find_problems(reports: Sequence[Report]) -> list[Problem]:
    """What is wrong with what the processes see."""
    checks = (_directories, _clocks, _devices, _versions, _names)
    return [problem for check in checks for problem in check(reports)]


def _directories(reports: Sequence[Report]) -> Iterator[Problem]:
    if broken := [each for each in reports if each["write_error"]]:
        cure = "choose another with run.dir, or free some space"
        yield Problem(_who(broken), f"the run directory cannot be written: {broken[0]['write_error']}", cure)
    if blind := [each for each in reports if not each["shared"] and not each["write_error"]]:
        cure = "put run.dir on a file system that all hosts share; checkpoints would be torn apart"
        yield Problem(_who(blind), "the run directory is not the one of process 0", cure)
    if slow := [each for each in reports if 0 < each["write"] < SLOW_DISK]:
        speed = min(each["write"] for each in slow) / 1e6
        yield Problem(_who(slow), f"it writes {speed:.0f} MB/s to the run directory", "use a faster file system for it")


def _clocks(reports: Sequence[Report]) -> Iterator[Problem]:
    ours = reports[0]["clock"]
    if far := [each for each in reports if abs(each["clock"] - ours) > MAX_SKEW]:
        most = max((each["clock"] - ours for each in far), key=abs)
        yield Problem(_who(far), f"the clock is {most:+.1f} s from process 0's", "have the hosts run NTP or chrony")


def _devices(reports: Sequence[Report]) -> Iterator[Problem]:
    counts = {each["used"] for each in reports}
    if len(counts) > 1:
        usual = statistics.mode(each["used"] for each in reports)
        odd = [each for each in reports if each["used"] != usual]
        what = f"{odd[0]['used']} devices are used, and {usual} elsewhere"
        yield Problem(_who(odd), what, "ask the scheduler for as many GPUs on each host")
    kinds = {each["device"] for each in reports}
    if len(kinds) > 1:
        cure = "a job is as slow as its slowest: ask for one kind of GPU"
        yield Problem("", f"devices of several kinds: {', '.join(sorted(kinds))}", cure)
    if idle := [each for each in reports if each["device"] == "cpu" and each["visible"]]:
        what = f"{idle[0]['visible']} GPUs are visible, and jax runs on the CPU"
        yield Problem(_who(idle), what, "pip install 'meshtrain[cuda13]', and look at JAX_PLATFORMS")
    for host in {each["host"] for each in reports}:
        here = [each for each in reports if each["host"] == host and each["device"] != "cpu"]
        used, visible = sum(each["used"] for each in here), max((each["visible"] or 0 for each in here), default=0)
        if used < visible:
            what = f"{used} of the {visible} visible GPUs are used"
            yield Problem(_who(here), what, "start one process per host, or one per GPU")


def _versions(reports: Sequence[Report]) -> Iterator[Problem]:
    for name, ours in reports[0]["versions"].items():
        if other := [each for each in reports if each["versions"].get(name) != ours]:
            what = f"{name} {other[0]['versions'].get(name)}, and {ours} in process 0"
            yield Problem(_who(other), what, "install the same everywhere, or use one container")


def _names(reports: Sequence[Report]) -> Iterator[Problem]:
    if len({each["host"] for each in reports}) == 1:
        return
    if loops := [each for each in reports if each["addresses"] and all(map(_is_loopback, each["addresses"]))]:
        what = f"the host's own name resolves to {loops[0]['addresses'][0]}: collectives on CPUs offer it to the others"
        yield Problem(_who(loops), what, "correct /etc/hosts")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _who(reports: Sequence[Report]) -> str:
    shown = ", ".join(str(each["process"]) for each in reports[:8]) + (", ..." if len(reports) > 8 else "")
    hosts = sorted({each["node"] for each in reports})
    return f"process {shown} ({', '.join(hosts[:4])}{', ...' if len(hosts) > 4 else ''})"


# ------------------------------------------------------------ the mesh


def time_axes(mesh: Mesh) -> list[AxisTime]:
    """Times an all-reduce along each axis of more than one device. Every process calls it."""
    num_bytes = CPU_BYTES if mesh.devices.flat[0].platform == "cpu" else GPU_BYTES
    return [time_axis(mesh, axis, num_bytes) for axis, size in mesh.shape.items() if size > 1]


def time_axis(mesh: Mesh, axis: str, num_bytes: int) -> AxisTime:
    """Times an all-reduce of `num_bytes` per device along one axis, in float32."""
    size = mesh.shape[axis]
    spec = PartitionSpec(tuple(mesh.axis_names))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec)
    def reduce(x: jax.Array) -> jax.Array:
        return jax.lax.pcast(jax.lax.psum(x, axis), axis, to="varying")

    shape = (mesh.size * num_bytes // 4,)
    sharding = NamedSharding(mesh, spec)
    x = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=sharding)()
    reduce(x).block_until_ready()
    seconds = []
    for _ in range(NUM_TIMED):
        begun = time.perf_counter()
        reduce(x).block_until_ready()
        seconds.append(time.perf_counter() - begun)
    median = statistics.median(seconds)
    moved = 2 * (size - 1) / size * num_bytes
    return AxisTime(axis, size, num_bytes, median, moved / median)


def most_in_a_group(mesh: Mesh, axis: str, owners: Sequence[str]) -> int:
    """The most owners that one group of an axis spans.

    Args:
        owners: of each process's devices, such as its host.
    """
    groups = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])
    return max(len({owners[device.process_index] for device in group}) for group in groups)


def positions(mesh: Mesh) -> dict[int, str]:
    """Where each process's devices lie in the mesh: `data 0-1, model 0`."""
    found = {}
    for process in sorted({device.process_index for device in mesh.devices.flat}):
        own = np.argwhere(np.vectorize(lambda device: device.process_index)(mesh.devices) == process)
        spans = zip(mesh.axis_names, own.min(0), own.max(0), strict=True)
        found[process] = ", ".join(f"{name} {low}" + (f"-{high}" if high > low else "") for name, low, high in spans)
    return found


def mesh_problems(mesh: Mesh, hosts: Sequence[str]) -> list[Problem]:
    """What is wrong with how the mesh lies on the hosts of the processes."""
    spanned = most_in_a_group(mesh, MODEL, hosts)
    if spanned == 1:
        return []
    cure = "lower mesh.model to the GPUs of one host: tensor parallelism needs the fast links inside it"
    return [Problem("", f"the model axis of {mesh.shape[MODEL]} devices spans {spanned} hosts", cure)]


# ------------------------------------------------------------ the command


def run(config: Config) -> int:
    """`meshtrain doctor`: 0, or 1 if something is wrong."""
    console = wide_terminal()
    try:
        with start(config) as world, world.failures_told():
            return examine(config, world, console)
    except LaunchError as error:
        console.print(Text.assemble(("problem ", "bold red"), str(error)), soft_wrap=True)
        return 1


def examine(config: Config, world: World, console: Console) -> int:
    """Looks at everything, in all processes; process 0 prints. 1 if something is wrong."""
    root = Path(config.run.dir).expanduser()
    token = f".doctor-{world.place.job.replace(' ', '-').replace('/', '-')}-{world.place.port}"
    with mark(root, token, make=world.is_main):
        world.agree("begin", {})  # from here on the mark is there, and the clocks are read at the same moment
        reports = world.gather("what each process sees", look(world, root, token))
    problems = find_problems(reports) if world.is_main else []
    times: list[AxisTime] = []
    mesh = None
    try:
        mesh = make_mesh(config.mesh.data, config.mesh.model)
        with world.limit("timed collectives", config.launch.compile):
            times = time_axes(mesh)
    except MeshError as error:
        problems.append(Problem("", str(error), "change the mesh, or the number of processes"))
    if mesh is not None and world.is_main:
        problems += mesh_problems(mesh, [each["node"] for each in reports])
    if world.is_main:
        _show(console, world, root, mesh, reports, times, problems)
    return int(bool(problems))


def _show(
    console: Console, world: World, root: Path, mesh: Mesh | None, reports: Sequence[Report],
    times: Sequence[AxisTime], problems: Sequence[Problem],
) -> None:  # fmt: skip
    console.print(f"start    {world.describe()}", soft_wrap=True)
    console.print(_processes(reports, {} if mesh is None else positions(mesh)), markup=False)
    if mesh is not None:
        sizes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
        console.print(f"mesh     {sizes}", soft_wrap=True)
    if times:
        console.print(_collectives(times))
    console.print(f"versions {', '.join(f'{name} {text}' for name, text in reports[0]['versions'].items())}")
    console.print(f"runs     {root}", soft_wrap=True)
    for text in world.warnings:
        console.print(Text.assemble(("warning ", "yellow"), text), soft_wrap=True)
    for problem in problems:
        who = f"{problem.who}: " if problem.who else ""
        console.print(Text.assemble(("problem ", "bold red"), f"{who}{problem.what}"), soft_wrap=True)
        console.print(Text.assemble(("cure    ", "green"), problem.cure), soft_wrap=True)
    console.print("nothing is wrong" if not problems else f"{len(problems)} problem{'s' * (len(problems) > 1)}")


def _processes(reports: Sequence[Report], where: Mapping[int, str]) -> Table:
    table = Table(title="processes", title_justify="left")
    for name in ("process", "host", "task", "GPUs", "used", "device", "mesh", "address", "proxy", "clock", "writes"):
        is_number = name in ("process", "task", "GPUs", "used", "clock", "writes")
        table.add_column(name, justify="right" if is_number else "left")
    for each in reports:
        host = each["node"] if each["node"] == each["host"] else f"{each['node']} ({each['host']})"
        clock, speed = each["clock"] - reports[0]["clock"], each["write"] / 1e6
        table.add_row(
            *(str(each["process"]), host, str(each["task"]), "-" if each["visible"] is None else str(each["visible"])),
            *(str(each["used"]), each["device"], where.get(each["process"], "-")),
            *(", ".join(each["addresses"][:2]) or "?", ", ".join(each["proxies"]) or "-"),
            *(f"{clock:+.2f} s", f"{speed:.0f} MB/s" if speed else "no"),
        )
    return table


def _collectives(times: Sequence[AxisTime]) -> Table:
    table = Table(title="all-reduce along each axis", title_justify="left")
    for name in ("axis", "devices", "size", "time", "bus bandwidth"):
        table.add_column(name, justify="left" if name == "axis" else "right")
    for each in times:
        table.add_row(
            each.axis, str(each.size), f"{each.num_bytes >> 20} MiB",
            f"{1e3 * each.seconds:.2f} ms", f"{each.bus_bandwidth / 1e9:.2f} GB/s",
        )  # fmt: skip
    return table
