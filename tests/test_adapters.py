"""Any model, unchanged: the gradients of plain jax on one device, whatever the stage, the mesh and the framework."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshtrain import (
    Engine,
    Model,
    Precision,
    TrainState,
    UserError,
    from_function,
    from_linen,
    from_nnx,
)
from meshtrain.engine import LayoutWarning
from meshtrain.precision import LossScale
from meshtrain.zero import Weight
from tests.tiny_lms import (
    KINDS,
    B,
    D,
    V,
    X,
    assert_close,
    gradients,
    initial,
    make_batch,
    make_engine,
    nest,
    plain_loss,
    with_params,
)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("adapters")]  # one worker: its tests share what they compute

STAGES = [0, 1, 2, 3]
MESHES = [(1, 1), (4, 2), (2, 4), (8, 1)]


# ---------------------------------------------------------------- whole models


@functools.cache
def kind(name: str) -> tuple[Model, Any, dict[str, np.ndarray]]:
    make, rules = KINDS[name]
    model = make()
    return model, rules, initial(model, make_batch())


@functools.cache
def plain_gradients(name: str) -> tuple[float, dict[str, np.ndarray]]:
    params = kind(name)[2]
    loss, grads = jax.jit(jax.value_and_grad(functools.partial(plain_loss, name)))(params, make_batch())
    return float(loss), {path: np.asarray(grad) for path, grad in grads.items()}


def check_gradients(name: str, stage: int, mesh: tuple[int, int], num_microbatches: int) -> None:
    model, rules, params = kind(name)
    engine = make_engine(model, make_batch(), stage, mesh, rules, num_microbatches=num_microbatches)
    loss, grads = gradients(engine, params, make_batch())
    expected_loss, expected = plain_gradients(name)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert all(np.any(grad) for path, grad in expected.items() if "key/bias" not in path)  # softmax drops that one
    assert_close(grads, expected)


slow = pytest.mark.slow
LAYOUT_BY_STAGE = [((4, 2), 2), ((2, 4), 1), ((4, 2), 2), ((2, 4), 2)]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "name", ["nnx-scan", pytest.param("linen-scan", marks=slow), pytest.param("function", marks=slow)]
)
def test_every_gradient_leaf_at_every_stage(name: str, stage: int) -> None:
    check_gradients(name, stage, *LAYOUT_BY_STAGE[stage])


@pytest.mark.parametrize("name", ["linen-scan", "function"])
def test_every_gradient_leaf_of_other_frameworks(name: str) -> None:
    check_gradients(name, 3, (4, 2), 1)


@pytest.mark.parametrize("name", ["nnx", pytest.param("linen", marks=slow)])
def test_every_gradient_leaf_of_separate_layers(name: str) -> None:
    check_gradients(name, 3, (4, 2), 1)


def start(engine: Engine, params: Any) -> TrainState:
    """`engine.init()` with given parameters: placed, not compiled, which would take most of a test's time."""
    target = engine.abstract_state()
    optimizer = jax.jit(engine.optimizer.init)(params)
    state = TrainState(np.int32(0), params, optimizer, LossScale.start(Precision()))
    return jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, target))


