"""How a process starts: where it is, its devices, the others.

with start(config) as world:  # joins, and starts jax's own coordination
    world.agree("data", {"fingerprint": fingerprint})
    with world.limit("compile", config.launch.compile):
        ...

One process alone is a world of one: the same calls, without the waiting.
"""

import atexit
import contextlib
import importlib.metadata
import os
import platform as system
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from meshtrain.config import Config, flatten
from meshtrain.distributed.deadline import Deadlines
from meshtrain.distributed.gpus import plan_gpus, visible_gpus
from meshtrain.distributed.hub import EXIT_LOST, EXIT_USER_ERROR
from meshtrain.distributed.link import Link, StopFlag, join
from meshtrain.distributed.place import Place, find_place
from meshtrain.distributed.proxy import proxy_settings
from meshtrain.errors import LaunchError, PeerError, UserError
from meshtrain.mesh import ask_for_virtual_devices, claim_gpu_memory

GPU_FLAGS = ("--xla_gpu_enable_latency_hiding_scheduler=true",)  # overlaps collectives with computation
UNWIND_SECONDS = 20.0  # from a failure until the process ends, whatever it still waits for
VIRTUAL_DEVICES = "MESHTRAIN_DEVICES"  # virtual CPU devices of this process, set by `meshtrain launch`


