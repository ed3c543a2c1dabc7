"""Reads compiled HLO text and lists its collectives, with the trip counts of the loops around them multiplied in.

    compiled = jax.jit(step).lower(state, batch).compile()
    for found in collectives(compiled.as_text(), {"data": 4, "model": 2}):
        print(found.op, found.axis, found.count, found.bytes, found.source)

HLO text holds one instruction a line, in named blocks (*computations*) that call one another:

    %body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
      %g = f32[16]{0} all-gather(%x), channel_id=1, replica_groups={{0,2},{1,3}}, dimensions={0}, metadata={...}
    }
    ENTRY %main (a: f32[8]) -> f32[8] {
      %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"4"}}
    }

So three passes suffice: cut the text into computations, count how often each is executed from the entry down, and
describe the collectives in those that are. What the figures mean:
- *Devices* are numbered as in the text: by their place in the mesh, flattened row-major in the order of its axes.
- *Trip counts* come from the compiler where it knows them; else from a loop condition that compares one counter with
  one constant, taken to count up from 0 by 1, as `lax.scan` and `lax.fori_loop(0, n)` do. Otherwise `count` is None.
- *Conditionals*: every branch counts as if it were taken, so counts there are upper bounds.
- *Types* are the compiler's. XLA on CPU moves every bf16 collective as f32 (float16 it leaves alone) and marks only the
  reductions that it widens so, which have `promoted` set. Figures in elements do not depend on that.
- *Asynchronous* forms (GPU) count once, at their `-start`. Groups of one device move nothing and are left out, and
  point-to-point `send` and `recv` are not read.
"""

import dataclasses
import graphlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshtrain.errors import MeshError

Groups = Sequence[NDArray[np.int64]]  # the devices of each group

OPS = (
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all",
    "reduce-scatter",
)  # fmt: skip

