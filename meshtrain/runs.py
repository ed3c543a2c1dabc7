"""The run directory: one name, one owner, one config, one place for everything a run writes.

    runs/<name>/config.yaml      the resolved config
                run.json         state, step, owner, heartbeat; replaced in one step at each change
                run.lock         serializes a take-over, held for milliseconds
                metrics.jsonl    figures, one JSON object per line
                checkpoints/     one directory per step
                logs/            what the processes print

`open_run` makes or reopens it. Process 0 of a job owns the directory; the other processes only use its paths.
"""

import contextlib
import fcntl
import logging
import os
import socket
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import pydantic

from meshtrain import atomic
from meshtrain.config import Config, dump, flatten, load
from meshtrain.errors import ConfigError, UserError

HEARTBEAT_SECONDS = 15.0  # the owner renews `updated` this often, whatever its training loop is doing
STALE_SECONDS = 60.0  # an owner on another host that has been silent for longer is taken to be dead

# What a resumed run may change. Everything else, new fields included, changes what is computed and is refused.
FREE_SECTIONS = ("mesh", "zero", "checkpoint", "log", "launch")
FREE_KEYS = frozenset(
    {
        *("run.name", "run.dir", "model.rules", "data.prefetch", "devices"),
        *("train.microbatches", "train.remat", "train.sequence_parallel"),
        *("train.eval_every", "train.eval_batches", "train.log_every", "train.max_skipped"),
    }
)

State = Literal["running", "complete", "preempted", "failed"]

logger = logging.getLogger(__name__)


class RunState(pydantic.BaseModel):
    """What `run.json` holds. Times are UTC; `job` is `""` outside SLURM."""

    model_config = pydantic.ConfigDict(frozen=True)

    state: State
    step: int = 0
    steps: int
    started: datetime
    updated: datetime
    host: str
    pid: int
    machine: str = ""  # boot and pid namespace in which `pid` means something; "" where the system cannot tell
    process: str = ""  # tells two processes that had one pid apart; "" where the system cannot tell
    job: str = ""
    token: str  # of the `Run` that wrote this

    @property
    def owner(self) -> str:
        """Host, pid and job in words."""
        return f"host {self.host}, pid {self.pid}" + (f", job {self.job}" if self.job else "")