class World:
    """All processes of the job, as this one sees them. Made by `start`.

    Attributes:
        place: which process this is.
        warnings: of starting, for people.
    """

    def __init__(self, config: Config, place: Place, link: Link | None, flag: StopFlag) -> None:
        self.place, self.flag = place, flag
        self.warnings: list[str] = list(place.warnings)
        self._limits = config.launch
        self._link = link
        self._deadlines = Deadlines(self._expire)
        self._told = False

    @property
    def is_main(self) -> bool:
        """Whether this is the process that speaks and writes: process 0."""
        return self.place.process_id == 0

    @property
    def address(self) -> str:
        """At which this process reaches process 0; "" for one alone."""
        return "" if self._link is None else self._link.address

    def describe(self) -> str:
        """Processes and devices, in a line."""
        local, total = jax.local_device_count(), jax.device_count()
        kind = jax.devices()[0].device_kind
        return f"{self.place.why}; this process uses {local} of {total} devices ({kind})"

    def agree(self, topic: str, facts: Mapping[str, Any]) -> None:
        """Returns once every process has called it with equal facts.

        Raises:
            PeerError: they differ, or a process did not come within `launch.join`; the text names it.
        """
        if self._link is not None:
            self._link.agree(topic, facts, self._limits.join)

    def gather(self, topic: str, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The facts of all processes, by process, in process 0; nothing elsewhere. Every process calls it.

        Raises:
            PeerError: a process did not come within `launch.join`; the text names it.
        """
        return [dict(facts)] if self._link is None else self._link.gather(topic, facts, self._limits.join)

    @contextlib.contextmanager
    def limit(self, name: str, seconds: float) -> Iterator[None]:
        """A wait with a name; over its limit it ends the job, and says which process was waited for."""
        with contextlib.ExitStack() as stack:
            if self._link is not None:
                stack.enter_context(self._link.phase(name))
            stack.enter_context(self._deadlines.limit(name, seconds))
            yield

    def may_step(self, step: int) -> bool:
        """Whether update `step`, counted from 0, may start. After a signal to any process: False in all at one step."""
        if self._link is not None:
            return self._link.may_step(step)
        return not self.flag.signum

    def warn(self, text: str) -> None:
        """Has process 0 show a warning, once however many processes have it."""
        if self._link is not None and not self.is_main:
            self._link.warn(text)

    def listen(self, show: Any, at_exit: Any = None) -> None:
        """Where the warnings of others are shown, and what is called if another process's end ends this one."""
        if self._link is not None:
            self._link.on_warning = show
            if at_exit is not None:
                self._link.at_exit.append(at_exit)

    @contextlib.contextmanager
    def failures_told(self) -> Iterator[None]:
        """What the body raises is told to the others at once: what unwinds around it may wait for them.

        Raises:
            PeerError: the body failed because another process had; its traceback is in the text.
        """
        try:
            yield
        except BaseException as error:
            cause = self._tell(error)
            if cause is not None:
                raise cause from error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A clean end waits for the others."""
        if self._link is not None and error is None:
            with self.limit("end", self._limits.save):
                self._link.close(self._limits.save)
            with self.limit("leave", self._limits.heartbeat):
                jax.distributed.shutdown()
        self._deadlines.close()

    def _tell(self, error: BaseException) -> PeerError | None:
        """Says that this process fails. Returns the error of the process that was the cause, if another was.

        Unwinding may wait for peers that are gone: it has `UNWIND_SECONDS`.
        """
        if self._link is None or self._told:
            return None
        self._told = True
        is_users = isinstance(error, UserError)
        details = "" if is_users else "".join(traceback.format_exception(error))
        code = getattr(error, "exit_code", EXIT_USER_ERROR if is_users else 1)
        first_line = (str(error).splitlines() or [""])[0]
        text = first_line if is_users else f"{type(error).__name__}: {first_line}"
        cause = self._link.fail(text, details, code)
        code = code if cause is None else cause.exit_code
        atexit.register(_leave, code)
        timer = threading.Timer(UNWIND_SECONDS, _give_up, [str(cause or details or text), code])
        timer.daemon = True
        timer.start()
        return cause

    def _expire(self, name: str, limit: float) -> None:
        if self._link is not None:
            self._link.late(name, limit)  # the hub's verdict ends this process too
        else:
            os._exit(EXIT_LOST)


def _leave(code: int) -> None:
    """Ends the process in the place of jax's own goodbye, which waits for processes that are gone, or aborts."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _give_up(text: str, code: int) -> None:
    print(f"error: {text}", file=sys.stderr, flush=True)
    os._exit(code)


def start(config: Config, flag: StopFlag | None = None, environment: MutableMapping[str, str] | None = None) -> World:
    """Finds the other processes of the job and makes jax's devices ready. Before jax is first used.

    Args:
        config: the run's; all processes must have the same.
        flag: set by the caller's signal handler.
        environment: the process's own by default.

    Raises:
        LaunchError: this process's number, devices or connection are not what they must be.
        PeerError: another process is missing, is there twice or differs.
    """
    env = os.environ if environment is None else environment
    flag = flag or StopFlag()
    launch = config.launch
    place = find_place(env, mode=launch.distributed, port=launch.port)
    positions = _prepare_devices(config, place, env)
    if place.num_processes == 1:
        world = World(config, place, None, flag)
        world.warnings += check_devices(config, place, len(positions))
        return world
    link = join(place, common_facts(config), join_limit=launch.join, heartbeat=launch.heartbeat, flag=flag)
    world = World(config, place, link, flag)
    settings, warnings = proxy_settings(env, (link.address, *place.hosts))
    env.update(settings)
    world.warnings += warnings
    with world.failures_told(), world.limit("start jax", launch.join):
        _start_jax(place, link, positions, launch.join, launch.heartbeat)
        world.warnings += check_devices(config, place, len(positions))
    return world


def common_facts(config: Config) -> dict[str, Any]:
    """What must be equal in all processes: the versions, the config, where the run lies."""
    versions = {name: importlib.metadata.version(name) for name in ("meshtrain", "jax", "jaxlib", "flax", "optax")}
    python = ".".join(system.python_version_tuple()[:2])
    where = str((Path(config.run.dir).expanduser() / config.run.name).absolute())
    return {**versions, "python": python, **flatten(config), "run directory": where}


def _prepare_devices(config: Config, place: Place, env: MutableMapping[str, str]) -> tuple[int, ...]:
    """Chooses this process's devices, before jax looks for any; the positions of its GPUs in the visible list.

    Raises:
        LaunchError: GPUs are asked for and none is there, or they do not suffice for the processes of this host.
    """
    virtual = num_virtual_devices(config, place, env)
    platform = config.launch.platform
    if virtual or platform == "cpu":
        ask_for_virtual_devices(max(virtual, 1))
        return ()
    if env.get("JAX_PLATFORMS", "").startswith("cpu"):
        if platform == "gpu":
            raise LaunchError("launch.platform=gpu, and JAX_PLATFORMS=cpu keeps jax from them: unset one of the two")
        return ()
    num_gpus = visible_gpus(env) or 0
    if not num_gpus:
        if platform == "gpu":
            raise LaunchError(
                f"launch.platform=gpu, and host {socket.gethostname()} shows this process 0 GPUs (CUDA_VISIBLE_DEVICES="
                f"{env.get('CUDA_VISIBLE_DEVICES', 'not set')}): ask the scheduler for GPUs"
            )
        return ()
    claim_gpu_memory(env)
    flags = env.get("XLA_FLAGS", "")
    env["XLA_FLAGS"] = " ".join([flags, *(each for each in GPU_FLAGS if each.partition("=")[0] not in flags)]).strip()
    return plan_gpus(num_gpus, place, env)


def num_virtual_devices(config: Config, place: Place, env: Mapping[str, str]) -> int:
    """Virtual CPU devices that this process makes; 0: none.

    Raises:
        LaunchError: `devices` cannot be shared out equally.
    """
    own = env.get(VIRTUAL_DEVICES, "")
    if own and not own.isdecimal():
        raise LaunchError(f"{VIRTUAL_DEVICES}={own} must be a number of virtual CPU devices")
    each, rest = divmod(config.devices, place.num_processes)
    if rest:
        raise LaunchError(
            f"devices={config.devices} virtual devices cannot be shared out equally to {place.num_processes} processes"
        )
    if own and each and int(own) != each:
        raise LaunchError(
            f"devices={config.devices} gives each of {place.num_processes} processes {each}, and "
            f"{VIRTUAL_DEVICES}={own}: leave one of the two out"
        )
    return int(own or each)


def _start_jax(place: Place, link: Link, positions: tuple[int, ...], limit: float, heartbeat: float) -> None:
    # jax would put its own SIGTERM handler over the trainer's; the channel agrees on the step to stop at.
    jax.config.update("jax_enable_preemption_service", False)
    address = f"[{link.address}]" if ":" in link.address else link.address
    jax.distributed.initialize(
        coordinator_address=f"{address}:{link.port}",
        num_processes=place.num_processes,
        process_id=place.process_id,
        local_device_ids=list(positions) or None,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, int(limit)),
        heartbeat_timeout_seconds=int(2 * heartbeat) + 60,  # the channel is sooner, and says more
        shutdown_timeout_seconds=max(10, int(heartbeat)),
    )


