"""`meshtrain prove`: does a config's layout compute what one device computes?

    proof = prove(load("config.yaml"))
    proof.ok, proof.worst("gradient")

The config's small twin (`shrink.py`) runs twice in float32: in the wanted layout on virtual CPU devices (mesh, ZeRO
stage, microbatches, sequence parallelism), and on one device (1 x 1, stage 0, one batch). Both start from the same
parameters and take the same batches. Compared are, by name: each step's loss and gradient norm, every leaf of the
gradient, and every parameter after the last step.

* The batches are random tokens of which each row counts a very different number, so a mean of means shows.
* The parameters are the initial ones plus noise, so that no bias is zero and no branch dead.
* Everything but the order of float32 sums is the same, so what differs by more than `TOLERANCES` is a fault.

Errors of a leaf are ||a - b|| / max(||b||, FLOOR * r * sqrt(n)) with n its elements and r the root mean square over all
leaves: a leaf whose true gradient is zero (a key's bias) is not judged by its own rounding.
"""

import argparse
import dataclasses
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from meshtrain.adapters import Model, abstract_params
from meshtrain.config import Config
from meshtrain.data import abstract_batch
from meshtrain.engine import Engine
from meshtrain.errors import ConfigError, ModelError
from meshtrain.lint import Cluster, abstract_mesh
from meshtrain.mesh import DATA, MODEL, make_mesh, use_virtual_devices
from meshtrain.precision import LossScale
from meshtrain.shrink import MAX_DEVICES, Twin, shrink
from meshtrain.state import TrainState, state_shardings
from meshtrain.step import make_gradients
from meshtrain.target import Target, load_target
from meshtrain.terminal import Terminal
from meshtrain.trainer import make_engine
from meshtrain.zero import from_view, to_view

Arrays = dict[str, NDArray[np.float32]]
Outcome = tuple[dict[tuple[str, str], float], Arrays]  # figures by (kind, name), and one array for each parameter

# At least 10 times the largest error of float32 sums in another order that was measured: see docs/design/proving.md.
TOLERANCES: Mapping[str, float] = {"loss": 1e-5, "norm": 1e-5, "gradient": 3e-5, "parameter": 1e-4}
_LEAVES = ("gradient", "parameter")
FLOOR = 0.1
NOISE = 0.02  # standard deviation added to every initial parameter
LEARNING_RATE = 1e-2
# Much is compiled here and little computed: LLVM's optimizations cost more than they save.
_FAST_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_SHOWN = 8  # leaves of each kind in the table


@dataclasses.dataclass(frozen=True)
class Check:
    """One figure or leaf, in the wanted layout and on one device.

    Attributes:
        kind: "loss", "norm", "gradient" or "parameter".
        name: "start", "step 0" and so on, or the parameter's path.
        got: the figure, or the leaf's norm, in the wanted layout.
        expected: the same on one device.
        error: relative, as the module's text says; infinite where something is not finite.
        factor: the number that `expected` times comes nearest to `got`.
        hint: where `factor` alone explains the difference: which of the run's sizes it is.
    """

    kind: str
    name: str
    got: float
    expected: float
    error: float
    factor: float
    hint: str = ""

    @property
    def ok(self) -> bool:
        """Whether the difference is one of rounding."""
        return self.error <= TOLERANCES[self.kind]


