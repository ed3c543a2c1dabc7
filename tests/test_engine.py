"""`initialize`: every optimizer under every stage, warnings, and what a batch may be."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from meshtrain import Engine, from_function, initialize, make_mesh
from meshtrain.config import OptimConfig
from meshtrain.engine import LayoutWarning, param_shapes
from meshtrain.errors import ConfigError, UserError
from meshtrain.optim import make_optimizer

SHAPES = {
    "blocks/attn/qkv/kernel": (2, 8, 3, 4, 4),
    "blocks/attn/qkv/bias": (2, 3, 4, 4),
    "blocks/mlp/up/kernel": (2, 8, 16),
    "blocks/ln_1/scale": (2, 8),
    "wte/embedding": (24, 8),
    "odd/kernel": (3, 5),  # nothing divides: rests replicated
}
RULES = [
    ("qkv/kernel", P(None, None, "model", None)),
    ("qkv/bias", P(None, "model", None)),
    ("up/kernel", P(None, "model")),
    ("wte/embedding", P("model", None)),
    (".*", P()),
]
STEPS = 10


def pattern(path: str) -> np.ndarray:
    """Small whole numbers: their sums are exact in float32, in whatever order they are reduced."""
    return np.random.default_rng(len(path)).integers(-3, 4, SHAPES[path]).astype(np.float32)


def loss(params, batch, key):
    """Linear in the parameters, with exact gradients: what differs between layouts is the optimizer alone."""
    total = sum(jnp.sum(value * pattern(path)) for path, value in params.items())
    return total * jnp.sum(batch["x"]), jnp.asarray(batch["x"].size, jnp.float32)


def init(key):
    keys = jax.random.split(key, len(SHAPES))
    return {path: jax.random.normal(keys[i], shape) for i, (path, shape) in enumerate(SHAPES.items())}


def make_linear(optimizer, stage: int, data: int = 4, model: int = 2, **rest) -> Engine:
    return initialize(
        from_function(init, loss),
        {"x": np.zeros(16, np.float32)},
        mesh=make_mesh(data, model, jax.devices()[: data * model]),
        rules=RULES,
        optimizer=optimizer,
        stage=stage,
        **rest,
    )


def trained(name: str, stage: int, data: int, model: int) -> dict[str, np.ndarray]:
    config = OptimConfig(name=name, lr=0.01, weight_decay=0.1, clip_norm=2.0, schedule="constant")

    def optimizer(layout):
        stacked = {path: 1 for path in SHAPES if path.startswith("blocks/")}
        return make_optimizer(config, STEPS, param_shapes(layout), stacked)

    engine = make_linear(optimizer, stage, data, model, num_microbatches=2)
    state = engine.init()
    for i in range(STEPS):
        x = np.random.default_rng(i).integers(-4, 5, 16).astype(np.float32)
        state, _ = engine.step(state, {"x": x})
    return {path: np.asarray(value) for path, value in state.params.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "lion", "lamb", "sgd"])
def test_every_optimizer_is_the_same_on_every_stage(name: str) -> None:
    expected = trained(name, 0, 4, 2)
    start = make_linear(optax.sgd(0.0), 0, 1, 1).init().params
    for stage in (1, 2, 3):
        got = trained(name, stage, 4, 2)
        for path, value in expected.items():
            assert np.abs(value - np.asarray(start[path])).max() > 1e-4, f"{path} was not trained"
            # Muon's Newton-Schulz iteration amplifies rounding
            np.testing.assert_allclose(got[path], value, rtol=2e-5, atol=2e-4 if name == "muon" else 2e-6, err_msg=path)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_does_not_divide_is_replicated_and_shown(stage: int) -> None:
    engine = make_linear(optax.sgd(0.1), stage)
    leaf = engine.layout.leaves["odd/kernel"]
    assert leaf.zero_dim is None
    assert leaf.why_replicated == "no dim divides by data=4"
    assert "no dim divides by data=4" in str(engine.layout)
    state, _ = engine.step(engine.init(), {"x": np.ones(16, np.float32)})
    got = np.asarray(state.params["odd/kernel"])
    start = np.asarray(make_linear(optax.sgd(0.1), 0, 1, 1).init().params["odd/kernel"])
    np.testing.assert_allclose(got, start - 0.1 * pattern("odd/kernel"), rtol=1e-5, atol=1e-6)


def test_a_parameter_that_is_never_read_is_named() -> None:
    def forgetful(params, batch, key):
        return jnp.sum(params["used"] * batch["x"].sum()), jnp.asarray(1.0)

    with pytest.warns(LayoutWarning, match="rule 'idle/kernel' matches no parameter"):
        initialize(
            from_function(lambda key: {"used": jnp.ones(8), "unused": jnp.ones(8)}, forgetful),
            {"x": np.zeros(8, np.float32)},
            mesh=make_mesh(8, 1),
            rules=[("idle/kernel", P("model")), (".*", P())],
            optimizer=optax.sgd(0.1),
        )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"stage": 4}, ConfigError, "must be 0, 1, 2 or 3"),
        ({"num_microbatches": 3}, ConfigError, "16 records cannot be cut"),
        ({"num_microbatches": 0}, ConfigError, "num_microbatches=0 must be at least 1"),
        ({"seed": 2**40}, ConfigError, r"must lie in \[0, 2\*\*32\)"),
        ({"precision": "fp8"}, ConfigError, "precision 'fp8' must be float32"),
    ],
)
def test_mistakes(changes: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_linear(optax.sgd(0.1), **({"stage": 1} | changes))


def test_a_batch_may_be_on_the_host_or_on_the_devices() -> None:
    engine = make_linear(optax.sgd(0.1), 1)
    batch = {"x": np.arange(16, dtype=np.float32)}
    placed = engine.shard(batch)
    assert engine.shard(placed)["x"] is placed["x"]
    assert placed["x"].sharding == engine.batch_sharding
    losses = [float(engine.step(engine.init(), given)[1]["loss"]) for given in (batch, placed)]
    assert losses[0] == losses[1]


def test_a_state_serves_one_step_and_a_batch_has_its_shapes() -> None:
    engine = make_linear(optax.sgd(0.1), 1)
    batch = {"x": np.ones(16, np.float32)}
    state = engine.init()
    after, _ = engine.step(state, batch)
    with pytest.raises(ConfigError, match="was given to `step` before"):
        engine.step(state, batch)
    for other in ({"y": batch["x"]}, {"x": np.ones(8, np.float32)}):
        with pytest.raises(ConfigError, match="the batch has the shapes"):
            engine.step(after, other)


def test_lowering_computes_nothing_and_names_the_state() -> None:
    compiled = make_linear(optax.adamw(1e-3), 2).lower().compile()
    assert compiled.memory_analysis().argument_size_in_bytes > 0


def test_errors_are_the_users(tmp_path) -> None:
    with pytest.raises(UserError, match="no rule places"):
        initialize(
            from_function(init, loss),
            {"x": np.zeros(16, np.float32)},
            mesh=make_mesh(8, 1),
            rules=[("qkv/kernel", P())],
            optimizer=optax.sgd(0.1),
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage": True}, "ZeRO stage must be 0, 1, 2 or 3, got True"),
        ({"stage": "2"}, "got '2'"),
        ({"stage": 2.0}, "got 2.0"),
        ({"model": init}, "`model` must come from from_nnx, from_linen or from_function, and is init"),
        ({"model": None}, "`model` must come from"),
        ({"mesh": "4x2"}, "`mesh` must come from make_mesh"),
        ({"batch": {}}, "at least one array"),
        ({"optimizer": optax.adamw}, "optax transformation such as"),
        ({"sequence_parallel": True}, 'never says meshtrain.name\\(x, "residual"\\)'),
        ({"optimizer": "adamw"}, "optax transformation such as optax.adamw"),
        ({"optimizer": lambda layout: None}, "made a NoneType, not an optax"),
        ({"precision": jnp.bfloat16}, "`precision` must be a name"),
        ({"rules": None}, "`rules` must be a list"),
        ({"rules": "kernel"}, "`rules` must be a list"),
        ({"batch": {"x": [0.0] * 16}}, r"\['x'\]\[0\] must be an array"),
        ({"batch": {"x": "text"}}, r"\['x'\] must be an array .* not a str"),
    ],
)
def test_an_argument_of_the_wrong_type_is_named(change: dict, message: str) -> None:
    given = {"batch": {"x": np.zeros(16, np.float32)}, "mesh": make_mesh(4, 2), "rules": RULES} | change
    arguments = {"model": from_function(init, loss), "optimizer": optax.sgd(1.0)} | given
    with pytest.raises(UserError, match=message):
        initialize(**arguments)


def test_an_evaluation_batch_may_have_another_size_that_divides() -> None:
    engine = make_linear(optax.sgd(1.0), 1)
    state = engine.init()
    assert float(engine.evaluate(state, {"x": np.zeros(8, np.float32)})[1]) == 8
    with pytest.raises(ConfigError, match="a global batch of 13 records cannot be cut"):
        engine.evaluate(state, {"x": np.zeros(13, np.float32)})
