"""Collectives read from HLO text: programs compiled here for 8 CPU devices, and text as XLA writes it for GPUs."""

# ruff: noqa: E501 (HLO has one instruction a line)

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshtrain.errors import MeshError
from meshtrain.plan.hlo import Collective, collectives

MESH = {"data": 4, "model": 2}
DATA_GROUPS = "{{0,2,4,6},{1,3,5,7}}"


def compile_text(
    function: Callable[..., Any], *args: tuple[jax.Array, P], manual: set[str], mesh: dict[str, int] | None = None
) -> str:
    """Compiles `function` inside a shard_map over `manual`; the other axes of the mesh are auto."""
    sizes = mesh or MESH
    devices = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    placed = [jax.device_put(array, NamedSharding(devices, spec)) for array, spec in args]
    in_specs = tuple(P(*(axis if axis in manual else None for axis in spec)) for _, spec in args)
    mapped = jax.shard_map(function, mesh=devices, in_specs=in_specs, out_specs=P(), axis_names=manual, check_vma=False)
    return jax.jit(mapped).lower(*placed).compile().as_text() or ""


def along(axis: str, found: list[Collective]) -> list[tuple[str, int | None, int, bool]]:
    return sorted((c.op, c.count, c.bytes, c.in_loop) for c in found if c.axis == axis)


def in_entry(line: str, header: str = "HloModule m") -> str:
    return f"{header}\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n  %p = f32[8]{{0}} parameter(0)\n  {line}\n}}\n"


def only(line: str, mesh_shape: dict[str, int] | None = None) -> Collective:
    (found,) = collectives(in_entry(line), mesh_shape or MESH)
    return found


# Compiled programs


def test_nested_scans_multiply_and_each_kind_reports_its_whole_buffer() -> None:
    def step(x: jax.Array) -> jax.Array:
        def inner(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            whole = jax.lax.all_gather(x, "data", tiled=True)  # [8] from [2]
            return jnp.sin(whole[:2] + whole[2:4]), None

        def outer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            x, _ = jax.lax.scan(inner, x, None, length=5)
            mine = jax.lax.psum_scatter(jnp.tile(x, 8), "data", tiled=True)  # [4] from [16]
            return x + mine[:2], None

        x, _ = jax.lax.scan(outer, x, None, length=3)
        return jax.lax.psum(x, "data")

    found = collectives(compile_text(step, (jnp.ones(8), P("data")), manual={"data"}), MESH)
    assert along("data", found) == [
        ("all-gather", 15, 32, True),
        ("all-reduce", 1, 8, False),
        ("reduce-scatter", 3, 64, True),
    ]
    assert {c.group_size for c in found} == {4}
    assert {c.op: c.elements for c in found} == {"all-gather": 8, "all-reduce": 2, "reduce-scatter": 16}
    assert {c.op: c.volume for c in found} == {"all-gather": 15 * 32, "all-reduce": 2 * 8, "reduce-scatter": 3 * 64}
    assert all("test_hlo.py:" in c.source and "shard_map" in c.source for c in found)


def test_collectives_of_the_compiler_lie_on_the_auto_axis_and_a_buffer_stays_a_shard_over_other_axes() -> None:
    def step(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:  # Megatron's pair: columns, then rows
            return jnp.tanh(jnp.tanh(x @ w) @ v), None

        x, _ = jax.lax.scan(layer, x, None, length=6)
        return jax.lax.psum(x.sum(), "data")

    args = (
        (jnp.ones((16, 32)), P(None, "model")),
        (jnp.ones((32, 16)), P("model", None)),
        (jnp.ones((8, 16)), P("data")),
    )
    found = collectives(compile_text(step, *args, manual={"data"}), MESH)
    assert along("model", found) == [("all-reduce", 6, 2 * 16 * 4, True)]
    assert along("data", found) == [("all-reduce", 1, 4, False)]


def test_groups_over_several_axes_and_the_mesh_order_of_three() -> None:
    mesh = {"replica": 2, "data": 2, "model": 2}

    def step(x: jax.Array) -> jax.Array:
        whole = jax.lax.psum(x, ("data", "replica"))
        ends = jax.lax.pmax(jnp.sin(whole), ("replica", "model"))
        turned = jax.lax.all_to_all(jnp.tile(ends, 2), "data", 0, 0, tiled=True)  # [8]
        return jax.lax.ppermute(turned[:3], "model", [(0, 1), (1, 0)])

    found = collectives(compile_text(step, (jnp.ones(8), P("data")), manual=set(mesh), mesh=mesh), mesh)
    assert sorted((c.op, c.axis, c.group_size, c.bytes) for c in found) == [
        ("all-reduce", "replica+data", 4, 16),
        ("all-reduce", "replica+model", 4, 16),
        ("all-to-all", "data", 2, 32),
        ("collective-permute", "model", 2, 12),
    ]


def test_a_resharding_that_the_compiler_writes_over_a_mesh_of_its_own() -> None:
    devices = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(jnp.ones((16, 8)), NamedSharding(devices, P(("model", "data"))))
    gathered = NamedSharding(devices, P("model"))
    text = jax.jit(lambda x: jnp.sin(x), out_shardings=gathered).lower(x).compile().as_text()
    (found,) = collectives(text or "", MESH)
    assert (found.op, found.axis, found.group_size, found.elements) == ("all-gather", "data", 4, 64)


def test_a_loop_whose_length_depends_on_data_has_no_count() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x.sum() < 3, lambda x: jax.lax.psum(x, "data"), x)

    (found,) = collectives(compile_text(step, (jnp.ones(8), P("data")), manual=set(MESH)), MESH)
    assert (found.op, found.count, found.in_loop) == ("all-reduce", None, True)
    with pytest.raises(ValueError, match="trip count is unknown"):
        _ = found.volume


def test_each_branch_of_a_conditional_counts() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x[0] > 0, lambda x: jax.lax.psum(x, "data"), lambda x: jax.lax.pmax(x, "model"), x)

    found = collectives(compile_text(step, (jnp.ones(8), P("data")), manual=set(MESH)), MESH)
    assert sorted((c.op, c.axis, c.count) for c in found) == [("all-reduce", "data", 1), ("all-reduce", "model", 1)]


