"""`meshtrain slurm CONFIG --nodes 4 --gpus-per-node 8`: an sbatch script that says why each line is there.

What the script does with the exit code of the training is the whole of its logic: 75 was stopped with a checkpoint and
goes on if it may, a lost process is tried again a few times, and everything else is an end.
"""

import argparse
import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from meshtrain.atomic import write_text
from meshtrain.config import Config
from meshtrain.errors import ConfigError, LaunchError
from meshtrain.terminal import Terminal, command_name, last_of_each_key

SIGNAL_SECONDS = 300  # before the time limit: to finish an update and write a checkpoint
MAX_LOSSES = 3  # restarts after a lost process, until somebody should look at the machine
END_SECONDS = 300  # from the end of the first task until srun ends the others: the channel needs some
_TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")
_ARRAY = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?")
_PLAIN = re.compile(r"[\w.,:/@+%=-]+", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Script:
    """What is asked for.

    Attributes:
        program: the words that start meshtrain.
        arguments: of `meshtrain train`: the config and the overrides. `%a` stands for the number in the array.
        name: of the job.
        gpus_per_node: 0 for CPUs alone.
        time: SLURM's form, such as 1-12:00:00; "" takes the partition's.
        container: a .sif file for Apptainer, or what else pyxis takes.
    """

    program: tuple[str, ...]
    arguments: tuple[str, ...]
    name: str
    nodes: int
    gpus_per_node: int
    tasks_per_node: int = 1
    time: str = ""
    partition: str = ""
    account: str = ""
    container: str = ""
    array: str = ""
    requeue: bool = False
    signal_seconds: int = SIGNAL_SECONDS
    extra: tuple[str, ...] = ()

    def render(self) -> str:
        """The script."""
        return "\n".join([*self._head(), "", *self._options(), "", *self._body(), ""])

    def _head(self) -> Iterator[str]:
        nodes = f"{self.nodes} node{'s' * (self.nodes > 1)}"
        gpus = f" with {self.gpus_per_node} GPUs each" if self.gpus_per_node else ""
        yield "#!/usr/bin/env bash"
        yield f"# Trains {self.name} on {nodes}{gpus}. Written by `meshtrain slurm`, and yours to edit."
        yield "# Submit it with sbatch, and again to go on: training resumes from the newest checkpoint."

    def _options(self) -> Iterator[str]:
        """The `#SBATCH` lines, each after what it is for."""
        for text, option in self._explained():
            yield f"# {text}"
            yield f"#SBATCH {option}"

    def _explained(self) -> Iterator[tuple[str, str]]:
        yield "The name in squeue and of the log.", f"--job-name={self.name}"
        yield "Hosts.", f"--nodes={self.nodes}"
        one = "One process per host drives all its GPUs." if self.gpus_per_node > 1 else "One process per host."
        per_node = f"{self.tasks_per_node} processes per host share its GPUs."
        yield one if self.tasks_per_node == 1 else per_node, f"--ntasks-per-node={self.tasks_per_node}"
        if self.gpus_per_node:
            yield (
                "GPUs of each host; each process sees all, and takes its share.",
                f"--gpus-per-node={self.gpus_per_node}",
            )
        if self.time:
            yield "After this the job is killed.", f"--time={self.time}"
        if self.partition:
            yield "Where to queue.", f"--partition={self.partition}"
        if self.account:
            yield "Who pays.", f"--account={self.account}"
        if self.array:
            yield "One run for each number.", f"--array={self.array}"
        before = f"SIGTERM to the processes {self.signal_seconds} s before the time limit: they save, and end with 75."
        yield before, f"--signal=TERM@{self.signal_seconds}"
        if self.requeue:
            yield "SLURM queues the job again when a node fails or it is preempted.", "--requeue"
        else:
            yield "SLURM does not queue the job again by itself.", "--no-requeue"
        yield "One log, which a job that is queued again goes on writing.", f"--output={self.log('%j', '%A', '%a')}"
        yield "It is not written anew.", "--open-mode=append"
        for option in self.extra:
            yield "As you asked.", option

    def log(self, job: str, array: str, index: str) -> str:
        """The log's name; for `sbatch` with its own placeholders."""
        number = f"{array}_{index}" if self.array else job
        return f"{self.name}-{number}.log"

    def _body(self) -> Iterator[str]:
        yield "# A mistake in this script ends it."
        yield "set -euo pipefail"
        yield "# What a requeued job is to be called: an element of an array has a number of its own."
        yield "job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"
        yield "job=${job:-$SLURM_JOB_ID}"
        yield ""
        yield "# srun starts the processes, which find each other by SLURM's variables. When one fails the others"
        yield f"# hear of it and end by themselves; --wait ends, after {END_SECONDS} s, one that does not hear."
        yield "code=0"
        words = [f"srun --wait={END_SECONDS} --kill-on-bad-exit=0", *self._container(), shlex.join(self.program)]
        yield from _wrapped([*words, "train", *map(self._argument, self.arguments)], "|| code=$?")
        yield ""
        yield from self._end()

    def _container(self) -> list[str]:
        if not self.container:
            return []
        image = shlex.quote(self.container)
        if self.container.endswith(".sif"):
            return [f'apptainer exec --nv --bind "$PWD" --pwd "$PWD" {image}']
        return [f'--container-image={image} --container-mounts="$PWD:$PWD" --container-workdir="$PWD"']

    def _argument(self, word: str) -> str:
        if not self.array or "%a" not in word:
            return shlex.quote(word)
        return '"$SLURM_ARRAY_TASK_ID"'.join(shlex.quote(part) if part else "" for part in word.split("%a"))

    def _end(self) -> Iterator[str]:
        """What becomes of the job, by the training's exit code."""
        yield "case $code in"
        yield '0) echo "complete" ;;'
        yield "75)"
        yield '    echo "stopped with a checkpoint"'
        yield from self._again("    ")
        yield "    ;;"
        yield "76 | 134 | 135 | 137 | 139)"
        yield "    # A process was lost: its machine failed, its memory ran out, or it was killed."
        if self.requeue:
            yield f"    # Try again, {MAX_LOSSES} times: a machine that is broken would kill the run for ever."
            yield '    count=".losses-$job"'
            yield '    losses=$(($(cat "$count" 2>/dev/null || echo 0) + 1))'
            yield '    echo "$losses" >"$count"'
            yield '    echo "a process was lost (exit code $code), for the ${losses}. time in this job"'
            yield f"    if ((losses <= {MAX_LOSSES})); then"
            yield from self._again("        ")
            yield "    fi"
        else:
            yield '    echo "a process was lost (exit code $code): submit this script again to go on"'
        yield "    ;;"
        yield '*) echo "failed with exit code $code: see above; trying again would not help" ;;'
        yield "esac"
        yield "exit $code"

    def _again(self, indent: str) -> Iterator[str]:
        if not self.requeue:
            yield f'{indent}echo "submit this script again to go on"'
            return
        yield f"{indent}# Queue this job again, under its own number. It ends here, when SLURM kills it."
        yield f'{indent}if scontrol requeue "$job"; then'
        yield f"{indent}    sleep 60"
        yield f"{indent}else"
        yield f'{indent}    echo "warning: scontrol could not queue $job again: submit this script to go on" >&2'
        yield f"{indent}fi"


def _wrapped(words: Sequence[str], end: str) -> Iterator[str]:
    """A command over several lines of at most 100 characters."""
    line = ""
    for word in words:
        if line and len(line) + len(word) > 96:
            yield f"{line} \\"
            line = f"    {word}"
        else:
            line = f"{line} {word}" if line else word
    yield f"{line} {end}"


# ------------------------------------------------------------ the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `meshtrain slurm`, beside CONFIG and the overrides."""
    add = parser.add_argument
    add("--nodes", type=int, required=True, metavar="N", help="hosts")
    add("--gpus-per-node", type=int, required=True, metavar="G", help="GPUs of each; 0 for CPUs alone")
    add(
        "--tasks-per-node", type=int, default=1, metavar="T", help="processes per host: 1 (default), or as many as GPUs"
    )
    add("--time", default="", metavar="LIMIT", help="such as 12:00:00 or 1-12:00:00; default: the partition's")
    add("--partition", default="", metavar="NAME")
    add("--account", default="", metavar="NAME")
    add("--container", default="", metavar="IMAGE", help="a .sif file for Apptainer, or an image for pyxis")
    add("--array", default="", metavar="NUMBERS", help="a run for each, such as 0-3; %%a in an override is the number")
    add("--requeue", action="store_true", help="go on by itself after the time limit, a preemption or a lost node")
    add("--signal", type=int, default=SIGNAL_SECONDS, metavar="SECONDS",
        help=f"before the time limit, to save (default: {SIGNAL_SECONDS})")  # fmt: skip
    add("--sbatch", action="append", default=[], metavar="OPTION", help="another #SBATCH line, such as --qos=high")
    add("--submit", action="store_true", help="submit it, and say how to follow, cancel and resume")
    add(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="where the script goes; default: standard output, or NAME.sbatch",
    )


def run(config: Config, args: argparse.Namespace) -> int:
    """`meshtrain slurm`: prints or submits the script.

    Raises:
        LaunchError: the options do not fit together, or sbatch refuses them.
    """
    script = make_script(config, args)
    text = script.render()
    if not args.submit and args.output is None:
        print(text, end="")
        return 0
    path = args.output or Path(f"{script.name}.sbatch")
    write_text(path, text)
    if args.submit:
        _show(script, path, _submit(path))
    return 0


def make_script(config: Config, args: argparse.Namespace) -> Script:
    """The script that the options ask for.

    Raises:
        LaunchError: they do not fit together, or the config.
    """
    _check(config, args)
    arguments = [args.config, *args.overrides]
    if args.array:
        name = next(
            (word for word in reversed(arguments) if word.startswith("run.name=")), f"run.name={config.run.name}"
        )
        arguments.append(name if "%a" in name else f"{name}-%a")
    arguments.append("launch.distributed=required")
    if args.gpus_per_node:
        arguments.append("launch.platform=gpu")
    program = ("meshtrain",) if args.container else tuple(shlex.split(command_name(sys.argv[0])))
    asked = {name: getattr(args, name) for name in ("nodes", "gpus_per_node", "tasks_per_node", "time", "partition")}
    asked |= {name: getattr(args, name) for name in ("account", "container", "array", "requeue")}
    return Script(
        program,
        tuple(last_of_each_key(arguments)),
        config.run.name,
        **asked,
        signal_seconds=args.signal,
        extra=tuple(args.sbatch),
    )


def _check(config: Config, args: argparse.Namespace) -> None:
    nodes, gpus, tasks = args.nodes, args.gpus_per_node, args.tasks_per_node
    if nodes < 1 or gpus < 0 or tasks < 1 or not 0 < args.signal < 65536:
        raise LaunchError("--nodes, --tasks-per-node and --signal must be 1 or more, and --gpus-per-node 0 or more")
    if gpus and (tasks > gpus or gpus % tasks):
        raise LaunchError(f"--tasks-per-node {tasks} processes cannot share --gpus-per-node {gpus} GPUs equally")
    if gpus and config.devices:
        raise LaunchError(f"devices={config.devices} makes virtual CPU devices: leave it out, or set --gpus-per-node 0")
    if args.time and not _TIME.fullmatch(args.time):
        raise LaunchError(f"--time {args.time} must be MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS")
    if args.time and seconds(args.time) <= args.signal:
        raise LaunchError(f"--time {args.time} is no longer than the {args.signal} s of --signal: raise it")
    if args.array and not _ARRAY.fullmatch(args.array):
        raise LaunchError(f"--array {args.array} must be numbers and ranges, such as 0-3 or 1,5-9%2")
    if not args.array and any("%a" in word for word in args.overrides):
        raise LaunchError("%a in an override stands for the number in an array: add --array")
    for option in ("partition", "account"):
        if (value := getattr(args, option)) and not _PLAIN.fullmatch(value):
            raise LaunchError(f"--{option} {value!r} must be a name")
    for option in args.sbatch:
        if not option.startswith("-") or "\n" in option:
            raise LaunchError(
                f"--sbatch {option!r} must be an option of sbatch in one line, such as --sbatch=--qos=high"
            )
    _check_mesh(config, nodes * (gpus or tasks))
    if args.config != "-" and not Path(args.config).exists():
        raise ConfigError(f"{args.config}: no such file")


def _check_mesh(config: Config, count: int) -> None:
    """The devices that the config's mesh needs must be those that are asked for."""
    count = config.devices or count
    data, model = config.mesh.data, config.mesh.model
    if count % model or (data > 0 and data * model != count):
        shape = f"data={data} x " if data > 0 else ""
        raise LaunchError(f"the mesh {shape}model={model} does not fit {count} devices: change mesh.data or --nodes")


def seconds(time: str) -> int:
    """A time limit of SLURM's: MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS[:MINUTES[:SECONDS]]."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


def _submit(path: Path) -> str:
    """Submits a script; the job's number.

    Raises:
        LaunchError: there is no sbatch, or it refuses; its own words.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise LaunchError(f"{path} is written, but sbatch is not on PATH: submit it on a login node of the cluster")
    done = subprocess.run([sbatch, "--parsable", str(path)], capture_output=True, text=True)  # noqa: S603
    if done.returncode:
        raise LaunchError(f"sbatch refused {path}: {done.stderr.strip().removeprefix('sbatch: error: ')}")
    return done.stdout.strip().partition(";")[0]


def _show(script: Script, path: Path, job: str) -> None:
    log = Path(script.log(job, job, "*")).absolute()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for label, text in [
        ("job", job),
        ("script", str(path)),
        ("log", str(log)),
        ("look", f"squeue -j {job}"),
        ("follow", f"tail -F {log}"),
        ("stop", f"scancel --signal=TERM {job}   (saves, and ends with 75)"),
        ("cancel", f"scancel {job}"),
        ("resume", f"sbatch {path}"),
    ]:
        table.add_row(label, text)
    Terminal().print(table, soft_wrap=True)
