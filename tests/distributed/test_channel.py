"""The channel between processes, with threads as processes: who comes, who agrees, where all stop, who is lost."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from meshtrain.distributed import hub as hub_module
from meshtrain.distributed import link as link_module
from meshtrain.distributed.hub import EXIT_LOST, first_difference, free_port
from meshtrain.distributed.link import Link, StopFlag, join
from meshtrain.distributed.place import Place
from meshtrain.errors import LaunchError, PeerError

FACTS = {"version": "0.1", "train.steps": 3}


@pytest.fixture(autouse=True)
def no_exit(monkeypatch: pytest.MonkeyPatch) -> "queue.Queue[dict[str, Any]]":
    """The reading thread of a stuck process would end the test process: it says so here instead."""
    exits: queue.Queue[dict[str, Any]] = queue.Queue()
    monkeypatch.setattr(Link, "_exit", lambda self, verdict: exits.put({"of": self.id, **verdict}))
    monkeypatch.setattr(link_module, "GRACE_SECONDS", 2.0)  # more than the hub waits for other reasons
    monkeypatch.setattr(hub_module, "LINGER_SECONDS", 0.5)
    return exits


def make_place(process_id: int, num: int, port: int, job: str = "test 1.0", host: str = "localhost") -> Place:
    hosts = (host,) * max(num, process_id + 1)
    return Place(process_id, num, process_id, num, hosts, host, port, job, "flags", "a test", ())


class Job:
    """Some processes of one job, each joined in a thread of its own."""

    def __init__(self, num: int, *, join_limit: float = 10, heartbeat: float = 5) -> None:
        self.num, self.port = num, free_port()
        self.join_limit, self.heartbeat = join_limit, heartbeat
        self.flags = [StopFlag() for _ in range(num)]
        self.pool = ThreadPoolExecutor(16)
        self.started: list[Future[Link]] = []

    def start(self, process_id: int, facts: Any = FACTS, **changes: Any) -> "Future[Link]":
        arguments = {"num": self.num, "port": self.port} | changes
        place = make_place(process_id, **arguments)
        limits = {"join_limit": self.join_limit, "heartbeat": self.heartbeat}
        self.started.append(self.pool.submit(join, place, facts, flag=self.flags[process_id % self.num], **limits))
        return self.started[-1]

    def end(self) -> None:
        """No thread of a link may outlive the test: one that finds its job ended ends the process."""
        for future in self.started:
            if not future.cancel() and future.exception(15) is None:
                future.result()._leaving = True
                future.result()._wire.close()
        for thread in threading.enumerate():
            if thread.name == "channel":
                thread.join(15)
        self.pool.shutdown(wait=False, cancel_futures=True)

    def all(self) -> list[Link]:
        return results([self.start(i) for i in range(self.num)])

    def each(self, links: list[Link], call: Callable[[Link], Any]) -> "list[Future[Any]]":
        return [self.pool.submit(call, link) for link in links]


def results(futures: "list[Future[Any]]") -> list[Any]:
    return [future.result(15) for future in futures]


def errors(futures: "list[Future[Any]]") -> list[str]:
    found = []
    for future in futures:
        with pytest.raises(LaunchError) as caught:
            future.result(15)
        found.append(str(caught.value))
    return found


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(3)
    yield made
    made.end()


def close(links: list[Link]) -> None:
    with ThreadPoolExecutor() as pool:
        results([pool.submit(link.close, 10.0) for link in links])


# ------------------------------------------------------------ joining


def test_all_come_in_any_order_and_leave_seconds_apart(job: Job) -> None:
    late = [job.start(2), job.start(1)]
    time.sleep(0.6)  # process 0 starts last
    links = results([job.start(0), *reversed(late)])
    assert [link.names[1].split(" (")[0] for link in links] == ["process 1"] * 3
    assert len({link.port for link in links}) == 1 and links[0].port not in (0, job.port)
    first = job.each(links[1:], lambda link: link.close(10.0))
    time.sleep(0.5)
    assert not any(future.done() for future in first)  # they wait for process 0
    links[0].close(10.0)
    results(first)
    socket.create_server(("", job.port)).close()  # the port is free again


def test_who_does_not_come_is_named_with_its_host(job: Job) -> None:
    job.join_limit = 1.0
    texts = errors([job.start(0, host="localhost"), job.start(1)])
    assert all("1 of 3 processes did not come within 1 s (launch.join): process 2 (host localhost)" in t for t in texts)


def test_two_with_one_number_are_named(job: Job) -> None:
    texts = errors([job.start(0), job.start(1), job.start(1)])
    assert all(f"two processes claim the number 1: pid {os.getpid()} on host" in text for text in texts)


@pytest.mark.parametrize(
    ("process_id", "num", "text"),
    [
        (4, 5, "process 4 (host {host}, pid {pid}) was started as one of 5 processes, and process 0 as one of 3"),
        (3, 3, "process 3 (host {host}, pid {pid}) came to a job of 3 processes, numbered from 0 to 2"),
    ],
)
def test_one_too_many(job: Job, process_id: int, num: int, text: str) -> None:
    texts = errors([job.start(0), job.start(1), job.start(process_id, num=num, host="localhost")][:2])
    expected = text.format(host=socket.gethostname(), pid=os.getpid())
    assert all(expected in each for each in texts)


def test_a_latecomer_does_not_disturb_a_job_that_is_complete(job: Job) -> None:
    links = job.all()
    (text,) = errors([job.start(7, num=3)])
    assert "came to a job of 3 processes, numbered from 0 to 2" in text
    results(job.each(links, lambda link: link.agree("still here", {}, 5)))
    close(links)


def test_a_process_of_another_job_is_refused_and_this_one_goes_on(job: Job) -> None:
    first = job.start(0)
    (text,) = errors([job.start(1, job="test 2.0")])
    assert f"port {job.port} of localhost is in use by job test 1.0, and this process belongs to job test 2.0" in text
    links = results([first, job.start(1), job.start(2)])
    close(links)


def test_a_second_job_on_the_port_says_so_at_once(job: Job) -> None:
    links = job.all()
    (text,) = errors([job.start(0, job="test 2.0")])
    assert f"port {job.port} of localhost is in use by job test 1.0, and this process belongs to job test 2.0" in text
    (text,) = errors([job.start(0)])
    host, pid = socket.gethostname(), os.getpid()
    assert f"two processes claim the number 0: pid {pid} on host {host} and pid {pid} on host {host}" in text
    close(links)  # which does not disturb the job that is complete


def test_a_port_that_something_else_listens_on(job: Job) -> None:
    with socket.create_server(("", job.port)):
        (text,) = errors([job.start(0)])
    assert f"process 0 cannot listen on port {job.port} of this host (Address already in use)" in text


def test_a_second_process_0_on_another_host(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is not where process 0 belongs asks there."""
    first = job.start(0)
    time.sleep(0.3)
    monkeypatch.setattr(link_module, "_is_own", lambda host: False)
    (text, there) = errors([job.start(0), first])
    assert "two processes claim the number 0" in text and there == text


