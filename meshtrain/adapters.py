"""Any Flax model, unchanged: an nnx module, a linen module or a plain function becomes a `Model`.

    from_nnx(lambda rngs: MyModel(rngs=rngs), loss)   # loss(model, batch) -> (loss sum, weight sum)
    from_linen(MyModel(), loss)                       # the same loss: `model` is called like the module
    from_function(init, loss)                         # init(key) -> params, loss(params, batch, key) -> the same pair

A loss returns two scalars, the sum of the token losses and the sum of the token weights (see `meshtrain.losses`).

Inside the step a parameter may not be an array but a `zero.Weight`, which gathers itself. The adapters put it where
the model reads it: an `nnx.Param` subclass whose `get_value` reads, a linen metadata box whose `unbox` does. A plain
function is given whole arrays, gathered at its start.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta
from jax.sharding import AbstractMesh

from meshtrain.errors import ModelError
from meshtrain.jaxprs import count_dots, follow_params, mark_read
from meshtrain.zero import Weight

Batch = Any  # a pytree of arrays [batch, ...]
Params = dict[str, jax.Array]
Weights = Mapping[str, "jax.Array | Weight"]
LossSum = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model as the step sees it: two pure functions over a flat `{path: array}`.

    Attributes:
        init: `(key, batch) -> params`, float32; `batch` gives shapes only.
        loss: `(weights, batch, key) -> (loss sum, weight sum)`; with key None it evaluates: no dropout.
    """

    init: Callable[[jax.Array, Batch], Params]
    loss: Callable[[Weights, Batch, jax.Array | None], LossSum]


@dataclasses.dataclass(frozen=True)
class Probe:
    """What one abstract trace of the loss shows of a model.

    Attributes:
        num_stacked: by path, the leading dims that the model scans over (it reads a slice of fewer dims).
        unread: parameters that the loss never reads.
        has_remat: whether the model recomputes most of its matrix products in the backward pass.
    """

    num_stacked: dict[str, int]
    unread: tuple[str, ...]
    has_remat: bool


# ---------------------------------------------------------------- nnx


class SelfReadingParam(nnx.Param):  # type: ignore[type-arg]
    """An `nnx.Param` whose value may be a `Weight`: reading it, or an attribute of it such as `.T`, gathers."""

    def get_value(self, **index: Any) -> Any:
        """The parameter's array, or the part of it that `index` names."""
        raw = self.get_raw_value()
        if isinstance(raw, Weight):
            return self.replace(raw.read()).get_value(**index)
        return super().get_value(**index)

    def __getattr__(self, name: str) -> Any:
        raw = object.__getattribute__(self, "_raw_value")
        if isinstance(raw, Weight) and name not in object.__getattribute__(self, "_var_metadata"):
            return getattr(self.get_value(), name)
        return super().__getattr__(name)


@functools.cache
def _self_reading(kind: type[nnx.Param[Any]]) -> type[SelfReadingParam]:
    """The self-reading subclass of a kind of Param, such as `nnx.LoRAParam`: a model may tell them apart."""
    return SelfReadingParam if kind is nnx.Param else type(f"SelfReading{kind.__name__}", (SelfReadingParam, kind), {})


def from_nnx(build: Callable[[nnx.Rngs], nnx.Module], loss: Callable[[Any, Batch], LossSum]) -> Model:
    """An nnx model.

    Args:
        build: the module's class, if it takes nothing but `rngs`, or a function `rngs -> module`. Called abstractly,
            and once more inside the sharded initialization, so the whole model never lies on one device. Sharding
            annotations (`nnx.with_partitioning`) are not used: the rules place every parameter.
        loss: `(module, batch) -> (loss sum, weight sum)`.

    Raises:
        ModelError: `build` makes no module; the module has state that training would have to update (BatchNorm).
    """
    if isinstance(build, nnx.Module):
        raise ModelError("from_nnx takes a function that builds the module: lambda rngs: MyModel(rngs=rngs)")
    build = _traceable(build)
    abstract = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    if not isinstance(abstract, nnx.Module):
        raise ModelError(f"from_nnx: the function built a {type(abstract).__name__}, not an nnx.Module")
    _refuse_mutable_state(abstract)
    _make_params_self_reading(abstract)
    graphs: dict[bool, Any] = {}
    for train in (True, False):
        (abstract.train if train else abstract.eval)()
        graphs[train], params, rngs, rest = _split(abstract)
    constants = _constants(build) if jax.tree.leaves(rest) else rest

    def init(key: jax.Array, batch: Batch) -> Params:
        # A stream of their own: adding dropout to a model does not change its initial parameters.
        rngs = nnx.Rngs(params=key, default=jax.random.fold_in(key, 1))
        state = nnx.state(build(rngs), nnx.Param)
        return _as_float32({_join(path): var.get_value() for path, var in nnx.to_flat_state(state)})

    def apply(weights: Weights, batch: Batch, key: jax.Array | None) -> LossSum:
        flat = [(path, var.replace(weights[_join(path)])) for path, var in nnx.to_flat_state(params)]
        seeded = _seed_rngs(rngs, jax.random.key(0) if key is None else key)
        module = nnx.merge(graphs[key is not None], nnx.from_flat_state(flat), seeded, constants)
        return _checked(loss(module, batch))

    return Model(init, apply)


