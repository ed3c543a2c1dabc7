"""What crosses each axis: sums and rows of made programs, nothing found in good layouts, every planted fault found."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from meshtrain import Engine, from_function, from_nnx, initialize, make_mesh
from meshtrain.plan.facts import Cluster, Facts
from meshtrain.plan.hlo import Collective, collectives
from meshtrain.plan.traffic import axis_traffic, findings, place, rows, zero_volume
from models.gpt import GPT
from tests.plan.made_facts import FACTS, collective, made
from tests.tiny_gpt import SIZES, make_batch, make_engine

NODE = Cluster("h100", 1, 8)


def facts_of(engine: Engine, tokens: int = 32 * SIZES.seq_len, num_microbatches: int = 1) -> Facts:
    """What compiling for virtual CPU devices tells of an engine's communication."""
    shape = dict(engine.mesh.shape)
    return made(
        cluster=NODE,
        platform="cpu",
        mesh=shape,
        stage=engine.layout.stage,
        microbatches=num_microbatches,
        compute="float32",
        tokens=tokens,
        params=engine.layout.num_params,
        shard_params=sum(map(engine.layout.compute_size, engine.layout.leaves.values())),
        collectives=tuple(collectives(engine.lower().compile().as_text(), shape)),
        weight_shapes={path: leaf.shape for path, leaf in engine.layout.leaves.items()},
    )


def texts(facts: Facts) -> list[str]:
    return [str(finding) for finding in findings(facts)]


# ---------------------------------------------------------------- sums and rows


def test_sums_by_axis_in_bytes_and_psi() -> None:
    """1e9 parameters on model=4: a gather of half of a shard and a scatter of the whole; all-reduces count twice."""
    data, model = axis_traffic(FACTS)
    assert (data.axis, data.bytes, data.psi, data.promise) == ("data", 1_500_000_000, 3.0, 2)
    assert (model.axis, model.bytes, model.promise) == ("model", 2 * 96 * 8_000_000, None)
    assert (data.nodes, model.nodes) == (2, 1)  # devices are numbered row by row, model innermost
    assert data.leaves_node
    assert not model.leaves_node


@pytest.mark.parametrize(
    ("stage", "microbatches", "psi"), [(0, 4, 2), (1, 4, 2), (2, 1, 2), (2, 4, 5), (3, 1, 3), (3, 4, 12)]
)
def test_zeros_volume(stage: int, microbatches: int, psi: int) -> None:
    assert zero_volume(stage, microbatches) == psi


def test_a_loop_of_unknown_length_counts_once() -> None:
    facts = made(collectives=(collective("all-gather", "data", 4, None, 1000),))
    assert [each.bytes for each in axis_traffic(facts)] == [1000]
    assert rows(facts)[0].count is None


def weight(op: str, elements: int, scope: str, **changes: Any) -> Collective:
    made_one = Collective(
        op, "data", 4, 24, 2 * elements, elements, "bf16", True, False, f"jit(f)/{scope}/x (z.py:3)", "b"
    )
    return dataclasses.replace(made_one, **changes)


def test_rows_say_which_parameter_is_carried() -> None:
    """A stack of 24 layers of [1024, 4096], cut by model=4: whole or one layer of it."""
    one = 1024 * 4096 // 4
    facts = made(
        collectives=(
            weight("all-gather", one, "gather_weights"),
            weight("reduce-scatter", one, "transpose(jvp(reduce_gradients))", dtype="f32", bytes=4 * one),
            weight("all-gather", 24 * one, "gather_weights", count=1),
            weight("all-gather", 12_345_678, "gather_weights", count=1),
            weight("all-reduce", 2, "sum", count=1, in_loop=False),
        )
    )
    found = [(row.op, row.count, row.volume, row.what) for row in rows(facts)]
    assert found == [
        ("reduce-scatter", 24, 24 * 4 * one, "gradients: blocks/up/kernel"),
        ("all-gather", 24, 24 * 2 * one, "weights: blocks/up/kernel"),
        ("all-gather", 1, 24 * 2 * one, "weights: blocks/up/kernel"),
        ("all-gather", 1, 2 * 12_345_678, "weights: several parameters at once"),
        ("all-reduce", 1, 2 * 4, "small ones: this is the largest"),
    ]