def test_the_first_difference_is_named(job: Job) -> None:
    texts = errors([job.start(0), job.start(1), job.start(2, {"version": "0.1", "train.steps": 4, "more": 1})])
    assert all("process 2 (" in text and "has train.steps=4, and process 0 has train.steps=3" in text for text in texts)


def test_a_key_that_only_one_has_is_a_difference() -> None:
    assert first_difference({0: {"a": 1}, 1: {"a": 1}, 2: {"a": 1, "b": None, "c": 2}}) == (2, "c", 2, None)
    assert first_difference({0: {"a": 1, "b": 2}, 1: {"b": 3}}) == (1, "a", None, 1)
    assert first_difference({0: FACTS, 1: dict(FACTS)}) is None


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\xff\n", b"[]\n", b'{"kind": "hello"}\n', b"x" * 2_000_000]
)
def test_what_is_no_process_is_turned_away(job: Job, noise: bytes) -> None:
    first = job.start(0)
    time.sleep(0.2)
    with socket.create_connection(("localhost", job.port)) as stranger:
        stranger.settimeout(5)
        try:
            stranger.sendall(noise)
            assert stranger.recv(1) == b""
        except ConnectionError:
            pass  # reset while it was still talking
    links = results([first, job.start(1), job.start(2)])
    close(links)


