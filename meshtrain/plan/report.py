"""What a compiled step costs, to read: tables in a terminal, one JSON object for a script.

report = Report(facts, estimate(facts, card), findings(facts))
console.print(report.render())
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshtrain.layout import show_bytes
from meshtrain.mesh import MEMORY_FRACTION
from meshtrain.plan.compile import INSTALL
from meshtrain.plan.estimate import Estimate
from meshtrain.plan.facts import Facts
from meshtrain.plan.traffic import AxisTraffic, Finding, Row, axis_traffic, rows

_COLOURS = ("blue", "cyan", "bright_black", "bright_black", "magenta", "yellow", "green", "red")
_BAR = 30  # characters
_NOT_A_GPUS = (
    "compiled on virtual CPU devices: state and the collectives over data are exact, temporaries are not a GPU's. "
    f"For those: {INSTALL}"
)


@dataclasses.dataclass(frozen=True)
class Report:
    """A compiled step with what was made of it."""

    facts: Facts
    estimate: Estimate | None
    findings: tuple[Finding, ...]

    def render(self) -> Group:
        """The whole report, for a rich console."""
        facts = self.facts
        parts: list[RenderableType] = [Text(headline(facts), style="bold")]
        if facts.platform == "cpu":
            parts.append(Text(_NOT_A_GPUS, style="yellow"))
        parts += [memory_table(facts), verdict(facts), traffic_table(facts), axes_table(axis_traffic(facts))]
        if self.estimate is not None:
            parts.append(self.estimate.table())
        parts += [Text(f"look at: {finding}", style="yellow") for finding in self.findings]
        return Group(*parts)

    def to_json(self) -> dict[str, Any]:
        """One object. Sizes are bytes of one GPU, times seconds; what is estimated says so."""
        facts = self.facts
        return {
            "gpu": facts.cluster.gpu,
            "nodes": facts.cluster.nodes,
            "gpus_per_node": facts.cluster.gpus_per_node,
            "platform": facts.platform,
            "mesh": facts.mesh,
            "stage": facts.stage,
            "microbatches": facts.microbatches,
            "compute": facts.compute,
            "tokens": facts.tokens,
            "params": facts.params,
            "state_bytes": facts.state_bytes,
            "peak_bytes": facts.peak_bytes,
            "card_bytes": facts.card_bytes or None,
            "fits": facts.fits,
            "compile_seconds": facts.compile_seconds,
            "memory": [dataclasses.asdict(part) for part in facts.memory],
            "flops": facts.flops,
            "model_flops": facts.model_flops,
            "collectives": [dataclasses.asdict(each) for each in facts.collectives],
            "volume": {each.axis: _axis_json(each) for each in axis_traffic(facts)},
            "estimate": None if self.estimate is None else self.estimate.to_json(),
            "findings": [str(finding) for finding in self.findings],
        }


def headline(facts: Facts) -> str:
    """What was compiled, for what."""
    cluster = facts.cluster
    mesh = " x ".join(f"{axis}={size}" for axis, size in facts.mesh.items())
    return (
        f"{facts.params:,} parameters on {cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu}: mesh {mesh}, ZeRO "
        f"stage {facts.stage}, {facts.compute}, {facts.tokens:,} tokens per update in {facts.microbatches} "
        f"microbatch{'es' * (facts.microbatches > 1)}; compiled in {facts.compile_seconds:.1f} s"
    )


def memory_table(facts: Facts) -> Table:
    """The parts of the peak, each where the last one ended, against the card."""
    table = Table(title="Memory of one GPU at the peak", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("part", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("", width=_BAR, no_wrap=True)
    table.add_column("", style="dim", no_wrap=True)
    size = max(facts.card_bytes, facts.peak_bytes, 1)
    begin = 0
    for i, part in enumerate(facts.memory):
        bar = Bar(size, begin, begin + part.bytes, width=_BAR, color=_COLOURS[i % len(_COLOURS)])
        table.add_row(part.name, show_bytes(part.bytes), bar, "share estimated" if part.estimated else "")
        begin += part.bytes
    table.add_section()
    bar = Bar(size, 0, facts.peak_bytes, width=_BAR, color="red" if facts.fits is False else "green")
    table.add_row("peak", show_bytes(facts.peak_bytes), bar, "the compiler's", style="bold")
    if facts.card_bytes:
        table.add_row(
            "the card",
            show_bytes(facts.card_bytes),
            Bar(size, 0, facts.card_bytes, width=_BAR),
            f"{100 * MEMORY_FRACTION:.0f} % of it",
        )
    return table


def verdict(facts: Facts) -> Text:
    """Whether it fits, and by how much."""
    if facts.fits is None:
        return Text("  whether it fits is not known without the GPU's compiler", style="yellow")
    room = facts.card_bytes - facts.peak_bytes
    if facts.fits:
        return Text(f"  fits: {show_bytes(room)} to spare", style="bold green")
    return Text(f"  does not fit: {show_bytes(-room)} too much", style="bold red")


def traffic_table(facts: Facts) -> Table:
    """Each kind of collective, the largest first."""
    table = Table(title="Communication of one GPU per update", box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("axis", "collective"):
        table.add_column(name, no_wrap=True)
    for name in ("count", "each", "in all"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("type", no_wrap=True)
    table.add_column("loop", no_wrap=True)
    table.add_column("of what", overflow="fold")
    for row in rows(facts):
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> Iterator[str | Text]:
    yield from (row.axis, row.op, f"{row.count:,}" if row.count is not None else "?")
    yield from (show_bytes(row.bytes), show_bytes(row.volume), row.dtype, "yes" if row.in_loop else "")
    yield Text(row.what)


def axes_table(axes: tuple[AxisTraffic, ...]) -> Table:
    """Sums by axis beside what ZeRO promises, in units of the parameters of a model shard."""
    table = Table(title="Sums by mesh axis", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("axis", no_wrap=True)
    for name in ("sent", "in psi", "ZeRO's"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("where")
    for each in axes:
        where = f"leaves the node: a group spans {each.nodes} nodes" if each.leaves_node else "inside a node"
        in_psi = ("", "") if each.promise is None else (f"{each.psi:.4g}", f"{each.promise:g}")
        table.add_row(each.axis, show_bytes(each.bytes), *in_psi, where)
    if not axes:
        table.add_row("none", "0 B", "0", "", "one GPU sends nothing")
    return table


def _axis_json(each: AxisTraffic) -> dict[str, Any]:
    return {
        "bytes": each.bytes, "psi": each.psi, "zero_psi": each.promise, "nodes": each.nodes,
        "leaves_node": each.leaves_node,
    }  # fmt: skip
