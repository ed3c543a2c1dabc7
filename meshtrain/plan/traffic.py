"""What crosses each mesh axis in a compiled step, beside what ZeRO promises, and what of it nobody asked for."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from meshtrain.layout import show_bytes
from meshtrain.mesh import DATA, MODEL
from meshtrain.plan.estimate import nodes_of_groups
from meshtrain.plan.facts import Facts
from meshtrain.plan.hlo import Collective
from meshtrain.zero import GATHER, REDUCE

SMALL_SHARE = 0.001  # of an axis's bytes: what is less stands in one line with the others of its kind
EXTRA_SHARE = 0.02  # over ZeRO's volume, from which on it is worth a look: biases and scalars are far below


@dataclasses.dataclass(frozen=True)
class AxisTraffic:
    """The sum over one axis (or several at once) in one update, for one device.

    Attributes:
        axis: as in `Collective.axis`.
        bytes: sent, as `Collective.volume` counts; what is in a loop of unknown length counts once.
        psi: the same in elements, in units of `Facts.shard_params`.
        promise: what ZeRO sends over `data`, in psi; None for other axes.
        nodes: that a group of devices along the axis touches.
    """

    axis: str
    bytes: int
    psi: float
    promise: float | None
    nodes: int

    @property
    def leaves_node(self) -> bool:
        """Whether a group of devices along the axis spans nodes."""
        return self.nodes > 1


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives of one kind, size and purpose.

    Attributes:
        count: executions per update; None where a loop's length is unknown.
        bytes: of one.
        volume: bytes sent by all.
        what: the parameters they most likely carry, or the operation and line they come from.
    """

    axis: str
    op: str
    count: int | None
    bytes: int
    volume: int
    dtype: str
    in_loop: bool
    what: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something in the compiled step that is likely not meant: what, why, and what to do."""

    text: str

    def __str__(self) -> str:
        return self.text


def zero_volume(stage: int, microbatches: int) -> int:
    """What ZeRO sends over `data` in one update, in units of the parameters: the table in `meshtrain.zero`."""
    return {0: 2, 1: 2, 2: 1 + microbatches, 3: 3 * microbatches}[stage]


def axis_traffic(facts: Facts) -> tuple[AxisTraffic, ...]:
    """The sums by axis, in the order of their names."""
    sums: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for each in facts.collectives:
        sums[each.axis][0] += _counted(each).volume
        sums[each.axis][1] += _counted(each).volume_elements
    promise = zero_volume(facts.stage, facts.microbatches)
    return tuple(
        AxisTraffic(
            axis, sent, elements / facts.shard_params, promise if axis == DATA else None,
            nodes_of_groups(axis, facts.mesh, facts.cluster.gpus_per_node),
        )
        for axis, (sent, elements) in sorted(sums.items())
    )  # fmt: skip


def rows(facts: Facts) -> tuple[Row, ...]:
    """All collectives, alike ones together, by axis and then by what they send; small ones in one line per kind."""
    totals = {each.axis: each.bytes for each in axis_traffic(facts)}
    names = _Names(facts)
    groups: dict[tuple[object, ...], list[Collective]] = collections.defaultdict(list)
    for each in facts.collectives:
        if _counted(each).volume < SMALL_SHARE * totals[each.axis]:
            groups[each.axis, each.op].append(each)
        else:
            what = names.what(each)
            groups[each.axis, each.op, each.bytes, each.dtype, each.in_loop, what].append(each)
    found = [_row(key, group) for key, group in groups.items()]
    return tuple(sorted(found, key=lambda row: (row.axis, -row.volume, row.op)))


def _row(key: Sequence[object], group: Sequence[Collective]) -> Row:
    first, counts = group[0], [each.count for each in group]
    count = None if None in counts else sum(filter(None, counts))
    volume = sum(_counted(each).volume for each in group)
    if len(key) > 2:
        return Row(first.axis, first.op, count, first.bytes, volume, first.dtype, first.in_loop, str(key[-1]))
    dtypes, in_loop = "+".join(sorted({each.dtype for each in group})), any(each.in_loop for each in group)
    most = max(each.bytes for each in group)
    return Row(first.axis, first.op, count, most, volume, dtypes, in_loop, "small ones: this is the largest")


def _counted(each: Collective) -> Collective:
    return each if each.count is not None else dataclasses.replace(each, count=1)


class _Names:
    """Which parameter a collective carries, by its size: a stack, one layer of it, whole over `model` or not."""

    def __init__(self, facts: Facts) -> None:
        self.sizes: dict[int, list[str]] = collections.defaultdict(list)
        cuts = {1, facts.mesh.get(MODEL, 1)}
        for path, shape in facts.weight_shapes.items():
            whole, layer = math.prod(shape), math.prod(shape[1:])
            for size in {n // cut for n in (whole, layer) for cut in cuts if n % cut == 0}:
                self.sizes[size].append(path)

    def what(self, each: Collective) -> str:
        """In words."""
        for scope, kind in ((GATHER, "weights"), (REDUCE, "gradients")):
            if scope in each.source:
                return f"{kind}: {self._paths(each.elements)}"
        return place(each)

    def _paths(self, elements: int) -> str:
        paths = self.sizes.get(elements, [])
        if not paths:
            return "several parameters at once"
        return paths[0] + (f" or {len(paths) - 1} of the same size" if len(paths) > 1 else "")


def place(each: Collective) -> str:
    """Operation and line, without the transformations around it and the folders above the file."""
    name, _, where = each.source.partition(" (")
    line = re.sub(r".*/", "", where.rstrip(")"))
    operations = re.findall(r"[\w.\-]+", name.split("/")[-1])  # several, where the compiler made one of many
    short = "+".join(dict.fromkeys(operations))
    return ", ".join(part for part in (short, line) if part) or "not told by the compiler"


# ---------------------------------------------------------------- findings


def findings(facts: Facts) -> tuple[Finding, ...]:
    """What is likely not meant, the most expensive kind of mistake first."""
    found = [
        *_gathered_weights(facts), *_gathered_activations(facts), *_reductions_per_microbatch(facts),
        *_more_than_zero(facts), *_reshapes(facts), *_wide_gathers(facts), *_model_leaves_node(facts),
        *_unknown_counts(facts),
    ]  # fmt: skip
    return tuple(map(Finding, dict.fromkeys(found)))


def _gathered_weights(facts: Facts) -> Iterator[str]:
    """A weight that `model` cuts is multiplied as it is; where XLA gathers it, rule and use do not agree."""
    paths = _paths_by_form(facts)
    for each in _gathers_over_model(facts):
        if path := paths.get(_form(each.dims)):
            yield (
                f"'{path}' (or one of its shape) is gathered over {each.axis}, {_size(each)}, at {place(each)}: its "
                "rule cuts another dim than the model's use of it needs; cut a dim that the product keeps or sums over"
            )


def _gathered_activations(facts: Facts) -> Iterator[str]:
    """Where the dims that rules cut do not fit together, XLA often moves the smaller operand, the activation."""
    paths, least = _paths_by_form(facts), _local_tokens(facts)
    found = [each for each in _gathers_over_model(facts) if each.elements >= least and _form(each.dims) not in paths]
    if found:
        yield (
            f"activations are gathered over {MODEL}, {_several(found)}: two rules do not fit together; of two products "
            "in a row cut the first's kernel in the dim it keeps, the second's in the dim it sums over, and cut no "
            "dim of the stream that all layers share"
        )


def _paths_by_form(facts: Facts) -> dict[tuple[int, ...], str]:
    """A parameter of each shape, whole or one layer of a stack."""
    return {
        form: path
        for path, shape in facts.weight_shapes.items()
        for dims in (shape, shape[1:])
        for form in _forms(dims)
    }


def _gathers_over_model(facts: Facts) -> list[Collective]:
    """All-gathers over `model` that nobody asked for: neither ZeRO nor a constraint, as at the named points."""
    return [
        each
        for each in facts.collectives
        if each.op == "all-gather"
        and MODEL in each.axis.split("+")
        and not _is_zero(each)
        and "sharding_constraint" not in each.source
    ]


def _form(dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(size for size in dims if size != 1))


def _forms(dims: Sequence[int]) -> set[tuple[int, ...]]:
    """The dims of a matrix in any order, and as the two that a product makes of several."""
    if len(dims) < 2:
        return set()
    merged = [(math.prod(dims[:cut]), math.prod(dims[cut:])) for cut in range(1, len(dims))]
    return {form for form in map(_form, [dims, *merged]) if len(form) > 1}


def _is_zero(each: Collective) -> bool:
    """Whether ZeRO's own code makes it."""
    return GATHER in each.source or REDUCE in each.source


def _reductions_per_microbatch(facts: Facts) -> Iterator[str]:
    """At stages 0 and 1 gradients add up on each device, and cross `data` once."""
    if facts.stage > 1:
        return
    reductions = [
        each
        for each in facts.collectives
        if each.op in ("all-reduce", "reduce-scatter") and DATA in each.axis.split("+") and each.in_loop
    ]
    if sum(_counted(each).volume_elements for each in reductions) > EXTRA_SHARE * facts.shard_params:
        yield (
            f"sums over {DATA} inside a loop, {_several(reductions)}: stage {facts.stage} reduces gradients once per "
            "update; something sums over the batch inside the loss"
        )


def _more_than_zero(facts: Facts) -> Iterator[str]:
    for axis in axis_traffic(facts):
        if axis.promise is not None and axis.psi > (1 + EXTRA_SHARE) * axis.promise:
            yield (
                f"{axis.psi:.3g} psi cross {axis.axis}, and ZeRO stage {facts.stage} needs {axis.promise:g}: "
                "see its largest collectives above; a loss that sums over the batch itself is the usual cause"
            )


def _reshapes(facts: Facts) -> Iterator[str]:
    """Collectives that move what is there already into other places."""
    groups: dict[tuple[str, str], list[Collective]] = collections.defaultdict(list)
    for each in facts.collectives:
        moves = each.op in ("all-to-all", "ragged-all-to-all", "collective-permute")
        if moves and each.elements >= _local_tokens(facts):
            groups[each.op, each.axis].append(each)
    for (op, axis), group in groups.items():
        yield (
            f"{op} over {axis}, {_several(group)}: a cut dim is split, merged or shifted there, as when q, k and v are "
            "taken out of one dim of 3 x d (give each part a dim of its own), or what meets there is cut in two ways"
        )


def _local_tokens(facts: Facts) -> int:
    """Tokens of a microbatch in one model group: an activation has at least as many elements."""
    return facts.tokens // facts.microbatches // math.prod(size for axis, size in facts.mesh.items() if axis != MODEL)


def _wide_gathers(facts: Facts) -> Iterator[str]:
    """XLA on CPU widens all of them, so there they tell nothing."""
    if facts.platform == "cpu" or facts.compute == "float32":
        return
    least = EXTRA_SHARE * facts.shard_params
    wide = [each for each in facts.collectives if each.op == "all-gather" and each.axis == DATA and each.dtype == "f32"]
    if sum(_counted(each).volume_elements for each in wide) > least:
        largest = max(wide, key=lambda each: each.bytes)
        yield (
            f"weights cross {DATA} in float32, {_size(largest)} at {place(largest)}, though the model "
            f"computes in {facts.compute}: twice the bytes; the compiler has moved a cast, please report it"
        )


def _model_leaves_node(facts: Facts) -> Iterator[str]:
    for axis in axis_traffic(facts):
        if axis.axis == MODEL and axis.leaves_node:
            per_node = facts.cluster.gpus_per_node
            yield (
                f"mesh.model={facts.mesh[MODEL]} spans {axis.nodes} nodes of {per_node} GPUs: {show_bytes(axis.bytes)} "
                f"of activations cross the network in each update, exposed: use a divisor of {per_node}"
            )


def _unknown_counts(facts: Facts) -> Iterator[str]:
    unknown = [each for each in facts.collectives if each.count is None]
    if unknown:
        yield (
            f"{len(unknown)} collectives lie in loops whose length the compiler does not know, and are counted once: "
            f"use lax.scan or a fixed number of turns; the first is at {place(unknown[0])}"
        )


def _size(each: Collective) -> str:
    times = "" if each.count in (None, 1) else f"{each.count} times "
    return f"{times}{show_bytes(each.bytes)}"


def _several(group: Sequence[Collective]) -> str:
    """How many times, how much in all, and which is the largest."""
    largest = max(group, key=lambda each: _counted(each).volume)
    times = sum(_counted(each).count or 0 for each in group)
    if times == 1:
        return f"{show_bytes(largest.bytes)} at {place(largest)}"
    total = show_bytes(sum(_counted(each).volume for each in group))
    return f"{times} times, {total} in all, the most at {place(largest)} ({_size(largest)})"
