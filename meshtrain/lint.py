"""`meshtrain lint`: everything that is wrong with a config's layout, at once, on any machine.

    report = lint(load("config.yaml"), Cluster(nodes=16, gpus_per_node=8))
    report.errors, report.warnings

Nothing is compiled or computed and no data is read: the mesh is abstract, the model is traced with shapes alone. So a
trillion parameters take as long as a million.

An *error* stops training before its first step. A *warning* trains, but most likely not as meant. What counts as a
large replicated parameter is `LARGE_BYTES`, `LARGE_SHARE` and `SMALL_BYTES` below.
"""

import argparse
import dataclasses
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P
from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from meshtrain.activations import placed
from meshtrain.adapters import Probe, abstract_params, probe
from meshtrain.config import Config
from meshtrain.data import abstract_batch
from meshtrain.engine import param_shapes
from meshtrain.errors import ConfigError, MeshError, UserError
from meshtrain.layout import Layout, LeafLayout, make_layout, show_bytes, show_spec
from meshtrain.mesh import DATA, MODEL
from meshtrain.optim import make_optimizer
from meshtrain.rules import axes_of, inspect
from meshtrain.state import abstract_state, state_bytes_per_device
from meshtrain.step import check_batch
from meshtrain.target import Target, load_target
from meshtrain.terminal import Terminal
from meshtrain.trainer import make_precision

T = TypeVar("T")

LARGE_BYTES = 64_000_000  # replicated at rest, per device, of one parameter: worth a warning whatever the model's size
LARGE_SHARE = 0.01  # of the model's parameters: one that is whole over an axis is worth a warning from here on,
SMALL_BYTES = 1_000_000  # unless it has fewer bytes than this


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices that need not be here. Zero nodes: as many as the config says, or this machine has."""

    nodes: int = 0
    gpus_per_node: int = 8

    @property
    def num_devices(self) -> int:
        """All devices of the cluster; 0 if none was named."""
        return self.nodes * self.gpus_per_node


@dataclasses.dataclass(frozen=True)
class Report:
    """What lint found.

    Attributes:
        layout: None where the model could not be built, else of every parameter that could be placed.
        state_bytes: of the whole state (weights, optimizer) on one device, at rest; None if not known.
        errors: one line each: what, where, what to do.
        warnings: the same.
    """

    layout: Layout | None
    state_bytes: int | None
    errors: tuple[str, ...]
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The report as plain values: `mesh, stage, params, state_bytes, leaves, errors, warnings`."""
        found: dict[str, Any] = {"errors": list(self.errors), "warnings": list(self.warnings)}
        if self.layout is None:
            return found
        layout = self.layout
        about = {"mesh": dict(layout.mesh.shape), "stage": layout.stage, "params": layout.num_params}
        leaves = [_leaf_json(layout, leaf) for leaf in layout.leaves.values()]
        return about | {"state_bytes": self.state_bytes, "leaves": leaves} | found


def lint(config: Config, cluster: Cluster | None = None) -> Report:
    """Looks a config's layout over.

    Args:
        cluster: the devices to lay it out on, where the config leaves them open.
    """
    cluster = cluster or Cluster()
    found = _Findings()
    mesh = found.attempt(abstract_mesh, config, cluster)
    target = found.attempt(load_target, config)
    if mesh is not None:
        found.attempt(check_batch, _batch(config), config.train.microbatches, mesh)
        found.add(_check_sequence(config, mesh), found.errors)
        found.add(_check_nodes(mesh, cluster), found.warnings)
    if target is None or mesh is None:
        return found.report(None, None)
    params = found.attempt(abstract_params, target.model, _batch(config))
    if params is None:
        return found.report(None, None)
    seen = found.attempt(_probe, config, target, params, found)
    layout = _lay_out(config, target, mesh, params, seen, found)
    total = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in params.values())
    found.add(_large(layout, total), found.warnings)
    return found.report(layout, found.attempt(_state_bytes, config, target, layout))