def test_an_address_where_nobody_answers(job: Job) -> None:
    job.join_limit = 1.0
    (text,) = errors([job.start(1)])
    assert f"process 1 could not reach process 0 at localhost, port {job.port}, within 1 s (launch.join)" in text
    assert "Connection refused" in text


def test_a_name_that_does_not_resolve(job: Job) -> None:
    job.join_limit = 1.0
    (text,) = errors([job.start(1, host="no-such-host.invalid")])
    assert "at no-such-host.invalid" in text and "within 1 s" in text


def test_a_head_name_that_means_this_host_itself(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"head": ["127.0.1.1"], "node2": ["10.0.0.2"]}
    monkeypatch.setattr(link_module, "resolve", lambda host, port: addresses[host])
    place = Place(1, 2, 0, 1, ("head", "node2"), "head", job.port, "test 1.0", "SLURM", "", ())
    start = time.monotonic()
    with pytest.raises(LaunchError, match="'head', the host of process 0, resolves to 127.0.1.1 on host 'node2'"):
        join(place, FACTS, join_limit=30, heartbeat=5)
    assert time.monotonic() - start < 5
    addresses["node2"] = ["127.0.0.1"]  # a cluster of one machine
    link_module._refuse_loopback(place, ["127.0.1.1"])


# ------------------------------------------------------------ agreeing


def test_agreeing_waits_for_all_and_names_what_differs(job: Job) -> None:
    links = job.all()
    first = job.each(links[:2], lambda link: link.agree("data", {"fingerprint": "ab"}, 5))
    time.sleep(0.3)
    assert not any(future.done() for future in first)
    links[2].agree("data", {"fingerprint": "ab"}, 5)
    results(first)
    texts = errors(job.each(links, lambda link: link.agree("step", {"hash": 7 if link.id == 1 else 6}, 5)))
    assert all("process 1 (" in text and "has hash=7, and process 0 has hash=6" in text for text in texts)


def test_who_is_late_for_an_agreement_is_named_with_what_it_does(job: Job, no_exit: Any) -> None:
    job.heartbeat = 1.0
    links = job.all()
    with links[2].phase("open data"):
        texts = errors(job.each(links[:2], lambda link: link.agree("data", {}, 1.5)))
        assert all(
            "'data': not all came within 1.5 s; process 2 (" in t and "is still in 'open data'" in t for t in texts
        )
        assert no_exit.get(timeout=5)["of"] == 2  # it is stuck where nothing interrupts it


# ------------------------------------------------------------ stopping


def run_steps(link: Link, limit: int = 10_000, pause: float = 0.002) -> int:
    """Updates that were made."""
    for step in range(limit):
        if not link.may_step(step):
            return step
        time.sleep(pause * (1 + link.id))  # some are faster
    return limit


@pytest.mark.parametrize("signalled", [(0,), (2,), (0, 1, 2)])
def test_a_signal_to_any_stops_all_at_one_step(job: Job, signalled: tuple[int, ...]) -> None:
    links = job.all()
    running = job.each(links, run_steps)
    time.sleep(0.3)
    for i in signalled:
        job.flags[i].signum = signal.SIGTERM
    steps = results(running)
    assert len(set(steps)) == 1 and 0 < steps[0] < 10_000
    assert [flag.signum for flag in job.flags] == [signal.SIGTERM] * 3
    close(links)


def test_a_signal_before_the_first_step_stops_before_it(job: Job) -> None:
    links = job.all()
    job.flags[1].signum = signal.SIGTERM
    time.sleep(0.8)  # agreed on before anybody asks
    assert [run_steps(link) for link in links] == [0, 0, 0]
    assert not links[0].may_step(300)  # of a run that was resumed
    close(links)


def test_a_stop_is_agreed_on_while_a_process_does_something_long(job: Job) -> None:
    """One that compiles cannot answer; its reading thread does."""
    links = job.all()
    assert links[0].may_step(5)  # processes 1 and 2 are not there yet
    job.flags[0].signum = signal.SIGUSR1
    assert not links[0].may_step(6)
    assert links[1].may_step(5) and links[2].may_step(5)  # they make up for it
    assert not links[1].may_step(6) and not links[2].may_step(6)
    close(links)