@pytest.mark.parametrize(
    ("op", "num_bytes"),
    [(jax.lax.psum, 16 * 4), (partial(jax.lax.psum_scatter, tiled=True), 16 * 4)],
    ids=["all-reduce", "reduce-scatter"],
)
def test_a_16_bit_reduction_that_the_cpu_widens_is_marked(op: Callable[..., jax.Array], num_bytes: int) -> None:
    x = jnp.arange(16, dtype=jnp.bfloat16)
    (found,) = collectives(compile_text(lambda x: op(jnp.sin(x), "data"), (x, P()), manual=set(MESH)), MESH)
    assert (found.promoted, found.dtype, found.bytes) == (True, "f32", num_bytes)


def test_the_volume_in_elements_does_not_depend_on_the_type_that_the_backend_moves() -> None:
    def step(x: jax.Array) -> jax.Array:
        whole = jax.lax.all_gather(x, "data", tiled=True)  # [16] from [4]
        return jax.lax.psum(jnp.sin(whole), "data")

    volumes = {}
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        x = jnp.arange(16, dtype=dtype)
        found = collectives(compile_text(step, (x, P("data")), manual=set(MESH)), MESH)
        volumes[jnp.dtype(dtype).name] = sum(c.volume_elements for c in found), sum(c.volume for c in found)
    assert volumes == {"bfloat16": (3 * 16, 3 * 64), "float16": (3 * 16, 3 * 32), "float32": (3 * 16, 3 * 64)}


def test_axes_of_size_one_cost_nothing() -> None:
    mesh = {"data": 8, "model": 1}

    def step(x: jax.Array) -> jax.Array:
        return jax.lax.psum(jax.lax.psum(x, "model"), "data")

    found = collectives(compile_text(step, (jnp.ones(8), P("data")), manual=set(mesh), mesh=mesh), mesh)
    assert [(c.op, c.axis) for c in found] == [("all-reduce", "data")]


def test_another_mesh_than_the_program_was_compiled_for_is_refused() -> None:
    text = compile_text(lambda x: jax.lax.psum(x, "data"), (jnp.ones(8), P("data")), manual={"data"})
    with pytest.raises(MeshError, match="runs on 8 devices and the mesh data=2, model=2 has 4"):
        collectives(text, {"data": 2, "model": 2})