@dataclasses.dataclass(frozen=True)
class Proof:
    """What was compared, on which mesh, of which twin.

    Attributes:
        idle: parameters whose gradient is zero on one device: of them nothing is proven.
        notes: what was changed for the proof beside the sizes.
    """

    mesh: dict[str, int]
    stage: int
    twin: Twin
    checks: tuple[Check, ...]
    idle: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing differs by more than rounding."""
        return all(check.ok for check in self.checks)

    def worst(self, kind: str) -> Check:
        """The check of a kind that is furthest off."""
        return max((check for check in self.checks if check.kind == kind), key=lambda check: check.error)

    def as_json(self) -> dict[str, Any]:
        """The proof as plain values; an infinite error as null."""
        checks = [dataclasses.asdict(check) | {"ok": check.ok} for check in self.checks]
        checks = [{k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in c.items()} for c in checks]
        return {
            "ok": self.ok, "mesh": self.mesh, "stage": self.stage, "changes": list(self.twin.changes),
            "moved": list(self.twin.moved), "idle": list(self.idle), "notes": list(self.notes),
            "tolerances": dict(TOLERANCES), "checks": checks,
        }  # fmt: skip


def prove(config: Config, steps: int = 3) -> Proof:
    """Compares a config's layout with one device, in small.

    Needs 8 virtual CPU devices: call it before jax is first used, or where `use_virtual_devices(8)` was called.

    Args:
        steps: optimizer updates; 0 compares one gradient.

    Raises:
        UserError: the config does not fit together, or jax has started with other devices.
    """
    use_virtual_devices(MAX_DEVICES)
    data, model = _wanted_mesh(config)
    twin = shrink(config, data, model)
    target, notes = _without_randomness(twin.config)
    wanted, single = _engines(twin.config, target)
    params = _parameters(target.model, twin.config)
    batches = [_batch(twin.config, wanted.mesh.shape[DATA], step) for step in range(max(steps, 1))]

    figures, expected = _gradients(single, params, batches[0])
    if not np.isfinite(figures["norm", "start"]):
        raise ModelError("on one device already the gradient is not finite: there is nothing to compare with")
    causes = _causes(twin.config)
    checks = list(_compare("gradient", _gradients(wanted, params, batches[0]), (figures, expected), causes))
    if steps:
        smooth = _smooth(twin.config, figures["norm", "start"], sum(leaf.size for leaf in expected.values()))
        got, expected_end = (_train(engine, params, batches) for engine in _engines(smooth, target))
        checks += _compare("parameter", got, expected_end, causes)
    idle = tuple(path for path, leaf in expected.items() if not leaf.any())
    order = list(TOLERANCES)
    checks.sort(key=lambda check: (order.index(check.kind), -check.error * (check.kind in _LEAVES)))
    return Proof(dict(wanted.mesh.shape), wanted.layout.stage, twin, tuple(checks), idle, notes)


# ---------------------------------------------------------------- what is run


def _wanted_mesh(config: Config) -> tuple[int, int]:
    """Sizes of the mesh axes that the config asks for; what it leaves to the machine is as large as a proof can be."""
    if config.mesh.data == -1 and not config.devices:
        return max(MAX_DEVICES // config.mesh.model, 2), config.mesh.model
    mesh = abstract_mesh(config, Cluster())
    return mesh.shape[DATA], mesh.shape[MODEL]


def _without_randomness(config: Config) -> tuple[Target, tuple[str, ...]]:
    """The model without dropout: its keys depend on the data index, so no two meshes would draw the same."""
    target = load_target(config)
    batch = abstract_batch(config.train.global_batch, config.data.seq_len)
    params = abstract_params(target.model, batch)
    if "random_bits" not in str(jax.make_jaxpr(target.model.loss)(params, batch, jax.random.key(0))):
        return target, ()
    loss = target.model.loss
    model = dataclasses.replace(target.model, loss=lambda weights, batch, key: loss(weights, batch, None))
    note = "the model draws random numbers while it trains: it is proven as it evaluates"
    return dataclasses.replace(target, model=model), (note,)


def _engines(config: Config, target: Target) -> tuple[Engine, Engine]:
    """The wanted layout, and one device."""
    train = {"microbatches": 1, "sequence_parallel": False}
    single = config.model_copy(
        update={
            "train": config.train.model_copy(update=train),
            "zero": config.zero.model_copy(update={"stage": 0}),
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the layout deserves a look for, lint says
        mesh = config.mesh
        wanted = make_engine(config, target, make_mesh(mesh.data, mesh.model, jax.devices()[: mesh.data * mesh.model]))
        return wanted, make_engine(single, target, make_mesh(1, 1, jax.devices()[:1]))


def _parameters(model: Model, config: Config) -> Arrays:
    """The initial parameters with noise on top, by path."""
    batch = abstract_batch(config.train.global_batch, config.data.seq_len)
    made = jax.jit(lambda key: model.init(key, batch))(jax.random.key(config.run.seed))
    rng = np.random.default_rng(config.run.seed)
    return {
        path: np.asarray(value) + NOISE * rng.standard_normal(value.shape, np.float32)
        for path, value in sorted(made.items())
    }


def _batch(config: Config, num_data: int, step: int) -> dict[str, NDArray[Any]]:
    """Random tokens [batch, seq]; each row counts its first tokens only, and each data shard very differently many."""
    batch, seq_len = config.train.global_batch, config.data.seq_len
    rng = np.random.default_rng([config.run.seed, step])
    tokens = rng.integers(0, config.data.vocab_size, (batch, seq_len + 1)).astype(np.int32)
    most = np.linspace(seq_len, 2, num_data).astype(int).repeat(-(-batch // num_data))[:batch]
    lengths = rng.integers(1, most + 1)
    lengths[0] = seq_len
    weights = (np.arange(seq_len) < lengths[:, None]).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def _gradients(engine: Engine, params: Arrays, batch: Mapping[str, Any]) -> Outcome:
    """Loss and gradient of the mean loss per token, by the engine's own step."""
    local = make_gradients(engine.model, engine.zero, engine.step_config)

    def mean(params: Any, batch: Any) -> Any:
        views = to_view(params, engine.layout)
        loss_sum, tokens, grads = local(views, batch, jnp.zeros((), jnp.int32), jnp.ones(()))
        return loss_sum / tokens, {path: grad / tokens for path, grad in from_view(grads, engine.layout).items()}

    with jax.set_mesh(engine.mesh):
        placed = jax.device_put(params, engine.layout.shardings())
        loss, grads = jax.jit(mean)(placed, engine.shard(batch))
    host = {path: np.asarray(grad) for path, grad in grads.items()}
    return {("loss", "start"): float(loss), ("norm", "start"): _norm(host.values())}, host


