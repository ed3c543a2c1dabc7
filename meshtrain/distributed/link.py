"""Each process's end of the channel: joins, agrees, stops at the common step, and ends with the job.

link = join(place, facts, join_limit=300, heartbeat=60)
link.agree("data", {"fingerprint": "ab12"}, limit=300)
while link.may_step(step): ...
link.close(limit=1800)

Two threads serve it beside the training: one reads what the hub says, one sends beats. When the job ends while the
training thread waits for a peer that will never come, in a collective that nothing interrupts, the reading thread ends
the process.
"""

import contextlib
import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from meshtrain.distributed.hub import EXIT_LOST, LINGER_SECONDS, Hub, beat_seconds
from meshtrain.distributed.place import Place
from meshtrain.distributed.wire import MAX_TEXT, Message, Wire, WireError
from meshtrain.errors import LaunchError, PeerError

RETRY_SECONDS = 0.25
CHALLENGE_SECONDS = 5.0  # to find another process 0, where this one cannot be it
GRACE_SECONDS = 3.0  # for the training thread to end by itself, once the job has ended


class StopFlag:
    """The signal that asks the job to stop, or 0. Set by a handler, read between updates."""

    signum: int = 0


class Link:
    """The connection of one process to the hub. Made by `join`."""

    def __init__(self, wire: Wire, hub: Hub | None, heartbeat: float, flag: StopFlag) -> None:
        self.address = str(wire.connection.getpeername()[0])  # at which this process reaches process 0
        self.port = 0  # for jax's coordination service, from the hub
        self.names: list[str] = []  # of all processes
        self.flag = flag
        self.on_warning: Callable[[str], None] = lambda text: None
        self.at_exit: list[Callable[[], None]] = []  # before the reading thread ends the process
        self._wire, self._hub, self._heartbeat = wire, hub, heartbeat
        self._changed = threading.Condition()
        self._verdict: Message | None = None
        self._welcome = self._farewell = self._leaving = False
        self._agreed: dict[str, list[dict[str, Any]]] = {}
        self._phase, self._phase_since = "joining", time.monotonic()
        self._heard = time.monotonic()
        self._begun = 0  # updates that may have been started
        self._deciding = False  # between the hub's question and its answer, no update starts
        self._stop_at: int | None = None
        self._stop_sent = False
        threading.Thread(target=self._listen, name="channel", daemon=True).start()

    # ------------------------------------------------------------ what the training calls

    def agree(self, topic: str, facts: Mapping[str, Any], limit: float) -> None:
        """Returns once every process has called it with equal facts.

        Args:
            topic: the same words in every process, used once.
            facts: JSON values; the first that differs is named.
            limit: seconds from the first process's call.

        Raises:
            PeerError: facts differ, a process did not come in time, or the job has ended; the text says which.
        """
        self._meet(topic, facts, limit, equal=True)

    def gather(self, topic: str, facts: Mapping[str, Any], limit: float) -> list[dict[str, Any]]:
        """Returns once every process has called it: in process 0 the facts of all, by process, elsewhere nothing.

        Raises:
            PeerError: a process did not come in time, or the job has ended.
        """
        return self._meet(topic, facts, limit, equal=False)

    def may_step(self, step: int) -> bool:
        """Whether update `step`, counted from 0, may start: False from the step on at which all processes stop.

        A signal to any process stops all of them at one step, the largest that any has started. Until that is known
        nothing starts, which takes a round trip.
        """
        with self._changed:
            self._begun = max(self._begun, step)
        self._pass_on_stop()
        with self._changed:
            self._changed.wait_for(lambda: not self._deciding or self._verdict is not None)
            if self._stop_at is not None and step >= self._stop_at:
                return False
            self._begun = step + 1
            return True

    def phase(self, name: str) -> "_Phase":
        """A context in which the process says that it is doing `name`, such as "compile"."""
        return _Phase(self, name)

    def warn(self, text: str) -> None:
        """Passes a warning to process 0, which shows each once."""
        self._send("warn", text=text)

    def late(self, what: str, limit: float) -> None:
        """Says that a wait is over its limit: the job ends, and the hub says who was waited for."""
        self._send("late", what=what, limit=limit)

    def fail(self, text: str, details: str, code: int) -> PeerError | None:
        """Says that this process fails, and why.

        Args:
            text: the error in a line.
            details: the traceback, or "".
            code: what this process would exit with.

        Returns:
            The error to end with instead, where another process was the cause.
        """
        with self._changed:
            self._leaving = True
        self._send("fail", text=text, details=details[-MAX_TEXT:], code=code)
        with self._changed:
            self._changed.wait_for(lambda: self._verdict is not None, GRACE_SECONDS)
            verdict = self._verdict
        self._outlive_others()
        ours = verdict is None or verdict["culprit"] == self.id or verdict["text"].endswith(f"failed: {text}")
        return None if ours else peer_error(verdict or {})

    def close(self, limit: float) -> None:
        """Says that this process is done and returns when all are.

        Raises:
            PeerError: another process failed, or was not done in time.
        """
        with self.phase("end"):
            self._send("bye")
            self._wait(lambda: self._farewell, limit, "end")
        with self._changed:
            self._leaving = True
        self._end()

    # ------------------------------------------------------------ inside

    @property
    def id(self) -> int:
        """This process's number."""
        return self._id

    _id = 0

    def hello(self, place: Place, facts: Mapping[str, Any], ends: float) -> None:
        """Introduces this process and waits until all have come."""
        self._id = place.process_id
        self._send("hello", **_introduction(place), facts=dict(facts))
        # Only now: the hub takes one whose first words are no hello for something else that found its port.
        threading.Thread(target=self._beat, name="channel-beat", daemon=True).start()
        limit = max(ends - time.monotonic(), 0) + self._heartbeat + GRACE_SECONDS  # the hub's own limit comes first
        self._wait(lambda: self._welcome, limit, f"join at {self.address}, port {place.port}")
        self.set_phase("own work")

    def set_phase(self, name: str) -> str:
        """Sets what this process says that it is doing; returns what it said before."""
        with self._changed:
            before, self._phase, self._phase_since = self._phase, name, time.monotonic()
        return before  # the hub hears of it with the next beat: an update is a phase, and must cost nothing

    def _meet(self, topic: str, facts: Mapping[str, Any], limit: float, *, equal: bool) -> list[dict[str, Any]]:
        with self.phase(topic):
            self._send("agree", topic=topic, facts=dict(facts), limit=limit, equal=equal)
            self._wait(lambda: topic in self._agreed, limit + self._heartbeat + GRACE_SECONDS, topic)
        return self._agreed[topic]

    def _wait(self, done: Callable[[], bool], limit: float, what: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: done() or self._verdict is not None, limit)
            if done() and not (self._verdict and not self._farewell):
                return
            self._leaving = True
            verdict = self._verdict
        if verdict is None:
            self.late(what, limit)
            verdict = {"text": f"'{what}' took more than its limit of {limit:g} s", "code": EXIT_LOST}
        self._outlive_others()
        raise peer_error(verdict)

    def _send(self, kind: str, **values: Any) -> None:
        with contextlib.suppress(WireError):  # the reading thread notices
            self._wire.send(kind, **values)

    def _pass_on_stop(self) -> None:
        with self._changed:
            if not self.flag.signum or self._stop_sent:
                return
            self._stop_sent = True
            self._deciding = self._stop_at is None
        self._send("stop", signum=int(self.flag.signum))

    def _listen(self) -> None:
        while not self._finished():
            try:
                messages = self._wire.receive()
            except WireError:
                self._lose_hub("was lost: killed, out of memory, or its machine is gone")
                return
            if messages:
                self._heard = time.monotonic()
            for message in messages:
                self._take(message)
            if time.monotonic() - self._heard > self._heartbeat + GRACE_SECONDS:
                self._lose_hub(
                    f"has been silent for {self._heartbeat:g} s (launch.heartbeat): stopped, or out of reach"
                )
                return

    def _lose_hub(self, what: str) -> None:
        name = self.names[0] if self.names else "process 0"
        self._receive_end({"text": f"{name} {what}", "code": EXIT_LOST, "culprit": 0, "details": ""})

    def _finished(self) -> bool:
        return self._farewell or self._verdict is not None

    def _take(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "end":
            self._receive_end(message)
            return
        if kind == "warn":
            self.on_warning(f"{message['text']} (process {message['id']})" if message["id"] else message["text"])
            return
        with self._changed:
            if kind == "welcome":
                self.port, self.names, self._welcome = message["port"], message["names"], True
            elif kind == "agreed":
                self._agreed[message["topic"]] = message["facts"]
            elif kind == "report":
                self._deciding = self._stop_sent = True
            elif kind == "stop_at":
                self._stop_at, self._deciding = message["step"], False
                self.flag.signum = self.flag.signum or message["signum"]
            elif kind == "farewell":
                self._farewell = True
            begun = self._begun
            self._changed.notify_all()
        if kind == "report":
            self._send("steps", begun=begun)

    def _receive_end(self, verdict: Message) -> None:
        """The job has ended. The training thread hears it where it waits for us, or fails by itself, or is stuck."""
        with self._changed:
            if self._verdict is not None or self._farewell:
                return
            self._verdict = verdict
            self._changed.notify_all()
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            if self._leaving:
                return
            time.sleep(0.05)
        self._exit(verdict)

    def _exit(self, verdict: Message) -> None:
        """Ends this process from the reading thread. Nothing unwinds, so what must be said is said here."""
        cleaner = threading.Thread(target=self._clean, daemon=True)
        cleaner.start()
        cleaner.join(GRACE_SECONDS)  # a file system that is gone must not keep us
        print(f"error: {explain(verdict)}", file=sys.stderr, flush=True)
        self._outlive_others()
        os._exit(int(verdict["code"]) or 1)

    def _clean(self) -> None:
        for call in self.at_exit:
            try:
                call()
            except Exception as error:
                print(f"warning: {error}", file=sys.stderr)
        sys.stdout.flush()

    def _beat(self) -> None:
        pause = min(beat_seconds(self._heartbeat), RETRY_SECONDS)
        beat_at = 0.0
        while not self._finished():
            self._pass_on_stop()
            if time.monotonic() >= beat_at:
                self._send("beat", phase=self._phase, since=time.monotonic() - self._phase_since)
                beat_at = time.monotonic() + beat_seconds(self._heartbeat)
            time.sleep(pause)

    def _end(self) -> None:
        self._wire.close()
        self._outlive_others()

    def _outlive_others(self) -> None:
        """Process 0 leaves last: jax aborts a process whose coordinator has gone, over its last words."""
        if self._hub is not None:
            self._wire.close()
            self._hub.join(LINGER_SECONDS + GRACE_SECONDS)


class _Phase:
    def __init__(self, link: Link, name: str) -> None:
        self.link, self.name = link, name

    def __enter__(self) -> None:
        self.before = self.link.set_phase(self.name)

    def __exit__(self, *error: object) -> None:
        self.link.set_phase(self.before)


def explain(verdict: Message) -> str:
    """A verdict for people, the culprit's traceback included."""
    details = str(verdict.get("details", "")).rstrip()
    return f"{verdict['text']}" + (f"\n{details}" if details else "")


def peer_error(verdict: Message) -> PeerError:
    """What the training thread raises when the job has ended through another process."""
    return PeerError(explain(verdict), int(verdict["code"]) or 1)


def join(
    place: Place, facts: Mapping[str, Any], *, join_limit: float, heartbeat: float, flag: StopFlag | None = None
) -> Link:
    """Meets the job's other processes.

    Args:
        place: this process's number and where process 0 listens.
        facts: what must be equal everywhere: version and config, JSON values.
        join_limit: seconds in which all must come.
        heartbeat: seconds of silence after which a process is lost.
        flag: set by the caller's signal handler.

    Raises:
        LaunchError: process 0 cannot be reached, or its port cannot be had.
        PeerError: a process is missing, is there twice or differs.
    """
    ends = time.monotonic() + join_limit
    hub = None
    if place.process_id == 0:
        if not _is_own(place.coordinator):
            _challenge(place, place.coordinator)
        try:
            hub = Hub(place, join_limit=join_limit, heartbeat=heartbeat)
        except OSError as error:
            _challenge(place, "localhost")
            raise LaunchError(
                f"process 0 cannot listen on port {place.port} of this host ({os.strerror(error.errno or 0)}): choose "
                "another with launch.port"
            ) from None
    wire = _connect(place, ends, join_limit)
    link = Link(wire, hub, heartbeat, flag or StopFlag())
    link.hello(place, facts, ends)
    return link


def _introduction(place: Place) -> Message:
    own = {"id": place.process_id, "count": place.num_processes, "job": place.job}
    return own | {"host": socket.gethostname(), "pid": os.getpid()}


def _challenge(place: Place, host: str) -> None:
    """Looks for another process 0 where this one cannot be it. Returns if nobody answers who knows us.

    Raises:
        PeerError: there is one, of this job or of another; its words.
    """
    ends = time.monotonic() + CHALLENGE_SECONDS
    while time.monotonic() < ends:
        try:
            wire = Wire(socket.create_connection((host, place.port), timeout=CHALLENGE_SECONDS))
            wire.send("hello", **_introduction(place), facts={})
            answers = wire.receive()
            wire.close()
        except (OSError, WireError):
            time.sleep(RETRY_SECONDS)
            continue
        for answer in answers:
            if answer["kind"] == "end":
                raise peer_error(answer)
        return


def _connect(place: Place, ends: float, limit: float) -> Wire:
    """Tries until process 0 answers: it may start later, and a cluster's name service too."""
    host = "localhost" if place.process_id == 0 else place.coordinator
    problem = "no answer"
    while (left := ends - time.monotonic()) > 0:
        try:
            addresses = resolve(host, place.port)
            _refuse_loopback(place, addresses)
            connection = socket.create_connection((host, place.port), timeout=min(left, 5.0))
        except OSError as error:
            problem = error.strerror or str(error) or type(error).__name__
        else:
            return Wire(connection)
        time.sleep(RETRY_SECONDS)
    raise LaunchError(
        f"process {place.process_id} could not reach process 0 at {host}, port {place.port}, within {limit:g} s "
        f"(launch.join): {problem}. Is process 0 running, is the name right, and does a firewall let the port through?"
    )


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name.

    Raises:
        OSError: it has none, now.
    """
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _refuse_loopback(place: Place, addresses: list[str]) -> None:
    """A name that means this host here and another one there makes a process wait for itself.

    Raises:
        LaunchError: process 0's name resolves to a loopback address, and it runs on another host.
    """
    if place.process_id == 0 or not all(map(_is_loopback, addresses)):
        return
    mine = place.hosts[place.process_id]
    if mine in ("", place.coordinator) or all(map(_is_here, {*place.hosts} - {""})):
        return
    raise LaunchError(
        f"'{place.coordinator}', the host of process 0, resolves to {addresses[0]} on host '{mine}', which is this "
        "host itself: correct /etc/hosts or the name service, or set MESHTRAIN_COORDINATOR=ADDRESS:PORT"
    )


def _is_here(host: str) -> bool:
    """Whether a name means this machine: on a cluster of one machine all of them do."""
    try:
        return all(map(_is_loopback, resolve(host, 0)))
    except OSError:
        return False


def _is_own(host: str) -> bool:
    """Whether a name is one of this machine, or has no address that would tell."""
    try:
        addresses = resolve(host, 0)
    except OSError:
        return True
    return any(_can_bind(address) for address in addresses)


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback
