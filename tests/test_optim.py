"""Schedules against written-out tables, masks by path, and every optimizer stacked, sharded, in fp16 and at zero."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshtrain.config import OptimConfig
from meshtrain.errors import ConfigError
from meshtrain.optim import decay_mask, global_norm, make_optimizer, make_schedule, muon_layout

OPTIMIZERS = ("adamw", "sgd", "lion", "adafactor", "muon", "lamb")
Arrays = dict[str, Any]  # numpy in, jax out: eager jax operations would cost a compilation per shape

QUICK = {"xla_backend_optimization_level": 0}  # compiles in half the time; the values are what is tested

STEPS = 10
LAYERS = 2
# One layer of a transformer; up/kernel is large enough (>= 128 twice) for Adafactor to factor it.
LAYER = {
    "norm/scale": (8,),
    "attn/qkv/kernel": (8, 3, 2, 4),
    "attn/qkv/bias": (3, 2, 4),
    "attn/out/kernel": (2, 4, 8),
    "mlp/up/kernel": (128, 136),
}
STACKED: dict[str, tuple[int, ...]] = {f"blocks/{path}": (LAYERS, *shape) for path, shape in LAYER.items()} | {
    "wte/embedding": (16, 8)
}


def constant(name: Any, **fields: Any) -> OptimConfig:
    """Rate 0.01 throughout, no clipping, no decay, unless `fields` say otherwise."""
    base: dict[str, Any] = {"lr": 0.01, "schedule": "constant", "weight_decay": 0.0, "clip_norm": None}
    return OptimConfig(name=name, **(base | fields))


def structs(params: Arrays) -> dict[str, jax.ShapeDtypeStruct]:
    return {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in params.items()}


def random_arrays(shapes: dict[str, tuple[int, ...]], seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return {path: rng.standard_normal(shape, np.float32) for path, shape in shapes.items()}


def stacked_dims(params: Arrays) -> dict[str, int]:
    return {path: int(path.startswith("blocks/")) for path in params}


def build(config: OptimConfig, params: Arrays) -> optax.GradientTransformation:
    return make_optimizer(config, STEPS, structs(params), stacked_dims(params))


def run(optimizer: optax.GradientTransformation, params: Arrays, grads: list[Arrays]) -> tuple[list[Arrays], Any]:
    """The updates of each call, applied in between, and the last state."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def step(grad: Any, state: Any, params: Any) -> tuple[Any, Any, Any]:
        updates, state = optimizer.update(grad, state, params)
        return updates, state, optax.apply_updates(params, updates)

    state, history = jax.jit(optimizer.init, compiler_options=QUICK)(params), []
    for grad in grads:
        updates, state, params = step(grad, state, params)
        history.append(updates)
    return history, state


# ---------------------------------------------------------------- schedules

TABLES = [
    ({"schedule": "constant", "lr": 2.0, "warmup_steps": 4}, 6, [0.0, 0.5, 1.0, 1.5, 2.0, 2.0, 2.0]),
    (
        {"schedule": "linear", "lr": 1.0, "warmup_steps": 2, "min_lr_ratio": 0.2},
        10,
        [0.0, 0.5, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2],
    ),
    (
        {"schedule": "cosine", "lr": 1.0, "min_lr_ratio": 0.0},
        4,
        [1.0, 0.8535533905932737, 0.5, 0.14644660940672627, 0.0, 0.0],
    ),
    (
        {"schedule": "cosine", "lr": 0.5, "warmup_steps": 2, "min_lr_ratio": 0.2},
        6,
        [0.0, 0.25, 0.5, 0.1 + 0.4 * 0.8535533905932737, 0.3, 0.1 + 0.4 * 0.14644660940672627, 0.1],
    ),
    (
        {"schedule": "wsd", "lr": 1.0, "warmup_steps": 2, "min_lr_ratio": 0.2, "decay_steps": 4},
        10,
        [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2],
    ),
    ({"schedule": "wsd", "lr": 1.0, "min_lr_ratio": 0.1}, 20, [1.0] * 19 + [0.55, 0.1]),  # decays over 20 / 10 updates
    ({"schedule": "linear", "lr": 1.0, "warmup_steps": 3, "min_lr_ratio": 0.1}, 3, [0.0, 1 / 3, 2 / 3, 0.1]),
]


@pytest.mark.parametrize(("fields", "steps", "table"), TABLES)
def test_schedule_tables(fields: dict[str, Any], steps: int, table: list[float]) -> None:
    schedule = make_schedule(OptimConfig(**fields), steps)
    got = np.array([schedule(k) for k in range(len(table))], np.float64)
    np.testing.assert_allclose(got, table, rtol=2e-7, atol=1e-9)  # one float32 rounding


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_short_runs_have_finite_rates(kind: Any) -> None:
    for steps in range(1, 5):
        for warmup in range(steps + 1):
            config = OptimConfig(schedule=kind, warmup_steps=warmup, lr=0.3, min_lr_ratio=0.0)
            rates = np.asarray(make_schedule(config, steps)(np.arange(6)))
            assert np.isfinite(rates).all() and (rates >= 0).all() and (rates <= np.float32(0.3)).all()
            if warmup < steps:
                assert rates[warmup] == np.float32(0.3)
            assert rates[steps] == np.float32(0.3 if kind == "constant" else 0.0)


def test_schedule_is_the_same_traced_or_not() -> None:
    schedule = make_schedule(OptimConfig(warmup_steps=3, lr=6e-4), 50)
    one_rounding_of_the_cosine = 1.2e-7 * 6e-4
    np.testing.assert_allclose(
        jax.vmap(schedule)(np.arange(50)), schedule(np.arange(50)), atol=one_rounding_of_the_cosine
    )
    np.testing.assert_array_equal(jax.jit(schedule)(7), jax.jit(schedule)(jnp.int32(7)))


def test_schedules_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="optim.warmup_steps=5 is more than the run's 4 steps"):
        make_schedule(OptimConfig(warmup_steps=5), 4)
    with pytest.raises(ConfigError, match=r"optim.decay_steps=3 does not fit: 2 of 4 steps"):
        make_schedule(OptimConfig(schedule="wsd", warmup_steps=2, decay_steps=3), 4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_update_k_uses_schedule_k(name: str) -> None:
    """A first update of rate 0 leaves the parameters as they are; a unit gradient shows sgd's rate itself."""
    config = constant(name, schedule="linear", warmup_steps=2, lr=0.5, beta1=0.0)
    params = {"up/kernel": jnp.ones((4, 4))}
    history, _ = run(build(config, params), params, [{"up/kernel": jnp.ones((4, 4))}] * 4)
    assert not np.any(np.asarray(history[0]["up/kernel"]))
    assert np.all(np.asarray(history[1]["up/kernel"]) < 0) if name != "muon" else True
    if name == "sgd":
        schedule = make_schedule(config, STEPS)
        assert [float(-u["up/kernel"][0, 0]) for u in history] == [float(schedule(k)) for k in range(4)]


# ---------------------------------------------------------------- which parameters decay


def test_mask_goes_by_path_and_not_by_ndim() -> None:
    mask = decay_mask(STACKED)
    assert mask == {
        "blocks/norm/scale": False,
        "blocks/attn/qkv/kernel": True,
        "blocks/attn/qkv/bias": False,
        "blocks/attn/out/kernel": True,
        "blocks/mlp/up/kernel": True,
        "wte/embedding": True,
    }


@pytest.mark.parametrize(
    ("path", "decays"),
    [
        ("ln_f/weight", False),
        ("model/layers/input_layernorm/weight", False),
        ("model/layers/0/self_attn/q_proj/weight", True),
        ("LayerNorm_0/scale", False),
        ("ln1/scale", False),
        ("lnf/bias", False),
        ("q_norm/scale", False),
        ("norm/beta", False),
        ("logit_scale", False),
        ("dt_bias", False),
        ("experts/w1", True),
        ("pos_embed", True),
        ("linear/kernel", True),
    ],
)
def test_built_in_rules(path: str, decays: bool) -> None:
    assert decay_mask({path: None}) == {path: decays}


def test_unknown_paths_are_named() -> None:
    params = {"ssm/A_log": None, "ssm/kernel": None, "ssm/D": None}
    with pytest.raises(ConfigError, match="ssm/A_log, ssm/D: add optim.decay_rules"):
        decay_mask(params)
    assert decay_mask(params, [("A_log|D", False)]) == {"ssm/A_log": False, "ssm/kernel": True, "ssm/D": False}
    shapes = {path: jax.ShapeDtypeStruct((2, 2), jnp.float32) for path in params}
    make_optimizer(constant("adamw"), STEPS, shapes, {})  # without weight decay nothing needs a rule
    with pytest.raises(ConfigError, match="weight_decay=0"):
        make_optimizer(constant("adamw", weight_decay=0.1), STEPS, shapes, {})


def test_own_rules_win_and_must_match_something() -> None:
    params = {"wte/embedding": None, "up/kernel": None, "up_gate/kernel": None}
    assert decay_mask(params, [("embedding", False), ("up/kernel", False)]) == {
        "wte/embedding": False,
        "up/kernel": False,
        "up_gate/kernel": True,
    }
    with pytest.raises(ConfigError, match=r"no parameter matches 'embeding'"):
        decay_mask(params, [("embeding", False)])
    with pytest.raises(ConfigError, match=r"optim.decay_rules: .*not a regular expression"):
        decay_mask(params, [("(", False)])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_is_decoupled_and_spares_stacked_norms(name: str) -> None:
    """Without gradients an update is -rate * decay * weight (lamb: as long as the weight); norms and biases stay."""
    params = random_arrays(FEW | {"blocks/attn/qkv/bias": (LAYERS, 3, 2, 4)}, 0)
    zeros = {path: np.zeros_like(x) for path, x in params.items()}
    (updates,), _ = run(build(constant(name, weight_decay=0.1), params), params, [zeros])
    rate = 0.01 if name == "lamb" else 0.001
    for path, decays in decay_mask(params).items():
        if decays:
            np.testing.assert_allclose(updates[path], -rate * params[path], rtol=1e-5, err_msg=path)
        else:
            assert not np.any(np.asarray(updates[path])), path


# ---------------------------------------------------------------- values


def test_clipping_scales_the_whole_gradient() -> None:
    params = {"a/kernel": jnp.zeros((1, 2)), "a/bias": jnp.zeros((2,))}
    grads = {"a/kernel": jnp.array([[3.0, 0.0]]), "a/bias": jnp.array([0.0, 4.0])}
    for limit, factor in ((1.0, 0.2), (5.5, 1.0)):
        (updates,), _ = run(build(constant("sgd", lr=1.0, clip_norm=limit), params), params, [grads])
        np.testing.assert_allclose(updates["a/kernel"], [[-3.0 * factor, 0.0]], rtol=1e-6)
        np.testing.assert_allclose(updates["a/bias"], [0.0, -4.0 * factor], rtol=1e-6)


def test_global_norm_sums_in_float32() -> None:
    grads = {"a": jnp.full((64, 64), 300.0, jnp.float16), "b": jnp.full((3,), 2.0, jnp.bfloat16)}
    assert float(global_norm(grads)) == pytest.approx((64 * 64 * 300.0**2 + 12.0) ** 0.5, rel=1e-6)
    assert global_norm(grads).dtype == jnp.float32


def test_adamw_is_adam_with_decoupled_decay() -> None:
    """Two updates against the formulas of Loshchilov & Hutter 2019, algorithm 2, in float64."""
    config = constant("adamw", weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-3)
    params = random_arrays({"a/kernel": (3, 4)}, 0)
    grads = [random_arrays({"a/kernel": (3, 4)}, seed) for seed in (1, 2)]
    history, _ = run(build(config, params), params, grads)
    x, m, v = np.asarray(params["a/kernel"], np.float64), np.zeros((3, 4)), np.zeros((3, 4))
    for t, (grad, updates) in enumerate(zip(grads, history, strict=True), start=1):
        g = np.asarray(grad["a/kernel"], np.float64)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        expected = -0.01 * (m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3) + 0.1 * x)
        np.testing.assert_allclose(updates["a/kernel"], expected, rtol=1e-4)
        x = x + expected