def history(name: str, mesh: tuple[int, int], stage: int, num_microbatches: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of 5 updates."""
    model, rules, params = kind(name)
    engine = make_engine(model, make_batch(), stage, mesh, rules, num_microbatches=num_microbatches)
    state = start(engine, params)
    seen = []
    for i in range(5):
        state, metrics = engine.step(state, make_batch(i))
        seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return seen


reference = functools.cache(functools.partial(history, mesh=(1, 1), stage=0, num_microbatches=1))


# Each kind of model at each stage; that the meshes and microbatches agree is tests/test_zero.py's to show.
LAYOUTS = [((4, 2), stage, 2) for stage in STAGES] + [((8, 1), 1, 1), ((2, 4), 3, 1), ((1, 1), 2, 2)]


@slow
@pytest.mark.parametrize("name", ["nnx-scan", "linen-scan", "function"])
@pytest.mark.parametrize(("mesh", "stage", "num_microbatches"), LAYOUTS)
def test_every_layout_trains_as_one_device(name: str, mesh: tuple[int, int], stage: int, num_microbatches: int) -> None:
    np.testing.assert_allclose(history(name, mesh, stage, num_microbatches), reference(name), rtol=1e-5)


def test_stage_3_trains_as_one_device() -> None:
    np.testing.assert_allclose(history("nnx-scan", (4, 2), 3, 2), reference("nnx-scan"), rtol=1e-5)


# ---------------------------------------------------------------- stock modules

X_BTD = {"x": np.random.default_rng(1).normal(size=(B, 4, D)).astype(np.float32)}

NNX_STOCK: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {
    "Linear": lambda rngs: nnx.Linear(D, D, rngs=rngs),
    "LinearGeneral": lambda rngs: nnx.LinearGeneral(D, (2, 8), rngs=rngs),
    "Einsum": lambda rngs: nnx.Einsum("btd,df->btf", (D, D), (D,), rngs=rngs),
    "Embed": lambda rngs: Tokens(nnx.Embed(V, D, rngs=rngs)),
    "Conv": lambda rngs: nnx.Conv(D, D, (3,), rngs=rngs),
    "ConvTranspose": lambda rngs: nnx.ConvTranspose(D, D, (3,), rngs=rngs),
    "LayerNorm": lambda rngs: nnx.LayerNorm(D, rngs=rngs),
    "RMSNorm": lambda rngs: nnx.RMSNorm(D, rngs=rngs),
    "GroupNorm": lambda rngs: nnx.GroupNorm(D, 4, rngs=rngs),
    "InstanceNorm": lambda rngs: nnx.InstanceNorm(D, rngs=rngs),
    "LoRA": lambda rngs: nnx.LoRA(D, 4, D, base_module=nnx.Linear(D, D, rngs=rngs), rngs=rngs),
    "LoRALinear": lambda rngs: nnx.LoRALinear(D, D, lora_rank=4, rngs=rngs),
    "MultiHeadAttention": lambda rngs: nnx.MultiHeadAttention(4, D, decode=False, normalize_qk=True, rngs=rngs),
    "PReLU": lambda rngs: nnx.PReLU(),
    "RNN": lambda rngs: nnx.RNN(nnx.GRUCell(D, D, rngs=rngs)),
    "Sequential": lambda rngs: nnx.Sequential(nnx.Linear(D, D, rngs=rngs), nnx.relu, nnx.Linear(D, D, rngs=rngs)),
    "annotated": lambda rngs: nnx.Linear(
        D, D, kernel_init=nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp")), rngs=rngs
    ),
}


class Tokens(nnx.Module):
    """Embeds tokens made of numbers, and looks all of them up again: an embedding used at both ends."""

    def __init__(self, embed: nnx.Embed) -> None:
        self.embed = embed

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.embed.attend(self.embed((x[..., 0] * 8).astype(jnp.int32) % V))


class NnxStock(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.parts = nnx.Dict({name: make(rngs) for name, make in NNX_STOCK.items()})


LINEN_STOCK: dict[str, Callable[[str], nn.Module]] = {
    "Dense": lambda name: nn.Dense(D, name=name),
    "DenseGeneral": lambda name: nn.DenseGeneral((2, 8), name=name),
    "Einsum": lambda name: nn.Einsum((D, D), "btd,df->btf", name=name),
    "Conv": lambda name: nn.Conv(D, (3,), name=name),
    "LayerNorm": lambda name: nn.LayerNorm(name=name),
    "RMSNorm": lambda name: nn.RMSNorm(name=name),
    "GroupNorm": lambda name: nn.GroupNorm(4, name=name),
    "MultiHeadDotProductAttention": lambda name: nn.MultiHeadDotProductAttention(4, name=name),
    "PReLU": lambda name: nn.PReLU(name=name),
    "RNN": lambda name: nn.RNN(nn.GRUCell(D), name=name),
    "Sequential": lambda name: nn.Sequential([nn.Dense(D), nn.relu, nn.Dense(D)], name=name),
    "annotated": lambda name: nn.Dense(
        D, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp")), name=name
    ),
}


class LinenStock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> list[jax.Array]:
        embed = nn.Embed(V, D, name="Embed")
        attended = embed.attend(embed((x[..., 0] * 8).astype(jnp.int32) % V))
        return [attended, *(make(name)(x) for name, make in LINEN_STOCK.items())]


def sum_of_squares(outputs: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    return sum(jnp.sum(jnp.square(y)) for y in outputs) / D, jnp.asarray(batch["x"].shape[0], jnp.float32)


def nnx_stock_loss(module: NnxStock, batch: Any) -> tuple[jax.Array, jax.Array]:
    return sum_of_squares((part(batch["x"]) for part in module.parts.values()), batch)


@functools.cache
def stock_gradients(framework: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """At stage 3, and by plain jax."""
    if framework == "nnx":
        model = from_nnx(lambda rngs: NnxStock(rngs=rngs), nnx_stock_loss)
    else:
        model = from_linen(LinenStock(), lambda model, batch: sum_of_squares(model(batch["x"]), batch))
    params = initial(model, X_BTD)

    def mean(params: Any) -> Any:
        if framework == "nnx":
            with nnx.use_eager_sharding(False):
                module = NnxStock(rngs=nnx.Rngs(0))
            return nnx_stock_loss(with_params(module, params), X_BTD)[0] / B
        return sum_of_squares(LinenStock().apply({"params": nest(params)}, X_BTD["x"]), X_BTD)[0] / B

    return gradients(make_engine(model, X_BTD, 3), params, X_BTD)[1], jax.jit(jax.grad(mean))(params)


# The cell and the layers that RNN and Sequential are given belong to the module around them
LINEN_NAMES = {*LINEN_STOCK, "Embed", "GRUCell_0", "Dense_0", "Dense_1"} - {"RNN", "Sequential"}
STOCK = [("nnx", f"parts/{name}/") for name in NNX_STOCK] + [("linen", f"{name}/") for name in sorted(LINEN_NAMES)]


@pytest.mark.parametrize(("framework", "prefix"), STOCK)
def test_stock_modules_gather_at_stage_3(framework: str, prefix: str) -> None:
    grads, expected = stock_gradients(framework)
    paths = [path for path in expected if path.startswith(prefix)]
    assert paths
    for path in paths:
        scale = max(np.abs(expected[other]).max() for other in paths)
        np.testing.assert_allclose(grads[path], expected[path], rtol=2e-5, atol=1e-6 * scale, err_msg=path)


# ---------------------------------------------------------------- where parameters lie


class Containers(nnx.Module):
    """Parameters in every container, one of them in two modules, and state that is not trained."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        def linear() -> nnx.Linear:
            return nnx.Linear(D, D, use_bias=False, rngs=rngs)

        def param() -> nnx.Param:
            return nnx.Param(jax.random.normal(rngs.params(), (D, D)))

        self.list = nnx.data([linear(), param()])
        self.dict = nnx.data({"a": linear(), "b": [param()]})
        self.tuple = nnx.data((linear(), param()))
        self.nnx_list = nnx.List([linear(), param()])
        self.nnx_dict = nnx.Dict(a=linear(), b=param())
        self.first, self.second = linear(), linear()
        self.second.kernel = self.first.kernel
        self.lora = nnx.LoRAParam(jax.random.normal(rngs.params(), (D, D)))
        self.table = nnx.Variable(jnp.arange(1.0, D + 1))
        self.array = jnp.full(D, 0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        modules = [self.list[0], self.dict["a"], self.tuple[0], self.nnx_list[0], self.nnx_dict["a"]]
        params = [self.list[1], self.dict["b"][0], self.tuple[1], self.nnx_list[1], self.nnx_dict["b"], self.lora]
        assert isinstance(self.lora, nnx.LoRAParam)
        for module in [*modules, self.first, self.second]:
            x = jnp.sin(module(x))
        for param in params:
            x = jnp.sin(x @ param / D)
        return x * self.table * self.array


def mean_square(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(model(batch["x"]) ** 2), jnp.asarray(batch["x"].shape[0], jnp.float32)


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_in_any_container_tied_ones_once(stage: int) -> None:
    model = from_nnx(lambda rngs: Containers(rngs=rngs), mean_square)
    params = initial(model, X)
    assert set(params) == {
        *("list/0/kernel", "list/1", "dict/a/kernel", "dict/b/0", "tuple/0/kernel", "tuple/1", "lora"),
        *("nnx_list/0/kernel", "nnx_list/1", "nnx_dict/a/kernel", "nnx_dict/b", "first/kernel"),
    }

    def mean(params: Any) -> Any:
        return mean_square(with_params(Containers(rngs=nnx.Rngs(0)), params), X)[0] / B

    assert_close(gradients(make_engine(model, X, stage), params, X)[1], jax.jit(jax.grad(mean))(params))


@pytest.mark.parametrize("stage", [1, 3])
def test_leaves_of_a_function_keep_their_places(stage: int) -> None:
    """As text, layer 10 sorts before layer 2 and "a-" before "a/": a swap of equal shapes would go unseen."""

    def init(key: jax.Array) -> Any:
        layers = [jax.random.normal(k, (D, D)) / 4 for k in jax.random.split(key, 12)]
        return {"a": {"b": jnp.full(D, 1.0)}, "a-": jnp.full(D, 2.0), "layers": layers}

    def loss(params: Any, batch: Any, key: Any) -> tuple[jax.Array, jax.Array]:
        x = jnp.sin(batch["x"] + params["a"]["b"]) * params["a-"]
        for layer in params["layers"]:
            x = jnp.sin(x @ layer)
        return jnp.sum(x**2), jnp.asarray(x.shape[0], jnp.float32)

    tree = jax.jit(init)(jax.random.key(0))
    expected = jax.jit(jax.grad(lambda params: loss(params, X, None)[0] / B))(tree)
    engine = make_engine(from_function(init, loss), X, stage)
    params = initial(engine.model, X)
    assert params["a/b"][0] == 1 and params["a-"][0] == 2
    grads = gradients(engine, params, X)[1]
    flat = {"a/b": expected["a"]["b"], "a-": expected["a-"]}
    assert_close(grads, flat | {f"layers/{i}": grad for i, grad in enumerate(expected["layers"])})


class Unread(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.used, self.spare = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, D, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.used(x)


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_that_is_never_read_warns_and_has_no_gradient(stage: int) -> None:
    model = from_nnx(lambda rngs: Unread(rngs=rngs), mean_square)
    with pytest.warns(LayoutWarning, match="never reads 'spare/kernel': its gradient is zero"):
        engine = make_engine(model, X, stage)
    grads = gradients(engine, initial(model, X), X)[1]
    assert not grads["spare/kernel"].any() and grads["used/kernel"].all()


# ---------------------------------------------------------------- refusals


class WithInteger(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.count = nnx.Param(jnp.arange(4))


class WithStatistics(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(D, rngs=rngs)


def test_refused_models_say_why() -> None:
    def linear(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Linear(D, D, rngs=rngs)

    def batch_norm(model: Any, batch: Any) -> Any:
        return mean_square(lambda x: model(x, use_running_average=False), batch)

    with pytest.raises(UserError, match=r"from_nnx takes a function that builds the module: lambda rngs"):
        from_nnx(linear(nnx.Rngs(0)), mean_square)
    with pytest.raises(UserError, match="built a list, not an nnx.Module"):
        from_nnx(lambda rngs: [linear(rngs)], mean_square)
    with pytest.raises(UserError, match=r"running statistics \(norm/mean\).*LayerNorm"):
        from_nnx(lambda rngs: WithStatistics(rngs=rngs), mean_square)
    with pytest.raises(UserError, match="the module keeps state in batch_stats"):
        make_engine(from_linen(nn.BatchNorm(), batch_norm), X, 0)
    with pytest.raises(UserError, match="the loss never calls the model"):
        make_engine(from_linen(nn.Dense(D), lambda model, batch: mean_square(jnp.sin, batch)), X, 0)
    with pytest.raises(UserError, match="parameter 'count' is of type int32"):
        make_engine(from_nnx(lambda rngs: WithInteger(rngs=rngs), mean_square), X, 0)
    with pytest.raises(UserError, match="parameter 'steps' is of type int32"):
        make_engine(from_function(lambda key: {"steps": jnp.arange(4)}, lambda params, batch, key: None), X, 0)
    with pytest.raises(UserError, match="do not use '/' in a parameter's name"):
        make_engine(from_function(lambda key: {"a/b": X["x"], "a": {"b": X["x"]}}, lambda *args: None), X, 0)


@pytest.mark.parametrize("result", [lambda x: jnp.mean(x), lambda x: (jnp.sum(x), x), lambda x: (jnp.sum(x),) * 3])
def test_a_loss_that_is_no_pair_of_sums_is_refused(result: Any) -> None:
    with pytest.raises(UserError, match=r"must return two scalars \(sum of token losses, sum of token weights\)"):
        make_engine(from_linen(nn.Dense(D), lambda model, batch: result(model(batch["x"]))), X, 0)


# ---------------------------------------------------------------- dropout

BITS = 10


class Masks(nnx.Module):
    """Writes the masks that dropout draws in two scanned layers as one number: layer 0 in the lower ten bits."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(jnp.ones(8))
        self.layers = nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs))(rngs.split(2))

    def __call__(self, x_B: jax.Array) -> jax.Array:
        def layer(dropout: nnx.Dropout, code_B: jax.Array) -> jax.Array:
            mask_BN = dropout(jnp.ones((*x_B.shape, BITS))) > 0
            return code_B * 2**BITS + jnp.sum(mask_BN * 2.0 ** jnp.arange(BITS), -1)

        code_B = nnx.scan(layer, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, jnp.zeros(x_B.shape))
        return code_B * x_B * self.w[0]


class LinenMasks(nn.Module):
    @nn.compact
    def __call__(self, x_B: jax.Array, train: bool) -> jax.Array:
        w = self.param("w", nn.initializers.ones, (8,))
        mask_BN = nn.Dropout(0.5, deterministic=not train)(jnp.ones((*x_B.shape, 2 * BITS))) > 0
        return jnp.sum(mask_BN * 2.0 ** jnp.arange(2 * BITS), -1) * x_B * w[0]


def function_masks(params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    shape = (*batch["x"].shape, 2 * BITS)
    mask_BN = jnp.ones(shape) if key is None else jax.random.bernoulli(key, 0.5, shape)
    code_B = jnp.sum(mask_BN * 2.0 ** jnp.arange(2 * BITS), -1)
    return jnp.sum(code_B * batch["x"] * params["w"][0]), jnp.sum(batch["x"])


def masks_loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    x_B = batch["x"]
    code_B = model(x_B) if isinstance(model, nnx.Module) else model(x_B, model.train)
    return jnp.sum(code_B), jnp.sum(x_B)


MASKS: dict[str, Callable[[], Model]] = {
    "nnx": lambda: from_nnx(lambda rngs: Masks(rngs=rngs), masks_loss),
    "linen": lambda: from_linen(LinenMasks(), masks_loss),
    "function": lambda: from_function(lambda key: {"w": jnp.ones(8)}, function_masks),
}


def row(i: int) -> dict[str, np.ndarray]:
    """A batch of 8 rows in which only row i counts: the loss is its mask."""
    return {"x": np.eye(8, dtype=np.float32)[i]}


@functools.cache
def masks(framework: str, stage: int, model_axis: int) -> list[list[int]]:
    """The masks [step][row] of 2 updates that change nothing; 4 data shards x 2 microbatches x 1 row."""
    model = MASKS[framework]()
    engine = make_engine(model, row(0), stage, (4, model_axis), num_microbatches=2)
    engine = dataclasses.replace(engine, optimizer=optax.sgd(0.0, momentum=0.9))
    host = jax.tree.map(np.asarray, start(engine, initial(model, row(0))))
    place = functools.partial(jax.device_put, device=jax.tree.map(lambda x: x.sharding, engine.abstract_state()))
    seen = []
    for step in (0, 1):
        at = dataclasses.replace(host, step=np.int32(step))
        seen.append([int(engine.step(place(at), row(i))[1]["loss"]) for i in range(8)])
    evaluated = [float(engine.evaluate(place(host), row(i))[0]) for i in range(8)]
    assert evaluated == [2 ** (2 * BITS) - 1] * 8, "evaluation drops nothing"
    return seen


@pytest.mark.parametrize(
    ("framework", "stage", "model_axis"),
    [("nnx", 1, 1), ("nnx", 2, 2), ("nnx", 3, 2), ("linen", 3, 2), ("function", 3, 2)],
)
def test_dropout_is_the_same_on_every_stage_and_model_axis(framework: str, stage: int, model_axis: int) -> None:
    assert masks(framework, stage, model_axis) == masks(framework, 0, 1)


@pytest.mark.parametrize("framework", MASKS)
def test_dropout_differs_by_step_data_index_microbatch_and_layer(framework: str) -> None:
    drawn = [code for step in masks(framework, 0, 1) for code in step]
    layers = [part for code in drawn for part in divmod(code, 2**BITS)]
    assert len(set(drawn)) == len(drawn)  # 16 draws of 20 bits: a chance meeting has probability 1e-4
    assert len(set(layers)) > 28  # 32 draws of 10 bits: equal layers would leave 16
    assert 0.4 < sum(code.bit_count() for code in drawn) / (len(drawn) * 2 * BITS) < 0.6


# ---------------------------------------------------------------- bfloat16


@pytest.mark.parametrize(
    "name", ["function", pytest.param("nnx-scan", marks=slow), pytest.param("linen-scan", marks=slow)]
)
def test_bfloat16_weights_reach_the_model(name: str) -> None:
    """Every stage computes the same in bfloat16, close to float32 but not equal to it."""
    model, rules, params = kind(name)
    seen: set[Any] = set()

    def loss(weights: Any, batch: Any, key: Any) -> Any:
        seen.update(w.read().dtype if isinstance(w, Weight) else w.dtype for w in weights.values())
        return model.loss(weights, batch, key)

    losses = []
    for stage in (0, 2, 3):
        precision = Precision.make(compute="bfloat16")
        engine = make_engine(model, make_batch(), stage, (4, 2), rules, precision=precision)
        loss_sum, grads = gradients(dataclasses.replace(engine, model=Model(model.init, loss)), params, make_batch())
        assert {grad.dtype for grad in grads.values()} == {np.dtype("float32")}
        losses.append(loss_sum)
    assert seen == {jnp.bfloat16.dtype}
    expected = plain_gradients(name)[0]
    np.testing.assert_allclose(losses, losses[0], rtol=2**-8)  # one unit of bfloat16
    np.testing.assert_allclose(losses, expected, rtol=2e-2)
    assert abs(losses[0] - expected) > 1e-6 * expected
