"""Where parameters rest: the choice of ZeRO's dim, exact bytes, and the view in which a parameter enters the step."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshtrain.errors import RuleError
from meshtrain.layout import Layout, LeafLayout, make_layout, show_bytes, show_spec
from meshtrain.mesh import make_mesh
from meshtrain.rules import axes_of
from models.gpt import GPT
from tests.tiny_gpt import make_engine


def mesh_of(data: int, model: int) -> Mesh:
    return make_mesh(data, model, jax.devices()[: data * model])


def leaf_of(
    shape: tuple[int, ...], spec: P = P(), data: int = 4, model: int = 2, stage: int = 1, num_stacked: int = 0
) -> tuple[Layout, LeafLayout]:
    """The layout of one parameter, `w`."""
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    layout = make_layout(params, [("w", spec)], mesh_of(data, model), stage, {"w": num_stacked})
    return layout, layout.leaves["w"]


# ---------------------------------------------------------------- which dim


@pytest.mark.parametrize(
    ("shape", "spec", "storage"),
    [
        ((8,), P(), P("data")),
        ((8, 16), P(), P(None, "data")),  # the largest
        ((16, 8), P(), P("data", None)),
        ((16, 16), P(), P("data", None)),  # the first of two equal ones
        ((6, 8), P(), P(None, "data")),  # the largest that divides, of which there is one
        ((4, 18), P(), P("data", None)),
        ((8, 64), P(None, "model"), P("data", "model")),  # a whole dim goes before a larger one that model cuts
        ((3, 64), P(None, "model"), P(None, ("model", "data"))),
        ((3, 12), P(None, "model"), P(None, "model")),  # 12 / 2 = 6 does not divide by 4
        ((64, 3), P("model", None), P(("model", "data"), None)),
        ((3, 5), P(), P(None, None)),
        ((), P(), P()),
        ((0, 8), P(), P(None, "data")),
        ((1,), P(), P(None)),
    ],
)
def test_the_dim_that_zero_cuts(shape: tuple[int, ...], spec: P, storage: P) -> None:
    _, leaf = leaf_of(shape, spec)
    assert leaf.storage_spec == storage
    assert leaf.compute_spec == P(*(None,) * (len(shape) - len(spec)), *spec)


def test_stacked_dims_stay_whole() -> None:
    _, leaf = leaf_of((64, 8, 4), num_stacked=1)
    assert leaf.storage_spec == P(None, "data", None)
    assert leaf.zero_dim == -2  # counted from the end: the same inside the scan, where the parameter is (8, 4)
    _, leaf = leaf_of((64, 3, 5), num_stacked=1)
    assert leaf.zero_dim is None and leaf.why_replicated == "no dim divides by data=4"
    _, leaf = leaf_of((64, 64, 8), num_stacked=2)
    assert leaf.storage_spec == P(None, None, "data")
    _, leaf = leaf_of((8,), num_stacked=1)  # a scalar per layer
    assert leaf.zero_dim is None and leaf.why_replicated == "scalar"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"stage": 0}, "ZeRO stage 0"),
        ({"data": 1}, "data axis of size 1"),
        ({"shape": ()}, "scalar"),
        ({"shape": (3, 5)}, "no dim divides by data=4"),
        ({}, ""),
    ],
)
def test_a_replicated_parameter_says_why(changes: dict[str, Any], why: str) -> None:
    _, leaf = leaf_of(**({"shape": (8, 8)} | changes))
    assert leaf.why_replicated == why
    assert (leaf.zero_dim is None) == bool(why)
    if why:
        assert leaf.storage_spec == leaf.compute_spec


def test_stages_1_to_3_rest_alike_and_stage_0_is_replicated() -> None:
    resting = [make_engine(4, 2, stage).layout.shardings() for stage in (1, 2, 3)]
    assert resting[0] == resting[1] == resting[2]
    nothing = make_engine(4, 2, 0).layout
    assert all(leaf.storage_spec == leaf.compute_spec for leaf in nothing.leaves.values())
    assert not any("data" in axes_of(entry) for sharding in nothing.shardings().values() for entry in sharding.spec)


def test_the_layout_of_a_gpt() -> None:
    leaves = make_engine(4, 2, 2).layout.leaves  # 2 layers of 32, 8 heads, vocabulary padded to 64
    rest = {path: show_spec(leaf.storage_spec) for path, leaf in leaves.items()}
    assert rest["blocks/attn/qkv/kernel"] == "- data - model -"
    assert rest["blocks/attn/out/kernel"] == "- model - data"
    assert rest["blocks/mlp/up/kernel"] == "- data model"
    assert rest["blocks/mlp/up/bias"] == "- model+data"
    assert rest["blocks/ln_1/scale"] == "- data"
    assert rest["wte/embedding"] == "model data"
    assert all(leaf.num_stacked == path.startswith("blocks/") for path, leaf in leaves.items())


def test_errors_and_warnings_of_the_rules_come_through() -> None:
    params = {"wte/embedding": jax.ShapeDtypeStruct((17, 8), jnp.float32)}
    with pytest.raises(RuleError, match=r"'wte/embedding' dim 0 has size 17, which axis 'model' of size 2"):
        make_layout(params, GPT.rules, mesh_of(4, 2), 1)
    layout = make_layout(params, GPT.rules, mesh_of(8, 1), 1)
    assert any("mlp/up/kernel" in text for text in layout.warnings)


# ---------------------------------------------------------------- exact bytes, on any shape and mesh

MESHES = [(1, 1), (8, 1), (1, 8), (4, 2), (2, 4), (2, 2), (3, 2), (1, 2), (7, 1)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, LeafLayout]:
    """A parameter of any shape, with at most one dim cut over `model`, on any of the meshes."""
    data, model = draw(st.sampled_from(MESHES))
    dim = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 14, 16, 24])
    shape = tuple(draw(st.lists(dim, max_size=4)))
    num_stacked = draw(st.integers(0, min(1, len(shape))))
    cut = [i for i in range(num_stacked, len(shape)) if shape[i] % model == 0]
    chosen = draw(st.sampled_from([None, *cut]))
    spec = P(*("model" if i == chosen else None for i in range(len(shape))))
    return leaf_of(shape, spec, data, model, draw(st.integers(0, 3)), num_stacked)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_bytes_per_device_are_those_of_the_real_sharding(case: tuple[Layout, LeafLayout]) -> None:
    layout, leaf = case
    sharding = layout.sharding("w")
    assert sharding == layout.shardings()["w"] == NamedSharding(layout.mesh, leaf.storage_spec)
    assert layout.bytes_per_device(leaf) == math.prod(sharding.shard_shape(leaf.shape)) * 4
    parts = math.prod(size // part for size, part in zip(leaf.shape, sharding.shard_shape(leaf.shape), strict=True))
    assert layout.bytes_per_device(leaf) * parts == math.prod(leaf.shape) * 4
    assert layout.num_params == math.prod(leaf.shape)
    used = NamedSharding(layout.mesh, leaf.compute_spec)
    assert layout.compute_size(leaf) == math.prod(used.shard_shape(leaf.shape))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_zero_cuts_what_it_can(case: tuple[Layout, LeafLayout]) -> None:
    layout, leaf = case
    num_data, num_model = layout.mesh.shape["data"], layout.mesh.shape["model"]
    parts = [num_model if entry == "model" else 1 for entry in leaf.compute_spec]
    possible = [
        (parts[i] == 1, leaf.shape[i])
        for i in range(leaf.num_stacked, len(leaf.shape))
        if leaf.shape[i] % (parts[i] * num_data) == 0
    ]
    if layout.stage == 0 or num_data == 1 or not possible:
        assert leaf.zero_dim is None and leaf.why_replicated
        return
    assert leaf.zero_dim is not None and -len(leaf.shape) + leaf.num_stacked <= leaf.zero_dim < 0
    assert (leaf.num_model_shards == 1, leaf.shape[leaf.zero_dim]) == max(possible)
    assert leaf.num_model_shards == parts[leaf.zero_dim]


@settings(max_examples=100, deadline=None)
@given(cases())
def test_the_view_moves_no_data(case: tuple[Layout, LeafLayout]) -> None:
    """Every device holds the same elements, in the same order, at rest and in the view that enters the step."""
    layout, leaf = case
    view = leaf.view_shape
    assert math.prod(view) == math.prod(leaf.shape)
    assert len(leaf.view_spec) == len(leaf.manual_spec) == len(view)
    assert "model" not in [axis for entry in leaf.manual_spec for axis in axes_of(entry)]
    assert "data" not in [axis for entry in leaf.view_spec for axis in axes_of(entry)]
    if leaf.zero_dim is not None:
        assert leaf.manual_spec[leaf.zero_dim] == "data"  # the same dim, counted from the end
        assert leaf.view_spec[leaf.zero_dim] is None or layout.mesh.shape["model"] == 1  # `data` has it for itself
    both = P(*(manual or auto for manual, auto in zip(leaf.manual_spec, leaf.view_spec, strict=True)))
    elements = np.arange(math.prod(leaf.shape)).reshape(leaf.shape)
    at_rest = layout.sharding("w").devices_indices_map(leaf.shape)
    in_view = NamedSharding(layout.mesh, both).devices_indices_map(view)
    for device in layout.mesh.devices.flat:
        np.testing.assert_array_equal(
            elements[at_rest[device]].ravel(), elements.reshape(view)[in_view[device]].ravel()
        )


def test_a_view_splits_only_a_dim_that_both_axes_cut() -> None:
    _, leaf = leaf_of((5, 3, 64), P(None, "model"), num_stacked=1)
    assert leaf.view_shape == (5, 3, 2, 32)
    assert leaf.view_spec == P(None, None, "model", None)
    assert leaf.manual_spec == P(None, None, None, "data")
    _, leaf = leaf_of((8, 64), P(None, "model"))
    assert leaf.view_shape == (8, 64) and leaf.manual_spec == P("data", None)


# ---------------------------------------------------------------- optimizer state


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((5, 8, 64), P(None, "data", "model")),  # moments rest as their parameter
        ((5, 8), P(None, "data")),  # Adafactor's row and column moments: fewer dims
        ((5, 64), P(None, "data")),
        ((8, 64), P(None, "data")),
        ((5, 6), P()),  # divides by nothing
        ((5,), P()),
        ((64,), P()),  # its only dim could be the stacked one
        ((1,), P()),
        ((), P()),
    ],
)
def test_state_of_another_shape_is_cut_where_it_divides(shape: tuple[int, ...], expected: P) -> None:
    layout, _ = leaf_of((5, 8, 64), P(None, "model"), num_stacked=1)
    assert layout.spec_like("w", shape) == expected


def test_state_takes_the_largest_dim_and_follows_the_stage_and_the_mesh() -> None:
    layout, _ = leaf_of((8, 16, 3))
    assert layout.spec_like("w", (8, 16)) == P(None, "data")
    assert layout.spec_like("w", (16, 8)) == P("data", None)
    assert layout.spec_like("w", (1, 4)) == P(None, "data")
    layout, _ = leaf_of((8, 16, 3), stage=0)
    assert layout.spec_like("w", (8, 16)) == P()
    layout, _ = leaf_of((8, 16, 3), data=1)
    assert layout.spec_like("w", (8, 16)) == P()


@settings(max_examples=100, deadline=None)
@given(case=cases(), shape=st.lists(st.sampled_from([1, 2, 3, 4, 8, 12, 14]), max_size=4))
def test_any_state_can_rest_where_it_is_put(case: tuple[Layout, LeafLayout], shape: list[int]) -> None:
    layout, _ = case
    NamedSharding(layout.mesh, layout.spec_like("w", tuple(shape))).shard_shape(tuple(shape))  # refuses what is uneven


# ---------------------------------------------------------------- the table


def test_the_table_names_every_parameter_and_fits() -> None:
    layout = make_engine(4, 2, 1).layout
    text = str(layout)
    assert max(map(len, text.splitlines())) <= 150
    rows = {line.split()[0]: line for line in text.splitlines() if line.split()}
    for path, leaf in layout.leaves.items():
        assert " x ".join(map(str, leaf.shape)) in rows[path]
        assert show_spec(leaf.storage_spec) in rows[path]
        assert show_bytes(layout.bytes_per_device(leaf)) in rows[path]
    assert f"data=4 x model=2, ZeRO stage 1: {layout.num_params:,} parameters" in text
    total = sum(layout.bytes_per_device(leaf) for leaf in layout.leaves.values())
    assert f"{show_bytes(total)} of float32 weights per device" in text
    assert "no dim divides" not in text


def test_the_table_says_why_a_parameter_is_replicated() -> None:
    layout, _ = leaf_of((3, 5))
    assert "no dim divides by data=4" in str(layout)
    assert "60 B" in str(layout)


def test_the_table_takes_long_paths_and_rules_with_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    path = "model/decoder/layers_0/self_attention/query_projection/lora_adapter/up/kernel"
    rules = [(r"[a-z]+/kernel|[/]x", P(None, "model"))]
    text = str(make_layout({path: jax.ShapeDtypeStruct((8, 8), jnp.float32)}, rules, mesh_of(4, 2), 1))
    assert path in text
    assert max(map(len, text.splitlines())) <= 150
    assert "[a-z]" in text and "[/]x" in "".join(text.split())
    assert "\x1b" not in text


def test_specs_and_bytes_in_few_characters() -> None:
    assert show_spec(P(None, ("model", "data"), "model")) == "- model+data model"
    assert show_spec(P()) == "(scalar)"
    assert [show_bytes(count) for count in (0, 999, 1000, 1_234_000, 2.5e9, 3e13)] == [
        "0 B", "999 B", "1.0 kB", "1.2 MB", "2.5 GB", "30.0 TB",
    ]  # fmt: skip


def test_repeated_layers_are_one_row() -> None:
    shapes = {f"blocks/{i}/up/kernel": jax.ShapeDtypeStruct((8, 16), jnp.float32) for i in range(12)}
    shapes["blocks/12/up/kernel"] = jax.ShapeDtypeStruct((8, 32), jnp.float32)
    shown = str(make_layout(shapes, [(".*", P())], make_mesh(8, 1), stage=0))
    assert "blocks/*/up/kernel (12 alike)" in shown
    assert "6.1 kB" in shown  # 12 x 8 x 16 x 4 bytes
    assert "blocks/12/up/kernel" in shown
    assert shown.count("up/kernel") == 2
