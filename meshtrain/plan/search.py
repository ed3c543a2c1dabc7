"""Finds a layout: formulas rule out what cannot fit, the compiler looks at the rest in order of estimated speed.

    result = search(config, cluster, card, compile=compile_step)
    console.print(result.table())

Every compiled step is kept on disk under a hash of all that it depends on, so a search that was broken off goes on
where it was, and a second one compiles nothing.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol

from rich import box, progress
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from meshtrain.atomic import write_text
from meshtrain.config import Config
from meshtrain.errors import UserError
from meshtrain.layout import show_bytes
from meshtrain.plan.candidates import Candidate, candidates, mesh_shapes, rough_facts
from meshtrain.plan.estimate import NETWORK, Estimate, estimate, show_seconds
from meshtrain.plan.facts import Cluster, Facts
from meshtrain.plan.gpus import Card

KEEP = 10
MAX_FAILURES = 5  # as many alike, before anything works, and the search gives up
MIN_COMPILE_S = 5.0  # with less time left, none is begun
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "jax-cuda13-plugin", "jax-cuda13-pjrt")
_WITHOUT_EFFECT = {"run", "log", "checkpoint", "devices"}  # sections of a config that its step does not depend on

Why = Literal["invalid", "too big by formula", "too big", "as big as one too big", "failed", "slower", "no time left"]
Report = Callable[[int, int, str], None]  # candidates settled, candidates in all, what happens now


class Compile(Protocol):
    """Compiles the step of a config for a cluster, such as `meshtrain.plan.compile.compile_step`."""

    def __call__(self, config: Config, cluster: Cluster, *, card: Card | None, timeout_s: float) -> Facts:
        """Raises UserError where the config does not work, the compiler fails or the time is up."""
        ...


@dataclasses.dataclass(frozen=True)
class Found:
    """A layout that fits (or, compiled for CPU, may fit), and its compiled figures."""

    candidate: Candidate
    facts: Facts
    estimate: Estimate


@dataclasses.dataclass(frozen=True)
class Dropped:
    """A layout, or all of a mesh (no candidate), that is not among the best.

    Attributes:
        mesh: data times model.
        detail: in words.
        over: bytes that are missing, where it is about memory.
    """

    why: Why
    mesh: str
    candidate: Candidate | None
    detail: str
    over: int = 0


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        best: by estimated tokens/s per GPU, the fastest first.
        dropped: all others.
        num_compiled, num_cached: steps compiled now, and found on disk.
    """

    cluster: Cluster
    best: tuple[Found, ...]
    dropped: tuple[Dropped, ...]
    num_compiled: int
    num_cached: int
    seconds: float

    def table(self) -> Group:
        """As rich tables: the best, how to use the first, and why the others fell out."""
        lines: list[Any] = [_best_table(self)]
        if self.best:
            words = " ".join(self.best[0].candidate.overrides())
            lines.append(Text(f"  the first is {words}", no_wrap=True, overflow="ignore"))
        lines.append(Text(_summary(self), style="dim"))
        return Group(*lines, _dropped_table(self.dropped))

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "best": [
                dataclasses.asdict(each.candidate)
                | {"peak_bytes": each.facts.peak_bytes, "card_bytes": each.facts.card_bytes, "fits": each.facts.fits}
                | {"tokens_per_s_per_gpu": each.estimate.tokens_per_s, "step_s": each.estimate.step_s}
                | {"mfu": each.estimate.mfu, "overrides": each.candidate.overrides(), "estimated": True}
                for each in self.best
            ],
            "dropped": [dataclasses.asdict(each) for each in self.dropped],
            "compiled": self.num_compiled,
            "cached": self.num_cached,
            "seconds": self.seconds,
        }