def test_sgd_momentum_and_lion_sign() -> None:
    params = {"a/kernel": jnp.ones((1, 2))}
    grads = [{"a/kernel": jnp.array([[1.0, -2.0]])}, {"a/kernel": jnp.array([[1.0, 5.0]])}]
    sgd, _ = run(build(constant("sgd", lr=1.0, beta1=0.5), params), params, grads)
    np.testing.assert_allclose(sgd[1]["a/kernel"], [[-1.5, -4.0]], rtol=1e-6)
    lion, _ = run(build(constant("lion", lr=1.0, beta1=0.5, beta2=0.5), params), params, grads)
    np.testing.assert_array_equal(lion[0]["a/kernel"], [[-1.0, 1.0]])
    np.testing.assert_array_equal(lion[1]["a/kernel"], [[-1.0, -1.0]])  # 0.5 * 5 + 0.5 * (-1) > 0


def test_lamb_steps_are_as_long_as_each_layers_own_weight() -> None:
    scale = np.array([1.0, 100.0], np.float32)[:, None, None]
    params = {"blocks/up/kernel": random_arrays({"x": (2, 4, 6)}, 0)["x"] * scale}
    (updates,), _ = run(build(constant("lamb"), params), params, [random_arrays({"blocks/up/kernel": (2, 4, 6)}, 1)])
    lengths = np.linalg.norm(np.asarray(updates["blocks/up/kernel"]).reshape(2, -1), axis=1)
    weights = np.linalg.norm(np.asarray(params["blocks/up/kernel"]).reshape(2, -1), axis=1)
    np.testing.assert_allclose(lengths, 0.01 * weights, rtol=1e-5)


def test_adafactor_steps_are_relative_to_each_layers_own_rms() -> None:
    """|g| of rank one is what two factors hold exactly: the first update is then rate * rms(layer) * sign(g)."""
    rng = np.random.default_rng(0)
    size = np.abs(rng.standard_normal((2, 128, 1))) * np.abs(rng.standard_normal((2, 1, 136))) + 1e-3
    size = size[:, :, :1] * size[:, :1, :]
    grad = (size * rng.choice([-1.0, 1.0], size.shape) * np.array([1.0, 1e-4])[:, None, None]).astype(np.float32)
    params = {
        "blocks/up/kernel": random_arrays({"x": (2, 128, 136)}, 1)["x"]
        * np.array([1.0, 7.0], np.float32)[:, None, None]
    }
    history, state = run(build(constant("adafactor", beta1=0.0), params), params, [{"blocks/up/kernel": grad}])
    rms = np.sqrt(np.mean(np.square(np.asarray(params["blocks/up/kernel"])), axis=(1, 2), keepdims=True))
    np.testing.assert_allclose(history[0]["blocks/up/kernel"], -0.01 * rms * np.sign(grad), rtol=1e-3)
    shapes = sorted(x.shape for x in jax.tree.leaves(state) if x.ndim)
    assert shapes == [(2, 1), (2, 128), (2, 136)]  # the factors of each layer, and no full second moment


