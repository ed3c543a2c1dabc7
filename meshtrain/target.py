"""From a config's `model` section to a `Model`: `target: "package.module:Class"`, a preset and overrides.

What a class must have to be a target:

* `presets`: a dict from name to a dataclass with the model's sizes.
* `Class(sizes, rngs=rngs)` (nnx) or `Class(sizes)` (linen) builds it.
* `rules`: its placement rules; without them the config's `model.rules` must give some.
* optionally `loss(model, batch) -> (loss sum, weight sum)`; without it, the cross-entropy of `model(batch["tokens"])`.
"""

import dataclasses
import difflib
import importlib
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
from flax import nnx

from meshtrain.adapters import Batch, LossSum, Model, from_linen, from_nnx
from meshtrain.config import Config
from meshtrain.errors import ConfigError, ModelError
from meshtrain.losses import cross_entropy
from meshtrain.rules import Rule, as_rules

# Types of an override by the type of the preset's value, where they are not just that one (a bool is no int here). Of
# what a preset leaves open with None, only the model knows the type.
_ACCEPTED: dict[type, tuple[type, ...]] = {float: (float, int), type(None): (bool, int, float, str)}


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
        ModelError: the class is not a Flax module, or has no presets.
    """
    cls = _import(config.model.target)
    if not _is_module_class(cls):
        raise ModelError(f"model.target={config.model.target} is not a Flax module class (nnx or linen)")
    sizes = _sizes(cls, config)
    build: Any = cls
    loss = getattr(cls, "loss", _token_loss)
    if issubclass(cls, nn.Module):
        model = from_linen(build(sizes), loss)
    else:
        model = from_nnx(lambda rngs: build(sizes, rngs=rngs), loss)
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
    return dataclasses.replace(preset, **filled)


def _near(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join(known) or 'none'}"


def _token_loss(model: Any, batch: Batch) -> LossSum:
    """Cross-entropy of the logits [B, T, V] that a model makes of `batch["tokens"]`."""
    return cross_entropy(model(batch["tokens"]), batch["targets"], batch["weights"])