def _traceable(build: Callable[[nnx.Rngs], nnx.Module]) -> Callable[[nnx.Rngs], nnx.Module]:
    """The same where it is traced.

    Without nnx's own sharding of annotated parameters, which looks for a mesh with the axes that they name; and with
    plain arrays among a module's attributes marked as data, which nnx does itself outside a trace only.
    """

    def traceable(rngs: nnx.Rngs) -> nnx.Module:
        with nnx.use_eager_sharding(False):
            module = build(rngs=rngs) if isinstance(build, type) else build(rngs)
        for _, node in list(nnx.iter_graph(module)):
            for name, value in list(vars(node).items()) if isinstance(node, nnx.Pytree) else ():
                if isinstance(value, jax.Array):
                    setattr(node, name, nnx.data(value))
        return module

    return traceable


def _refuse_mutable_state(module: nnx.Module) -> None:
    stats = [_join(path) for path, _ in nnx.to_flat_state(nnx.state(module, nnx.BatchStat))]
    if stats:
        raise ModelError(
            f"the model keeps running statistics ({stats[0]}), which meshtrain does not train: "
            "use a norm without them, such as LayerNorm, RMSNorm or GroupNorm"
        )


def _make_params_self_reading(module: nnx.Module) -> None:
    """Replaces each Param object, wherever it is referred to, so that tied ones stay tied."""
    replaced: dict[int, Any] = {}

    def swap(value: Any) -> Any:
        if not isinstance(value, nnx.Param) or isinstance(value, SelfReadingParam):
            return value
        kind = _self_reading(type(value))
        return replaced.setdefault(id(value), kind.from_metadata(value.get_raw_value(), value.get_metadata()))

    for _, node in list(nnx.iter_graph(module)):
        for name, value in list(vars(node).items()) if isinstance(node, nnx.Pytree) else ():
            # Params lie in a module as they are, or in lists, tuples and dicts
            leaves, structure = jax.tree.flatten(value, is_leaf=lambda x: isinstance(x, (nnx.Variable, nnx.Pytree)))
            if any(isinstance(leaf, nnx.Param) for leaf in leaves):
                setattr(node, name, jax.tree.unflatten(structure, map(swap, leaves)))


def _split(module: nnx.Module) -> Any:
    """Graph, parameters, random streams and the rest of a module."""
    return nnx.split(module, nnx.Param, nnx.RngState, ...)


def _constants(build: Callable[[nnx.Rngs], nnx.Module]) -> Any:
    """State that is neither parameters nor random: computed once, alone (the compiler drops the parameters)."""

    def rest() -> Any:
        return _split(build(nnx.Rngs(0)))[3]

    return jax.tree.map(np.asarray, jax.jit(rest)())


def _seed_rngs(rngs: Any, key: jax.Array) -> Any:
    """Random streams as a function of `key` and their path, one key per layer where they are stacked."""
    flat = []
    for path, var in nnx.to_flat_state(rngs):
        shape = var.get_raw_value().shape
        if isinstance(var, nnx.RngKey):
            own = jax.random.fold_in(key, zlib.crc32(_join(path).encode()))
            flat.append((path, var.replace(jax.random.split(own, shape) if shape else own)))
        else:
            flat.append((path, var.replace(jnp.zeros(shape, jnp.uint32))))
    return nnx.from_flat_state(flat)


