"""Checkpoints on eight virtual devices: exact bytes on any layout, nothing listed before it is whole."""

import asyncio
import dataclasses
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint._src.serialization import jax_array_handlers

from meshtrain.checkpoint import Checkpointer
from meshtrain.errors import CheckpointError

# A save that is made to fail leaves tensorstore futures behind, which wake up after Orbax has closed their event loop.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Moments(NamedTuple):
    count: Any
    mu: Any
    nu: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    step: Any
    params: Any
    opt_state: Any
    rng: Any


SPECS = TrainState(
    step=P(),
    params={"emb/embedding": P("model", "data"), "blocks/mlp/up/kernel": P(None, "data", "model"), "odd": P()},
    opt_state=(Moments(P(), {"a": P(("model", "data"))}, {"a": P("data")}), None),
    rng=P(),
)


def make_mesh(data: int, model: int) -> Mesh:
    devices = np.array(jax.devices()[: data * model]).reshape(data, model)
    return Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def place(tree: Any, mesh: Mesh, specs: Any = SPECS) -> Any:
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)


def make_state() -> TrainState:
    """Every element differs from its neighbours; 7x3 and 5 divide by no axis; subnormals, NaN and -0.0 must survive."""
    floats = np.random.default_rng(0).standard_normal((16, 24)).astype(np.float32)
    floats[0, :4] = [np.nan, -0.0, np.inf, 1e-42]
    return TrainState(
        step=jnp.int32(10),
        params={
            "emb/embedding": jnp.asarray(floats),
            "blocks/mlp/up/kernel": jnp.arange(3 * 8 * 8, dtype=jnp.bfloat16).reshape(3, 8, 8) / 7,
            "odd": jnp.arange(21, dtype=jnp.float32).reshape(7, 3),
        },
        opt_state=(
            Moments(jnp.uint8(200), {"a": jnp.arange(16, dtype=jnp.float16)}, {"a": jnp.arange(8) % 3 == 0}),
            None,
        ),
        rng=jax.random.key(3),
    )


def target_of(tree: Any, mesh: Mesh, specs: Any = SPECS) -> Any:
    def leaf(x: jax.Array, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(leaf, tree, specs)


def content(leaf: jax.Array) -> tuple[str, tuple[int, ...], bytes]:
    dtype = str(leaf.dtype)
    data = jax.random.key_data(leaf) if dtype.startswith("key") else leaf
    return dtype, leaf.shape, np.asarray(data).tobytes()


def assert_same(left: Any, right: Any) -> None:
    structures: list[Any] = [jax.tree.structure(left), jax.tree.structure(right)]
    assert structures[0] == structures[1]
    assert [content(leaf) for leaf in jax.tree.leaves(left)] == [content(leaf) for leaf in jax.tree.leaves(right)]


def plain(value: float, size: int = 8) -> dict[str, jax.Array]:
    return {"w": jnp.full((size,), value)}


def plain_target(size: int = 8, dtype: Any = jnp.float32, name: str = "w") -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct((size,), dtype, sharding=SingleDeviceSharding(jax.devices()[0]))}


class SlowWriter:
    """Holds the background write back until `open`, then goes on, or fails with `error`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = True
        self.error: OSError | None = None
        self.write = jax_array_handlers._async_serialize_replica_slices
        monkeypatch.setattr(jax_array_handlers, "_async_serialize_replica_slices", self)

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for _ in range(4000):  # 20 s at least: a test that fails before it opens must end too
            if not self.held:
                break
            await asyncio.sleep(0.005)
        if self.error:
            raise self.error
        return await self.write(*args, **kwargs)

    def open(self, error: OSError | None = None) -> None:
        self.error, self.held = error, False


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Any:
    slow = SlowWriter(monkeypatch)
    yield slow
    slow.open(slow.error)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of `make_state` as saved on a 4x2 mesh."""
    path = tmp_path_factory.mktemp("saved")
    with Checkpointer(path, keep=1) as checkpointer:
        checkpointer.save(10, place(make_state(), make_mesh(4, 2)), {"tokens": 4096})
    return path


