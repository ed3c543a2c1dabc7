"""A budget: a small YAML file that says what a step may cost, kept beside the config and checked before each launch.

The first check writes it; later ones compare. What grew past it fails the check, what shrank could be tightened.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from meshtrain.atomic import write_text
from meshtrain.errors import ConfigError
from meshtrain.layout import show_bytes
from meshtrain.plan.facts import Facts

PEAK_TOLERANCE = 0.01  # the compiler's peak moves a little with its version; state and collectives do not
MAX_BYTES = 1 << 16
_HEADER = "# What one training step may cost on one device. Written by `meshtrain plan --budget`; sizes are bytes.\n"


class Check(NamedTuple):
    """What differs from a budget, one line each: what grew past it (a failure), and what became smaller."""

    grown: list[str]
    smaller: list[str]


def budget_of(facts: Facts) -> dict[str, Any]:
    """The budget that a step keeps exactly, as plain values."""
    sent: dict[str, int] = defaultdict(int)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for each in facts.collectives:
        known = each.count is not None
        sent[each.axis] += each.volume if known else each.bytes
        counts[each.axis][each.op if known else f"{each.op} of unknown count"] += each.count or 1
    cluster = facts.cluster
    return {
        "for": {
            "gpu": cluster.gpu, "nodes": cluster.nodes, "gpus_per_node": cluster.gpus_per_node,
            "platform": facts.platform,
        },
        "peak_bytes": facts.peak_bytes,
        "state_bytes": facts.state_bytes,
        "axes": {
            axis: {"bytes": sent[axis], "collectives": dict(sorted(counts[axis].items()))} for axis in sorted(sent)
        },
    }  # fmt: skip


def write(path: Path, facts: Facts) -> None:
    """Writes the budget that `facts` keeps exactly.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        write_text(path, _HEADER + yaml.safe_dump(budget_of(facts), sort_keys=False))
    except OSError as error:
        raise ConfigError(f"{path}: the budget cannot be written: {error.strerror or error}") from None


def check(path: Path, facts: Facts) -> Check:
    """Compares a step with a budget: state and collectives to the byte, the peak with 1 % to spare.

    Raises:
        ConfigError: the file cannot be read, is not a budget, or was written for other machines.
    """
    budget, actual = _read(path), budget_of(facts)
    if budget["for"] != actual["for"]:
        raise ConfigError(
            f"{path}: this budget is for {_machines(budget['for'])}, and the step was compiled for "
            f"{_machines(actual['for'])}: give the same cluster, or another budget file"
        )
    allowed, found = dict(_figures(budget)), dict(_figures(actual))
    result = Check([], [])
    for name in [*allowed, *(name for name in found if name not in allowed)]:
        old, new = allowed.get(name, 0), found.get(name, 0)
        limit = old * (1 + PEAK_TOLERANCE) if name == "peak_bytes" else old
        if new > limit:
            result.grown.append(f"{name}: {_change(name, old, new)}")
        elif new < old:
            result.smaller.append(f"could be tightened: {name}: {_change(name, old, new)}")
    return result


def _figures(budget: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Every number of a budget with its key, such as `data all-gather`."""
    yield "peak_bytes", budget["peak_bytes"]
    yield "state_bytes", budget["state_bytes"]
    for axis, of_axis in budget["axes"].items():
        yield f"{axis} bytes", of_axis["bytes"]
        yield from ((f"{axis} {op}", count) for op, count in of_axis["collectives"].items())


def _change(name: str, old: int, new: int) -> str:
    if name.endswith("bytes"):
        return f"{old:,} -> {new:,} bytes ({show_bytes(new - old) if new < old else '+' + show_bytes(new - old)})"
    return f"{old:,} -> {new:,} per step"


def _machines(section: Mapping[str, Any]) -> str:
    by = "" if section["platform"] == "cuda" else ", compiled for CPU"
    return f"{section['nodes']} x {section['gpus_per_node']} {section['gpu']}{by}"


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes, so not a budget")
        values = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{path}: the budget cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        first = str(error).partition("\n")[0]
        raise ConfigError(f"{path}: not a budget ({first}): delete it to write a new one") from None
    if problem := _problem(values):
        raise ConfigError(f"{path}: not a budget ({problem}): delete it to write a new one")
    return dict(values)


def _problem(values: Any) -> str:
    """What keeps read values from being a budget; empty if nothing."""
    if not isinstance(values, dict):
        return "it must hold keys such as peak_bytes"
    if set(values) != {"for", "peak_bytes", "state_bytes", "axes"}:
        return "its keys must be for, peak_bytes, state_bytes and axes"
    keys = {"gpu", "nodes", "gpus_per_node", "platform"}
    if not isinstance(values["for"], dict) or set(values["for"]) != keys:
        return "'for' must say gpu, nodes, gpus_per_node and platform"
    if not isinstance(values["axes"], dict):
        return "'axes' must hold an entry per axis"
    for axis, of_axis in values["axes"].items():
        if not isinstance(of_axis, dict) or not isinstance(of_axis.get("collectives"), dict) or "bytes" not in of_axis:
            return f"axis '{axis}' must have bytes and collectives"
    for name, number in _figures(values):
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            return f"'{name}' must be a whole number"
    return ""