# ---------------------------------------------------------------- linen


@dataclasses.dataclass(frozen=True)
class LinenCall:
    """A linen module bound to its parameters; call it as `module.apply` without the variables.

    `train` says whether the step trains or evaluates: pass `deterministic=not model.train` to dropout.
    """

    module: nn.Module
    variables: Any
    rngs: dict[str, jax.Array]
    train: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`module.apply(variables, *args, **kwargs)`."""
        return self.module.apply(self.variables, *args, rngs=self.rngs, **kwargs)


class _Initialized(Exception):
    """Carries the variables out of a loss that is only run to initialize its model."""

    def __init__(self, variables: Any) -> None:
        super().__init__()
        self.variables = variables


@dataclasses.dataclass(frozen=True)
class _LinenInit:
    """Stands for the model while the loss is run once to see with which arguments it calls the module."""

    module: nn.Module
    key: jax.Array
    train: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _Initialized(meta.unbox(self.module.init(self.key, *args, **kwargs)))


class WeightBox(meta.AxisMetadata[Any]):
    """A linen metadata box whose `unbox`, which linen calls where a module reads a parameter, gathers."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def unbox(self) -> Any:
        """The parameter's array."""
        return self.value.read() if isinstance(self.value, Weight) else self.value

    def replace_boxed(self, val: Any) -> "WeightBox":
        """A box around another value."""
        return WeightBox(val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "WeightBox":
        """The same: a weight's dims count from the end."""
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "WeightBox":
        """The same: a weight's dims count from the end."""
        return self


jax.tree_util.register_pytree_node(
    WeightBox, lambda box: ((box.value,), None), lambda _, children: WeightBox(*children)
)


def from_linen(
    module: nn.Module, loss: Callable[[Any, Batch], LossSum], rng_names: tuple[str, ...] = ("dropout",)
) -> Model:
    """A linen model.

    Args:
        module: the module; it is initialized with the arguments with which `loss` first calls it. Sharding annotations
            (`nn.with_partitioning`) are not used: the rules place every parameter.
        loss: `(model, batch) -> (loss sum, weight sum)`, where `model(x, ...)` applies the module and `model.train`
            says whether this is training.
        rng_names: the random streams that the module draws from while training.

    Raises:
        ModelError: the module has collections other than "params", or `loss` never calls the model.
    """

    def init(key: jax.Array, batch: Batch) -> Params:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch)
        try:
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # else annotations look for the axes they name
                loss(_LinenInit(module, key), zeros)
        except _Initialized as done:
            variables = done.variables
        else:
            raise ModelError("the loss never calls the model")
        extra = sorted(set(variables) - {"params"})
        if extra:
            raise ModelError(f"the module keeps state in {', '.join(extra)}, which meshtrain does not train")
        return flatten(variables["params"])

    def apply(weights: Weights, batch: Batch, key: jax.Array | None) -> LossSum:
        boxed = _nest({path: WeightBox(weight) for path, weight in weights.items()})
        rngs = {} if key is None else {name: _named_key(key, name) for name in rng_names}
        return _checked(loss(LinenCall(module, {"params": boxed}, rngs, key is not None), batch))

    return Model(init, apply)


# ---------------------------------------------------------------- plain functions


def from_function(init: Callable[[jax.Array], Any], loss: Callable[[Any, Batch, jax.Array | None], LossSum]) -> Model:
    """A model that is two functions over a pytree of parameters (nested dicts, lists, tuples, dataclasses).

    Args:
        init: `key -> params`.
        loss: `(params, batch, key) -> (loss sum, weight sum)`; key is None in evaluation. The parameters are whole
            arrays in the compute type. ZeRO-3 gathers all of them at the loss's start, and again in the backward pass;
            write a Flax module to have each gathered where it is read.
    """
    abstract = jax.eval_shape(init, jax.random.key(0))
    structure, paths = jax.tree.structure(abstract), paths_of(abstract)

    def apply(weights: Weights, batch: Batch, key: jax.Array | None) -> LossSum:
        ordered = [weights[path] for path in paths]  # not in the dict's own order: "10" sorts before "2"
        arrays = [weight.read() if isinstance(weight, Weight) else weight for weight in ordered]
        return _checked(loss(jax.tree.unflatten(structure, arrays), batch, key))

    return Model(lambda key, batch: flatten(init(key)), apply)