def test_text_that_is_no_program_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY computation"):
        collectives("module @jit_f { }", MESH)


# Device groups in each of the forms that XLA writes, on a 4 x 2 mesh


@pytest.mark.parametrize(
    ("groups", "axis", "group_size"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", "model", 2),
        (DATA_GROUPS, "data", 4),
        ("{{6,0,4,2},{7,1,5,3}}", "data", 4),
        ("{{0,2},{4,6},{1,3},{5,7}}", "data", 2),  # half of the axis at a time
        ("{{0,1,2,3,4,5,6,7}}", "data+model", 8),
        ("{}", "data+model", 8),
        ("[4,2]<=[8]", "model", 2),
        ("[2,4]<=[4,2]T(1,0)", "data", 4),
        ("[1,8]<=[8]", "data+model", 8),
        ("[2,4]<=[8]", "data+model", 4),  # {0,1,2,3}: halves of data with both of model
        ("[4,2]<=[2,2,2]T(0,2,1)", "data", 2),
        ("mesh['data'=4,'model'=2] {'data'}", "data", 4),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", "model", 2),
        ("mesh['a'=4,'b'=2] {'a','b'}", "data+model", 8),
        ("mesh[a=4,b=2] {a:(1)2}", "data", 2),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", "model", 2),  # 'b' = (data's lower half, model)
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}", "data", 4),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", "data", 4),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", "model", 2),
    ],
)
def test_replica_groups(groups: str, axis: str, group_size: int) -> None:
    found = only(f"ROOT %r = f32[8]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}")
    assert (found.axis, found.group_size) == (axis, group_size)


def test_groups_of_an_unknown_form_are_an_error() -> None:
    with pytest.raises(ValueError, match="device groups cannot be read"):
        only("ROOT %r = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups=torus(8)")


@pytest.mark.parametrize(
    ("pairs", "axis"),
    [
        ("{{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}", "data"),
        ("{{0,1},{1,0}}", "model"),
        ("{{0,3}}", "data+model"),
    ],
)
def test_source_target_pairs(pairs: str, axis: str) -> None:
    found = only(f"ROOT %r = f32[8]{{0}} collective-permute(%p), channel_id=1, source_target_pairs={pairs}")
    assert (found.axis, found.bytes, found.group_size) == (axis, 32, 2)


@pytest.mark.parametrize(
    "line",
    [
        "ROOT %r = f32[8]{0} all-reduce(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}",
        "ROOT %r = f32[8]{0} all-reduce(%p), replica_groups=[8,1]<=[8]",
        "ROOT %r = f32[8]{0} collective-permute(%p), source_target_pairs={{0,0},{1,1}}",
        "ROOT %r = f32[8]{0} collective-permute(%p), source_target_pairs={}",
    ],
)
def test_groups_of_one_are_left_out(line: str) -> None:
    assert collectives(in_entry(line), MESH) == []


# Result shapes, with the asynchronous forms of GPUs