def _smooth(config: Config, norm: float, num_params: int) -> Config:
    """The config with an optimizer in which rounding stays as small as it is in the gradients.

    Adam divides a gradient by its own size, so that one that is nothing but rounding becomes a whole step. With `eps`
    as large as the usual gradient it does not. The clip is set where it bites.
    """
    clip = None if config.optim.clip_norm is None else norm / 2
    eps = max(norm / num_params**0.5, 1e-30)
    changes = {
        "name": "adamw",
        "lr": LEARNING_RATE,
        "schedule": "constant",
        "warmup_steps": 0,
        "moment_dtype": "float32",
    }
    optim = config.optim.model_copy(update={**changes, "clip_norm": clip, "eps": eps})
    return config.model_copy(update={"optim": optim})


def _train(engine: Engine, params: Arrays, batches: list[dict[str, NDArray[Any]]]) -> Outcome:
    """Loss and gradient norm of each update, and how far each parameter has moved after the last."""
    with jax.set_mesh(engine.mesh):
        arrays = {path: jnp.asarray(value) for path, value in params.items()}
        loss_scale = LossScale.start(engine.zero.precision)
        start = TrainState(jnp.zeros((), jnp.int32), arrays, engine.optimizer.init(arrays), loss_scale)
        state = jax.device_put(start, state_shardings(start, engine.layout))
    figures = {}
    for step, batch in enumerate(batches):
        state, metrics = engine.step(state, batch)
        figures["loss", f"step {step}"] = float(metrics["loss"])
        figures["norm", f"step {step}"] = float(metrics["grad_norm"])
    return figures, {path: np.asarray(value) - params[path] for path, value in state.params.items()}


# ---------------------------------------------------------------- what is compared


def _norm(leaves: Iterable[NDArray[Any]]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in leaves)))


def _compare(kind: str, got: Outcome, expected: Outcome, causes: Mapping[str, float]) -> Iterator[Check]:
    """Compares the figures and the leaves, which are of the given kind."""
    for (figure, name), value in expected[0].items():
        yield _check(figure, name, got[0][figure, name], value, causes)
    rms = _norm(expected[1].values()) / sum(leaf.size for leaf in expected[1].values()) ** 0.5
    for path, leaf in expected[1].items():
        yield _check(kind, path, got[1][path], leaf, causes, FLOOR * rms * leaf.size**0.5)


def _check(kind: str, name: str, got: Any, expected: Any, causes: Mapping[str, float], floor: float = 0.0) -> Check:
    """One comparison of two arrays, or of two numbers."""
    a, b = (np.asarray(value, np.float64) for value in (got, expected))
    size = max(_norm([b]), floor, 1e-30)
    error = _norm([a - b]) / size
    square = float(np.sum(b * b))
    factor = float(np.sum(a * b)) / square if square else 1.0
    left = _norm([a - factor * b]) / size
    hint = ""
    if TOLERANCES[kind] < error and left <= max(0.01 * error, TOLERANCES[kind]):  # scaled, and nothing else
        hint = next((cause for cause, value in causes.items() if abs(factor / value - 1) < 1e-3), "")
    return Check(kind, name, _signed(a), _signed(b), error if np.isfinite(error) else np.inf, factor, hint)


