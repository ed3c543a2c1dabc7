"""What crosses each axis, read from the compiled step: ZeRO's volumes exactly, Megatron's all-reduces and no more."""

import dataclasses
import functools
import re

import numpy as np
import pytest

from meshtrain import Precision
from meshtrain.plan.hlo import Collective, collectives
from tests.tiny_gpt import BATCH, SIZES, make_batch, make_engine

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("collectives")]  # one worker: its tests share what they compute

LAYERS = SIZES.num_layers


@functools.cache
def compiled(
    data: int, model: int, stage: int, num_microbatches: int, sequence_parallel: bool = False, compute: str = "float32",
    reduce: str = "float32",
) -> tuple[Collective, ...]:  # fmt: skip
    engine = make_engine(
        data, model, stage, num_microbatches, sequence_parallel=sequence_parallel,
        precision=Precision.make(compute, reduce),
    )  # fmt: skip
    return tuple(collectives(engine.lower().compile().as_text(), dict(engine.mesh.shape)))


@functools.cache
def num_elements(model: int) -> tuple[int, int]:
    """Parameters that one model shard holds: inside the scanned blocks, and outside."""
    engine = make_engine(8 // model, model, 1)
    counts = [0, 0]
    for path, leaf in engine.layout.leaves.items():
        parts = model if "model" in str(leaf.compute_spec) else 1
        counts[not path.startswith("blocks/")] += int(np.prod(leaf.shape)) // parts
    return counts[0], counts[1]


def is_weight_sized(found: Collective) -> bool:
    """Leaves out the scalars: loss, token count, gradient norm."""
    return found.bytes > 4 * 64


def over_data(found: tuple[Collective, ...], op: str) -> list[Collective]:
    return [c for c in found if c.op == op and "data" in c.axis.split("+")]


def num_reduced(found: tuple[Collective, ...], op: str, itemsize: int) -> int:
    total = sum(c.bytes * c.count for c in over_data(found, op))
    assert total % itemsize == 0
    return total // itemsize


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("model", [1, 2])
def test_volume_over_data_is_the_table_of_zero(model: int, stage: int, num_microbatches: int) -> None:
    """In float32 elements, each side exactly. M microbatches, Psi parameters on a model shard."""
    found = compiled(8 // model, model, stage, num_microbatches)
    in_blocks, outside = num_elements(model)
    psi, m = in_blocks + outside, num_microbatches
    gathered = num_reduced(found, "all-gather", 4)
    scattered = num_reduced(found, "reduce-scatter", 4)
    reduced = sum(c.bytes * c.count for c in over_data(found, "all-reduce") if is_weight_sized(c)) // 4
    small = [c for c in over_data(found, "all-reduce") if not is_weight_sized(c)]
    assert all(c.count <= 2 and not c.in_loop for c in small)
    if stage == 0:
        assert (gathered, scattered) == (0, 0)
        scalars = reduced - psi  # the loss and the token count may share the gradients' all-reduce
        assert 0 <= scalars <= 2
        assert not any(c.in_loop for c in over_data(found, "all-reduce"))
    else:
        assert reduced == 0
        # Stage 3 gathers a block's weights (inside the scan over layers) for the forward and for the backward pass.
        # Those outside are gathered once or twice a microbatch: XLA may merge the two, or take one out of the loop.
        inside = sum(c.bytes * c.count for c in over_data(found, "all-gather") if c.count == LAYERS * m) // 4
        if stage == 3:
            assert inside == 2 * m * in_blocks
            assert outside <= gathered - inside <= 2 * m * outside
        else:
            assert gathered == psi
        assert scattered == {1: psi, 2: m * psi, 3: m * psi}[stage]
    if stage == 1:
        assert not any(c.in_loop for c in over_data(found, "all-gather") + over_data(found, "reduce-scatter"))
    if stage >= 2:
        assert any(c.in_loop for c in over_data(found, "reduce-scatter"))


@functools.cache
def asked_types(stage: int, reduce: str) -> dict[str, set[str]]:
    """Element types of the arrays in each collective that the step asks the compiler for, in a bf16 run.

    Read before compilation: XLA on CPU has neither 16-bit gathers nor 16-bit sums, and widens them.
    """
    text = make_engine(4, 2, stage, 1, precision=Precision.make("bfloat16", reduce)).lower().as_text()
    types: dict[str, set[str]] = {"all_gather": set(), "reduce_scatter": set(), "all_reduce": set()}
    for op, found in types.items():
        for shape in re.findall(rf'"stablehlo.{op}"\(.*?(?:}}>|}}\)) : \(tensor<([^>]*)>', text, re.DOTALL):
            if "x" in shape:  # not the scalars
                found.add(shape.split("x")[-1])
    return types


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_are_gathered_in_the_compute_type(stage: int) -> None:
    assert asked_types(stage, "float32")["all_gather"] == {"bf16"}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("reduce", "expected"), [("float32", "f32"), ("compute", "bf16")])
def test_gradients_are_reduced_in_the_type_asked_for(stage: int, reduce: str, expected: str) -> None:
    op = "all_reduce" if stage == 0 else "reduce_scatter"
    assert asked_types(stage, reduce)[op] == {expected}


@pytest.mark.parametrize("stage", [0, 1])
def test_a_16_bit_reduction_runs_where_there_is_none(stage: int) -> None:
    """XLA on CPU aborts on a 16-bit sum that is not fully manual."""
    engine = make_engine(4, 2, stage, 1, precision=Precision.make("bfloat16", "compute"))
    _, metrics = engine.step(engine.init(), make_batch())
    assert float(metrics["loss"]) == pytest.approx(np.log(SIZES.vocab_size), rel=0.02)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("data", "model"), [(1, 2), (4, 2), (2, 4)])