@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (8, 1), (1, 8), (2, 2), (1, 1)])
def test_restores_every_byte_on_any_mesh(saved: Path, shape: tuple[int, int]) -> None:
    target = target_of(make_state(), make_mesh(*shape))
    with Checkpointer(saved, keep=1) as checkpointer:
        restored = checkpointer.restore(10, target)
    assert_same(restored, make_state())
    for got, asked in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
        assert got.sharding == asked.sharding


def test_saved_on_one_device_restores_on_eight(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(0, make_state(), {})
        checkpointer.wait()
        restored = checkpointer.restore(0, target_of(make_state(), make_mesh(4, 2)))
    assert_same(restored, make_state())


def test_an_unplaced_single_device_is_a_layout_too(saved: Path) -> None:
    device = SingleDeviceSharding(jax.devices()[5])
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), make_state())
    restored = Checkpointer(saved, keep=1).restore(10, target)
    assert_same(restored, make_state())
    assert {leaf.sharding for leaf in jax.tree.leaves(restored)} == {device}


def test_two_axes_can_swap_their_order_on_one_dim(tmp_path: Path) -> None:
    mesh = make_mesh(4, 2)
    x = jnp.arange(32.0)
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, place({"x": x}, mesh, {"x": P(("model", "data"))}), {})
        checkpointer.wait()
        restored = checkpointer.restore(1, target_of({"x": x}, mesh, {"x": P(("data", "model"))}))
    np.testing.assert_array_equal(restored["x"], x)
    assert [float(shard.data[0]) for shard in restored["x"].addressable_shards] == [0, 4, 8, 12, 16, 20, 24, 28]


def test_a_saved_tree_does_not_depend_on_classes(saved: Path) -> None:
    state = make_state()
    as_dicts = {
        "step": state.step,
        "params": {"emb": {"embedding": state.params["emb/embedding"]}, "odd": state.params["odd"]},
        "opt_state": {"0": {"count": state.opt_state[0].count, "mu": {"a": state.opt_state[0].mu["a"]}}},
        "rng": state.rng,
    }
    as_dicts["params"]["blocks"] = {"mlp": {"up": {"kernel": state.params["blocks/mlp/up/kernel"]}}}
    as_dicts["opt_state"]["0"]["nu"] = {"a": state.opt_state[0].nu["a"]}
    specs = jax.tree.map(lambda _: P(), as_dicts)
    restored = Checkpointer(saved, keep=1).restore(10, target_of(as_dicts, make_mesh(8, 1), specs))
    assert_same(restored, as_dicts)


def test_names_are_data_and_cannot_leave_the_directory(tmp_path: Path) -> None:
    names = ["../../out", "/abs", "a", "a/0.0", "a/../a", "a.b", "w?x=1#y%2e", "x y", "é", ".zarray", "~"]
    state = {name: jnp.full((2, 2), i) for i, name in enumerate(names)}
    with Checkpointer(tmp_path / "root", keep=1) as checkpointer:
        checkpointer.save(1, state, {})
        checkpointer.wait()
        restored = checkpointer.restore(1, target_of(state, make_mesh(2, 1), jax.tree.map(lambda _: P(), state)))
    assert {name: int(x[1, 1]) for name, x in restored.items()} == {name: i for i, name in enumerate(names)}
    assert os.listdir(tmp_path) == ["root"]
    assert os.listdir(tmp_path / "root") == ["1"]


def test_the_step_may_donate_right_after_save(tmp_path: Path, writer: SlowWriter) -> None:
    state = place(make_state(), make_mesh(4, 2))
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, state, {})
        for _ in range(3):  # overwrites the donated buffers while nothing is written yet
            state.params, state.opt_state = update((state.params, state.opt_state))
        jax.block_until_ready(state.params)
        assert checkpointer.steps() == []
        writer.open()
        checkpointer.wait()
        assert_same(checkpointer.restore(1, target_of(make_state(), make_mesh(2, 4))), make_state())