class _Findings:
    """Errors and warnings, collected."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def attempt(self, function: Callable[..., T], *args: Any) -> T | None:
        """The function's result; None, and an error noted, where it refuses."""
        try:
            return function(*args)
        except UserError as error:
            self.errors.append(str(error))
            return None

    def add(self, texts: Iterable[str], where: list[str]) -> None:
        where.extend(texts)

    def report(self, layout: Layout | None, state_bytes: int | None) -> Report:
        return Report(layout, state_bytes, *(tuple(dict.fromkeys(texts)) for texts in (self.errors, self.warnings)))


# ---------------------------------------------------------------- the parts


def abstract_mesh(config: Config, cluster: Cluster) -> AbstractMesh:
    """The mesh that a config asks for, of devices that need not exist.

    Raises:
        MeshError: its sizes do not multiply to the number of devices.
    """
    data, model = config.mesh.data, config.mesh.model
    num_devices = cluster.num_devices or config.devices
    if data == -1:
        num_devices = num_devices or len(jax.devices())
        if num_devices % model:
            raise MeshError(
                f"mesh.model={model} does not divide the {num_devices} devices: choose a divisor, or name the devices "
                "to be linted for: --nodes N --gpus-per-node M, devices=N, or mesh.data=N"
            )
        data = num_devices // model
    elif num_devices and data * model != num_devices:
        raise MeshError(
            f"a mesh of data={data} x model={model} needs {data * model} devices, and there are {num_devices}: "
            "set mesh.data=-1 to use them all"
        )
    return AbstractMesh((data, model), (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def _batch(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    return abstract_batch(config.train.global_batch, config.data.seq_len)


def _check_sequence(config: Config, mesh: AbstractMesh) -> Iterator[str]:
    seq_len, model = config.data.seq_len, mesh.shape[MODEL]
    if config.train.sequence_parallel and seq_len % model:
        yield (
            f"train.sequence_parallel: mesh.model={model} does not divide data.seq_len={seq_len}: "
            f"use data.seq_len={seq_len // model * model or model} or {-(-seq_len // model) * model}, or switch it off"
        )


def _check_nodes(mesh: AbstractMesh, cluster: Cluster) -> Iterator[str]:
    model, per_node = mesh.shape[MODEL], cluster.gpus_per_node
    if cluster.nodes > 1 and per_node % model:
        yield (
            f"mesh.model={model} leaves the node of {per_node} devices, and every layer's activations cross the "
            f"network: choose a divisor of {per_node}"
        )


def _probe(config: Config, target: Target, params: Mapping[str, Any], found: _Findings) -> Probe:
    """How the loss reads its parameters, and which named points it has."""
    points = _Points()
    with placed(points):
        seen = probe(target.model, params, _batch(config))
    for path in seen.unread:
        found.warnings.append(f"the loss never reads '{path}', so it is not trained: remove it, or use it")
    if config.train.sequence_parallel and "residual" not in points.names:
        found.warnings.append(
            f"train.sequence_parallel does nothing: {config.model.target} names no point 'residual'; mark it with "
            "meshtrain.name(x, 'residual'), or switch it off"
        )
    return seen


class _Points(dict[str, tuple[P, ...]]):
    """Activation rules that place nothing and note which points a model names."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def get(self, point: str, default: Any = None) -> Any:
        self.names.add(point)
        return default


def _lay_out(
    config: Config, target: Target, mesh: AbstractMesh, params: Mapping[str, Any], seen: Probe | None, found: _Findings
) -> Layout:
    """The layout of all that the rules can place; what they cannot goes to the findings."""
    rules = inspect(target.rules, params, mesh.shape)
    found.errors.extend(rules.errors)
    found.warnings.extend(map(_with_cure, rules.warnings))
    good = {path: params[path] for path in rules.good_paths}
    stacked = seen.num_stacked if seen else {}
    # A layout only reads the mesh's sizes, which an abstract one has too.
    return make_layout(good, rules.good_rules, cast(Mesh, mesh), config.zero.stage, stacked)


def _with_cure(warning: str) -> str:
    if "matches no parameter" in warning:
        return f"{warning}: correct its pattern, or delete it"
    return f"{warning}; make the patterns exclude each other, or delete one"


def _state_bytes(config: Config, target: Target, layout: Layout) -> int | None:
    """Bytes of the state on one device; also the check of the optimizer's own rules."""
    stacked = {path: leaf.num_stacked for path, leaf in layout.leaves.items()}
    optimizer = make_optimizer(config.optim, config.train.steps, param_shapes(layout), stacked)
    if set(layout.leaves) != set(abstract_params(target.model, _batch(config))):
        return None
    state = abstract_state(target.model, layout, optimizer, make_precision(config), _batch(config))
    return state_bytes_per_device(state)


# ---------------------------------------------------------------- replication


def replicated_axes(layout: Layout, leaf: LeafLayout) -> tuple[str, ...]:
    """Axes of more than one device over which a parameter rests whole."""
    used = {axis for entry in leaf.storage_spec for axis in axes_of(entry)}
    return tuple(axis for axis, size in layout.mesh.shape.items() if size > 1 and axis not in used)


def replicated_bytes(layout: Layout, leaf: LeafLayout) -> int:
    """Bytes of a parameter at rest that a device would not hold if every axis cut it."""
    copies = math.prod(layout.mesh.shape[axis] for axis in replicated_axes(layout, leaf))
    held = layout.bytes_per_device(leaf)
    return held - held // copies


def _large(layout: Layout, model_bytes: int) -> Iterator[str]:
    """Large parameters of a model of so many bytes that are whole over an axis, and what would cut them."""
    if layout.stage == 0 and layout.mesh.shape[DATA] > 1:
        held = sum(map(layout.bytes_per_device, layout.leaves.values()))
        if held > LARGE_BYTES:
            yield (
                f"zero.stage=0 keeps all of the state on each of the {layout.mesh.shape[DATA]} devices of 'data', "
                f"{show_bytes(held)} of weights alone: zero.stage=1 sends no more bytes and cuts it"
            )
    for name, leaves in grouped(layout).items():
        yield from _large_leaf(layout, model_bytes, name, leaves)


def _large_leaf(layout: Layout, model_bytes: int, name: str, leaves: Sequence[LeafLayout]) -> Iterator[str]:
    leaf, sizes = leaves[0], layout.mesh.shape
    total = sum(math.prod(each.shape) * each.dtype.itemsize for each in leaves)
    share = total / model_bytes
    resting = replicated_axes(layout, leaf)
    if layout.stage == 0:  # whole over data as it was asked for
        resting = tuple(axis for axis in resting if axis != DATA)
    replicated = sum(replicated_bytes(layout, each) for each in leaves)
    if not resting or (replicated <= LARGE_BYTES and (share <= LARGE_SHARE or total < SMALL_BYTES)):
        return
    shown = f"'{name}' {leaf.shape}, {show_bytes(total)} or {100 * share:.1f}% of the model,"
    if MODEL in resting:
        fits = [dim for dim, size in enumerate(leaf.shape) if dim >= leaf.num_stacked and size % sizes[MODEL] == 0]
        cure = f"cut dim {' or '.join(map(str, fits))} over 'model'" if fits else f"pad a dim to n x {sizes[MODEL]}"
        yield f"{shown} is whole on each of the {sizes[MODEL]} devices of 'model' (rule '{leaf.rule}'): {cure}"
    if DATA in resting:
        yield (
            f"{shown} rests whole on each of the {sizes[DATA]} devices of 'data', {leaf.why_replicated}: pad a dim to "
            f"a multiple of {sizes[DATA]}, or choose another mesh.data"
        )


def grouped(layout: Layout) -> dict[str, list[LeafLayout]]:
    """Parameters that differ in nothing but a number in their path, under one name: `blocks/*/up/kernel (4 alike)`."""
    groups: dict[Any, list[LeafLayout]] = {}
    for leaf in layout.leaves.values():
        groups.setdefault((path_pattern(leaf.path), dataclasses.replace(leaf, path="")), []).append(leaf)
    return {
        leaves[0].path if len(leaves) == 1 else f"{pattern} ({len(leaves)} alike)": leaves
        for (pattern, _), leaves in groups.items()
    }


def path_pattern(path: str) -> str:
    """A path with its numbers, whole components as in `blocks/3/up`, replaced by a star."""
    return re.sub(r"(?<![^/])\d+(?![^/])", "*", path)


# ---------------------------------------------------------------- showing


def _leaf_json(layout: Layout, leaf: LeafLayout) -> dict[str, Any]:
    return {
        "path": leaf.path,
        "shape": list(leaf.shape),
        "dtype": leaf.dtype.name,
        "rule": leaf.rule,
        "compute": [list(axes_of(entry)) for entry in leaf.compute_spec],
        "storage": [list(axes_of(entry)) for entry in leaf.storage_spec],
        "bytes_per_device": layout.bytes_per_device(leaf),
        "replicated_bytes": replicated_bytes(layout, leaf),
        "replicated_over": list(replicated_axes(layout, leaf)),
        "why_replicated": leaf.why_replicated,
    }


def _table(layout: Layout, state_bytes: int | None) -> Table:
    sizes = " x ".join(f"{name}={size}" for name, size in layout.mesh.shape.items())
    state = "" if state_bytes is None else f", {show_bytes(state_bytes)} of state per device"
    table = Table(
        title=f"{sizes}, ZeRO stage {layout.stage}: {layout.num_params:,} parameters{state}",
        caption="compute: over which axes each dim is cut in the step; rest: between steps; bytes of float32 weights "
        "at rest; replicated: what a device would not hold if every axis cut it",
        box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left",
    )  # fmt: skip
    table.add_column("parameter", no_wrap=True)
    for name in ("shape", "rule", "compute", "rest"):
        table.add_column(name, overflow="fold")
    for name in ("per device", "replicated"):
        table.add_column(name, justify="right")
    for name, leaves in grouped(layout).items():
        leaf, extra = leaves[0], sum(replicated_bytes(layout, each) for each in leaves)
        over = f"{show_bytes(extra)} over {'+'.join(replicated_axes(layout, leaf))}"
        table.add_row(
            escape(name), " x ".join(map(str, leaf.shape)) or "()", escape(leaf.rule), show_spec(leaf.compute_spec),
            show_spec(leaf.storage_spec), show_bytes(sum(map(layout.bytes_per_device, leaves))),
            Text(over, style="yellow" if extra > SMALL_BYTES else "dim") if extra else "-",
        )  # fmt: skip
    return table


def show(report: Report, console: Terminal) -> None:
    """Prints a report: the table, each finding on a line of its own, and what it comes to."""
    if report.layout is not None:
        console.print(_table(report.layout, report.state_bytes))
    for label, style, texts in (("error", "red", report.errors), ("warning", "yellow", report.warnings)):
        for text in texts:
            console.print(Text.assemble((f"{label:<9}", style), text), soft_wrap=True)
    counts = f"{_count(len(report.errors), 'error')}, {_count(len(report.warnings), 'warning')}"
    console.print(Text(counts, style="red" if report.errors else "yellow" if report.warnings else "green"))


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'s' * (number != 1)}"


# ---------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `meshtrain lint`, beside CONFIG and the overrides."""
    parser.add_argument("--nodes", type=int, default=0, metavar="N", help="lay out on N nodes that need not be here")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="M", help="devices of each node (default: 8)")
    parser.add_argument("--strict", action="store_true", help="exit 1 on a warning too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(config: Config, args: argparse.Namespace) -> int:
    """Lints and prints; the exit code: 1 on an error (`--strict`: on a warning too), else 0.

    Raises:
        ConfigError: the options make no sense.
    """
    if args.nodes < 0 or args.gpus_per_node < 1:
        raise ConfigError(f"--nodes {args.nodes} and --gpus-per-node {args.gpus_per_node} must be at least 1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model's own, of the trace: what lint has to say is in its report
        report = lint(config, Cluster(args.nodes, args.gpus_per_node))
    if args.json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        console = Terminal()
        show(report, console if console.is_terminal else Terminal(width=150))
    return int(bool(report.errors or (args.strict and report.warnings)))