def test_model_axis_has_megatrons_all_reduces_and_no_weight(data: int, model: int, stage: int) -> None:
    """Two per layer forward, two backward (Shoeybi et al. 2019, figure 4), one for the lookup, one for the logits."""
    m = 2
    found = [c for c in compiled(data, model, stage, m) if c.axis == "model"]
    activation = BATCH // data // m * SIZES.seq_len * SIZES.dim * 4
    per_token = BATCH // data // m * SIZES.seq_len * 4
    assert {c.op for c in found} == {"all-reduce"}
    whole = sum(c.bytes // activation * c.count for c in found)
    # Where ZeRO-3 gathers again for the backward pass, it also computes the lookup and the loss's sums again.
    again = stage == 3
    assert whole == m * (4 * LAYERS + 1 + 1 + again)
    # The loss: the largest logit, the normalizer and the target's logit of each token; then the norm's scalars.
    rest = sum(c.bytes % activation * c.count for c in found)
    assert 3 * m * per_token <= rest <= (5 if again else 3) * m * per_token + 4 * 64


def test_sequence_parallelism_gathers_activations_and_no_weight() -> None:
    """Four gathers per layer, where the residual stream meets a branch, each beside a sum.

    On GPUs the sums become reduce-scatters (tests/plan/test_gpu_compile.py); XLA on CPU has no pass that does it.
    """
    found = [c for c in compiled(2, 4, 1, 1, sequence_parallel=True) if c.axis == "model"]
    activation = BATCH // 2 * SIZES.seq_len * SIZES.dim * 4
    gathers = [c for c in found if c.op == "all-gather"]
    positions = SIZES.seq_len * SIZES.dim * 4  # the gradient of the position table, cut as the sequence is
    assert {c.bytes for c in gathers} <= {activation, positions}
    assert sum(c.count for c in gathers if c.in_loop) == 4 * LAYERS
    sums = [c for c in found if c.op == "all-reduce" and c.in_loop]
    assert sum(c.bytes // activation * c.count for c in sums) == 4 * LAYERS


def test_no_collective_has_an_unknown_count() -> None:
    assert all(c.count is not None for stage in range(4) for c in compiled(4, 2, stage, 2))
    assert not any(c.op == "all-to-all" for stage in range(4) for c in compiled(4, 2, stage, 2))


@pytest.mark.slow
def test_remat_gathers_once_more_only_where_it_computes_again() -> None:
    """With every block recomputed, stage 3 still gathers each block's weights twice, not three times."""
    sizes = dataclasses.replace(SIZES, remat="full")
    engine = make_engine(4, 2, 3, 2, sizes=sizes)
    found = tuple(collectives(engine.lower().compile().as_text(), dict(engine.mesh.shape)))
    in_blocks, _ = num_elements(2)
    inside = sum(c.bytes * c.count for c in over_data(found, "all-gather") if c.count == LAYERS * 2) // 4
    biases = LAYERS * SIZES.dim  # of the MLPs' outputs: nothing that is computed again needs them
    assert inside == 2 * (2 * in_blocks - biases)
