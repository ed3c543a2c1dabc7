"""One call from a model, rules and a mesh to a sharded training step: the counterpart of `deepspeed.initialize`.

engine = initialize(model, batch, mesh=make_mesh(model=2), rules=RULES, optimizer=optax.adamw(1e-3), stage=2)
state = engine.init()
state, metrics = engine.step(state, batch)
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from meshtrain.activations import SEQUENCE_PARALLEL, points_seen
from meshtrain.adapters import Batch, LossSum, Model, Probe, abstract_params, probe
from meshtrain.errors import ConfigError, MeshError, ModelError, RuleError
from meshtrain.layout import Layout, make_layout
from meshtrain.mesh import batch_spec
from meshtrain.precision import Precision
from meshtrain.state import TrainState, abstract_state, init_state
from meshtrain.step import (
    Metrics,
    StepConfig,
    check_batch,
    jit_train_step,
    make_eval_step,
    make_train_step,
)
from meshtrain.zero import Zero

Optimizer: TypeAlias = optax.GradientTransformation | Callable[[Layout], optax.GradientTransformation]


class LayoutWarning(UserWarning):
    """The layout works, but something in it deserves a look."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model laid out on a mesh: makes its state, steps it, evaluates it.

    `batch` gives the shapes of the global batch; `step` takes host arrays or global `jax.Array`s of these shapes.
    """

    model: Model
    zero: Zero
    optimizer: optax.GradientTransformation
    step_config: StepConfig
    batch: Batch
    probe: Probe

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.zero.layout.mesh

    @property
    def layout(self) -> Layout:
        """Where each parameter lies; print it."""
        return self.zero.layout

    @property
    def batch_sharding(self) -> NamedSharding:
        """How a global batch is cut."""
        return NamedSharding(self.mesh, batch_spec(self.mesh))

    def init(self) -> TrainState:
        """A new state, sharded; a function of the seed alone."""
        args = self.model, self.layout, self.optimizer, self.zero.precision, self.batch, self.step_config.seed
        with jax.set_mesh(self.mesh):
            return init_state(*args)

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state: what a checkpoint is restored into."""
        return abstract_state(self.model, self.layout, self.optimizer, self.zero.precision, self.batch)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer update. The given state's memory is reused: do not touch it afterwards.

        Raises:
            ConfigError: the state was given to an earlier step; the batch is not of the shapes of `Engine.batch`.
        """
        if state.step.is_deleted():
            raise ConfigError("this state was given to `step` before, which reused its memory: go on from its result")
        given, expected = (jax.tree.map(jnp.shape, each) for each in (batch, self.batch))
        if given != expected:
            raise ConfigError(f"the batch has the shapes {given}, and this engine was made for {expected}")
        with jax.set_mesh(self.mesh):
            return self.jitted_step(state, self.shard(batch))

    def evaluate(self, state: TrainState, batch: Batch) -> LossSum:
        """`(sum of token losses, number of tokens)` of a batch of any size that the mesh divides, without dropout.

        Raises:
            ConfigError: the mesh does not divide it.
        """
        check_batch(batch, 1, self.mesh)
        with jax.set_mesh(self.mesh):
            return self._jitted_eval(state.params, self.shard(batch))

    def shard(self, batch: Batch) -> Batch:
        """A global batch on the devices; arrays that are there already are left alone."""
        sharding = self.batch_sharding

        def put(x: Any) -> Any:
            if isinstance(x, jax.Array) and x.sharding == sharding:
                return x
            host = np.asarray(x)
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

        return jax.tree.map(put, batch)

    @cached_property
    def jitted_step(self) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
        """The jitted training step; call or lower it under `jax.set_mesh(engine.mesh)`."""
        step = make_train_step(self.model, self.zero, self.optimizer, self.step_config)
        return jit_train_step(step, self.abstract_state(), self.zero)

    @cached_property
    def _jitted_eval(self) -> Callable[[Any, Batch], LossSum]:
        return jax.jit(make_eval_step(self.model, self.zero, self.step_config))

    def trace(self) -> Any:
        """The training step traced: `.jaxpr`, and `.lower()` to compile it for this mesh. Computes nothing."""
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.batch_sharding), self.batch)
        with jax.set_mesh(self.mesh):
            return self.jitted_step.trace(self.abstract_state(), batch)  # type: ignore[attr-defined]

    def lower(self) -> Any:
        """The training step lowered for this mesh, for `.compile()` and its memory analysis. Computes nothing."""
        with jax.set_mesh(self.mesh):
            return self.trace().lower()


def initialize(
    model: Model,
    batch: Batch,
    *,
    mesh: Mesh,
    rules: Sequence[tuple[str, Any]],
    optimizer: Optimizer,
    stage: int = 1,
    num_microbatches: int = 1,
    precision: Precision | str = "float32",
    sequence_parallel: bool = False,
    seed: int = 0,
) -> Engine:
    """Lays a model out on a mesh.

    Args:
        model: from `from_nnx`, `from_linen` or `from_function`.
        batch: a global batch, or its `ShapeDtypeStruct`s: a pytree of arrays [batch, ...].
        mesh: from `make_mesh`.
        rules: `(path regex, PartitionSpec of the trailing dims)` in order; see `meshtrain.rules`.
        optimizer: any optax transformation over a flat `{path: array}`, or a function that makes one of the layout.
        stage: ZeRO stage, 0 to 3.
        num_microbatches: parts that each device cuts its batch into, computed one after the other.
        precision: number formats, or the name of the compute type alone: "bfloat16" with float32 master weights.
        sequence_parallel: shard the points that the model names "residual" along their sequence dim over `model`.
        seed: of the initial parameters and of dropout.

    Raises:
        UserError: the rules, the mesh and the batch do not fit together; the message says how.
    """
    _check_arguments(model, batch, mesh, rules, optimizer, precision, stage)
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed={seed} must lie in [0, 2**32)")
    check_batch(batch, num_microbatches, mesh)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    params = abstract_params(model, shapes)
    with points_seen() as points:
        seen = probe(model, params, shapes)
    if sequence_parallel and "residual" not in points:
        raise ConfigError(
            "sequence parallelism cuts what the model names, and this one never says "
            'meshtrain.name(x, "residual"): name its residual stream (see models/gpt.py) or leave the switch off'
        )
    layout = make_layout(params, rules, mesh, stage, seen.num_stacked)
    for text in [*layout.warnings, *(f"the loss never reads '{path}': its gradient is zero" for path in seen.unread)]:
        warnings.warn(text, LayoutWarning, stacklevel=2)
    config = StepConfig(
        num_microbatches=num_microbatches,
        seed=seed,
        regather=stage == 3 and not seen.has_remat,
        activations=SEQUENCE_PARALLEL if sequence_parallel else {},
    )
    made = optimizer if isinstance(optimizer, optax.GradientTransformation) else optimizer(layout)
    if not isinstance(made, optax.GradientTransformation):
        raise ConfigError(f"`optimizer` is a function that made a {type(made).__name__}, not an optax transformation")
    formats = Precision.make(precision) if isinstance(precision, str) else precision
    return Engine(model, Zero(layout, formats), made, config, shapes, seen)


def _check_arguments(model: Any, batch: Any, mesh: Any, rules: Any, optimizer: Any, precision: Any, stage: Any) -> None:
    """Refuses what has the wrong type, before jax does in its own words."""
    if not isinstance(model, Model):
        made = getattr(model, "__name__", type(model).__name__)
        raise ModelError(f"`model` must come from from_nnx, from_linen or from_function, and is {made}")
    if not isinstance(mesh, Mesh | AbstractMesh):  # one of no devices gives an engine to look at, not to run
        raise MeshError(f"`mesh` must come from make_mesh, such as make_mesh(model=2), and is {mesh!r}")
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise ConfigError(f"the ZeRO stage must be 0, 1, 2 or 3, got {stage!r}")
    if not isinstance(optimizer, optax.GradientTransformation) and (
        not callable(optimizer) or getattr(optimizer, "__module__", "").startswith("optax")
    ):
        raise ConfigError(f"`optimizer` must be an optax transformation such as optax.adamw(1e-3), not {optimizer!r}")
    if not isinstance(precision, str | Precision):
        raise ConfigError(f'`precision` must be a name such as "bfloat16" or a `Precision`, not {precision!r}')
    if isinstance(rules, str) or not isinstance(rules, Sequence):
        raise RuleError(
            f"`rules` must be a list of (path regex, PartitionSpec), not {rules!r}; [] replicates everything"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            where = jax.tree_util.keystr(path) or "the batch"
            raise ConfigError(f"{where} must be an array [batch, ...], not a {type(leaf).__name__}: use numpy.asarray")


def param_shapes(layout: Layout) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter of a layout."""
    return {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in layout.leaves.items()}
