"""Every layout computes what one device computes: ZeRO stages, meshes and microbatches against a hand-written step."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from meshtrain.state import TrainState, state_bytes_per_device
from meshtrain.step import make_gradients
from meshtrain.zero import from_view, to_view
from tests.tiny_gpt import SIZES, ByHand, host, make_batch, make_engine

MESHES = [(1, 1), (8, 1), (1, 8), (4, 2), (2, 4)]
STEPS = 20


@functools.cache
def by_hand() -> list[tuple[float, float]]:
    return ByHand().train(STEPS)


@functools.cache
def gradients_by_hand() -> dict[str, np.ndarray]:
    return ByHand().gradients(make_batch())


@functools.cache
def initial_state() -> TrainState:
    """Of one device, on the host; that every mesh makes the same one has a test of its own."""
    return host(make_engine(1, 1, 0).init())


def check_history(data: int, model: int, stage: int, num_microbatches: int, **rest) -> None:
    engine = make_engine(data, model, stage, num_microbatches, **rest)
    state = jax.device_put(initial_state(), jax.tree.map(lambda leaf: leaf.sharding, engine.abstract_state()))
    for i, (loss, grad_norm) in enumerate(by_hand()):
        state, metrics = engine.step(state, make_batch(i))
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5), f"loss of update {i}"
        assert float(metrics["grad_norm"]) == pytest.approx(grad_norm, rel=1e-5), f"gradient norm of update {i}"
        assert float(metrics["tokens"]) == make_batch(i)["weights"].sum()
    assert int(state.step) == STEPS


def test_the_clip_bites() -> None:
    """Else the test below would not see a norm that is wrong by a factor."""
    assert all(grad_norm > 0.5 for _, grad_norm in by_hand()[:5])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_stage_trains_as_one_device(stage: int) -> None:
    check_history(4, 2, stage, num_microbatches=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "model", "stage", "num_microbatches"),
    [(*mesh, stage, m) for mesh in MESHES for stage in range(4) for m in (1, 4) if (mesh, m) != ((4, 2), 4)],
)
def test_every_layout_trains_as_one_device(data: int, model: int, stage: int, num_microbatches: int) -> None:
    check_history(data, model, stage, num_microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("data", "model"), [(1, 8), (4, 2)])
def test_sequence_parallelism_trains_as_one_device(data: int, model: int, stage: int) -> None:
    check_history(data, model, stage, 2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("data", "model", "stage", "num_microbatches"), [(4, 2, 0, 4), (8, 1, 1, 1), (4, 2, 2, 2), (2, 4, 3, 2)]
)
def test_every_gradient_leaf(data: int, model: int, stage: int, num_microbatches: int) -> None:
    engine = make_engine(data, model, stage, num_microbatches)
    state = engine.init()
    gradients = make_gradients(engine.model, engine.zero, engine.step_config)

    def mean_gradients(params, batch):
        _, tokens, grads = gradients(to_view(params, engine.layout), batch, 0, 1.0)
        return {path: grad / tokens for path, grad in from_view(grads, engine.layout).items()}

    with jax.set_mesh(engine.mesh):
        grads = host(jax.jit(mean_gradients)(state.params, engine.shard(make_batch())))
    expected = gradients_by_hand()
    assert grads.keys() == expected.keys()
    largest = max(np.abs(value).max() for value in expected.values())
    for path, value in grads.items():
        # float32 sums in another order: an error of a part of the whole gradient, not of an element near zero
        np.testing.assert_allclose(value, expected[path], rtol=1e-5, atol=1e-6 * largest, err_msg=path)


@pytest.mark.parametrize(("data", "model"), [(8, 1), (2, 4)])
def test_large_weights_are_gathered_layer_by_layer_to_the_same_bits(
    data: int, model: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(data, model, 2)
    leaves = engine.layout.leaves
    stacked = [path for path, leaf in leaves.items() if leaf.num_stacked]
    params = initial_state().params

    def gather() -> tuple[dict[str, np.ndarray], list[int]]:
        """The whole weights, and how often each loop of the program runs."""
        whole = jax.shard_map(
            lambda shards: engine.zero.gather_early(shards),
            mesh=engine.mesh,
            in_specs=({path: leaf.manual_spec for path, leaf in leaves.items()},),
            out_specs=jax.sharding.PartitionSpec(),
            axis_names={"data"},
            check_vma=False,
        )
        with jax.set_mesh(engine.mesh):
            views = to_view(jax.device_put(params, engine.layout.shardings()), engine.layout)
            loops = [found["length"] for found in scans(jax.make_jaxpr(whole)(views).jaxpr)]
            return host(jax.jit(whole)(views)), loops

    at_once, no_loops = gather()
    monkeypatch.setattr("meshtrain.zero._LARGE_LAYER", 1)
    by_layer, loops = gather()
    assert no_loops == [] and loops == [SIZES.num_layers] * len(stacked)
    for path, value in params.items():
        assert at_once[path].tobytes() == by_layer[path].tobytes() == value.tobytes(), path


def scans(jaxpr: Any) -> list[dict[str, Any]]:
    """The parameters of every scan of a jaxpr that is not inside another."""
    found = []
    for equation in jaxpr.eqns:
        inner = [equation.params[key] for key in ("jaxpr", "call_jaxpr") if key in equation.params]
        if equation.primitive.name == "scan":
            found.append(equation.params)
        else:
            found += [each for sub in inner for each in scans(getattr(sub, "jaxpr", sub))]
    return found


@pytest.mark.parametrize(("data", "model"), MESHES)
@pytest.mark.parametrize("stage", [0, 3])
def test_initial_parameters_are_bit_equal_on_every_mesh(data: int, model: int, stage: int) -> None:
    params = make_engine(data, model, stage).init().params
    for path, value in initial_state().params.items():
        assert np.asarray(params[path]).tobytes() == value.tobytes(), path


@pytest.mark.parametrize(("data", "model"), [(8, 1), (4, 2), (2, 4)])
def test_state_bytes_are_the_papers(data: int, model: int) -> None:
    """ZeRO table 1: stages >= 1 divide the whole state by the data degree (ours rests parameters sharded as well)."""
    for stage in (0, 1, 2, 3):
        engine = make_engine(data, model, stage)
        layout = engine.layout
        in_model = {
            path: np.prod(leaf.shape) // (model if "model" in str(leaf.compute_spec) else 1)
            for path, leaf in layout.leaves.items()
        }
        parts = 1 if stage == 0 else data
        scalars = 4 * 4  # step, Adam's count, the loss scale and its count
        expected = sum(3 * 4 * size // parts for size in in_model.values()) + scalars
        assert state_bytes_per_device(engine.abstract_state()) == expected
        if stage:
            assert not [leaf.path for leaf in layout.leaves.values() if leaf.zero_dim is None]
        first_shards = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(engine.init())]
        assert sum(shard.nbytes for shard in first_shards) == expected
