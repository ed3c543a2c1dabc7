"""A small twin of a config: the same model structure and layout, in sizes that a laptop runs in seconds.

    twin = shrink(config)
    twin.config, twin.changes

What makes it a twin: each parameter has a counterpart of as many dims, placed by the same rule, cut by `model` in the
same dims, stacked over as many dims and, wherever sizes allow, cut by ZeRO in the same dim. A stack keeps at least 2
layers, and a dim at least 8 (or all) of its elements, so that nothing that is cut or summed becomes trivial.

The search only assumes that a preset is a dataclass: it lowers each integer field, and the run's `seq_len` and
`vocab_size`, for as long as the model still builds, still traces, and stays a twin.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jax.sharding import AbstractMesh, AxisType, Mesh

from meshtrain.adapters import abstract_params, probe
from meshtrain.config import Config, validate
from meshtrain.data import abstract_batch
from meshtrain.errors import ConfigError
from meshtrain.layout import Layout, LeafLayout, make_layout
from meshtrain.lint import path_pattern
from meshtrain.mesh import DATA, MODEL
from meshtrain.target import load_target

MAX_DEVICES = 8
MIN_DIM = 8  # elements that a dim of a parameter keeps
MIN_STACK = 2  # layers that a stack, or a list of like parameters, keeps
MAX_STEPS = 40  # of the search, over all fields
_DEPTH = ("layer", "depth", "block")  # fields tried first: fewer layers make every later trace faster
_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclasses.dataclass(frozen=True)
class Twin:
    """A small config that stands for a large one.

    Attributes:
        config: ready to be run on `config.devices` devices.
        changes: what was changed, as `field: before -> after`, one line each.
        moved: parameters (patterns) whose ZeRO dim is another one than in the large layout.
    """

    config: Config
    changes: tuple[str, ...]
    moved: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What a twin's parameters of one pattern must have in common with the original's."""

    rule: str
    spec: str
    zero_dim: int | None
    num_stacked: int
    shape: tuple[int, ...]
    count: int  # parameters of this pattern


def shrink(config: Config, data: int, model: int) -> Twin:
    """Finds the twin of a config on a mesh of `data` x `model` devices.

    Raises:
        UserError: the config itself does not fit together: what `meshtrain lint` reports.
    """
    wanted = _shapes(_lay_out(config, data, model))
    num_data, num_model = shrink_mesh(data, model)
    start = _run_sizes(config, num_data, num_model)

    def moved_by(tried: Config) -> tuple[str, ...] | None:
        # What the shapes alone show costs no trace of the loss, and refuses most.
        quick = _moved(wanted, _shapes(_lay_out(tried, num_data, num_model, wanted)))
        return None if quick is None else _moved(wanted, _shapes(_lay_out(tried, num_data, num_model)))

    current, moved = _search(start, moved_by)
    changes = [f"mesh: {data} x {model} -> {num_data} x {num_model}"] if (num_data, num_model) != (data, model) else []
    return Twin(current, (*changes, *_changes(config, current)), moved)


def shrink_mesh(data: int, model: int) -> tuple[int, int]:
    """A mesh of at most 8 devices in which each axis of more than one keeps at least two, and divides it if it can."""

    def sizes(size: int) -> range:
        return range(min(size, 2), min(size, MAX_DEVICES) + 1)

    def worth(pair: tuple[int, int]) -> tuple[int, int, int]:
        divides = (data % pair[0] == 0) + (model % pair[1] == 0)
        return divides, pair[0] * pair[1], -abs(pair[0] - pair[1]) * 2 + (pair[0] > pair[1])

    pairs = [(d, m) for d in sizes(data) for m in sizes(model) if d * m <= MAX_DEVICES]
    return max(pairs, key=worth)


# ---------------------------------------------------------------- being a twin


def _lay_out(config: Config, data: int, model: int, stacked_as: Mapping[str, _Shape] | None = None) -> Layout:
    """A config's layout, traced only.

    Args:
        stacked_as: shapes by pattern whose `num_stacked` is believed, instead of tracing the loss.
    """
    target = load_target(config)
    batch = abstract_batch(config.train.global_batch, config.data.seq_len)
    params = abstract_params(target.model, batch)
    if config.train.sequence_parallel and config.data.seq_len % model:
        raise ConfigError(f"train.sequence_parallel: mesh.model={model} does not divide the sequence")
    if stacked_as is None:
        num_stacked = probe(target.model, params, batch).num_stacked
    else:
        num_stacked = {path: stacked_as[path_pattern(path)].num_stacked for path in params}
    mesh: Any = AbstractMesh((data, model), (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))
    sized: Mesh = mesh  # a layout only reads the sizes
    return make_layout(params, target.rules, sized, config.zero.stage, num_stacked)


def _shapes(layout: Layout) -> dict[str, _Shape]:
    groups: dict[str, list[LeafLayout]] = {}
    for leaf in layout.leaves.values():
        groups.setdefault(path_pattern(leaf.path), []).append(leaf)
    return {pattern: _shape(leaves) for pattern, leaves in groups.items()}


def _shape(leaves: list[LeafLayout]) -> _Shape:
    first = leaves[0]
    shape = tuple(min(sizes) for sizes in zip(*(leaf.shape for leaf in leaves), strict=True))
    spec = " ".join(sorted({str(leaf.compute_spec) for leaf in leaves}))
    return _Shape(first.rule, spec, first.zero_dim, first.num_stacked, shape, len(leaves))