def _signed(x: NDArray[Any]) -> float:
    return float(x) if x.ndim == 0 else _norm([x])


def _causes(config: Config) -> dict[str, float]:
    """Factors by which a sum is off when it crosses an axis not at all or twice, by name."""
    sizes = {
        "mesh.data": config.mesh.data,
        "mesh.model": config.mesh.model,
        "train.microbatches": config.train.microbatches,
    }
    found: dict[str, float] = {}
    for name, size in sizes.items():
        if size > 1:
            found |= {f"{size} times too large: {name}": size, f"{size} times too small: {name}": 1 / size}
    return found


# ---------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `meshtrain prove`, beside CONFIG and the overrides."""
    parser.add_argument("--steps", type=int, default=3, metavar="K", help="optimizer updates (default: 3)")
    parser.add_argument("--all", action="store_true", help="show every leaf, not only the worst")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(config: Config, args: argparse.Namespace) -> int:
    """Proves and prints; the exit code: 0, or 1 where the layout computes something else.

    Raises:
        ConfigError: no steps.
    """
    if args.steps < 1:
        raise ConfigError(f"--steps {args.steps} must be at least 1")
    os.environ["XLA_FLAGS"] = f"{_FAST_COMPILE} {os.environ.get('XLA_FLAGS', '')}"
    proof = prove(config, args.steps)
    if args.json:
        print(json.dumps(proof.as_json(), indent=1, allow_nan=False))
    else:
        show(proof, Terminal(), args.all)
    return int(not proof.ok)


def show(proof: Proof, console: Terminal, everything: bool = False) -> None:
    """Prints a proof: what was run, the comparisons with the worst leaves first, and what it comes to."""
    for change in proof.twin.changes:
        console.print(Text.assemble(("twin     ", "dim"), change), soft_wrap=True)
    notes = [*proof.notes]
    if proof.twin.moved:
        notes.append(f"ZeRO cuts another dim in these sizes: {', '.join(proof.twin.moved)}")
    if proof.idle:
        notes.append(f"no gradient, so nothing is proven of {', '.join(proof.idle)}")
    if set(proof.mesh.values()) == {1}:
        notes.append("the config asks for one device: give mesh.data, mesh.model or devices to prove a layout")
    for note in notes:
        console.print(Text.assemble(("note     ", "yellow"), note), soft_wrap=True)
    console.print(_table(proof, everything))
    console.print(_verdict(proof), soft_wrap=True)


def _table(proof: Proof, everything: bool) -> Table:
    sizes = " x ".join(f"{name}={size}" for name, size in proof.mesh.items())
    table = Table(
        title=f"{sizes}, ZeRO stage {proof.stage}, beside one device, in float32",
        caption="leaves: their norms; error: of the difference, relative. A parameter: how far it moved in all steps",
        box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left",
    )  # fmt: skip
    table.add_column("")
    table.add_column("what", no_wrap=True)
    for name in ("this layout", "one device", "error", "limit"):
        table.add_column(name, justify="right")
    for kind, limit in TOLERANCES.items():
        checks = [check for check in proof.checks if check.kind == kind]
        leaves = kind in _LEAVES and not everything
        for check in checks[:_SHOWN] if leaves else checks:
            error = Text(f"{check.error:.1e}", style="green" if check.ok else "bold red")
            cells = f"{check.got:.5g}", f"{check.expected:.5g}", error, f"{limit:.0e}"
            table.add_row(check.kind, escape(check.name), *cells)
        if leaves and len(checks) > _SHOWN:
            table.add_row("", Text(f"and {len(checks) - _SHOWN} more, all closer", style="dim"))
        table.add_section()
    return table


def _verdict(proof: Proof) -> Text:
    failed = [check for check in proof.checks if not check.ok]
    if not failed:
        worst = proof.worst("gradient")
        text = f"proven: {len(proof.checks)} comparisons; the worst gradient is that of {worst.name}"
        return Text(f"{text}, off by {worst.error:.1e}", style="green")
    worst = max(failed, key=lambda check: check.error / TOLERANCES[check.kind])
    hints = dict.fromkeys(check.hint for check in failed if check.hint)
    hint = f" ({'; '.join(hints)})" if hints else ""
    text = f"this layout computes something else: {len(failed)} of {len(proof.checks)} comparisons fail{hint}"
    return Text(f"{text}; the worst is the {worst.kind} of {worst.name}, off by {worst.error:.1e}", style="bold red")