def test_muon_orthogonalises_each_head_group_and_layer() -> None:
    """Singular values of every matrix lie where five Newton-Schulz steps leave them, in units of 0.2 * sqrt(fan)."""
    params = random_arrays(STACKED, 0)
    (updates,), _ = run(build(constant("muon", lr=1.0), params), params, [random_arrays(STACKED, 1)])
    u = {path: np.asarray(x) for path, x in updates.items()}
    matrices = [u["blocks/mlp/up/kernel"][layer] for layer in range(LAYERS)]
    matrices += [u["blocks/attn/qkv/kernel"][layer, :, i].reshape(8, 8) for layer in range(LAYERS) for i in range(3)]
    matrices += [u["blocks/attn/out/kernel"][layer].reshape(8, 8) for layer in range(LAYERS)]
    for matrix in matrices:
        values = np.linalg.svd(matrix, compute_uv=False) / (0.2 * max(matrix.shape) ** 0.5)
        assert np.median(values) > 0.6 and values.max() < 1.35
    adam = np.abs(u["wte/embedding"])
    np.testing.assert_allclose(adam, np.ones_like(adam), rtol=1e-3)  # Adam's first update is the sign


@pytest.mark.parametrize(
    ("path", "shape", "layout"),
    [
        ("mlp/up/kernel", (8, 32), "io"),
        ("attn/qkv/kernel", (8, 3, 2, 4), "iboo"),
        ("attn/kv/kernel", (8, 2, 2, 4), "iboo"),
        ("attn/q/kernel", (8, 2, 4), "ioo"),
        ("attn/out/kernel", (2, 4, 8), "iio"),
        ("mlp/gate_up/kernel", (8, 2, 32), "ibo"),
        ("experts/up/kernel", (4, 8, 32), "bio"),
        ("mlp/up/bias", (32,), None),
        ("norm/weight", (8,), None),
        ("wte/embedding", (64, 8), None),
        ("lm_head/kernel", (8, 64), None),
        ("router/kernel", (8, 4), None),
        ("conv/kernel", (3, 3, 8, 8), None),
    ],
)
def test_muon_layouts(path: str, shape: tuple[int, ...], layout: str | None) -> None:
    assert muon_layout(f"blocks/{path}", shape) == layout


# ---------------------------------------------------------------- every optimizer


SPECS = {
    "blocks/norm/scale": P(),
    "blocks/attn/qkv/kernel": P(None, "data", None, "model", None),
    "blocks/mlp/up/kernel": P(None, "data", "model"),
}
FEW = {path: STACKED[path] for path in SPECS}


def shard(tree: Arrays) -> Arrays:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    return {path: jax.device_put(x, NamedSharding(mesh, SPECS[path])) for path, x in tree.items()}


def uneven_layers(seed: int) -> Arrays:
    """Values whose second layer is 30 times the first, so that one norm or factor over both layers would show."""
    return {
        path: x * np.array([1, 30], np.float32).reshape(2, *(1,) * (x.ndim - 1))
        for path, x in random_arrays(FEW, seed).items()
    }


def unstack(tree: Arrays) -> Arrays:
    parts = {}
    for path, x in tree.items():
        parts |= {f"layer{i}/{path.removeprefix('blocks/')}": np.asarray(x)[i] for i in range(LAYERS)}
    return parts