def test_restored_arrays_give_their_memory_to_the_step(saved: Path) -> None:
    restored = Checkpointer(saved, keep=1).restore(10, target_of(make_state(), make_mesh(4, 2)))

    def buffers(tree: Any) -> list[int]:
        return [s.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]

    before = buffers(restored.params)
    params = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(restored.params)
    assert buffers(params) == before


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_typed_keys_draw_on_as_before(tmp_path: Path, implementation: str) -> None:
    mesh = make_mesh(4, 2)
    keys = place({"rng": jax.random.split(jax.random.key(7, impl=implementation), 8)}, mesh, {"rng": P("data")})
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, keys, {})
        checkpointer.wait()
        target = target_of(keys, mesh, {"rng": P(("data", "model"))})
        restored = checkpointer.restore(1, target)
    assert restored["rng"].sharding == target["rng"].sharding
    assert jax.random.key_impl(restored["rng"]) == implementation
    draw = jax.vmap(lambda key: jax.random.normal(key, (10,)))
    np.testing.assert_array_equal(draw(restored["rng"]), draw(keys["rng"]))


def test_keys_of_another_implementation_are_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, {"rng": jax.random.key(1)}, {})
        checkpointer.wait()
        with pytest.raises(CheckpointError, match=r"'rng' is stored as key<fry>\[\], this run has key<rbg>\[\]"):
            checkpointer.restore(1, {"rng": jax.random.key(1, impl="rbg")})


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (plain_target(size=16), r"'w' is stored as float32\[8\], this run has float32\[16\]"),
        (plain_target(dtype=jnp.bfloat16), r"'w' is stored as float32\[8\], this run has bfloat16\[8\]"),
        (plain_target(name="v"), r"'v' is not in the checkpoint; 'w' is in the checkpoint only"),
        ({"w": jax.ShapeDtypeStruct((8,), jnp.float32)}, "'w' has no sharding"),
        ({**plain_target(), **{f"x{i}": plain_target()["w"] for i in range(9)}}, "'x4' is not .*; and 4 more$"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_reading(tmp_path: Path, target: Any, message: str) -> None:
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(3, plain(1.0), {})
        checkpointer.wait()
        for data in tmp_path.glob("3/**/d/*"):
            data.unlink()  # reading would fail
        with pytest.raises(CheckpointError, match=message):
            checkpointer.restore(3, target)


def test_a_layout_that_does_not_divide_is_named(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(3, plain(1.0, size=7), {})
        checkpointer.wait()
        target = jax.ShapeDtypeStruct((7,), jnp.float32, sharding=NamedSharding(make_mesh(4, 2), P("data")))
        with pytest.raises(CheckpointError, match="'w' cannot be laid out as asked .*divide"):
            checkpointer.restore(3, {"w": target})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(2)}, "two leaves of the state are called 'a/b'"),
        ({"a": {"n": np.ones(2)}}, "'a/n' is a ndarray"),
        ({"a": 1}, "'a' is a int"),
        ({"a": jnp.ones((0, 3))}, r"'a' has shape \(0, 3\)"),
        (jnp.ones(2), "not a single array"),
        ({"a": None}, "no arrays"),
    ],
)
def test_a_state_that_cannot_be_stored_is_refused_by_name(tmp_path: Path, state: Any, message: str) -> None:
    with Checkpointer(tmp_path, keep=1) as checkpointer, pytest.raises(CheckpointError, match=message):
        checkpointer.save(1, state, {})
    assert os.listdir(tmp_path) == []