def test_alike_collectives_share_a_row() -> None:
    alike = weight("all-gather", 1 << 20, "gather_weights")
    (row,) = rows(made(collectives=(alike, alike)))
    assert (row.count, row.volume) == (48, 48 * alike.bytes)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("jit(f)/while/body/dot_general (/a/b/linear.py:298)", "dot_general, linear.py:298"),
        ("jit(f)/dot_general", "dot_general"),
        ("jit(f)/(psum:reduce_sum:reduce_sum) (/a/b.py:7)", "psum+reduce_sum, b.py:7"),
        ("", "not told by the compiler"),
    ],
)
def test_a_place_is_the_operation_and_the_line(source: str, expected: str) -> None:
    assert place(dataclasses.replace(FACTS.collectives[0], source=source)) == expected


# ---------------------------------------------------------------- good layouts


@pytest.mark.slow
@pytest.mark.parametrize(("data", "model"), [(1, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize(("stage", "num_microbatches"), [(0, 1), (0, 2), (1, 2), (2, 2), (3, 1)])
def test_nothing_is_found_in_our_own_layouts(data: int, model: int, stage: int, num_microbatches: int) -> None:
    engine = make_engine(data, model, stage, num_microbatches, sequence_parallel=model == 4)
    facts = facts_of(engine, num_microbatches=num_microbatches)
    assert texts(facts) == []
    assert (not facts.collectives) == (data * model == 1)
    if model == 1 and data > 1:
        (over_data,) = axis_traffic(facts)
        assert over_data.psi == pytest.approx(zero_volume(stage, num_microbatches), rel=1e-3)


# ---------------------------------------------------------------- planted faults

D, HEADS = 64, 4


def attention_like(params: Any, batch: Any, key: Any) -> Any:
    """q, k and v from one packed dim, as many models have it."""
    x = params["embed"][batch["tokens"]]
    q, k, v = jnp.split(x @ params["qkv"], 3, axis=-1)
    mixed = jnp.tanh(q * k) * v
    logits = jnp.tanh(mixed @ params["up"]) @ params["down"]
    return (logits.sum(-1) ** 2).sum(), jnp.float32(batch["tokens"].size)


def engine_with(rules: Any, data: int = 2, model: int = 4, stage: int = 1) -> Engine:
    def init(key: Any) -> Any:
        shapes = {"embed": (32, D), "qkv": (D, 3 * D), "up": (D, 4 * D), "down": (4 * D, D)}
        return {name: jnp.ones(shape) for name, shape in shapes.items()}

    batch = {"tokens": np.zeros((8, 128), np.int32)}
    return initialize(
        from_function(init, attention_like), batch, mesh=make_mesh(data, model), rules=rules,
        optimizer=optax.sgd(0.1), stage=stage,
    )  # fmt: skip


GOOD = [("up", P(None, "model")), ("down", P("model", None)), (".*", P())]


def test_the_model_of_the_faults_is_good_without_them() -> None:
    assert texts(facts_of(engine_with(GOOD), tokens=8 * 128)) == []


def test_two_products_cut_in_the_dim_that_they_keep() -> None:
    """The second needs its input whole: XLA gathers the hidden layer, [4, 128, 4 D] in float32, and no weight."""
    rules = [("up", P(None, "model")), ("down", P(None, "model")), (".*", P())]
    (found,) = texts(facts_of(engine_with(rules), tokens=8 * 128))
    # jax 0.10's XLA names the gather after what reads the hidden layer, later ones after what makes it.
    name = "dot_general" if jax.__version_info__ < (0, 11) else "tanh"
    assert found.startswith(f"activations are gathered over model, 524.3 kB at {name}, test_traffic.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sequence_parallel", "told"),
    [
        # The residual stream comes out of the lookup cut, and every product gathers its input.
        (False, r"activations are gathered over model, 1\d times, .* at dot_general, linear.py"),
        # The stream is cut along its sequence instead, and the logits gather the table.
        (True, r"'wte/embedding' \(or one of its shape\) is gathered over model, 8.2 kB, at dot_general, losses.py"),
    ],
)
def test_a_table_cut_along_its_width(sequence_parallel: bool, told: str) -> None:
    rules = [("wte/embedding", P(None, "model")), *(rule for rule in GPT.rules if "wte" not in rule[0])]
    engine = initialize(
        from_nnx(lambda rngs: GPT(SIZES, rngs=rngs), GPT.loss), make_batch(), mesh=make_mesh(4, 2), rules=rules,
        optimizer=optax.sgd(0.1), stage=1, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    (found,) = texts(facts_of(engine))
    assert re.match(told, found)


def test_a_packed_dim_that_is_split() -> None:
    rules = [("qkv", P(None, "model")), *GOOD]
    found = texts(facts_of(engine_with(rules), tokens=8 * 128))
    assert any("a cut dim is split" in text for text in found), found


LARGE = 250_000_000 // 20  # elements: 5 % of a model shard of `FACTS`


@pytest.mark.parametrize(
    ("changes", "planted", "told"),
    [
        ({}, {"op": "reduce-scatter", "in_loop": True, "count": 2}, "stage 1 reduces gradients once per update"),
        (
            {},
            {"op": "all-gather", "axis": "model"},
            "activations are gathered over model, 25.0 MB at x, z.py:3",
        ),
        (
            {},
            {"op": "all-gather", "axis": "model", "dims": (4096, 1024)},
            "'blocks/up/kernel' .* is gathered over model",
        ),
        ({}, {"op": "all-gather", "count": 50}, "psi cross data, and ZeRO stage 1 needs 2"),
        ({}, {"op": "all-gather", "dtype": "f32"}, "weights cross data in float32"),
        ({}, {"op": "all-to-all", "axis": "model"}, "all-to-all over model"),
        ({}, {"op": "collective-permute", "axis": "model"}, "collective-permute over model"),
        ({}, {"op": "all-reduce", "count": None}, "loops whose length the compiler does not know"),
        (
            {"cluster": Cluster("h100", 8, 2)},
            {"op": "all-reduce", "axis": "model"},
            "mesh.model=4 spans 2 nodes of 2 GPUs: .* use a divisor of 2",
        ),
    ],
)
def test_planted_in_a_made_program(changes: dict[str, Any], planted: dict[str, Any], told: str) -> None:
    """Beside what the stage needs, and nothing else is found."""
    needed = [
        weight("all-gather", 125_000_000, "gather_weights", count=1, in_loop=False),
        weight("reduce-scatter", 250_000_000, "reduce_gradients", count=1, in_loop=False),
    ]
    assert texts(made(collectives=tuple(needed))) == []
    fault = weight("", LARGE, "dot_general", count=1, in_loop=False)
    found = findings(made(collectives=(*needed, dataclasses.replace(fault, **planted)), **changes))
    assert len(found) == 1
    assert re.search(told, str(found[0]))


def test_widened_gathers_tell_nothing_on_cpu() -> None:
    wide = weight("all-gather", LARGE, "gather_weights", count=1, dtype="f32")
    assert texts(made(collectives=(wide,), platform="cpu")) == []


def test_many_small_reductions_in_a_loop_are_one_finding() -> None:
    """As of a model whose layers are not stacked: each is 1 % of the parameters."""
    gathered = weight("all-gather", 125_000_000, "gather_weights", count=1, in_loop=False)
    each = weight("reduce-scatter", 2_500_000, "psum", count=1)
    assert texts(made(collectives=(gathered, each, each))) == []
    (found,) = texts(made(collectives=(gathered, each, each, each)))
    assert found.startswith("sums over data inside a loop, 3 times, 15.0 MB in all, the most at x, z.py:3 (5.0 MB)")


def test_activations_that_a_named_point_gathers_are_asked_for() -> None:
    """Even where their shape is a weight's: one record of [1024, 4096], as of a trillion parameters."""
    source = "jit(f)/jvp()/while/body/sharding_constraint (activations.py:82)"
    asked = weight("all-gather", 1024 * 4096, "", axis="model", dims=(1, 1024, 4096), source=source)
    assert texts(made(collectives=(asked,))) == []