# ---------------------------------------------------------------- looking at a model


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Probed(Weight):
    """A weight that notes with which shapes it is read, and marks the reads in the jaxpr."""

    value: jax.Array
    path: str = dataclasses.field(metadata={"static": True})
    notes: "_Notes" = dataclasses.field(metadata={"static": True})

    def read(self) -> jax.Array:
        """The value itself."""
        self.notes.shapes.setdefault(self.path, set()).add(self.value.shape)
        return mark_read(self.value)


@dataclasses.dataclass(frozen=True, eq=False)  # compared and hashed by identity, as static pytree data must be
class _Notes:
    shapes: dict[str, set[tuple[int, ...]]] = dataclasses.field(default_factory=dict)


def abstract_params(model: Model, batch: Batch) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter, by path. Computes nothing.

    Args:
        batch: arrays or `ShapeDtypeStruct`s `[batch, ...]`.
    """
    return dict(jax.eval_shape(lambda key: model.init(key, batch), jax.random.key(0)))


def probe(model: Model, params: Mapping[str, jax.ShapeDtypeStruct], batch: Batch) -> Probe:
    """Traces the training loss once, abstractly, and notes how it reads its parameters.

    Raises:
        ModelError: a parameter is used without being read as one, so that under ZeRO a shard of it would be; or the
            model maps over a dim of it that is not a leading one.
    """
    notes = _Notes()

    def loss(arrays: Params, batch: Batch, key: jax.Array) -> LossSum:
        return model.loss({path: _Probed(x, path, notes) for path, x in arrays.items()}, batch, key)

    jaxpr = jax.make_jaxpr(loss)(dict(params), _shapes(batch), jax.random.key(0)).jaxpr
    paths = sorted(params)  # the order in which a dict is flattened
    follow_params(jaxpr, [*paths, *[None] * (len(jaxpr.invars) - len(paths))])
    num_stacked = {path: _num_stacked(path, params[path].shape, shapes) for path, shapes in notes.shapes.items()}
    unread = tuple(path for path in params if path not in num_stacked)
    num_dots, num_remat_dots = count_dots(jaxpr)
    return Probe(num_stacked, unread, 2 * num_remat_dots > num_dots)


def _num_stacked(path: str, whole: tuple[int, ...], seen: set[tuple[int, ...]]) -> int:
    """Over how many leading dims the model scans or maps where it reads a parameter."""
    for shape in seen:
        if whole[len(whole) - len(shape) :] != shape:
            raise ModelError(
                f"the model scans or maps over a dim of '{path}' that is not the first: stack layers along axis 0 "
                f"(shape {whole}, read with shape {shape})"
            )
    return len(whole) - min(map(len, seen))


# ---------------------------------------------------------------- paths


def flatten(tree: Any) -> Params:
    """A pytree of parameters as `{path: float32 array}`.

    Raises:
        ModelError: a leaf is not of a float type, or two leaves have the same path.
    """
    paths, leaves = paths_of(tree), jax.tree.leaves(tree)
    flat = dict(zip(paths, leaves, strict=True))
    if len(flat) != len(leaves):
        raise ModelError("two parameters have the same path: do not use '/' in a parameter's name")
    return _as_float32(flat)


def paths_of(tree: Any) -> list[str]:
    """The path of each leaf, in the tree's order."""
    return [_join(map(_key_name, path)) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _as_float32(params: Mapping[str, Any]) -> Params:
    for path, value in params.items():
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise ModelError(f"parameter '{path}' is of type {value.dtype}; only float parameters can be trained")
    return {path: value.astype(jnp.float32) for path, value in params.items()}


def _join(path: Any) -> str:
    return "/".join(str(part) for part in path)


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return nested


def _named_key(key: jax.Array, name: str) -> jax.Array:
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _checked(result: Any) -> LossSum:
    """The loss's result, if it is the pair of scalars that it must be."""
    if not (isinstance(result, tuple) and len(result) == 2 and all(jnp.shape(part) == () for part in result)):
        raise ModelError(
            "a loss must return two scalars (sum of token losses, sum of token weights), so that parts with unequal "
            f"token counts add up; got {jax.tree.map(jnp.shape, result)}"
        )
    return jnp.asarray(result[0], jnp.float32), jnp.asarray(result[1], jnp.float32)