def test_meta_is_kept_as_it_was_at_the_call(tmp_path: Path, writer: SlowWriter) -> None:
    meta: dict[str, Any] = {"loss": 2.5, "config": {"lr": [1e-3, None]}}
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, plain(1.0), meta)
        meta["config"]["lr"].append("later")
        writer.open()
        checkpointer.wait()
        assert checkpointer.meta(1) == {"loss": 2.5, "config": {"lr": [1e-3, None]}}
        with pytest.raises(CheckpointError, match="step 2: meta must be a JSON object"):
            checkpointer.save(2, plain(1.0), {"x": Path()})  # type: ignore[dict-item]


def test_the_newest_stay_and_none_goes_before_its_successor_stands(tmp_path: Path, writer: SlowWriter) -> None:
    writer.open()
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(9, plain(9.0), {})
        checkpointer.wait()
        writer.held = True
        checkpointer.save(10, plain(10.0), {})
        assert checkpointer.steps() == [9]
        writer.open()
        checkpointer.wait()
        assert (checkpointer.steps(), os.listdir(tmp_path)) == ([10], ["10"])
    with Checkpointer(tmp_path, keep=3) as checkpointer:
        for step in (100, 11, 12):
            checkpointer.save(step, plain(step), {})
    assert Checkpointer(tmp_path, keep=3).steps() == [11, 12, 100]


def test_a_save_below_abandoned_newer_steps_stays(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, plain(step), {})
        checkpointer.save(25, plain(25), {})
        checkpointer.wait()
        checkpointer.save(15, plain(15), {})
    assert checkpointer.steps() == [15, 25, 30]


def fail_wait(checkpointer: Checkpointer) -> None:
    checkpointer.wait()


def fail_save(checkpointer: Checkpointer) -> None:
    checkpointer.save(2, plain(2.0), {})


def fail_close(checkpointer: Checkpointer) -> None:
    checkpointer.close()


@pytest.mark.parametrize("call", [fail_wait, fail_save, fail_close])
def test_a_failed_save_is_raised_by_the_next_call_and_never_listed(
    tmp_path: Path, writer: SlowWriter, call: Callable[[Checkpointer], None]
) -> None:
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, plain(1.0), {})
    writer.open(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(CheckpointError, match="step 1 was not saved: .*No space left"):
        call(checkpointer)
    assert checkpointer.steps() == []
    if call is not fail_close:  # the disk has room again: the same object saves on, and the leftover goes
        writer.open()
        checkpointer.save(1, plain(1.5), {})
        checkpointer.close()
        assert os.listdir(tmp_path) == ["1"]


def test_every_error_of_a_failed_save_belongs_to_it(tmp_path: Path, writer: SlowWriter) -> None:
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, plain(1.0), {})
        checkpointer._orbax._metadata_store.update(tmp_path / "missing/file", custom_metadata={})  # a second failure
        writer.open(OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(CheckpointError, match="step 1 was not saved: .*No space left"):
            checkpointer.wait()
        writer.open()
        checkpointer.save(2, plain(2.0), {})
    assert checkpointer.steps() == [2]


def test_a_directory_that_vanishes_under_a_save_fails_it(tmp_path: Path, writer: SlowWriter) -> None:
    with Checkpointer(tmp_path / "checkpoints", keep=1) as checkpointer:
        writer.open()
        checkpointer.save(1, plain(1.0), {})
        checkpointer.wait()
        writer.held = True
        checkpointer.save(2, plain(2.0), {})
        temporary = tmp_path / "checkpoints/2.orbax-checkpoint-tmp/_CHECKPOINT_METADATA"
        for _ in range(1000):
            if temporary.exists():
                break
            time.sleep(0.01)
        os.rename(tmp_path / "checkpoints", tmp_path / "moved")
        (tmp_path / "checkpoints").write_text("a file in its place")
        writer.open()
        with pytest.raises(CheckpointError, match="step 2 was not saved"):
            checkpointer.wait()
    with Checkpointer(tmp_path / "moved", keep=1) as moved:
        assert moved.steps() == [1]


def test_a_failing_last_save_does_not_hide_the_error_before_it(tmp_path: Path, writer: SlowWriter) -> None:
    with pytest.raises(ZeroDivisionError) as caught, Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, plain(1.0), {})
        writer.open(OSError(errno.ENOSPC, "No space left on device"))
        raise ZeroDivisionError
    assert "step 1 was not saved" in caught.value.__notes__[0]