def search(
    config: Config,
    cluster: Cluster,
    card: Card,
    *,
    compile: Compile,
    network: float = NETWORK,
    budget_s: float = 600.0,
    workers: int = 2,
    cache: Path | None = None,
    report: Report | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Tries mesh shapes, ZeRO stages, microbatches, remat and sequence parallelism; the global batch stays.

    Args:
        config: what is trained; its own layout counts for nothing.
        card: the cluster's GPU.
        compile: how a step is compiled.
        network: bytes per second of each GPU to other nodes, for the estimate.
        budget_s: when to stop compiling and rank what is there.
        workers: compiles at once.
        cache: where compiled steps are kept; None: `cache_dir()`.
        report: is told how far the search is.

    Raises:
        UserError: the model of the config cannot be built at all, or nothing compiles.
    """
    started = clock()
    tell: Report = report or (lambda done, total, text: None)
    tell(0, 0, "laying out each mesh")
    open_, dropped = _screen(config, cluster, card, network)
    run = _Run(config, cluster, card, compile, network, Store(cache or cache_dir(), config, card), clock)
    total = len(open_)
    with ThreadPoolExecutor(workers) as pool:
        while open_:
            if run.is_settled(open_[0]):
                dropped += [Dropped("slower", each.candidate.mesh, each.candidate, "") for each in open_]
                break
            left = budget_s - (clock() - started)
            batch, open_ = open_[:workers], open_[workers:]
            tell(total - len(open_) - len(batch), total, ", ".join(str(each.candidate) for each in batch[:1]))
            for item, looked in zip(batch, pool.map(functools.partial(run.look, left), batch), strict=True):
                run.file(item, looked)
            run.check_that_something_works()
            open_ = run.without_hopeless(open_)
    tell(total, total, "done")
    ranked = sorted(run.found, key=_rank)
    slower = [Dropped("slower", each.candidate.mesh, each.candidate, "compiled") for each in ranked[KEEP:]]
    return SearchResult(
        cluster, tuple(ranked[:KEEP]), (*dropped, *run.dropped, *slower), run.num_compiled, run.num_cached,
        clock() - started,
    )  # fmt: skip


def _rank(found: Found) -> tuple[float, float, int, Candidate]:
    """The fastest first; of equals the one that leans less on overlap, then the one that leaves more memory."""
    return -found.estimate.tokens_per_s, found.estimate.serial_s, found.facts.peak_bytes, found.candidate


@dataclasses.dataclass(frozen=True)
class _Open:
    """A candidate that may fit, with its speed by formula in tokens/s per GPU."""

    candidate: Candidate
    speed: float


def _screen(config: Config, cluster: Cluster, card: Card, network: float) -> tuple[list[_Open], list[Dropped]]:
    """The candidates that formulas let pass, the fastest first, and the others."""
    kept: list[tuple[tuple[float, float, int], _Open]] = []
    dropped = []
    for shape in mesh_shapes(config, cluster):
        mesh = f"{shape.data} x {shape.model}"
        if shape.problem:
            dropped.append(Dropped("invalid", mesh, None, shape.problem))
        for candidate in candidates(config, shape):
            rough = rough_facts(candidate, config, shape, cluster, card)
            if not rough.fits:
                over = rough.peak_bytes - rough.card_bytes
                dropped.append(Dropped("too big by formula", mesh, candidate, f"at least {show_bytes(over)}", over))
                continue
            guess = estimate(rough, card, network=network)
            order = (guess.step_s, guess.serial_s, rough.peak_bytes)
            kept.append((order, _Open(candidate, guess.tokens_per_s)))
    return [each for _, each in sorted(kept, key=lambda pair: (pair[0], pair[1].candidate))], dropped


@dataclasses.dataclass(frozen=True)
class _Looked:
    """What became of compiling a candidate: its facts, or an error, or neither where no time was left."""

    facts: Facts | None
    error: str = ""
    cached: bool = False


class _Run:
    """One search under way."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        card: Card,
        compile: Compile,
        network: float,
        store: "Store",
        clock: Callable[[], float],
    ) -> None:
        self.config, self.cluster, self.card, self.network = config, cluster, card, network
        self.compile, self.store, self.clock = compile, store, clock
        self.found: list[Found] = []
        self.dropped: list[Dropped] = []
        self.num_compiled = self.num_cached = 0
        self.ratio = 0.0  # the largest of a compiled speed to the same by formula

    def look(self, seconds_left: float, item: _Open) -> "_Looked":
        """Compiles a candidate, or finds it on disk. Changes nothing in here, so several may run at once."""
        config = item.candidate.apply(self.config)
        key = self.store.key(config, self.cluster)
        if (facts := self.store.read(key)) is not None:
            return _Looked(facts, cached=True)
        if seconds_left < MIN_COMPILE_S:
            return _Looked(None)
        began = self.clock()
        try:
            facts = self.compile(config, self.cluster, card=self.card, timeout_s=seconds_left)
        except UserError as error:
            is_late = self.clock() - began >= seconds_left
            return _Looked(None, error="" if is_late else str(error))
        self.store.write(key, facts)
        return _Looked(facts)

    def file(self, item: _Open, looked: "_Looked") -> None:
        """Puts a candidate that was looked at where it belongs."""
        candidate, facts = item.candidate, looked.facts
        self.num_cached += looked.cached
        self.num_compiled += facts is not None and not looked.cached
        if facts is None:
            why: Why = "failed" if looked.error else "no time left"
            self.dropped.append(Dropped(why, candidate.mesh, candidate, looked.error))
        elif facts.fits is False:
            over = facts.peak_bytes - facts.card_bytes
            self.dropped.append(Dropped("too big", candidate.mesh, candidate, show_bytes(over), over))
        else:
            found = Found(candidate, facts, estimate(facts, self.card, network=self.network))
            self.found.append(found)
            self.ratio = max(self.ratio, found.estimate.tokens_per_s / item.speed if item.speed else 0.0)

    def check_that_something_works(self) -> None:
        """Raises UserError where every compile so far failed, several of them, with one and the same message."""
        texts = [each.detail for each in self.dropped if each.why == "failed"]
        if not self.num_compiled + self.num_cached and len(texts) >= MAX_FAILURES and len(set(texts)) == 1:
            raise UserError(f"the first {len(texts)} layouts failed alike: {texts[0]}")

    def without_hopeless(self, items: Sequence[_Open]) -> list[_Open]:
        """Leaves out what needs at least the memory of something that was too big."""
        big = [each for each in self.dropped if each.why == "too big" and each.candidate is not None]
        kept = []
        for item in items:
            like = next((b for b in big if b.candidate and item.candidate.needs_no_less_than(b.candidate)), None)
            if like is None:
                kept.append(item)
            else:
                text = f"as {like.candidate}"
                self.dropped.append(
                    Dropped("as big as one too big", item.candidate.mesh, item.candidate, text, like.over)
                )
        return kept

    def is_settled(self, next_best: _Open) -> bool:
        """Whether what is left, the fastest of it first, is slower than the best that were compiled."""
        if len(self.found) < KEEP:
            return False
        speeds = sorted((each.estimate.tokens_per_s for each in self.found), reverse=True)
        return next_best.speed * self.ratio < speeds[KEEP - 1]


