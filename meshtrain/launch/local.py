"""`meshtrain launch -n 4 -- train CONFIG`: a job of several processes on this machine, with one log.

The processes find each other as they would on a cluster (`distributed/place.py`), so what works here works there. When
one fails the channel between them ends the others (`distributed/hub.py`); what is left after that is killed.
"""

import argparse
import contextlib
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO

from rich.text import Text

from meshtrain.distributed.hub import EXIT_LOST, free_port
from meshtrain.distributed.start import VIRTUAL_DEVICES
from meshtrain.errors import LaunchError
from meshtrain.terminal import Terminal, command_name

EXIT_STOPPED = (75, 128 + signal.SIGINT)  # with a checkpoint: all processes end so, and none has failed
END_SECONDS = 15.0  # from the first failure until the others, which hear of it, are killed
TAIL_LINES = 400  # of a process's standard error that are kept
COLORS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")
_NOISE = re.compile(r"\[Gloo\] Rank \d+|Expected number of connected peer ranks|$")  # per device and group, often torn
_CULPRIT = re.compile(r"^error: process (\d+) \(host ")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `meshtrain launch`."""
    parser.add_argument("-n", "--processes", type=int, required=True, metavar="N", help="how many processes")
    parser.add_argument(
        "--devices-per-process", type=int, metavar="D",
        help="virtual CPU devices of each; without it they share this machine's GPUs, or have one CPU device each",
    )  # fmt: skip
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND",
        help="what each runs: a command of meshtrain, such as train CONFIG, or a program",
    )  # fmt: skip


def run(args: argparse.Namespace, own_commands: Sequence[str]) -> int:
    """`meshtrain launch`: the exit code of the first process that failed, or 0.

    Raises:
        LaunchError: there is nothing to run.
    """
    words = [word for index, word in enumerate(args.command) if index or word != "--"]
    if not words:
        raise LaunchError("what is to be launched? For instance: meshtrain launch -n 4 -- train examples/gpt_tiny.yaml")
    if args.processes < 1 or (args.devices_per_process is not None and args.devices_per_process < 1):
        raise LaunchError("-n and --devices-per-process must be 1 or more")
    command = [sys.executable, "-m", "meshtrain_command", *words] if words[0] in own_commands else words
    return Launch(command, args.processes, environments(args.processes, args.devices_per_process)).run()


def environments(num: int, devices: int | None = None, base: Mapping[str, str] = os.environ) -> list[dict[str, str]]:
    """What each process finds in its environment."""
    port, job = free_port(), f"local {os.getpid()}"
    shared = {**base, "MESHTRAIN_COORDINATOR": f"localhost:{port}", "MESHTRAIN_NUM_PROCESSES": str(num)}
    shared |= {"MESHTRAIN_NUM_LOCAL": str(num), "MESHTRAIN_JOB": job, "PYTHONUNBUFFERED": "1"}
    options = "" if devices is None else f" --devices-per-process {devices}"
    shared["MESHTRAIN_LAUNCHER"] = f"{command_name(sys.argv[0])} launch -n {num}{options} --"
    if devices is not None:
        shared[VIRTUAL_DEVICES] = str(devices)
    return [shared | {"MESHTRAIN_PROCESS_ID": str(id), "MESHTRAIN_LOCAL_ID": str(id)} for id in range(num)]


@dataclass
class Child:
    """One of the processes."""

    id: int
    process: subprocess.Popen[str]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))  # of its standard error
    code: int | None = None  # as a shell counts it

    def signal(self, signum: int) -> None:
        """Sends a signal to it and to whatever it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)