# ------------------------------------------------------------ losing


def test_a_process_that_fails_is_named_with_its_traceback(job: Job, no_exit: Any) -> None:
    links = job.all()
    assert (
        links[1].fail("ZeroDivisionError: division by zero", "Traceback ...\nZeroDivisionError: division by zero", 1)
        is None
    )
    ends = [no_exit.get(timeout=5) for _ in range(2)]
    assert {end["of"] for end in ends} == {0, 2}
    for end in ends:
        assert "process 1 (" in end["text"] and "failed: ZeroDivisionError: division by zero" in end["text"]
        assert end["details"].startswith("Traceback") and end["code"] == 1


def test_a_failure_that_another_caused_gives_way_to_it(job: Job, no_exit: Any) -> None:
    """A process is killed; a second one's collective breaks, and it is the first to speak."""
    links = job.all()
    failing = job.pool.submit(links[1].fail, "XlaRuntimeError: connection closed by peer", "Traceback", 1)
    time.sleep(0.1)
    links[2]._wire.close()  # what the kernel does for a process that is killed
    cause = failing.result(10)
    assert isinstance(cause, PeerError) and cause.exit_code == EXIT_LOST
    assert "process 2 (" in str(cause) and "was lost while in" in str(cause)


def test_one_mistake_in_all_processes_stays_each_ones_own(job: Job) -> None:
    links = job.all()
    assert results(job.each(links, lambda link: link.fail("train.steps=-1 must be positive", "", 2))) == [None] * 3


def test_a_silent_process_is_lost_after_the_limit(job: Job, no_exit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job.heartbeat = 1.0
    links = job.all()
    monkeypatch.setattr(links[2], "_send", lambda kind, **values: None)
    start = time.monotonic()
    end = no_exit.get(timeout=8)
    assert time.monotonic() - start < job.heartbeat + 5
    assert "process 2 (" in end["text"] and "has been silent for" in end["text"] and end["code"] == EXIT_LOST


def test_a_wait_over_its_limit_names_who_is_elsewhere(job: Job, no_exit: Any) -> None:
    job.heartbeat = 3.0
    links = job.all()
    links[0].set_phase("update 7")
    links[1].set_phase("update 7")
    links[2].set_phase("read data")
    time.sleep(1.5)  # until the next beats
    links[0].late("update 7", 2.0)
    end = no_exit.get(timeout=5)
    assert "'update 7' took more than its limit of 2 s; process 2 (" in end["text"]
    assert "has been in 'read data' for" in end["text"] and "process 1" not in end["text"]


def test_a_warning_of_many_is_shown_once_by_process_0(job: Job) -> None:
    links = job.all()
    shown: list[str] = []
    links[0].on_warning = shown.append
    for link in links[1:]:
        for _ in range(3):
            link.warn("slow disk")
    deadline = time.monotonic() + 5
    while not shown and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    assert len(shown) == 1 and shown[0].startswith("slow disk (process ")
    close(links)


CHILD = """
import json, sys, time
from meshtrain.distributed.link import join
from meshtrain.distributed.place import Place
process_id, port, action = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
place = Place(process_id, 2, process_id, 2, ("localhost",) * 2, "localhost", port, "job", "flags", "", ())
link = join(place, {}, join_limit=20, heartbeat=2)
print("joined", flush=True)
if action == "leave":
    link.close(10)
    sys.exit(0)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("process_id", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_ends_the_others(process_id: int, how: signal.Signals) -> None:
    port = str(free_port())
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(i), port, "stay"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        assert [child.stdout.readline() for child in children if child.stdout] == ["joined\n"] * 2
        children[process_id].send_signal(how)
        other = children[1 - process_id]
        _, err = other.communicate(timeout=12)  # heartbeat + 10 s
        assert other.returncode == EXIT_LOST
        assert f"process {process_id} (host {socket.gethostname()}, pid {children[process_id].pid})" in err
        assert ("was lost" if how == signal.SIGKILL else "has been silent") in err
    finally:
        for child in children:
            child.kill()
            child.communicate()