# ---------------------------------------------------------------- the cache


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/meshtrain/plan`, by default below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshtrain" / "plan"


class Store:
    """Compiled steps on disk, one JSON file each, named by a hash of all that they depend on.

    That is: the config without what its step does not see, the cluster, the card, the versions of jax and its
    neighbours, and the sources of meshtrain and of the model's module.
    """

    def __init__(self, directory: Path, config: Config, card: Card) -> None:
        self.directory = directory
        self._common = [dataclasses.asdict(card), _versions(), _sources(config.model.target)]

    def key(self, config: Config, cluster: Cluster) -> str:
        """The hash."""
        seen = config.model_dump(mode="json", exclude=_WITHOUT_EFFECT)
        text = json.dumps([seen, dataclasses.asdict(cluster), self._common], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def read(self, key: str) -> Facts | None:
        """The step of that key; None if there is none, or its file cannot be used."""
        try:
            return Facts.from_json(json.loads((self.directory / f"{key}.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def write(self, key: str, facts: Facts) -> None:
        """Keeps a step. A disk that is full or read-only costs the next search time, and this one nothing."""
        with contextlib.suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            write_text(self.directory / f"{key}.json", json.dumps(facts.to_json()))


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _sources(target: str) -> str:
    """A hash of the code that a step is made of, as far as it is ours or the model's own module."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    spec = importlib.util.find_spec(target.partition(":")[0])
    files += [Path(spec.origin)] if spec is not None and spec.origin else []
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


# ---------------------------------------------------------------- what is shown


@contextlib.contextmanager
def progress_bar(console: Console) -> Iterator[Report]:
    """A bar on the console, fed by what is yielded: `search(..., report=it)`."""
    columns = (
        progress.TextColumn("search"), progress.BarColumn(), progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(), progress.TextColumn("{task.fields[text]}", markup=False),
    )  # fmt: skip
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("search", total=None, text="")
        yield lambda done, total, text: bar.update(task, completed=done, total=total or None, text=text)


def _best_table(result: SearchResult) -> Table:
    cluster = result.cluster
    table = Table(
        title=Text(f"Best layouts on {cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu} (speeds are estimates)"),
        box=box.SIMPLE_HEAD, title_justify="left",
    )  # fmt: skip
    for name in ("", "data x model", "stage", "micro-\nbatches", "remat", "seq.\nparallel"):
        table.add_column(name)
    for name in ("peak", "to spare", "step", "MFU,\nat most", "tokens/s\nper GPU"):
        table.add_column(name, justify="right", no_wrap=True)
    for i, each in enumerate(result.best, 1):
        c, facts, time_ = each.candidate, each.facts, each.estimate
        room = "not known" if facts.fits is None else show_bytes(facts.card_bytes - facts.peak_bytes)
        table.add_row(
            str(i), c.mesh, str(c.stage), str(c.microbatches), c.remat, "yes" if c.sequence_parallel else "no",
            show_bytes(facts.peak_bytes), room, show_seconds(time_.step_s), f"{100 * time_.mfu:.1f} %",
            f"{time_.tokens_per_s:,.0f}",
        )  # fmt: skip
    return table


def _summary(result: SearchResult) -> str:
    if not result.best:
        head = "  nothing fits: use more GPUs or larger ones, a smaller global batch, or a smaller model; "
    else:
        head = "  "
    late = any(each.why == "no time left" for each in result.dropped)
    tail = "; the time was up: the same command goes on from here" if late else ""
    return f"{head}{result.num_compiled} compiled, {result.num_cached} from the cache, {result.seconds:.0f} s{tail}"


def _dropped_table(dropped: Iterable[Dropped]) -> Table:
    """One row per mesh and reason, with the candidate that came nearest."""
    groups: dict[tuple[str, Why], list[Dropped]] = {}
    for each in dropped:
        groups.setdefault((each.mesh, each.why), []).append(each)
    table = Table(title="Why the others fell out", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("data x model", no_wrap=True)
    table.add_column("layouts", justify="right")
    table.add_column("why", overflow="fold")
    for (mesh, why), group in sorted(groups.items(), key=lambda item: int(item[0][0].rpartition(" ")[2])):
        table.add_row(mesh, "all" if group[0].candidate is None else str(len(group)), Text(_explain(why, group)))
    return table


def _explain(why: Why, group: Sequence[Dropped]) -> str:
    nearest = min(group, key=lambda each: each.over)
    if why == "invalid":
        return nearest.detail
    if why == "too big by formula":
        return f"do not fit, by formula: the nearest ({nearest.candidate}) lacks {nearest.detail}"
    if why == "too big":
        return f"do not fit, compiled: the nearest ({nearest.candidate}) lacks {nearest.detail}"
    if why == "as big as one too big":
        return f"need no less than one that did not fit ({nearest.detail.removeprefix('as ')})"
    if why == "failed":
        return f"{nearest.candidate}: {nearest.detail}"
    return {"slower": "fit by formula, but slower than the best", "no time left": "not compiled: the time was up"}[why]