class Launch:
    """Some processes with one log. `run` starts them and returns when none is left."""

    def __init__(self, command: Sequence[str], num: int, envs: Sequence[Mapping[str, str]]) -> None:
        self.command, self.num, self.envs = list(command), num, envs
        self.console = Terminal()
        self.errors = Terminal(stderr=True)
        self.children: list[Child] = []
        self.lines: queue.Queue[tuple[Child, str, bool]] = queue.Queue()
        self.readers: list[threading.Thread] = []
        self.signals = 0
        self.failed: list[Child] = []  # in the order in which they ended

    def run(self) -> int:
        """Runs them.

        Raises:
            LaunchError: the command cannot be started.
        """
        with self._signals_passed_on():
            try:
                for id in range(self.num):
                    self._start(id)
                self._watch()
            finally:
                self._kill_all()
        self._show_lines()
        return self._report()

    def _start(self, id: int) -> None:
        try:
            process = subprocess.Popen(  # noqa: S603 - it is the user's own command
                self.command, env=dict(self.envs[id]), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise LaunchError(f"'{shlex.join(self.command[:3])}' cannot be started: {error.strerror}") from None
        child = Child(id, process)
        self.children.append(child)
        for stream, is_error in ((process.stdout, False), (process.stderr, True)):
            reader = threading.Thread(target=self._read, args=(child, stream, is_error), daemon=True)
            reader.start()
            self.readers.append(reader)

    def _read(self, child: Child, stream: IO[str], is_error: bool) -> None:
        for line in stream:
            self.lines.put((child, line.rstrip("\n"), is_error))

    def _watch(self) -> None:
        """Shows lines until all have ended, or the first failure was too long ago."""
        give_up = float("inf")
        while any(child.code is None for child in self.children) and time.monotonic() < give_up:
            self._show_lines(0.1)
            for child in self.children:
                code = child.process.poll()
                if code is None or child.code is not None:
                    continue
                child.code = code if code >= 0 else 128 - code
                if child.code and child.code not in EXIT_STOPPED:
                    self.failed.append(child)
                    give_up = min(give_up, time.monotonic() + END_SECONDS)

    def _show_lines(self, seconds: float = 0.0) -> None:
        """Shows what has come, and waits so long for more."""
        ends = time.monotonic() + seconds
        while True:
            try:
                child, line, is_error = self.lines.get(timeout=max(0.0, ends - time.monotonic()))
            except queue.Empty:
                return
            if is_error:
                child.tail.append(line)
            if is_error or not _NOISE.match(line):
                prefix = (f"[{child.id:>{len(str(self.num - 1))}}] ", COLORS[child.id % len(COLORS)])
                self.console.print(Text.assemble(prefix, line), soft_wrap=True)

    def _kill_all(self) -> None:
        """Nothing that was started is left: what a process has started itself ends with it."""
        for child in self.children:
            if child.code is None:
                child.code = EXIT_LOST
                self.errors.print(Text(f"process {child.id} did not end when the others did, and is killed", "yellow"))
            child.signal(signal.SIGKILL)
            child.process.wait()
        for reader in self.readers:
            reader.join(1.0)

    def _report(self) -> int:
        """Shows the first failure whole, last; the exit code."""
        if not self.failed:
            return max((child.code or 0 for child in self.children), default=0)
        first = self._first_failure()
        code = first.code or 1
        how = f"was killed by {signal.Signals(code - 128).name}" if code > 128 else f"ended with exit code {code}"
        self.errors.print(Text(f"process {first.id} {how}", style="bold red"))
        if first.tail:
            self.errors.print(Text("\n".join(first.tail)), soft_wrap=True)
        return code

    def _first_failure(self) -> Child:
        """The process that the others name; else the first that was killed, else the first that ended."""
        named = Counter(
            int(found[1])
            for child in self.failed
            for line in child.tail
            if (found := _CULPRIT.match(line)) and int(found[1]) != child.id
        )
        if named:
            culprit = self.children[named.most_common(1)[0][0] % self.num]
            if culprit in self.failed:
                return culprit
        return next((child for child in self.failed if (child.code or 0) > 128), self.failed[0])

    @contextlib.contextmanager
    def _signals_passed_on(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM goes to each process, which saves and ends; a second one ends them at once."""

        def handle(signum: int, frame: FrameType | None) -> None:
            self.signals += 1
            for child in self.children:
                if child.process.poll() is None:
                    child.signal(signum if self.signals == 1 else signal.SIGKILL)

        try:
            previous = {signum: signal.signal(signum, handle) for signum in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread
            previous = {}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)
