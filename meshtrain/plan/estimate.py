"""How long a compiled step may take: a roofline (Williams et al. 2009), with every assumption said.

    print(estimate(facts, card).table())

It is a bound more than a forecast: matrix units, memory and links at their data sheet's rates. What it is good for is
comparing layouts, and seeing which of compute, memory and links a layout leans on.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from meshtrain.errors import ConfigError
from meshtrain.flops import peak_flops
from meshtrain.layout import show_bytes
from meshtrain.mesh import MODEL
from meshtrain.plan.facts import Facts
from meshtrain.plan.gpus import Card
from meshtrain.plan.hlo import Collective

NETWORK = 50e9  # bytes per second of each GPU to other nodes and, at once, from them: one 400 Gb/s port per GPU
_COMPUTE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class Communication:
    """What crosses one axis (or several at once) in a step, for one device.

    Attributes:
        axis: as in `Collective.axis`.
        bytes: sent in a ring of this axis's size.
        bandwidth: bytes per second that one device has for it.
        seconds: the one by the other.
        leaves_node: whether groups along the axis span nodes.
        overlaps: whether it is taken to run beside compute.
    """

    axis: str
    bytes: float
    bandwidth: float
    seconds: float
    leaves_node: bool
    overlaps: bool


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimated times of one step, in seconds, and what they rest on.

    Attributes:
        matrix_flops: FLOP/s of one device in the compute type.
        compute_s: the matrix products at that rate, recomputation included.
        memory_s: weights and saved activations through the card's memory, beside the products.
        optimizer_s: the state through memory, after them.
        step_s: with overlap where it is assumed: the least that the step can take.
        serial_s: the same with no collective overlapped.
        tokens_per_s: of one GPU, at `step_s`.
        mfu: model FLOPs utilization at `step_s`: a bound from above (PaLM, Chowdhery et al. 2022, appendix B).
        assumptions: one sentence each, with their figures.
    """

    matrix_flops: float
    compute_s: float
    memory_s: float
    optimizer_s: float
    communication: tuple[Communication, ...]
    step_s: float
    serial_s: float
    tokens_per_s: float
    mfu: float
    assumptions: tuple[str, ...]

    @property
    def exposed_s(self) -> float:
        """Communication that no compute hides."""
        return self.step_s - max(self.compute_s, self.memory_s) - self.optimizer_s

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self) | {"estimated": True, "exposed_s": self.exposed_s}

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """What, how long (or how much), and of what: the lines of the report."""
        yield "compute", show_seconds(self.compute_s), f"matrix products at {self.matrix_flops / 1e12:,.1f} TFLOP/s"
        yield "memory", show_seconds(self.memory_s), "weights and saved activations, beside compute"
        yield "optimizer", show_seconds(self.optimizer_s), "state through memory, after compute"
        for each in self.communication:
            where = "between nodes" if each.leaves_node else "inside a node"
            how = "beside compute" if each.overlaps else "exposed"
            detail = f"{show_bytes(each.bytes)} {where} at {each.bandwidth / 1e9:,.0f} GB/s, {how}"
            yield f"over {each.axis}", show_seconds(each.seconds), detail
        yield "exposed", show_seconds(self.exposed_s), "communication that no compute hides"
        yield "step", show_seconds(self.step_s), f"at least; {show_seconds(self.serial_s)} with no overlap at all"
        yield "speed", f"{self.tokens_per_s:,.0f}", "tokens/s per GPU, at most"
        yield "MFU", f"{100 * self.mfu:.1f} %", "at most"

    def table(self) -> Group:
        """As rich tables: the figures, then the assumptions."""
        table = Table(title="Time per step (estimate)", box=box.SIMPLE_HEAD, title_justify="left")
        table.add_column("part", no_wrap=True)
        table.add_column("estimate", justify="right", no_wrap=True)
        table.add_column("of what", overflow="fold")
        for name, value, detail in self.rows():
            table.add_row(Text(name), value, Text(detail), style="bold" if name in ("step", "speed") else "")
        lines = Table.grid(padding=(0, 1))
        for line in self.assumptions:
            lines.add_row(Text("  -", style="dim"), Text(line, style="dim"))
        return Group(table, Text("  Estimated, not measured. Assumed:", style="dim"), lines)


def estimate(facts: Facts, card: Card, *, network: float = NETWORK) -> Estimate:
    """Bounds the time of a compiled step by the card's rates.

    Args:
        facts: of the compiled step.
        card: the GPU that it runs on.
        network: bytes per second that each GPU sends to other nodes, at most.

    Raises:
        ConfigError: the card's matrix rate for the compute type is not known.
    """
    if not network > 0:
        raise ConfigError(f"the network's bandwidth must be positive, got {network} bytes/s")
    rate = matrix_rate(card, facts.compute)
    compute_s = facts.flops / rate
    memory_s = pass_bytes(facts) / card.bandwidth
    optimizer_s = state_traffic(facts) / card.bandwidth
    communication = tuple(_communication(facts, card, network))
    hidden = sum(each.seconds for each in communication if each.overlaps)
    exposed = sum(each.seconds for each in communication if not each.overlaps)
    busy = max(compute_s, memory_s)
    step_s = max(busy, hidden) + exposed + optimizer_s
    serial_s = busy + hidden + exposed + optimizer_s
    tokens_per_s = facts.tokens / facts.cluster.num_gpus / step_s if step_s else 0.0
    mfu = facts.model_flops / (rate * step_s) if step_s else 0.0
    return Estimate(
        rate, compute_s, memory_s, optimizer_s, communication, step_s, serial_s, tokens_per_s, mfu,
        tuple(_assumptions(facts, card, network)),
    )  # fmt: skip


def matrix_rate(card: Card, compute: str) -> float:
    """Dense matrix products in FLOP/s of one card; float32 as TF32, half of bfloat16.

    Raises:
        ConfigError: neither the card nor the table of data sheets says.
    """
    half = 0.5 if compute == "float32" else 1.0
    rate = card.matrix_flops * half or peak_flops(card.name, compute)
    if rate is None:
        raise ConfigError(
            f"the matrix rate of '{card.name}' in {compute} is not known: give the card's file a `matrix_flops` "
            "(dense bfloat16, FLOP/s)"
        )
    return rate


def pass_bytes(facts: Facts) -> float:
    """Bytes that weights and saved activations move through one device's memory in the forward and backward passes."""
    weights = facts.params / facts.mesh.get(MODEL, 1) * _COMPUTE_BYTES.get(facts.compute, 4)
    # Forward, and for the gradients of inputs and of weights; recomputing adds its share of a forward pass.
    passes = 3 * (facts.flops / facts.model_flops if facts.model_flops else 1)
    saved = sum(part.bytes for part in facts.memory if "activation" in part.name)
    return float(facts.microbatches * (passes * weights + 2 * saved))


def state_traffic(facts: Facts) -> float:
    """Bytes that the optimizer moves: the state read and written, a gradient as large as the parameters read."""
    return float(2 * facts.state_bytes + facts.state.get("parameters", 0))


def nodes_of_groups(axis: str, mesh: Mapping[str, int], gpus_per_node: int) -> int:
    """How many nodes a group of devices along an axis touches, at most.

    Args:
        axis: names joined by "+", as in `Collective.axis`.
        mesh: axis name -> size; devices are numbered row-major, and fill one node after the other.
    """
    inside = [dim for dim, name in enumerate(mesh) if name in axis.split("+")]
    sizes = tuple(mesh.values())
    nodes = np.arange(math.prod(sizes)).reshape(sizes) // gpus_per_node
    members = math.prod(sizes[dim] for dim in inside)
    groups = np.sort(np.moveaxis(nodes, inside, range(-len(inside), 0)).reshape(-1, members), axis=1)
    return int((np.diff(groups, axis=1) > 0).sum(axis=1).max(initial=0)) + 1


def axis_bandwidth(axis: str, facts: Facts, card: Card, network: float) -> tuple[float, bool]:
    """Bytes per second that one device has along an axis, and whether the axis leaves the node."""
    nodes = nodes_of_groups(axis, facts.mesh, facts.cluster.gpus_per_node)
    nvlink = card.num_links * card.link_bandwidth
    if nodes == 1:
        return nvlink, False
    members = math.prod(size for name, size in facts.mesh.items() if name in axis.split("+")) / nodes
    return min(nvlink, network * max(members, 1.0)), True


def ring_bytes(collective: Collective) -> float:
    """Bytes that one device sends for a collective in a ring of its group; an unknown trip count counts once."""
    known = collective if collective.count is not None else dataclasses.replace(collective, count=1)
    size = collective.group_size
    return known.volume * (1.0 if collective.op == "collective-permute" else (size - 1) / size)


def _communication(facts: Facts, card: Card, network: float) -> Iterator[Communication]:
    sent: dict[str, float] = defaultdict(float)
    for each in facts.collectives:
        sent[each.axis] += ring_bytes(each)
    for axis, count in sorted(sent.items()):
        bandwidth, leaves = axis_bandwidth(axis, facts, card, network)
        yield Communication(axis, count, bandwidth, count / bandwidth, leaves, MODEL not in axis.split("+"))


def _assumptions(facts: Facts, card: Card, network: float) -> Iterator[str]:
    as_tf32 = ", where float32 runs as TF32" if facts.compute == "float32" else ""
    yield (
        f"matrix products run at the dense {facts.compute} rate of {card.name}'s data sheet, "
        f"{matrix_rate(card, facts.compute) / 1e12:,.1f} TFLOP/s{as_tf32}; real kernels reach a part of it"
    )
    yield (
        f"memory moves {card.bandwidth / 1e12:.2f} TB/s: weights once per pass and microbatch, saved "
        "activations once in and once out, the state once in and once out; other reads stay in "
        "caches or hide behind the products"
    )
    yield f"NVLink gives each GPU {card.num_links * card.link_bandwidth / 1e9:,.0f} GB/s in each direction"
    yield (
        f"the network gives each GPU {network / 1e9:,.0f} GB/s in each direction; a group of g GPUs in a node goes out "
        "over all g ports, up to NVLink's rate; no latency and no congestion"
    )
    yield "collectives over other axes than `model` run beside compute; those over `model` do not"
    if any(each.count is None for each in facts.collectives):
        yield "collectives in loops of unknown length count once"
    if facts.platform == "cpu":
        yield (
            "compiled for CPU, where bfloat16 crosses links as float32, and collectives over `model` and saved "
            "activations are not a GPU's"
        )


def show_seconds(seconds: float) -> str:
    """A duration in s, ms or us, three digits."""
    if 0 < seconds < 1e-6:
        return "< 1 us"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}" if seconds * scale < 1000 else f"{seconds * scale:,.0f} {unit}"
    raise AssertionError("the last unit takes everything")
