"""Two configs compiled for the same cluster, compared line by line.

console.print(diff(facts_a, facts_b, config_a, config_b, estimate_a, estimate_b))
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from meshtrain.config import Config
from meshtrain.layout import show_bytes
from meshtrain.plan.estimate import Estimate, show_seconds
from meshtrain.plan.facts import Facts


class Line(NamedTuple):
    """One compared figure: its section, its name, both values as text, and how the second differs from the first."""

    section: str
    name: str
    a: str
    b: str
    change: str


def lines(
    a: Facts,
    b: Facts,
    config_a: Config | None = None,
    config_b: Config | None = None,
    estimate_a: Estimate | None = None,
    estimate_b: Estimate | None = None,
) -> Iterator[Line]:
    """Every compared figure in order; equal ones too, but of the configs only the keys that differ."""
    if config_a is not None and config_b is not None:
        yield from _config_lines(_flat(config_a.model_dump(mode="json")), _flat(config_b.model_dump(mode="json")))
    yield Line("mesh", "axes", _mesh(a), _mesh(b), "" if a.mesh == b.mesh else "differs")
    yield from _numbers("memory", _memory(a), _memory(b), show_bytes)
    yield from _numbers("sent per step", _volumes(a), _volumes(b), show_bytes)
    yield from _numbers("collectives", _counts(a), _counts(b), lambda count: f"{count:,.0f}")
    if estimate_a is not None and estimate_b is not None:
        yield from _estimate_lines(estimate_a, estimate_b)


def diff(
    a: Facts,
    b: Facts,
    config_a: Config | None = None,
    config_b: Config | None = None,
    estimate_a: Estimate | None = None,
    estimate_b: Estimate | None = None,
    names: tuple[str, str] = ("A", "B"),
) -> Table:
    """The comparison as a rich table.

    Args:
        names: headings of the two columns.
    """
    cluster = a.cluster
    table = Table(
        title=Text(f"For {cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu}, per GPU"), box=box.SIMPLE_HEAD,
        title_justify="left",
    )  # fmt: skip
    table.add_column("", style="dim")
    table.add_column("", overflow="fold")
    for name in names:
        table.add_column(Text(name), justify="right", overflow="fold")
    table.add_column("change", justify="right")
    before = ""
    for line in lines(a, b, config_a, config_b, estimate_a, estimate_b):
        if before and line.section != before:
            table.add_section()
        section = "" if line.section == before else line.section
        table.add_row(section, Text(line.name), Text(line.a), Text(line.b), line.change, style=_style(line))
        before = line.section
    return table


def _style(line: Line) -> str:
    return "" if line.change else "dim"


def _config_lines(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Line]:
    for key in [*a, *(key for key in b if key not in a)]:
        if (old := a.get(key, "-")) != (new := b.get(key, "-")):
            yield Line("config", key, str(old), str(new), "differs")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as `section.key`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _mesh(facts: Facts) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in facts.mesh.items())


def _memory(facts: Facts) -> dict[str, int]:
    parts: dict[str, int] = defaultdict(int)
    for part in facts.memory:
        parts[part.name] += part.bytes
    return {**parts, "peak": facts.peak_bytes, "state at rest": facts.state_bytes}


def _volumes(facts: Facts) -> dict[str, int]:
    sent: dict[str, int] = defaultdict(int)
    for each in facts.collectives:
        sent[f"over {each.axis}"] += each.bytes if each.count is None else each.volume
    return dict(sorted(sent.items()))


def _counts(facts: Facts) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for each in facts.collectives:
        counts[f"{each.axis} {each.op}"] += each.count or 1
    return dict(sorted(counts.items()))


def _numbers(section: str, a: Mapping[str, float], b: Mapping[str, float], show: Any) -> Iterator[Line]:
    for name in [*a, *(name for name in b if name not in a)]:
        old, new = a.get(name, 0), b.get(name, 0)
        yield Line(section, name, show(old), show(new), _change(old, new))


def _change(old: float, new: float) -> str:
    """`+12.5 %`; empty where nothing changed."""
    if old == new:
        return ""
    return f"{100 * (new - old) / old:+.1f} %" if old else "new"


def _estimate_lines(a: Estimate, b: Estimate) -> Iterator[Line]:
    section = "estimate"
    for name in ("compute_s", "memory_s", "optimizer_s", "exposed_s", "step_s"):
        old, new = getattr(a, name), getattr(b, name)
        yield Line(section, name.removesuffix("_s"), show_seconds(old), show_seconds(new), _change(old, new))
    yield Line(
        section, "tokens/s per GPU", f"{a.tokens_per_s:,.0f}", f"{b.tokens_per_s:,.0f}",
        _change(a.tokens_per_s, b.tokens_per_s),
    )  # fmt: skip
    yield Line(section, "MFU, at most", f"{100 * a.mfu:.1f} %", f"{100 * b.mfu:.1f} %", _change(a.mfu, b.mfu))