@pytest.mark.parametrize(
    ("shape", "op", "operands", "num_bytes", "dtype"),
    [
        ("f32[8]{0}", "all-reduce", "%p", 32, "f32"),
        ("f32[]", "all-reduce", "%p", 4, "f32"),
        ("(bf16[8]{0}, /*index=1*/f32[2,3]{1,0})", "all-reduce", "%p, %q", 16 + 24, "bf16+f32"),
        ("bf16[4,2]{1,0:T(8,128)(2,1)S(1)}", "all-gather", "%p", 16, "bf16"),
        ("f8e4m3fn[8]{0}", "all-gather", "%p", 8, "f8e4m3fn"),
        ("s4[7]{0:E(4)}", "all-gather", "%p", 4, "s4"),
        ("pred[8]{0}", "all-gather", "%p", 8, "pred"),
        ("c64[8]{0}", "all-gather", "%p", 64, "c64"),
        ("f32[2]{0}", "reduce-scatter", "%p", 32, "f32"),
        ("(f32[2]{0}, bf16[4]{0})", "reduce-scatter", "%p, %q", 32 + 32, "f32+bf16"),
        ("(f32[2]{0}, f32[2]{0}, f32[2]{0}, f32[2]{0})", "all-to-all", "%a, %b, %c, %d", 32, "f32"),
        ("(f32[2]{0}, f32[8]{0})", "all-gather-start", "%p", 32, "f32"),
        ("((f32[2]{0}), f32[8]{0})", "all-gather-start", "%p", 32, "f32"),
        ("((f32[2]{0}, bf16[2]{0}), (f32[8]{0}, bf16[8]{0}))", "all-gather-start", "%p, %q", 48, "f32+bf16"),
        ("f32[8]{0}", "all-reduce-start", "%p", 32, "f32"),
        ("(f32[8]{0}, bf16[4]{0})", "all-reduce-start", "%p, %q", 40, "f32+bf16"),
        ("(f32[8]{0}, bf16[4]{0})", "all-reduce-start", "f32[8]{0} %p, bf16[4]{0} %q", 40, "f32+bf16"),
        ("((f32[8]{0}), f32[8]{0})", "all-reduce-start", "%p", 32, "f32"),
        ("(f32[8]{0}, f32[8]{0})", "all-reduce-start", "%p", 32, "f32"),
        ("((f32[8]{0}, f32[4]{0}), (f32[8]{0}, f32[4]{0}))", "all-reduce-start", "%p, %q", 48, "f32"),
        ("((f32[8]{0}), f32[2]{0}, u32[])", "reduce-scatter-start", "%p", 32, "f32"),
        ("((f32[8]{0}), f32[8]{0})", "all-to-all-start", "%p", 32, "f32"),
    ],
)
def test_bytes_of_the_whole_buffer(shape: str, op: str, operands: str, num_bytes: int, dtype: str) -> None:
    found = only(f"%r = {shape} {op}({operands}), channel_id=1, replica_groups={DATA_GROUPS}, dimensions={{0}}")
    assert (found.op, found.bytes, found.dtype) == (op.removesuffix("-start"), num_bytes, dtype)


def test_permute_start_reports_its_output_not_its_context() -> None:
    shape = "(f32[8]{0}, f32[8]{0}, u32[], u32[])"
    found = only(f"%r = {shape} collective-permute-start(%p), channel_id=1, source_target_pairs={{{{0,2}},{{2,0}}}}")
    assert (found.op, found.bytes, found.dtype) == ("collective-permute", 32, "f32")


GPU_LOOP = """\
HloModule jit_f, is_scheduled=true, num_partitions=8, frontend_attributes={fingerprint="0"}

FileNames
1 "model.py"

FunctionNames
1 "layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=17 end_line=17 column=21 end_column=21}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%add.clone (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %add.1 = bf16[] add(%x, %y)
}

%async_computation (param_0: f32[16]) -> f32[4] {
  %param_0 = f32[16]{0} parameter(0)
  ROOT %rs = f32[4]{0} reduce-scatter(%param_0), channel_id=7, replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}, to_apply=%add.clone
}

%body.spmd (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %p = (s32[], bf16[4,8]{1,0}) parameter(0)
  %ag = ((bf16[1,8]{1,0}), bf16[4,8]{1,0}) all-gather-start(%s), channel_id=1, replica_groups=mesh['data'=4,'model'=2] {'data'}, dimensions={0}, use_global_device_ids=true, metadata={op_name="jit(f)/while/body/all_gather" scheduling_name="ag" stack_frame_id=1}, backend_config={"collective_backend_config":{"is_sync":false}}
  %ag.done = bf16[4,8]{1,0} all-gather-done(%ag), metadata={op_name="jit(f)/while/body/all_gather" stack_frame_id=1}
  %ar = ((bf16[4,8]{1,0}), bf16[4,8]{1,0}) all-reduce-start(%d), channel_id=3, replica_groups=[4,2]<=[8], to_apply=%add.clone, output_to_operand_aliasing={{1}: (0, {})}, metadata={op_name="jit(f)/while/body/dot" source_file="old.py" source_line=3}
  ROOT %ar.done = bf16[4,8]{1,0} all-reduce-done(%ar)
}

%cond.spmd (p.1: (s32[], bf16[4,8])) -> pred[] {
  %n = s32[] constant(9)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%never (q: f32[8]) -> f32[8] {
  ROOT %r = f32[8]{0} all-reduce(%q), channel_id=9, replica_groups=[4,2]<=[8], to_apply=%add.clone
}

ENTRY %main (a: f32[16]) -> f32[4] {
  %w = (s32[], bf16[4,8]{1,0}) while(%t), condition=%cond.spmd, body=%body.spmd, metadata={op_name="calls=%never"}, backend_config={"known_trip_count":{"n":"6"},"known_init_step":{"init":"0","step":"1"}}
  %rs-start = ((f32[16]{0}), f32[4]{0}, u32[]) async-start(%a), calls=%async_computation
  %rs-update = ((f32[16]{0}), f32[4]{0}, u32[]) async-update(%rs-start), calls=%async_computation
  ROOT %rs-done = f32[4]{0} async-done(%rs-update), calls=%async_computation
}
"""


