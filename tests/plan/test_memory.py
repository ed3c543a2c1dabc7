"""The parts of a step's memory: what is exact, that all of it adds up, and what each buffer is taken for."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest

from meshtrain import Precision
from meshtrain.plan.buffers import Buffer, peak_buffers
from meshtrain.plan.memory import ACTIVATIONS, GRADIENTS, TEMPORARIES, WEIGHTS, memory_parts, state_parts
from meshtrain.state import state_bytes_per_device
from tests.tiny_gpt import SIZES, make_engine

DEEP = dataclasses.replace(SIZES, num_layers=6, remat="full")


def compiled(engine: Any, folder: Path) -> tuple[Any, list[Buffer]]:
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_proto": True}
    stats = engine.lower().compile(compiler_options=options).memory_analysis()
    (file,) = folder.glob("*jit_train_step*after_optimizations.hlo.pb")
    return stats, peak_buffers(file.read_bytes())


def sizes(parts: Any) -> dict[str, int]:
    return {part.name: part.bytes for part in parts}


@pytest.mark.parametrize(("data", "stage"), [(1, 0), (4, 2)])
def test_the_parts_are_all_that_the_compiler_allocates(tmp_path: Path, data: int, stage: int) -> None:
    engine = make_engine(data, 2, stage, sizes=DEEP)
    stats, buffers = compiled(engine, tmp_path)
    parts = memory_parts(engine, stats, buffers)
    new = stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert sum(part.bytes for part in parts) == stats.argument_size_in_bytes + stats.temp_size_in_bytes + new
    assert all(part.bytes >= 0 for part in parts)
    exact = {part.name for part in parts if not part.estimated}
    assert exact == {"parameters", "optimizer state", "other", "batch"}
    records = 32 // data * SIZES.seq_len
    assert sizes(parts)["batch"] == records * (4 + 4 + 4)  # tokens, targets, weights


def test_saved_activations_are_found(tmp_path: Path) -> None:
    """With full recomputation at least each layer's input is kept: [layers, batch, seq, dim] in float32."""
    engine = make_engine(2, 1, 1, sizes=DEEP)
    found = sizes(memory_parts(engine, *compiled(engine, tmp_path)))
    saved = 4 * DEEP.num_layers * 16 * DEEP.seq_len * DEEP.dim
    assert saved <= found[ACTIVATIONS] < 2 * saved


def test_weights_that_stay_whole_are_found(tmp_path: Path) -> None:
    """All kernels of the blocks, gathered once for the step."""
    engine = make_engine(4, 1, 2, sizes=DEEP)
    found = sizes(memory_parts(engine, *compiled(engine, tmp_path)))
    kernels = 4 * 12 * DEEP.num_layers * DEEP.dim**2
    assert kernels <= found[WEIGHTS] < 2 * kernels


def test_without_buffers_the_temporaries_stay_one(tmp_path: Path) -> None:
    engine = make_engine(2, 2, 1)
    stats, _ = compiled(engine, tmp_path)
    parts = memory_parts(engine, stats, None)
    assert [part.name for part in parts] == ["parameters", "optimizer state", "other", "batch", TEMPORARIES]
    assert not any(part.estimated for part in parts)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_states_parts_are_the_state(stage: int) -> None:
    state = make_engine(4, 2, stage).abstract_state()
    held = state_parts(state)
    assert sum(held.values()) == state_bytes_per_device(state)
    assert held["optimizer state"] == 2 * held["parameters"] + 4  # Adam's two moments and its count
    assert held["other"] == 4 + 8  # the step; the loss scale and its count


STEP, GRAD, LOOP = "jit(train_step)/shard_map", "transpose(jvp())", "while/body/closed_call"
D, LAYERS = DEEP.dim, DEEP.num_layers


@pytest.mark.parametrize(
    ("op_name", "dtype", "dims", "part"),
    [
        (f"{STEP}/gather_weights/broadcast_in_dim", "bf16", (LAYERS, D, 2 * D), WEIGHTS),
        (f"{STEP}/{GRAD}/{LOOP}/gather_weights/all_gather", "bf16", (D, 2 * D), WEIGHTS),
        ("", "bf16", (LAYERS, 2 * D, D), WEIGHTS),  # a copy, which the compiler gives no name
        (f"{STEP}/{GRAD}/while/body/dynamic_slice", "bf16", (1, D, 2 * D), WEIGHTS),
        (f"{STEP}/broadcast_in_dim", "f32", (LAYERS, D, 2 * D), GRADIENTS),  # where microbatches add up
        (f"{STEP}/{GRAD}/broadcast_in_dim", "bf16", (LAYERS, 2 * D, D), GRADIENTS),
        (f"{STEP}/{GRAD}/{LOOP}/reduce_gradients/reduce_scatter", "f32", (D, D // 2), GRADIENTS),
        (f"{STEP}/broadcast_in_dim", "bf16", (LAYERS, D, 2 * D), GRADIENTS),
        ("", "f32", (LAYERS, D // 4, 2 * D), GRADIENTS),  # a shard over data
        (f"{STEP}/jvp()/broadcast_in_dim", "bf16", (LAYERS, 8, 16, D), ACTIVATIONS),
        ("", "bf16", (LAYERS, 8, 16, D), ACTIVATIONS),
        (f"{STEP}/jvp(btd,vd->btv)/dot_general", "bf16", (128, 64), ACTIVATIONS),
        (f"{STEP}/{GRAD}/{LOOP}/checkpoint/rematted_computation/dot_general", "bf16", (128, D), TEMPORARIES),
        ("", "s32", (), TEMPORARIES),
    ],
)
def test_what_a_buffer_is_taken_for(op_name: str, dtype: str, dims: tuple[int, ...], part: str) -> None:
    """On data=4 x model=2 the MLP's kernels are [d, 2 d] in the step, of 4 d, and rest as [d / 4, 2 d]."""
    engine = make_engine(4, 2, 2, sizes=DEEP, precision=Precision.make("bfloat16"))
    parts = memory_parts(engine, _Stats(), [Buffer(10_000, "fusion", op_name, dtype, dims)])
    assert sizes(parts)[part] == (10_000 if part != TEMPORARIES else _Stats.temp_size_in_bytes)


@dataclasses.dataclass
class _Stats:
    argument_size_in_bytes: int = 100_000
    temp_size_in_bytes: int = 10_000
    output_size_in_bytes: int = 50
    alias_size_in_bytes: int = 50


def test_the_compilers_figures_are_there() -> None:
    stats = jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((64, 64), "float32")).compile().memory_analysis()
    assert all(isinstance(getattr(stats, field.name), int) for field in dataclasses.fields(_Stats))