_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT\s+)?%?[\w.\-]+ = (?P<shape>.*?) (?P<op>[a-z][\w\-]*)\((?P<rest>.*)$")
_CALLEES = re.compile(r"\b(body|condition|calls|to_apply|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")
_ARRAY = re.compile(r"\b([a-z]+(\d*)\w*)\[([\d,<= ]*)\]")  # type, its bits (only pred names none), dims
_TRIP_COUNT = re.compile(r"known_trip_count\W+n\W+(\d+)")
_BOUND = re.compile(r"[su]\d+\[\]\S* constant\((-?\d+)\)")
_DIRECTION = re.compile(r"\bcompare\(.*\bdirection=(\w+)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program.

    Attributes:
        op: its kind, one of `OPS`, without `-start`.
        axis: the mesh axes along which the devices of a group differ, in mesh order: `"data"`, `"data+model"`.
        group_size: devices in one group (collective-permute: 2, a source and its target).
        count: executions per call of the program; None where the trip count of a loop around it is unknown.
        bytes, elements: size per device and execution of the buffer that is whole over `axis` (still a shard over
            other axes): the output of an all-gather, the input of a reduce-scatter, the buffer of the others.
        dtype: element type as HLO writes it, such as `"bf16"`; where several operands share one collective, their
            sizes are summed and their distinct types joined: `"bf16+f32"`.
        in_loop: whether a loop executes it.
        promoted: whether the compiler made a bf16 reduction one of f32.
        source: the jax operation and, where the text tells, `file:line`.
        computation: name of the computation that holds it.
        dims: of its result on one device, where that is one array; else empty.
    """

    op: str
    axis: str
    group_size: int
    count: int | None
    bytes: int
    elements: int
    dtype: str
    in_loop: bool
    promoted: bool
    source: str
    computation: str
    dims: tuple[int, ...] = ()

    @property
    def volume(self) -> int:
        """Bytes that each device sends per call of the program, in the limit of many devices in a ring.

        An all-reduce is a reduce-scatter and an all-gather, so twice its buffer; everything else is once (Rajbhandari
        et al. 2020, "ZeRO", section 7). Raises ValueError where `count` is unknown.
        """
        return self.bytes * self._weight

    @property
    def volume_elements(self) -> int:
        """The same in elements: what ZeRO's volumes, in units of parameters, are compared with."""
        return self.elements * self._weight

    @property
    def _weight(self) -> int:
        if self.count is None:
            raise ValueError(f"{self.op} of {self.source or self.computation}: its loop's trip count is unknown")
        return self.count * (2 if self.op == "all-reduce" else 1)


class _Instruction(NamedTuple):
    shape: str
    op: str
    rest: str  # operands and attributes: all that follows the opening bracket


def collectives(text: str, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """Lists the collectives of a compiled program: those of its entry first, then of what it calls.

    Args:
        text: `compiled.as_text()` of a CPU or GPU program, with jax 0.10 or 0.12.
        mesh_shape: axis name -> size in the order of the mesh's axes, such as `mesh.shape`.

    Raises:
        MeshError: the program was compiled for another number of devices than the mesh has.
        ValueError: the text holds no entry computation, or groups of a form that is not known.
    """
    header, num_devices = text.partition("\n")[0], math.prod(mesh_shape.values())
    sizes = [int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)]
    if sizes and math.prod(sizes) != num_devices:
        mesh = ", ".join(f"{axis}={size}" for axis, size in mesh_shape.items()) + f" has {num_devices}"
        raise MeshError(f"the program runs on {math.prod(sizes)} devices and the mesh {mesh}: give the one it is for")
    entry, computations = _parse(text)
    executions = _count_executions(entry, computations)
    locate = _Locations(text)
    found = []
    for name, (executed, in_loop) in executions.items():
        count = None if math.isnan(executed) else int(executed)
        for instruction in computations[name]:
            op = instruction.op.removesuffix("-start")
            axis, group_size = _axis(_groups(instruction.rest, mesh_shape), mesh_shape) if op in OPS else ("", 0)
            if axis:
                size, elements, dtype, dims = _buffer(instruction, op, group_size)
                promoted = bool(re.search(r"to_apply=%?[\w.\-]*promoted", instruction.rest))
                about = in_loop, promoted, locate.source(instruction.rest), name, dims
                found.append(Collective(op, axis, group_size, count, size, elements, dtype, *about))
    return found


def _parse(text: str) -> tuple[str, dict[str, list[_Instruction]]]:
    """Returns the name of the entry computation, and the instructions of every computation."""
    computations: dict[str, list[_Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = match[2]
            computations[current] = []
            entry = current if match[1] else entry
        elif current and (match := _INSTRUCTION.match(line)):
            computations[current].append(_Instruction(**match.groupdict()))
    if not entry:
        raise ValueError("not the text of a compiled program: it has no ENTRY computation")
    return entry, computations


def _calls(instruction: _Instruction) -> Iterator[tuple[str, str]]:
    """Yields `(attribute, computation)` for each computation that the instruction executes."""
    if instruction.op.endswith(("-done", "-update")):  # these repeat the attributes of their -start
        return
    for attribute, names in _CALLEES.findall(re.sub(r'"[^"]*"', "", instruction.rest)):
        yield from ((attribute, name) for name in re.findall(r"[\w.\-]+", names))


def _count_executions(entry: str, computations: Mapping[str, list[_Instruction]]) -> dict[str, tuple[float, bool]]:
    """`(executions, in a loop?)` of each computation that the entry reaches; the executions are nan where unknown."""
    order = graphlib.TopologicalSorter({entry: ()})  # callers first, then what they call
    for name, instructions in computations.items():
        for _, callee in itertools.chain.from_iterable(map(_calls, instructions)):
            order.add(callee, name)
    executions = {entry: (1.0, False)}
    for name in order.static_order():
        for instruction in computations[name] if name in executions else ():
            is_loop = instruction.op == "while"
            trips = _trip_count(instruction, computations) if is_loop else 1
            for attribute, callee in _calls(instruction):
                (count, in_loop), (before, was_in_loop) = executions[name], executions.get(callee, (0, False))
                times = trips + (attribute == "condition")  # evaluated once more, to end the loop
                executions[callee] = before + count * times, in_loop or was_in_loop or is_loop
    return executions


def _trip_count(loop: _Instruction, computations: Mapping[str, list[_Instruction]]) -> float:
    if known := _TRIP_COUNT.search(loop.rest):
        return int(known[1])
    lines = [line for kind, callee in _calls(loop) if kind == "condition" for line in computations[callee]]
    # The comparison itself may lie in a fusion that the condition calls.
    lines += [inner for line in lines for _, callee in _calls(line) for inner in computations[callee]]
    text = "\n".join(f"{line.shape} {line.op}({line.rest}" for line in lines)
    bounds, directions = _BOUND.findall(text), _DIRECTION.findall(text)
    if len(bounds) != 1 or directions not in (["LT"], ["LE"]):
        return math.nan
    return max(0, int(bounds[0]) + (directions == ["LE"]))


def _split(text: str) -> list[str]:
    """Splits at the commas outside all brackets, up to the first bracket that closes what `text` does not open."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            break
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def _buffer(instruction: _Instruction, op: str, group_size: int) -> tuple[int, int, str, tuple[int, ...]]:
    """Bytes, elements and element types of the buffer that is whole over the group, and the result's dims."""
    shape = instruction.shape
    if instruction.op.endswith("-start") and shape.startswith("("):
        parts = _split(shape[1:])
        # (inputs, outputs, ...); but an all-reduce-start of several operands may list its outputs alone, side by side.
        if op != "all-reduce" or parts[0].startswith("(") or len(parts) != len(_split(instruction.rest)):
            shape = parts[1]
    dtypes, bits, dims = zip(*_ARRAY.findall(shape), strict=True)
    shapes = [tuple(map(int, re.findall(r"\d+", text))) for text in dims]
    sizes = [math.prod(shape) for shape in shapes]
    num_bytes = sum(math.ceil(size * int(width or 8) / 8) for size, width in zip(sizes, bits, strict=True))
    scale = group_size if op == "reduce-scatter" else 1
    return scale * num_bytes, scale * sum(sizes), "+".join(dict.fromkeys(dtypes)), shapes[0] if len(shapes) == 1 else ()


def _groups(rest: str, mesh_shape: Mapping[str, int]) -> Groups:
    """The device groups (collective-permute: source and target) in any of the forms that XLA writes."""
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d, ]*\},?\s*)*)\}", rest):
        groups = [np.array(re.findall(r"\d+", group), np.int64) for group in re.findall(r"\{([^}]*)\}", match[1])]
        # {} is one group of all, and of a collective-permute no pair.
        return groups or [np.arange(math.prod(mesh_shape.values()) if "replica_groups" in match[0] else 1)]
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", rest):
        return list(_devices(match[2]).reshape([int(n) for n in match[1].split(",")]))
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", rest):
        return _mesh_groups(*match.groups())
    raise ValueError(f"a collective's device groups cannot be read in: {rest[:200]}")