def test_gpu_text_counts_starts_once_and_only_what_is_executed() -> None:
    gather, reduce, scatter = sorted(collectives(GPU_LOOP, MESH), key=lambda c: c.op)
    place = "jit(f)/while/body/all_gather (model.py:17)", "body.spmd", (4, 8)
    assert gather == Collective("all-gather", "data", 4, 6, 64, 32, "bf16", True, False, *place)
    place = "jit(f)/while/body/dot (old.py:3)", "body.spmd", (4, 8)
    assert reduce == Collective("all-reduce", "model", 2, 6, 64, 32, "bf16", True, False, *place)
    assert scatter == Collective(
        "reduce-scatter", "data", 4, 1, 64, 16, "f32", False, False, "", "async_computation", (4,)
    )


@pytest.mark.parametrize(
    ("condition", "count"),
    [
        ("%n = s32[] constant(9)\n  ROOT %lt = pred[] compare(%i, %n), direction=LT", 9),
        ("%n = u32[] constant(9)\n  ROOT %le = pred[] compare(%i, %n), direction=LE", 10),
        ("%n = s32[] constant(-2)\n  ROOT %lt = pred[] compare(%i, %n), direction=LT", 0),
        ("%n = s32[] constant(9)\n  ROOT %ne = pred[] compare(%i, %n), direction=NE", None),
        ("%n = s32[] constant(9)\n  %m = s32[] constant(1)\n  ROOT %lt = pred[] compare(%i, %n), direction=LT", None),
        ("%x = f32[] constant(9)\n  ROOT %lt = pred[] compare(%f, %x), direction=LT", None),
    ],
)
def test_trip_count_from_the_condition_where_the_compiler_gives_none(condition: str, count: int | None) -> None:
    text = GPU_LOOP.replace('"known_trip_count":{"n":"6"},', "")
    old = "%n = s32[] constant(9)\n  ROOT %lt = pred[] compare(%i, %n), direction=LT"
    assert old in text
    found = collectives(text.replace(old, condition), MESH)
    assert [c.count for c in found if c.in_loop] == [count, count]


def test_calls_from_several_places_add_up_and_a_condition_runs_once_more_than_its_body() -> None:
    text = """\
HloModule m

%reduce (q: f32[8]) -> f32[8] {
  ROOT %r = f32[8]{0} all-reduce(%q), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add
}
%body (p: f32[8]) -> f32[8] {
  ROOT %c = f32[8]{0} call(%p), to_apply=%reduce
}
%cond (p: f32[8]) -> pred[] {
  %c = f32[8]{0} fusion(%p), kind=kLoop, calls=%reduce
}
ENTRY %main (a: f32[8]) -> f32[8] {
  %w = f32[8]{0} while(%a), condition=%cond, body=%body, backend_config="{\\"known_trip_count\\":{\\"n\\":\\"4\\"}}"
  %b = f32[8]{0} conditional(%i, %w, %w), branch_computations={%reduce, %body}
  ROOT %c = f32[8]{0} call(%b), to_apply=%reduce
}
""".replace(", to_apply=%add", "")
    (found,) = collectives(text, MESH)
    assert (found.count, found.in_loop, found.volume) == (4 + 5 + 2 + 1, True, 2 * 32 * 12)