@dataclass
class Run:
    """An open run directory.

    Attributes:
        path: the directory, absolute.
        changed: what this run's config changes in the config of the run that it resumes, as `key: old -> new`.
        resumed: earlier processes have trained or saved something here.
    """

    path: Path
    resumed: bool
    changed: list[str]
    _state: RunState | None  # None in a process that does not own the directory
    _guard: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _stop: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """The directory of the processes' logs."""
        return self.path / "logs"

    @property
    def metrics_path(self) -> Path:
        """The file of figures."""
        return self.path / "metrics.jsonl"

    @property
    def config_path(self) -> Path:
        """The resolved config."""
        return self.path / "config.yaml"

    def record_config(self, config: Config) -> None:
        """Writes `config.yaml`. A new run has it from the start; of a resumed one, it is replaced once the restore has
        gone well: until then it says what the checkpoints were made with. Not for a process that only reads.
        """
        if self._state is not None:
            atomic.write_text(self.config_path, dump(config))

    def update(self, step: int) -> None:
        """Records that `step` updates are done; for the log cadence, since it waits for the disk.

        Does nothing in a process that does not own the directory.

        Raises:
            UserError: another run has taken the directory over; this one must stop writing to it.
        """
        self._write(step=step)

    def finish(self, state: State) -> None:
        """Records how the run ended and gives the directory free. Only the first call counts.

        Raises:
            UserError: another run has taken the directory over.
        """
        if self._stop.is_set():
            return
        self._stop.set()
        self._write(state=state)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Records `complete`, or `failed` after an exception, unless `finish` was called."""
        if error is None:
            self.finish("complete")
            return
        try:
            self.finish("failed")
        except (UserError, OSError) as failure:  # the first error is the one to show; this one goes with it
            error.add_note(str(failure))

    def _write(self, **changes: Any) -> None:
        with self._guard:
            if self._state is None:
                return
            now = read_state(self.path)
            if now is not None and now.token != self._state.token:
                raise UserError(f"{self.path}: taken over by {now.owner}; this run has stopped writing there")
            self._state = self._state.model_copy(update={"updated": datetime.now(UTC), **changes})
            _write_state(self.path, self._state)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                self._write()
            except UserError:
                return  # the next `update` says so, in the thread that can stop the training
            except OSError as error:
                logger.warning("%s: the heartbeat cannot be written: %s", self.path, error)


def open_run(
    config: Config, *, owner: bool = True, allow: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> Run:
    """Makes `<run.dir>/<run.name>/`, or opens it again to resume.

    Every process of a job calls it; directories appear once, however many call at the same time. The owner also takes
    the directory, records itself in `run.json` and, of a new run, writes `config.yaml`. Where earlier processes have
    trained or saved something, the config must compute the same as theirs, see `compare_configs`.

    Args:
        config: the resolved config.
        owner: True in exactly one process of the job, the one that writes.
        allow: keys that may change all the same, for instance `optim.lr`.
        environment: names the job (SLURM variables).

    Raises:
        ConfigError: `run.name` cannot name a directory, or the config does not fit the run that is there.
        UserError: another run owns the directory and is alive; the directory cannot be made or written.
    """
    path = (Path(config.run.dir).expanduser() / safe_name(config.run.name)).absolute()
    try:
        for directory in (path / "checkpoints", path / "logs"):
            directory.mkdir(parents=True, exist_ok=True)
        if not owner:
            return _describe_run(path, config, allow, None)
        with _locked(path):
            return _take(path, config, allow, _job(environment))
    except OSError as error:
        raise UserError(f"{path}: cannot be used as a run directory: {error.strerror or error}") from error


def safe_name(name: str) -> str:
    """Returns `name` if it can name a directory in a folder and nothing outside it.

    Raises:
        ConfigError: it is empty, `.` or `..`, holds a separator or an unprintable character, or is too long.
    """
    if name in ("", ".", ".."):
        raise ConfigError(f"run.name={name!r} cannot name a directory: give the run a name such as gpt_tiny")
    bad = sorted({character for character in name if character in "/\\" or not character.isprintable()})
    if bad:
        raise ConfigError(f"run.name={name!r} holds {bad[0]!r}: a name is one directory; the folder is run.dir")
    if len(name.encode()) > 200:
        raise ConfigError(f"run.name={name[:20]!r}... is longer than 200 bytes: file systems refuse such names")
    return name


def read_state(path: Path) -> RunState | None:
    """Reads `run.json` of the run directory `path`; None where there is none.

    Raises:
        UserError: the file does not hold a run's state.
    """
    try:
        return RunState.model_validate_json((path / "run.json").read_bytes())
    except FileNotFoundError:
        return None
    except pydantic.ValidationError:
        raise UserError(f"{path / 'run.json'}: not a run's state; delete it if no run is using {path}") from None


def compare_configs(old: Config, new: Config) -> tuple[list[str], list[str]]:
    """Sorts the differences of a resumed run's config into `(refused, changed)`, each line `key: old -> new`.

    Refused is what would change the mathematics in silence: model, data, seed, optimizer, precision, global batch.
    Free are layout (mesh, ZeRO, placement rules, microbatches, remat), cadence and output. `train.steps` may grow; a
    schedule that decays then stretches over the new length, so the rate jumps at the resumed step, and the line says
    so. It may not shrink.
    """
    refused, changed = [], []
    before, after = flatten(old), flatten(new)
    for key in [*after, *(before.keys() - after.keys())]:
        was, now = before.get(key), after.get(key)
        if was == now:
            continue
        line = f"{key}: {was} -> {now}"
        if key == "train.steps" and new.train.steps > old.train.steps:
            stretches = new.optim.schedule != "constant"
            changed.append(line + f" (the {new.optim.schedule} schedule stretches over them)" * stretches)
        elif key in FREE_KEYS or key.split(".")[0] in FREE_SECTIONS:
            changed.append(line)
        else:
            refused.append(line)
    return refused, changed


def _describe_run(path: Path, config: Config, allow: Sequence[str], state: RunState | None) -> Run:
    """The `Run` at `path`, once its config fits what is there."""
    earlier = read_state(path)
    resumed = bool(earlier and earlier.step > 0) or any((path / "checkpoints").iterdir())
    changed = _check_config(path / "config.yaml", config, allow) if resumed else []
    return Run(path, resumed, changed, state)


def _check_config(config_path: Path, config: Config, allow: Sequence[str]) -> list[str]:
    refused, changed = compare_configs(_recorded_config(config_path), config)
    changed += [line for line in refused if line.partition(":")[0] in allow]
    refused = [line for line in refused if line.partition(":")[0] not in allow]
    if refused:
        raise ConfigError(
            f"{config_path.parent} holds a run with another config ({'; '.join(refused)}): "
            "choose another run.name, or set these back to resume"
        )
    return changed


def _recorded_config(path: Path) -> Config:
    """The config that a run was trained with. An empty file must not pass for the defaults.

    Raises:
        ConfigError: it is missing, empty or damaged.
    """
    cure = (
        "nothing says what was trained there: choose another run.name, or write the file again as it was, "
        f"meshtrain config CONFIG key=value ... > {path}"
    )
    if not path.exists():
        raise ConfigError(f"{path} is missing, so {cure}")
    try:
        config = load(path)
    except ConfigError as error:
        raise ConfigError(f"{str(error).splitlines()[0]}; so {cure}") from None
    if not path.read_bytes().strip():
        raise ConfigError(f"{path} is empty, so {cure}")
    return config


def _take(path: Path, config: Config, allow: Sequence[str], job: str) -> Run:
    """Takes the directory for this process and starts its heartbeat. The caller holds the lock."""
    earlier = read_state(path)
    if earlier is not None and earlier.state == "running":
        _refuse_live(path, earlier)
    now = datetime.now(UTC)
    state = RunState(
        state="running",
        step=earlier.step if earlier else 0,
        steps=config.train.steps,
        started=now,
        updated=now,
        host=socket.gethostname(),
        pid=os.getpid(),
        machine=_machine(),
        process=_process_start(os.getpid()),
        job=job,
        token=uuid.uuid4().hex,
    )
    run = _describe_run(path, config, allow, state)
    if not run.resumed:
        run.record_config(config)
    _write_state(path, state)
    threading.Thread(target=run._beat, name="run-heartbeat", daemon=True).start()
    return run


def _refuse_live(path: Path, owner: RunState) -> None:
    """Returns if the recorded owner is gone.

    Raises:
        UserError: it is alive: its process is, where this one can see it; else its heartbeat is fresh.
    """
    if owner.host == socket.gethostname() and owner.machine == _machine():
        start = _process_start(owner.pid)
        alive = _exists(owner.pid) and (not owner.process or start in ("", owner.process))
        evidence = "its process is running"
    else:
        age = (datetime.now(UTC) - owner.updated).total_seconds()
        alive = age < STALE_SECONDS
        evidence = f"its last heartbeat is {max(age, 0):.0f} s old, and it is dead after {STALE_SECONDS:.0f} s"
    if alive:
        raise UserError(
            f"{path} belongs to a live run ({owner.owner}; {evidence}): stop that run or choose another run.name"
        )
    logger.warning("%s: taken over from %s, which ended without saying so at step %d", path, owner.owner, owner.step)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, and there
    return True


def _machine() -> str:
    """Names what gives out pids: containers may share a host's name, and hosts may all be called localhost."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process_start(pid: int) -> str:
    """When a process started, in clock ticks after boot: no later process of this pid has the same. "" if unknown.

    "ended" for a process that nobody has collected yet (a zombie). See proc_pid_stat(5): field 2, the command, may
    hold blanks and brackets, so fields are counted after its last bracket.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    state, start = fields[0], fields[19]  # fields 3 and 22
    return "ended" if state in "ZX" else start


def _job(environment: Mapping[str, str]) -> str:
    """The SLURM job, as `ARRAY_TASK` for a task of an array: what `scontrol requeue` takes. "" outside SLURM."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")


def _write_state(path: Path, state: RunState) -> None:
    atomic.write_text(path / "run.json", state.model_dump_json(indent=2) + "\n")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds `run.lock`, so that of two processes that find a free directory one takes it first. The kernel gives the
    lock free when its holder dies. A file system without locks is used without.
    """
    with open(path / "run.lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("%s: no file locks here (%s): start one run at a time", path, error.strerror)
        yield
