"""Process 0's end of the channel: who has come, whether all agree, at which step to stop, who was lost.

All of it runs in one thread, which waits for sockets and looks at the clock, and never for the training. Every process,
process 0 too, is a client (`link.py`). The messages:

    client -> hub                                    hub -> client
    hello   id, count, job, host, pid, facts         welcome  port, names     all have come
    agree   topic, facts, limit, equal               agreed   topic, facts    all have; process 0 gets all their facts
    beat    phase, since                             beat
    stop    signum                                   report                   say how many steps you have begun
    steps   begun                                    stop_at  step, signum    the most that any has begun
    warn    text                                     warn     text, id        to process 0 alone
    fail    text, code                               end      text, code, culprit, details
    late    what, limit                              farewell                 all have said bye
    bye

The job ends at the first loss or failure. One process that dies makes others fail, in a collective that it has left:
so a verdict waits for `VERDICT_SECONDS`, and a loss comes before a failure.
"""

import contextlib
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshtrain.distributed.place import Place
from meshtrain.distributed.wire import MAX_TEXT, Message, Wire, WireError

EXIT_LOST = 76
EXIT_USER_ERROR = 2
POLL_SECONDS = 0.2
VERDICT_SECONDS = 1.0
HELLO_SECONDS = 10.0  # for a connection to say who it is
LINGER_SECONDS = 5.0  # for the processes to hear how the job ended, and to end

Facts = Mapping[str, Any]


@dataclass
class Member:
    """One connected process."""

    wire: Wire
    heard: float
    id: int = -1  # until its hello
    host: str = ""
    pid: int = 0
    phase: str = "joining"
    since: float = 0.0  # of the phase, on the hub's clock
    state: str = "guest"  # guest, refused, member, failed, lost, done

    @property
    def name(self) -> str:
        """Number, host and pid in words."""
        return f"process {self.id} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True)
class Verdict:
    """Why the job ends.

    Attributes:
        culprit: its process number; -1 for none in particular.
        details: the culprit's traceback, if it had one.
        lost: it said nothing: it was killed or stopped, or its machine is gone.
    """

    text: str
    code: int
    culprit: int = -1
    details: str = ""
    lost: bool = False


@dataclass
class Topic:
    """What all processes must agree on."""

    ends: float
    limit: float
    equal: bool  # or it ends the job
    facts: dict[int, Facts] = field(default_factory=dict)