def _mesh_groups(mesh: str, device_ids: str | None, axes: str) -> Groups:
    """Groups along named axes: `mesh['a'=4,'b'=2] {'a'}`, where `'a':(2)2` is the part of size 2 after one of 2."""
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", mesh)}
    ids = _devices(device_ids or f"[{math.prod(sizes.values())}]")
    chosen = re.findall(r"'?([^\s,':]+)'?(?::\((\d+)\)(\d+))?", axes)
    dims: list[int] = []
    inside: list[int] = []
    for name, size in sizes.items():
        parts = [(int(pre), int(part)) for axis, pre, part in chosen if axis == name and pre]
        cuts = sorted({1, size, *(pre for pre, _ in parts), *(pre * part for pre, part in parts)})
        for low, high in itertools.pairwise(cuts):
            if (name, "", "") in chosen or any(pre <= low and high <= pre * part for pre, part in parts):
                inside.append(len(dims))
            dims.append(high // low)
    outside = [dim for dim in range(len(dims)) if dim not in inside]
    return list(ids.reshape(dims).transpose(outside + inside).reshape(-1, math.prod(dims[i] for i in inside)))


def _devices(text: str) -> NDArray[np.int64]:
    """The devices of `0,2,1,3`, or of `[4,2]T(1,0)`: 0, 1, ... in an array of these dims, transposed, flat again."""
    if not (iota := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)):
        return np.array(re.findall(r"\d+", text), np.int64)
    dims, order = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
    return np.arange(math.prod(dims or ())).reshape(dims or ()).transpose(order).reshape(-1)


def _axis(groups: Groups, mesh_shape: Mapping[str, int]) -> tuple[str, int]:
    """The mesh axes along which members of a group differ (none: `""`), and the size of the largest group."""
    sizes = tuple(mesh_shape.values())
    differs = np.zeros(len(sizes), bool)
    for group in groups:
        places = np.stack(np.unravel_index(group, sizes))  # [axes, members]
        differs |= (places != places[:, :1]).any(axis=1)
    names = [name for name, differ in zip(mesh_shape, differs, strict=True) if differ]
    return "+".join(names), max(map(len, groups))


class _Locations:
    """Where an instruction comes from, by its metadata and the tables of files and stack frames above the program."""

    def __init__(self, text: str) -> None:
        self.files = dict(re.findall(r'^(\d+) "(.*)"$', text.partition("\nFunctionNames")[0], re.MULTILINE))
        places = re.findall(r"^(\d+) \{file_name_id=(\d+).*? line=(\d+)", text, re.MULTILINE)
        self.places = {place: at for place, *at in places}
        self.frames = dict(re.findall(r"^(\d+) \{file_location_id=(\d+)", text, re.MULTILINE))

    def source(self, rest: str) -> str:
        """`op_name (file:line)`, or as much of it as the metadata tells."""
        parts = re.findall(r'op_name="([^"]*)"', rest)[:1]
        if inline := re.search(r'source_file="([^"]*)" source_line=(\d+)', rest):
            parts.append(f"({inline[1]}:{inline[2]})")
        elif (frame := re.search(r"stack_frame_id=(\d+)", rest)) and frame[1] in self.frames:
            file, line = self.places[self.frames[frame[1]]]
            parts.append(f"({self.files[file]}:{line})")
        return " ".join(parts)