def test_only_complete_steps_are_listed_whenever_they_appear(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=5) as checkpointer:
        assert (checkpointer.steps(), checkpointer.latest()) == ([], None)
        checkpointer.save(10, plain(1.0), {})
        checkpointer.wait()
        assert checkpointer.steps() == [10]
        (tmp_path / "20").mkdir()
        (tmp_path / "21").mkdir()
        (tmp_path / "21/_CHECKPOINT_METADATA").write_text((tmp_path / "10/_CHECKPOINT_METADATA").read_text()[:-9])
        (tmp_path / "22").mkdir()
        (tmp_path / "22/_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": null, "custom_metadata": {}}')
        (tmp_path / "30.orbax-checkpoint-tmp").mkdir()
        (tmp_path / "40").write_text("a file")
        (tmp_path / "50").symlink_to(tmp_path / "10")
        os.rename(tmp_path / "10", tmp_path / "010")
        assert checkpointer.steps() == []
        os.rename(tmp_path / "010", tmp_path / "10")
        assert (checkpointer.steps(), checkpointer.latest()) == ([10], 10)
        assert checkpointer.leftovers() == ["20", "21", "22", "30.orbax-checkpoint-tmp", "40", "50"]
        with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 20 \(complete: \[10\]; other.*'20'"):
            checkpointer.restore(20, plain_target())


def test_what_a_killed_save_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    for name in ("20.orbax-checkpoint-tmp", "15.orbax-checkpoint-tmp", "5.pruned", "20"):
        (tmp_path / name).mkdir()
    (tmp_path / "20.orbax-checkpoint-tmp/d").write_text("half")
    (tmp_path / "notes.txt").write_text("mine")
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.save(20, plain(20.0), {})
        checkpointer.wait()
        assert sorted(os.listdir(tmp_path)) == ["20", "notes.txt"]
        assert float(checkpointer.restore(20, plain_target())["w"][7]) == 20.0


def test_an_incomplete_directory_with_data_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "20").mkdir()
    (tmp_path / "20/manifest.ocdbt").write_text("somebody may want this")
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.save(20, plain(20.0), {})
    assert checkpointer.steps() == [20]
    (aside,) = tmp_path.glob("20.incomplete-*")
    assert os.listdir(aside) == ["manifest.ocdbt"]


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.save(1, plain(1.0), {})
        checkpointer.save(1, plain(2.0), {})
        checkpointer.wait()
        assert float(checkpointer.restore(1, plain_target())["w"][0]) == 1.0
    with Checkpointer(tmp_path, keep=2) as other, pytest.raises(CheckpointError, match="1: is there already"):
        other.save(1, plain(3.0), {})


def test_damaged_data_is_named(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.save(1, plain(1.0, size=4096), {})
        checkpointer.wait()
        for data in tmp_path.glob("1/**/d/*"):
            data.write_bytes(b"")
        with pytest.raises(CheckpointError, match="/1: the stored data cannot be read"):
            checkpointer.restore(1, plain_target(size=4096))


def test_another_format_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.save(1, plain(1.0), {})
        checkpointer.wait()
        header = tmp_path / "1/_CHECKPOINT_METADATA"
        header.write_text(header.read_text().replace('"format": 1', '"format": 2'))
        with pytest.raises(CheckpointError, match="of format 2, not 1"):
            checkpointer.restore(1, plain_target())


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="keep=0"):
        Checkpointer(tmp_path, keep=0)
    with Checkpointer(tmp_path, keep=1) as checkpointer, pytest.raises(CheckpointError, match="at least 0"):
        checkpointer.save(-1, plain(1.0), {})
