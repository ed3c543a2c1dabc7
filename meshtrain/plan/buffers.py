"""Reads which buffers a compiled program holds at its peak, from the protocol buffer that XLA dumps.

    lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_proto": True})
    for buffer in peak_buffers(folder / "...after_optimizations.hlo.pb"):
        print(buffer.bytes, buffer.dtype, buffer.dims, buffer.op_name)

XLA decides where each value lies by simulating a heap over the program's schedule, and the dump holds that simulation
(`HeapSimulatorTrace`). Played again, it tells what is alive at the moment at which most bytes are. Only what is needed
of the format is read: a message is a list of (field number, value), and the numbers used here are those of
xla/service/hlo.proto and xla/xla_data.proto.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

# PrimitiveType in xla_data.proto, for the types a training step has.
_DTYPES = {
    1: "pred", 2: "s8", 3: "s16", 4: "s32", 5: "s64", 6: "u8", 7: "u16", 8: "u32", 9: "u64", 10: "f16", 11: "f32",
    12: "f64", 13: "tuple", 16: "bf16", 19: "f8e5m2", 20: "f8e4m3fn",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A value that has memory of its own at the peak.

    Attributes:
        bytes: its size on one device.
        opcode: of the HLO instruction that makes it.
        op_name: the jax operation, as a path of transformations; empty where the compiler made it up.
        dtype: as HLO writes it, such as "bf16".
        dims: its shape, as the compiler lays it out.
    """

    bytes: int
    opcode: str
    op_name: str
    dtype: str
    dims: tuple[int, ...]


def peak_buffers(dump: bytes) -> list[Buffer]:
    """The temporaries alive at the peak, largest first. Arguments are not among them.

    Args:
        dump: an `HloProto`, as a file `*after_optimizations.hlo.pb` holds it.

    Raises:
        ValueError: the bytes are no such message.
    """
    message = dict(_fields(dump))
    if 1 not in message or 3 not in message:
        raise ValueError("not an HloProto with a buffer assignment")
    instructions = _instructions(message[1])
    sizes, places, traces = {}, {}, []
    for number, value in _fields(message[3]):
        if number == 1:  # LogicalBufferProto
            fields = dict(_fields(value))
            location = _collect(fields.get(3, b""))
            sizes[fields.get(1, 0)] = fields.get(2, 0)
            places[fields.get(1, 0)] = (location.get(4, [0])[-1], _integers(location.get(3, [])))
        elif number == 4:
            traces.append(value)
    alive = [buffer for trace in traces for buffer in _alive_at_peak(trace, sizes)]
    found = [_buffer(sizes[buffer], *places[buffer], instructions) for buffer in alive]
    return sorted(found, key=lambda buffer: -buffer.bytes)


def _alive_at_peak(trace: bytes, sizes: dict[int, int]) -> list[int]:
    """Ids of the buffers that have memory of their own when most bytes do; one that shares another's has none.

    A shared block lives until the last of those that share it is freed.
    """
    owner: dict[int, int] = {}
    users: dict[int, int] = {}
    total = peak = 0
    best: list[int] = []
    for number, value in _fields(trace):
        if number != 1:
            continue
        event = dict(_fields(value))
        kind, buffer = event.get(1, 0), event.get(2, 0)
        if kind == 1:
            root = owner.pop(buffer)
            users[root] -= 1
            if not users[root]:
                del users[root]
                total -= sizes[root]
        else:
            root = owner[buffer] = owner.get(event.get(5, 0), event.get(5, 0)) if kind == 2 else buffer
            total += 0 if root in users else sizes[root]
            users[root] = users.get(root, 0) + 1
        if total > peak:
            peak, best = total, list(users)
    return best


def _buffer(size: int, instruction: int, index: tuple[int, ...], instructions: dict[int, tuple[Any, ...]]) -> Buffer:
    opcode, op_name, shape = instructions.get(instruction, ("", "", b""))
    for place in index:
        shape = _collect(shape)[4][place]
    fields = _collect(shape)
    return Buffer(size, opcode, op_name, _DTYPES.get(fields.get(2, [0])[0], "?"), _integers(fields.get(3, [])))


def _instructions(module: bytes) -> dict[int, tuple[str, str, bytes]]:
    """Opcode, jax operation and ShapeProto of every instruction, by id."""
    found = {}
    for computation in _collect(module).get(3, []):
        for text in _collect(computation).get(2, []):
            fields = dict(_fields(text))
            op_name = dict(_fields(fields.get(7, b""))).get(2, b"").decode()
            found[fields.get(35, 0)] = (fields[2].decode(), op_name, fields.get(3, b""))
    return found


def _collect(message: bytes) -> dict[int, list[Any]]:
    """The fields of a message by number, repeated ones in order."""
    found: dict[int, list[Any]] = {}
    for number, value in _fields(message):
        found.setdefault(number, []).append(value)
    return found


def _integers(values: list[Any]) -> tuple[int, ...]:
    """A repeated integer field, whose values may come packed."""
    found: list[int] = []
    for value in values:
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            number, at = _varint(value, at)
            found.append(number)
    return tuple(found)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The (field number, value) of a message: protobuf's wire format, https://protobuf.dev/programming-guides/encoding."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"not a protocol buffer: wire type {wire}")
        size, at = _varint(message, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
        if at + size > len(message):
            raise ValueError("a protocol buffer that is cut short")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message):
            raise ValueError("a protocol buffer that is cut short")
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
