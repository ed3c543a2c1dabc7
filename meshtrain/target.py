"""From a config's `model` section to a `Model`: `target: "package.module:Class"`, a preset and overrides.

What a class must have to be a target:

* `presets`: a dict from name to a dataclass with the model's sizes.
* `Class(sizes, rngs=rngs)` (nnx) or `Class(sizes)` (linen) builds it.
* `rules`: its placement rules; without them the config's `model.rules` must give some.
* optionally `loss(model, batch) -> (loss sum, weight sum)`; without it, the cross-entropy of `model(batch["tokens"])`.
"""

import contextlib
import dataclasses
import difflib
import importlib
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
from flax import nnx

from meshtrain.adapters import Batch, LossSum, Model, from_linen, from_nnx
from meshtrain.config import Config
from meshtrain.errors import ConfigError, ModelError, UserError
from meshtrain.losses import cross_entropy
from meshtrain.rules import Rule, as_rules
from meshtrain.terminal import show_path

# Types of an override by the type of the preset's value, where they are not just that one (a bool is no int here). Of
# what a preset leaves open with None, only the model knows the type.
_ACCEPTED: dict[type, tuple[type, ...]] = {float: (float, int), type(None): (bool, int, float, str)}
# What a model's own code raises of sizes that it cannot have. A NameError, say, is a bug in it, to be traced.
_OF_SIZES = (ArithmeticError, AssertionError, LookupError, TypeError, ValueError)


@dataclasses.dataclass(frozen=True)
class Target:
    """A model as a config names it: its sizes, its functions, its rules."""

    sizes: Any
    model: Model
    rules: tuple[Rule, ...]


def load_target(config: Config) -> Target:
    """Builds the model that a config names.

    Sizes that the run decides are filled in where the model has them: `vocab_size` and `seq_len` from `data`, `dtype`
    from `precision.compute`, `remat` from `train.remat`. `model.overrides` win.

    Raises:
        ConfigError: no such module, class, preset or field, or a size too small for the data.
        ModelError: the class is not a Flax module, has no presets, or refuses its sizes; also when an nnx model is
            initialized, which is when it is built.
    """
    cls = _import(config.model.target)
    if not _is_module_class(cls):
        raise ModelError(f"model.target={config.model.target} is not a Flax module class (nnx or linen)")
    sizes = _sizes(cls, config)
    loss = getattr(cls, "loss", _token_loss)
    if issubclass(cls, nn.Module):
        model = from_linen(_build(config, cls, sizes), loss)
    else:
        model = from_nnx(lambda rngs: _build(config, cls, sizes, rngs=rngs), loss)
    rules: Sequence[tuple[str, Any]] | None = config.model.rules
    if rules is None:
        rules = getattr(cls, "rules", None)
    if rules is None:
        raise ConfigError(f"{config.model.target} has no `rules`: give model.rules in the config")
    return Target(sizes, model, as_rules(rules))


def _import(target: str) -> type[Any]:
    module_name, separator, class_name = target.partition(":")
    if not separator or not class_name or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"model.target='{target}' must be of the form 'package.module:Class'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"model.target='{target}': there is no module '{error.name}' here; run from the folder that holds it"
        ) from None
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type):
        models = [name for name, value in vars(module).items() if _is_module_class(value)]
        raise ConfigError(f"model.target='{target}': no class '{class_name}' there{_near(class_name, models)}")
    return cls


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module | nnx.Module)


def _sizes(cls: type[Any], config: Config) -> Any:
    presets = getattr(cls, "presets", None)
    if not isinstance(presets, dict) or not presets:
        raise ModelError(f"{config.model.target} has no `presets`, a dict from name to a dataclass of sizes")
    if config.model.preset not in presets:
        raise ConfigError(f"model.preset='{config.model.preset}': no such preset{_near(config.model.preset, presets)}")
    preset = presets[config.model.preset]
    if not dataclasses.is_dataclass(preset) or isinstance(preset, type):
        raise ModelError(f"{config.model.target}: the preset '{config.model.preset}' is not an instance of a dataclass")
    types = {field.name: type(getattr(preset, field.name)) for field in dataclasses.fields(preset)}
    from_run = {
        "vocab_size": config.data.vocab_size,
        "seq_len": config.data.seq_len,
        "dtype": config.precision.compute,
        "remat": config.train.remat,
    }
    if config.train.remat != "none" and "remat" not in types:
        raise ConfigError(
            f"train.remat={config.train.remat}: {config.model.target} has no field 'remat' to carry it out"
        )
    for key, value in config.model.overrides.items():
        if key not in types:
            raise ConfigError(f"model.overrides.{key}: {config.model.target} has no such field{_near(key, types)}")
        if type(value) not in _ACCEPTED.get(types[key], (types[key],)):
            raise ConfigError(f"model.overrides.{key}={value!r} must be of type {types[key].__name__}")
        if key in ("vocab_size", "seq_len") and int(value) < int(from_run[key]):
            raise ConfigError(f"model.overrides.{key}={value} is less than data.{key}={from_run[key]}")
    filled = {key: value for key, value in from_run.items() if key in types} | config.model.overrides
    with _refusals(config, cls, "its preset"):
        return dataclasses.replace(preset, **filled)


def _build(config: Config, cls: Any, sizes: Any, **rngs: Any) -> Any:
    with _refusals(config, cls, f"{cls.__name__}(sizes{''.join(f', {name}={name}' for name in rngs)})"):
        return cls(sizes, **rngs)


@contextlib.contextmanager
def _refusals(config: Config, cls: type[Any], what: str) -> Iterator[None]:
    """Turns what the user's code raises of sizes that it cannot have into an error that says where.

    Raises:
        ModelError: from the original error, whose traceback goes with it. A bug of our own is raised as it is.
    """
    try:
        yield
    except UserError:
        raise
    except _OF_SIZES as error:
        frames = traceback.walk_tb(error.__traceback__)
        at = [(_package(frame.f_globals), frame.f_code.co_filename, line) for frame, line in frames]
        theirs = [f"{show_path(Path(file))}:{line}" for package, file, line in at if _is_of(cls, package, file)]
        if at[-1][0] == _package(globals()) and at[-1][1] != __file__:
            raise
        text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        where = f" ({theirs[-1]})" if theirs else ""
        raise ModelError(
            f"model.target={config.model.target}: {what} raises {text}{where}: see model.preset and model.overrides, "
            "or correct the model"
        ) from error


def _package(names: dict[str, Any]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]


def _is_of(cls: type[Any], package: str, file: str) -> bool:
    """Whether a frame is of the user's own code; a dataclass's generated `__init__` has no file."""
    return package == cls.__module__.partition(".")[0] and not file.startswith("<")


def _near(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join(known) or 'none'}"


def _token_loss(model: Any, batch: Batch) -> LossSum:
    """Cross-entropy of the logits [B, T, V] that a model makes of `batch["tokens"]`."""
    return cross_entropy(model(batch["tokens"]), batch["targets"], batch["weights"])