def assert_close(name: str, ours: list[Arrays], expected: list[Arrays]) -> None:
    """Up to summation order, in units of each leaf's largest value; Newton-Schulz amplifies rounding (muon)."""
    tolerance = 2e-4 if name == "muon" else 1e-5
    for mine, other in zip(ours, expected, strict=True):
        assert mine.keys() == other.keys()
        for path, update in mine.items():
            size = float(np.max(np.abs(other[path])))
            np.testing.assert_allclose(update, other[path], rtol=0, atol=tolerance * size, err_msg=path)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stacked_separate_and_sharded_layers_update_alike(name: str) -> None:
    config = constant(name, weight_decay=0.1, clip_norm=1.0)
    params, grads = uneven_layers(0), [uneven_layers(1), uneven_layers(2)]
    stacked, _ = run(build(config, params), params, grads)

    separate, _ = run(build(config, unstack(params)), unstack(params), [unstack(grad) for grad in grads])
    assert_close(name, [unstack(updates) for updates in stacked], separate)

    sharded, _ = run(build(config, params), shard(params), [shard(grad) for grad in grads])
    assert_close(name, sharded, stacked)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_gradients_give_exactly_zero_updates(name: str) -> None:
    """In float16 as in float32, for whole weights and for the rows of an embedding that no token used."""
    shapes = {
        "blocks/up/kernel": (2, 4, 6),
        "blocks/norm/scale": (2, 4),
        "half/kernel": (4, 6),
        "half/embedding": (4, 4),
    }
    params = random_arrays(shapes, 0)
    params |= {path: x.astype(np.float16) for path, x in params.items() if path.startswith("half")}
    zeros = {path: np.zeros_like(x) for path, x in params.items()}
    used = zeros | {"half/embedding": np.array([[1], [1], [0], [0]], np.float16) * np.ones((1, 4), np.float16)}
    history, state = run(build(constant(name, clip_norm=1.0), params), params, [zeros, zeros, used])
    for call, updates in enumerate(history):
        for path, update in updates.items():
            assert update.dtype == params[path].dtype
            moved = np.asarray(update)[:2] if call == 2 and path == "half/embedding" else np.empty(0)
            assert np.all(moved < 0) and np.count_nonzero(np.asarray(update)) == moved.size, path
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_mirrors_parameters_by_path(name: str) -> None:
    """Every array of the state that is not a scalar or a constant stands under its parameter's path."""
    params = random_arrays(STACKED, 0)
    state = jax.eval_shape(build(constant(name, moment_dtype="bfloat16"), params).init, structs(params))
    mirrored = set()
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
        paths = [key.key for key in keys if isinstance(key, jax.tree_util.DictKey)]
        if leaf.ndim and not paths:
            assert leaf.shape == (3,), keys  # Muon's three coefficients
            continue
        for path in paths:
            mirrored.add(path)
            if leaf.shape != params[path].shape:
                assert (name == "adafactor" and leaf.ndim < params[path].ndim) or leaf.size <= LAYERS, keys
        if leaf.dtype == jnp.bfloat16:
            assert leaf.shape == params[paths[0]].shape
    assert mirrored == set(params)
    assert any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(state))
    assert all(leaf.dtype in (jnp.bfloat16, jnp.float32, jnp.int32) for leaf in jax.tree.leaves(state))


def test_moment_dtype_is_of_the_first_moment_only() -> None:
    params = random_arrays({"a/kernel": (4, 4)}, 0)
    state = build(constant("adamw", moment_dtype="bfloat16"), params).init(params)
    adam = next(s for s in state if isinstance(s, optax.ScaleByAdamState))
    assert adam.mu["a/kernel"].dtype == jnp.bfloat16 and adam.nu["a/kernel"].dtype == jnp.float32


def test_norm_of_sharded_and_replicated_leaves() -> None:
    grads = random_arrays(FEW, 3)
    expected = np.sqrt(sum(np.sum(np.square(np.asarray(g, np.float64))) for g in grads.values()))
    assert float(jax.jit(global_norm)(shard(grads))) == pytest.approx(expected, rel=1e-6)

    params = {path: np.zeros_like(x) for path, x in grads.items()}
    config = constant("sgd", lr=1.0, beta1=0.0, clip_norm=2.0)
    (updates,), _ = run(build(config, params), shard(params), [shard(grads)])
    for path, update in updates.items():
        np.testing.assert_allclose(update, -2.0 / expected * np.asarray(grads[path]), rtol=1e-6)