def _moved(wanted: Mapping[str, _Shape], got: Mapping[str, _Shape]) -> tuple[str, ...] | None:
    """Patterns whose ZeRO dim differs; None if this is no twin at all."""
    if wanted.keys() != got.keys() or not all(_alike(wanted[pattern], got[pattern]) for pattern in wanted):
        return None
    return tuple(pattern for pattern in wanted if wanted[pattern].zero_dim != got[pattern].zero_dim)


def _alike(wanted: _Shape, got: _Shape) -> bool:
    same = (wanted.rule, wanted.spec, wanted.num_stacked) == (got.rule, got.spec, got.num_stacked)
    least = [MIN_STACK if dim < wanted.num_stacked else MIN_DIM for dim in range(len(wanted.shape))]
    kept = all(b >= min(a, c) for a, b, c in zip(wanted.shape, got.shape, least, strict=True)) if same else False
    return kept and got.count >= min(wanted.count, MIN_STACK)


# ---------------------------------------------------------------- the search


def _search(start: Config, moved_by: Callable[[Config], tuple[str, ...] | None]) -> tuple[Config, tuple[str, ...]]:
    """Lowers one field after the other until none can be lowered."""
    current, moved = start, moved_by(start)
    if moved is None:
        raise ConfigError("the model's layout changes its rules with the mesh's sizes: prove it on the mesh itself")
    for _ in range(MAX_STEPS):
        before = current
        for field in _fields(current):
            for tried in _lowered(current, field):
                now = _attempt(moved_by, tried)
                if now is not None and len(now) <= len(moved):
                    current, moved = tried, now
                    break
        if current == before:
            break
    return current, moved


def _attempt(moved_by: Callable[[Config], tuple[str, ...] | None], tried: Config) -> tuple[str, ...] | None:
    try:
        return moved_by(tried)
    except Exception:  # the user's own model refuses these sizes, in whatever way it likes
        return None


def _fields(config: Config) -> list[str]:
    """What can be lowered, the number of layers first."""
    sizes = load_target(config).sizes
    names = [field.name for field in dataclasses.fields(sizes) if type(getattr(sizes, field.name)) is int]
    of_run = {"seq_len", "vocab_size"} - set(config.model.overrides)
    names = sorted((name for name in names if name not in of_run), key=lambda name: not any(w in name for w in _DEPTH))
    return ["data.seq_len", "data.vocab_size", *names]


def _value(config: Config, field: str) -> int:
    section, _, name = field.rpartition(".")
    return int(getattr(config.data, name) if section else getattr(load_target(config).sizes, name))


def _lowered(config: Config, field: str) -> Iterator[Config]:
    """The config with a field lowered, the lowest first. An odd vocabulary stays odd, so that its table is padded."""
    value = _value(config, field)
    sizes = {*_SIZES, *(value >> k for k in range(1, 20))}
    odd = {size | 1 for size in sizes} if value % 2 else set()
    for size in sorted(odd if odd and field.endswith("vocab_size") else sizes | odd):
        if 2 <= size < value and (size >= MIN_DIM or not field.startswith("data.")):
            yield _with(config, field, size)


def _with(config: Config, field: str, size: int) -> Config:
    section, _, name = field.rpartition(".")
    if section:
        return config.model_copy(update={"data": config.data.model_copy(update={name: size})})
    overrides = config.model.overrides | {name: size}
    return config.model_copy(update={"model": config.model.model_copy(update={"overrides": overrides})})


# ---------------------------------------------------------------- the rest of the config


def _run_sizes(config: Config, data: int, model: int) -> Config:
    """The run around the model: two records in each of at most two microbatches of each data shard, float32."""
    values = config.model_dump()
    microbatches = min(config.train.microbatches, 2)
    values["train"] |= {"microbatches": microbatches, "global_batch": 2 * data * microbatches}
    values["mesh"] = {"data": data, "model": model}
    values["precision"] |= {"compute": "float32", "reduce": "float32"}
    overrides = config.model.overrides | dict.fromkeys(_dropout(config), 0.0)
    values["model"]["overrides"] = {name: value for name, value in overrides.items() if name != "dtype"}
    values["devices"] = 0
    return validate(values)


def _dropout(config: Config) -> list[str]:
    """Fields of the model's sizes that are rates of dropout and not zero."""
    sizes = load_target(config).sizes
    values = {field.name: getattr(sizes, field.name) for field in dataclasses.fields(sizes)}
    return [name for name, value in values.items() if "drop" in name and isinstance(value, float) and value > 0]


def _changes(before: Config, after: Config) -> Iterator[str]:
    old, new = (load_target(config).sizes for config in (before, after))
    for name, value in dataclasses.asdict(old).items():
        now = getattr(new, name)
        if isinstance(value, int | float | str) and now != value:
            yield f"{name}: {value} -> {now}"
    for key in ("data.seq_len", "data.vocab_size", "train.global_batch", "train.microbatches"):
        section, name = key.split(".")
        was, now = getattr(getattr(before, section), name), getattr(getattr(after, section), name)
        if was != now and not hasattr(new, name):
            yield f"{section}.{name}: {was} -> {now}"