class Hub:
    """Serves the channel of one job until all have said bye or the job has ended."""

    def __init__(self, place: Place, *, join_limit: float, heartbeat: float) -> None:
        """Listens.

        Raises:
            OSError: the port cannot be had.
        """
        self.place = place
        self._heartbeat = heartbeat
        self._join_limit = join_limit
        self._join_ends = time.monotonic() + join_limit
        self._server = _listen(place)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._guests: list[Member] = []
        self._members: dict[int, Member] = {}
        self._hello: dict[int, Facts] = {}
        self._topics: dict[str, Topic] = {}
        self._begun: dict[int, int] | None = None  # a stop is being agreed on
        self._signum = 0
        self._warned: Counter[str] = Counter()
        self._suspects: list[Verdict] = []
        self._verdict_at = float("inf")
        self._beat_at = 0.0
        self._open = True
        self._thread = threading.Thread(target=self._serve, name="hub", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Waits until the hub has nothing more to do."""
        self._thread.join(seconds)

    def _serve(self) -> None:
        while self._open:
            for key, _ in self._selector.select(POLL_SECONDS):
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._read(key.data)
            self._look_at_the_clock()
        self._selector.unregister(self._server)
        self._server.close()
        for key in list(self._selector.get_map().values()):
            if key.data.state == "lost":
                self._drop(key.data)
            else:
                key.data.wire.finish()
        ends = time.monotonic() + LINGER_SECONDS
        while self._selector.get_map() and time.monotonic() < ends:
            for key, _ in self._selector.select(POLL_SECONDS):
                self._hear_out(key.data)
        for key in list(self._selector.get_map().values()):
            self._drop(key.data)
        self._selector.close()

    def _hear_out(self, member: Member) -> None:
        """Reads until the other side has closed."""
        try:
            member.wire.receive()
        except WireError:
            self._drop(member)

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            return  # gone again before it was taken
        guest = Member(Wire(connection), heard=time.monotonic())
        self._guests.append(guest)
        self._selector.register(connection, selectors.EVENT_READ, guest)

    def _read(self, member: Member) -> None:
        try:
            messages = member.wire.receive()
        except WireError:
            self._drop(member)
            if member.state == "member":
                self._suspect(
                    f"{member.name} was lost while in '{member.phase}': killed, out of memory, or its machine is gone",
                    EXIT_LOST, member.id, lost=True,
                )  # fmt: skip
            return
        member.heard = time.monotonic()
        for message in messages:
            if member.state == "guest":
                self._greet(member, message)
            elif member.state != "refused":
                self._take(member, message)

    def _drop(self, member: Member) -> None:
        """Closes a connection that is of no more use."""
        self._selector.unregister(member.wire.connection)
        member.wire.close()
        if member in self._guests:
            self._guests.remove(member)

    # ------------------------------------------------------------ joining

    def _greet(self, guest: Member, message: Message) -> None:
        """Takes a newcomer in, or refuses it; what shows that two launches are mixed up ends the job."""
        try:
            guest.id, guest.host, guest.pid = int(message["id"]), str(message["host"]), int(message["pid"])
            job, count, facts = str(message["job"]), int(message["count"]), dict(message["facts"])
        except (KeyError, TypeError, ValueError):
            guest.state = "refused"  # something else that found this port
            guest.wire.finish()
            return
        if job != self.place.job:
            self._refuse(
                guest,
                f"port {self.place.port} of {self.place.coordinator} is in use by job {self.place.job}, and this "
                f"process belongs to job {job}: choose another with launch.port",
            )
        elif problem := self._problem_with(guest, count):
            cure = f"{problem}: start each of the {self.place.num_processes} once, with its own number"
            self._refuse(guest, cure)
            if len(self._members) < self.place.num_processes:  # else the job is complete, and goes on
                self._suspect(cure, EXIT_USER_ERROR, guest.id)
        else:
            self._admit(guest, facts)

    def _problem_with(self, guest: Member, count: int) -> str:
        """Why a newcomer of `count` processes is none that was waited for; "" where it is."""
        size = self.place.num_processes
        if count != size:
            return f"{guest.name} was started as one of {count} processes, and process 0 as one of {size}"
        if not 0 <= guest.id < size:
            return f"{guest.name} came to a job of {size} processes, numbered from 0 to {size - 1}"
        there = self._members.get(guest.id)
        if there is None:
            return ""
        first, second = (f"pid {each.pid} on host {each.host}" for each in (there, guest))
        return f"two processes claim the number {guest.id}: {first} and {second}"

    def _refuse(self, guest: Member, text: str) -> None:
        self._tell(guest, "end", text=text, code=EXIT_USER_ERROR, culprit=guest.id, details="")
        guest.state = "refused"
        guest.wire.finish()

    def _admit(self, guest: Member, facts: Facts) -> None:
        self._guests.remove(guest)
        guest.state, guest.since = "member", time.monotonic()
        self._members[guest.id] = guest
        self._hello[guest.id] = facts
        if len(self._members) < self.place.num_processes:
            return
        self._join_ends = float("inf")
        if difference := first_difference(self._hello):
            self._suspect(self._differ(*difference), EXIT_USER_ERROR, difference[0])
            return
        names = [self._members[id].name for id in sorted(self._members)]
        self._broadcast("welcome", port=free_port(), names=names)

    def _differ(self, id: int, key: str, theirs: Any, ours: Any) -> str:
        return (
            f"{self._members[id].name} has {key}={theirs!r}, and process 0 has {key}={ours!r}: all processes of a job "
            "need the same"
        )

    # ------------------------------------------------------------ working

    def _take(self, member: Member, message: Message) -> None:
        match message:
            case {"kind": "beat", "phase": str(phase), "since": float() | int() as since}:
                member.phase, member.since = phase, time.monotonic() - since
            case {"kind": "agree", "topic": str(topic), "facts": dict(facts), "limit": float() | int() as limit}:
                self._gather(member, topic, facts, limit, equal=bool(message.get("equal")))
            case {"kind": "stop", "signum": int(signum)}:
                self._begin_stop(signum)
            case {"kind": "steps", "begun": int(begun)}:
                self._count_steps(member, begun)
            case {"kind": "warn", "text": str(text)}:
                self._warn(member, text)
            case {"kind": "fail", "text": str(text), "details": str(details), "code": int(code)}:
                member.state = "failed"
                self._suspect(f"{member.name} failed: {text}", code, member.id, details)
            case {"kind": "late", "what": str(what), "limit": float() | int() as limit}:
                self._late(member, what, limit)
            case {"kind": "bye"}:
                member.state = "done"
                if all(each.state == "done" for each in self._members.values()):
                    self._broadcast("farewell")
                    self._open = False

    def _gather(self, member: Member, name: str, facts: Facts, limit: float, *, equal: bool) -> None:
        topic = self._topics.setdefault(name, Topic(time.monotonic() + limit, limit, equal))
        topic.facts[member.id] = facts
        if len(topic.facts) < self.place.num_processes:
            return
        del self._topics[name]
        if topic.equal and (difference := first_difference(topic.facts)):
            self._suspect(self._differ(*difference), EXIT_USER_ERROR, difference[0])
            return
        everything = [topic.facts[id] for id in sorted(topic.facts)]
        for each in self._members.values():
            self._tell(each, "agreed", topic=name, facts=[] if each.id or topic.equal else everything)

    def _begin_stop(self, signum: int) -> None:
        if self._begun is None:
            self._begun, self._signum = {}, signum
            self._broadcast("report")

    def _count_steps(self, member: Member, begun: int) -> None:
        if self._begun is None:
            return
        self._begun[member.id] = begun
        if len(self._begun) == self.place.num_processes:
            self._broadcast("stop_at", step=max(self._begun.values()), signum=self._signum)

    def _warn(self, member: Member, text: str) -> None:
        """Passes a warning on to process 0 the first time that any process has it."""
        self._warned[text] += 1
        if self._warned[text] == 1 and 0 in self._members:
            self._tell(self._members[0], "warn", text=text, id=member.id)

    def _late(self, member: Member, what: str, limit: float) -> None:
        """A wait that is over its limit: the processes that are elsewhere are the ones it waits for."""
        now = time.monotonic()
        others = [
            f"{each.name} has been in '{each.phase}' for {now - each.since:.0f} s"
            for each in self._members.values()
            if each.state == "member" and each.phase != member.phase
        ]
        where = "; ".join(others[:4]) or "every process is there too"
        text = f"{member.name}: '{what}' took more than its limit of {limit:g} s; {where}"
        member.state = "failed"
        self._suspect(text, EXIT_LOST, member.id)

    # ------------------------------------------------------------ the clock, and the end

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for guest in [each for each in self._guests if now - each.heard > HELLO_SECONDS]:
            self._drop(guest)
        if now > self._join_ends:
            self._suspect(self._missing(), EXIT_LOST)
            self._join_ends = float("inf")
        for name, topic in list(self._topics.items()):
            if now > topic.ends:
                late = [self._members[id] for id in self._members.keys() - topic.facts.keys()]
                seen = "; ".join(f"{each.name} is still in '{each.phase}'" for each in late)
                self._suspect(f"'{name}': not all came within {topic.limit:g} s; {seen}", EXIT_LOST, late[0].id)
                del self._topics[name]
        for member in self._members.values():
            silent = now - member.heard
            if member.state == "member" and silent > self._heartbeat:
                member.state = "lost"
                silence = f"has been silent for {silent:.0f} s (launch.heartbeat), while in '{member.phase}'"
                cause = "stopped, hung, or its machine is gone"
                self._suspect(f"{member.name} {silence}: {cause}", EXIT_LOST, member.id, lost=True)
        if now > self._beat_at:
            self._broadcast("beat")
            self._beat_at = now + beat_seconds(self._heartbeat)
        if now > self._verdict_at:
            self._pronounce()

    def _missing(self) -> str:
        hosts = self.place.hosts
        absent = [id for id in range(self.place.num_processes) if id not in self._members]
        names = [f"{id} (host {hosts[id]})" if hosts[id] else str(id) for id in absent]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return (
            f"{len(absent)} of {self.place.num_processes} processes did not come within {self._join_limit:g} s "
            f"(launch.join): process {shown}"
        )

    def _suspect(self, text: str, code: int, culprit: int = -1, details: str = "", *, lost: bool = False) -> None:
        """Notes a reason to end the job. The verdict is the first loss, or else the first reason."""
        self._suspects.append(Verdict(text, code, culprit, details[-MAX_TEXT:], lost))
        self._verdict_at = min(self._verdict_at, time.monotonic() + VERDICT_SECONDS)

    def _pronounce(self) -> None:
        verdict = next((each for each in self._suspects if each.lost), self._suspects[0])
        self._broadcast("end", text=verdict.text, code=verdict.code, culprit=verdict.culprit, details=verdict.details)
        self._open = False

    def _broadcast(self, kind: str, **values: Any) -> None:
        for member in list(self._members.values()):
            if member.wire.connection.fileno() >= 0:
                self._tell(member, kind, **values)

    def _tell(self, member: Member, kind: str, **values: Any) -> None:
        with contextlib.suppress(WireError):  # its end is noticed where it is read
            member.wire.send(kind, **values)


def beat_seconds(heartbeat: float) -> float:
    """How often both sides say that they are there."""
    return min(heartbeat / 4, 5.0)


def first_difference(facts: Mapping[int, Facts]) -> tuple[int, str, Any, Any] | None:
    """`(process, key, its value, process 0's)` of the first process and key that differ from process 0's; None if none.

    Keys are compared in process 0's order; one that only the other has comes last.
    """
    ours = facts[0]
    for id, theirs in sorted(facts.items()):
        for key in _keys(ours, theirs):
            if ours.get(key) != theirs.get(key):
                return id, key, theirs.get(key), ours.get(key)
    return None


def _keys(first: Facts, second: Facts) -> Iterator[str]:
    yield from first
    yield from (key for key in second if key not in first)


def free_port() -> int:
    """A TCP port of this host that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _listen(place: Place) -> socket.socket:
    """A server on all addresses, IPv6 too where the host has it: which one the others reach is theirs to know."""
    try:
        return socket.create_server(("", place.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    except (OSError, ValueError):
        pass  # no IPv6 here, or the port is taken: the next try tells
    return socket.create_server(("", place.port), backlog=4096)