def check_devices(config: Config, place: Place, num_gpus: int) -> list[str]:
    """Compares the devices that jax has made with what was to be there; starts them. Returns warnings.

    Args:
        num_gpus: that were planned for this process; 0: none.

    Raises:
        LaunchError: they are fewer, or CPUs where GPUs were asked for.
    """
    launch, found = config.launch, jax.local_device_count()
    backend = jax.default_backend()
    host = f"process {place.process_id} on host {socket.gethostname()}"
    asked = launch.platform == "gpu" or (num_gpus > 0 and place.source == "SLURM")
    if backend == "cpu" and num_gpus:
        text = f"{host} sees {num_gpus} GPUs, and jax runs on the CPU: pip install 'meshtrain[cuda13]'"
        if asked:
            raise LaunchError(f"{text}, or set launch.platform=cpu")
        return [text]
    if num_gpus and found != num_gpus:
        text = f"{host} was to use {num_gpus} GPUs, and jax has started {found}: is another process on them?"
        if asked or place.num_processes > 1:
            raise LaunchError(text)
        return [text]
    if launch.devices_per_process and found != launch.devices_per_process:
        raise LaunchError(
            f"{host} has {found} devices ({backend}), and launch.devices_per_process={launch.devices_per_process}: "
            "look at the scheduler's GPU options and CUDA_VISIBLE_DEVICES"
        )
    return []
