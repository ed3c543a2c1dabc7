"""Buffers at the peak: of programs compiled here, whose temporaries the compiler also sums up, and of made messages."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from meshtrain.plan.buffers import Buffer, peak_buffers

LAYERS, BATCH, WIDTH = 4, 64, 256


def varint(number: int) -> bytes:
    out = b""
    while True:
        number, low = number >> 7, number & 127
        out += bytes([low | 128 * bool(number)])
        if not number:
            return out


def message(*fields: tuple[int, int | bytes]) -> bytes:
    """The fields of a message, as protobuf writes them."""
    out = b""
    for number, value in fields:
        is_int = isinstance(value, int)
        out += varint(number << 3 | (0 if is_int else 2)) + (varint(value) if is_int else varint(len(value)) + value)
    return out


def instruction(number: int, opcode: bytes, op_name: bytes, dims: tuple[int, ...]) -> bytes:
    shape = message((2, 11), (3, b"".join(map(varint, dims))))
    return message((2, opcode), (3, shape), (7, message((2, op_name))), (35, number))


def event(kind: int, buffer: int, shares: int = 0) -> tuple[int, bytes]:
    return 1, message((1, kind), (2, buffer), (5, shares))


ALLOCATE, FREE, SHARE = 0, 1, 2


def dump(sizes: dict[int, int], *events: tuple[int, bytes]) -> bytes:
    """A program whose instruction `n` makes buffer `n`."""
    made = [(2, instruction(n, b"fusion", b"jit(f)/op_%d" % n, (n, 2))) for n in sizes]
    buffers = [(1, message((1, n), (2, size), (3, message((4, n))))) for n, size in sizes.items()]
    return message((1, message((3, message(*made)))), (3, message(*buffers, (4, message(*events)))))


def test_what_is_alive_when_most_bytes_are() -> None:
    events = [event(ALLOCATE, 1), event(ALLOCATE, 2), event(FREE, 1), event(ALLOCATE, 3), event(FREE, 2)]
    found = peak_buffers(dump({1: 10, 2: 100, 3: 50}, *events))
    assert [(buffer.bytes, buffer.op_name, buffer.dims) for buffer in found] == [
        (100, "jit(f)/op_2", (2, 2)),
        (50, "jit(f)/op_3", (3, 2)),
    ]
    assert {buffer.dtype for buffer in found} == {"f32"}


def test_a_block_that_two_share_is_one_and_lives_until_both_are_freed() -> None:
    events = [event(ALLOCATE, 1), event(SHARE, 2, 1), event(FREE, 1), event(ALLOCATE, 3), event(FREE, 2)]
    assert [buffer.bytes for buffer in peak_buffers(dump({1: 100, 2: 100, 3: 7}, *events))] == [100, 7]


def scan(x: jax.Array, weights: jax.Array) -> jax.Array:
    last, kept = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, weights)
    return (kept**2).sum() + last.sum()


def test_the_buffers_of_a_program_are_the_compilers_temporaries(tmp_path: Path) -> None:
    """To the few hundred bytes that alignment takes; the saved inputs of each layer are there by their shape."""
    shapes = (BATCH, WIDTH), (LAYERS, WIDTH, WIDTH)
    lowered = jax.jit(jax.grad(scan, 1)).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_proto": True}
    temporaries = lowered.compile(compiler_options=options).memory_analysis().temp_size_in_bytes
    (file,) = tmp_path.glob("*after_optimizations.hlo.pb")
    found = peak_buffers(file.read_bytes())
    assert 0 <= temporaries - sum(buffer.bytes for buffer in found) < 1024
    assert [buffer.bytes for buffer in found] == sorted((buffer.bytes for buffer in found), reverse=True)
    stacks = [buffer for buffer in found if buffer.dims == (LAYERS, BATCH, WIDTH)]
    assert {(buffer.bytes, buffer.dtype) for buffer in stacks} == {(4 * LAYERS * BATCH * WIDTH, "f32")}
    assert any("jvp" in buffer.op_name for buffer in found)


def test_a_type_that_is_not_known_has_no_name() -> None:
    made = dump({1: 10}, event(ALLOCATE, 1)).replace(message((2, 11)), message((2, 99)))
    assert peak_buffers(made) == [Buffer(10, "fusion", "jit(f)/op_1", "?", (1, 2))]


@pytest.mark.parametrize(
    "damaged", [b"", b"no message", dump({1: 10}, event(ALLOCATE, 1))[:-3], message((1, b"")), b"\xff" * 20]
)
def test_damaged_dumps_are_refused(damaged: bytes) -> None:
    with pytest.raises(ValueError, match="protocol buffer|HloProto"):
        peak_buffers(damaged)
