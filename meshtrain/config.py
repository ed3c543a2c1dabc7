"""The run's schema: a YAML file plus `key=value` overrides become one frozen, validated `Config`.

    config = load("examples/gpt_tiny.yaml", ["mesh.model=2", "zero.stage=2"])
    config.mesh.model  # 2

Every field has a default that serves and a description; `meshtrain config` prints both. YAML is read with PyYAML's
safe loader, made stricter: a key given twice, an alias (aliases can expand without bound), a tag (`!!...`) and deep
nesting are errors. Numbers are those of YAML 1.2: `1e-3` is one, where YAML 1.1 reads text, and `010` and `1:30` are
not 8 and 90.
"""

import difflib
import math
import re
import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

import pydantic
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator

from meshtrain.errors import ConfigError

MAX_BYTES = 1 << 16  # a config file is a page or two; more is a mistake or an attack
MAX_DEPTH = 20
MAX_PROBLEMS = 10  # shown of one config


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no silent conversion between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _check_scalar(value: Any) -> Any:
    """For the values of `model.overrides`, whose types only the model knows."""
    if not isinstance(value, bool | int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"must be true, false, a finite number or a text, got {_short(value)}")
    return value


def _check_axes(value: Any) -> Any:
    """For one dim of a placement rule."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(axis, str) for axis in value):
        return value
    raise ValueError(f"must be null, an axis or a list of axes, got {_short(value)}")


def _to_pair(value: Any) -> Any:
    """YAML has no tuples: a pair is a list there."""
    if isinstance(value, list | tuple) and len(value) == 2:
        return tuple(value)
    raise ValueError(f"must be a pair [path regex, value], got {_short(value)}")


def _short(value: Any) -> str:
    return reprlib.repr(value)


Scalar = Annotated[bool | int | float | str, PlainValidator(_check_scalar)]
Axes = Annotated[str | list[str] | None, PlainValidator(_check_axes)]


def _is_section(kind: Any) -> TypeGuard[type[Section]]:
    return isinstance(kind, type) and issubclass(kind, Section)


class RunConfig(Section):
    """Where the run lives and what makes it repeatable."""

    name: str = Field(default="", description="Name of the run's directory; empty takes the config file's name")
    dir: str = Field(default="runs", description="Folder that holds the run directories")
    seed: int = Field(default=0, ge=0, lt=2**32, description="Seed of parameters, dropout and data order")


class ModelConfig(Section):
    """Which model is trained, and where its parameters lie."""

    target: str = Field(default="models.gpt:GPT", description="The model's class as 'package.module:Class'")
    preset: str = Field(default="tiny", description="Name of one of the model's presets")
    overrides: dict[str, Scalar] = Field(
        default_factory=dict, description="Fields that replace the preset's, for instance {num_layers: 6}"
    )
    rules: list[Annotated[tuple[str, list[Axes]], BeforeValidator(_to_pair)]] | None = Field(
        default=None, description="Placement rules as [path regex, [axes]] pairs; null takes the model's own"
    )


class DataConfig(Section):
    """Where tokens come from and how they are cut into records of `seq_len + 1` tokens."""

    source: Literal["stdlib", "text", "tokens", "random"] = Field(
        default="stdlib", description="stdlib: Python's own sources; text: files by glob; tokens: a token file; random"
    )
    paths: list[str] = Field(default_factory=list, description="Globs of text files, or the one token file")
    dtype: Literal["uint8", "uint16", "uint32"] | None = Field(
        default=None, description="Element type of a raw token file; null for .npy, which names its own"
    )
    seq_len: int = Field(default=256, ge=1, description="Tokens the model sees per record")
    val_fraction: float = Field(default=0.05, ge=0, lt=1, description="Share of the source held out for evaluation")
    vocab_size: int = Field(default=256, ge=2, description="Token ids lie in [0, vocab_size); bytes need 256")
    prefetch: int = Field(default=2, ge=0, description="Batches prepared ahead of the step")


class MeshConfig(Section):
    """The sizes of the mesh axes. Their product is the number of devices."""

    data: int = Field(default=-1, description="Size of the data axis (ZeRO shards over it); -1 takes all devices left")
    model: int = Field(default=1, ge=1, description="Size of the tensor-parallel axis")


class ZeroConfig(Section):
    """ZeRO (Rajbhandari et al. 2020): what is sharded over the data axis."""

    stage: int = Field(
        default=1, ge=0, le=3, description="0: nothing; 1: optimizer state; 2: + gradients; 3: + parameters"
    )


class OptimConfig(Section):
    """The optimizer and the learning-rate schedule. Steps are optimizer updates, never microbatches."""

    name: Literal["adamw", "sgd", "lion", "adafactor", "muon", "lamb"] = Field(default="adamw", description="Optimizer")
    lr: float = Field(default=1e-3, ge=0, description="Peak learning rate")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="cosine", description="Decay after the warm-up; wsd: warmup-stable-decay"
    )
    warmup_steps: int = Field(default=0, ge=0, description="Updates from 0 up to the peak rate")
    decay_steps: int | None = Field(default=None, ge=1, description="wsd: length of the last decay; null takes a tenth")
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1, description="Final rate as a share of the peak")
    weight_decay: float = Field(default=0.1, ge=0, description="Decoupled weight decay (0: none)")
    decay_rules: list[Annotated[tuple[str, bool], BeforeValidator(_to_pair)]] | None = Field(
        default=None, description="Which parameters decay, as [path regex, bool]; null takes the built-in list"
    )
    clip_norm: float | None = Field(
        default=1.0, gt=0, description="Limit of the global gradient norm; null: no clipping"
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the first moment (sgd: the momentum)")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="Decay of the second moment")
    eps: float = Field(default=1e-8, gt=0, description="Term that keeps the division finite")
    moment_dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Type of the first moment")


class TrainConfig(Section):
    """The training loop."""

    steps: int = Field(default=1000, ge=1, lt=2**31, description="Optimizer updates in the whole run")
    global_batch: int = Field(default=32, ge=1, description="Records per update, over all devices and microbatches")
    microbatches: int = Field(default=1, ge=1, description="Parts that each device cuts its batch into")
    remat: Literal["none", "dots", "full"] = Field(default="none", description="What the backward pass computes again")
    sequence_parallel: bool = Field(default=False, description="Shard the residual stream's sequence dim over model")
    eval_every: int = Field(default=100, ge=0, description="Updates between evaluations (0: only at the end)")
    eval_batches: int = Field(default=8, ge=1, description="Batches of the fixed validation set")
    log_every: int = Field(default=10, ge=1, description="Updates between log lines")
    max_skipped: int = Field(
        default=20,
        ge=1,
        description="Updates in a row whose loss or gradient may be NaN or infinite before the run stops",
    )


class PrecisionConfig(Section):
    """Number formats. Master weights and optimizer state are float32."""

    compute: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="Type of weights and activations inside the step"
    )
    reduce: Literal["float32", "compute"] = Field(default="float32", description="Type in which gradients are reduced")
    loss_scale: float = Field(default=32768.0, ge=1, description="float16: first loss scale (dynamic afterwards)")
    loss_scale_window: int = Field(default=1000, ge=1, description="float16: finite updates before the scale doubles")


class CheckpointConfig(Section):
    """Orbax checkpoints under the run directory."""

    every: int = Field(default=500, ge=0, description="Updates between checkpoints (0: only at the end)")
    keep: int = Field(default=3, ge=1, description="How many of the newest checkpoints stay")


class LogConfig(Section):
    """Where figures go beside the terminal and metrics.jsonl."""

    tensorboard: bool = Field(default=False, description="Write TensorBoard events (extra: tensorboard)")
    wandb_project: str = Field(default="", description="Weights & Biases project; empty: none (extra: wandb)")
    progress: Literal["auto", "live", "plain", "none"] = Field(
        default="auto", description="Terminal output; auto: live on a terminal, plain lines elsewhere"
    )


class LaunchConfig(Section):
    """The processes of the run, and how long they wait for each other. Limits are seconds."""

    distributed: Literal["auto", "required", "off"] = Field(
        default="auto", description="Several processes: as found, or it is an error if none are, or never"
    )
    platform: Literal["auto", "gpu", "cpu"] = Field(
        default="auto", description="Devices: gpu refuses to run on anything else"
    )
    devices_per_process: int = Field(default=0, ge=0, description="How many each must have; 0 takes what is there")
    port: int = Field(default=0, ge=0, le=65535, description="Where process 0 listens; 0: a function of the job")
    join: float = Field(default=300, gt=0, description="Limit for all processes to come, and for each agreement")
    compile: float = Field(default=3600, gt=0, description="Limit for the first update, compilation included")
    update: float = Field(default=1800, gt=0, description="Limit for an update, and for an evaluation")
    save: float = Field(default=1800, gt=0, description="Limit for a save or a restore")
    heartbeat: float = Field(default=60, gt=0, description="Silence after which a process is lost")


class Config(Section):
    """One training run."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    zero: ZeroConfig = Field(default_factory=ZeroConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    devices: int = Field(default=0, ge=0, le=4096, description="Virtual CPU devices to make; 0 takes the machine's own")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _fill_empty_sections(cls, values: Any) -> Any:
        """A section of which only the heading is left, such as `train:`, is null in YAML."""
        if not isinstance(values, dict):
            return values
        return {key: {} if value is None and key in _SECTIONS else value for key, value in values.items()}

    @pydantic.model_validator(mode="after")
    def _check_across_sections(self) -> "Config":
        if self.optim.warmup_steps > self.train.steps:
            raise ValueError(
                f"optim.warmup_steps={self.optim.warmup_steps} is more than train.steps={self.train.steps}: "
                "the peak rate would never come; lower the one or raise the other"
            )
        if self.train.global_batch % self.train.microbatches:
            raise ValueError(
                f"train.global_batch={self.train.global_batch} records cannot be cut into "
                f"train.microbatches={self.train.microbatches} equal parts"
            )
        if self.mesh.data != -1 and self.mesh.data < 1:
            raise ValueError(f"mesh.data={self.mesh.data} must be -1 (all devices left) or at least 1")
        return self


_SECTIONS = frozenset(name for name, info in Config.model_fields.items() if _is_section(info.annotation))
_YAML_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9]+$|0o[0-7]+$|0x[0-9a-fA-F]+$")  # YAML 1.2.2, section 10.3.2
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$")


def _resolvers(*kept: str) -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """How a plain word finds its type: by its first letter, the first pattern that matches.

    Args:
        kept: the types that are still recognized as PyYAML does, before YAML 1.2's numbers.
    """
    tags = {_YAML_TAG + kind for kind in kept}
    resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items():
        resolvers[first] = [(tag, regexp) for tag, regexp in known if tag in tags]
    for first in "-+0123456789.":
        resolvers.setdefault(first, []).extend([(f"{_YAML_TAG}int", _INT), (f"{_YAML_TAG}float", _FLOAT)])
    return resolvers


def _refuse(node: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's numbers, and without aliases, tags, duplicate keys and deep nesting."""

    yaml_implicit_resolvers = _resolvers("bool", "null")
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        untyped: Any = self
        event = untyped.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _refuse(event, "an alias (*name) is not allowed in a config: write the value out")
        if event.tag is not None:
            raise _refuse(event, f"a tag ({event.tag}) is not allowed in a config: write a plain value")
        if self.depth == MAX_DEPTH:
            raise _refuse(event, f"nested more than {MAX_DEPTH} deep; a config has sections with keys")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _refuse(key_node, "a key must be a word")
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise _refuse(key_node, f"the key '{key}' is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int:
        """An integer; PyYAML would read `010` as 8."""
        text = node.value
        return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


_Loader.add_constructor(f"{_YAML_TAG}int", _Loader.construct_yaml_int)


class _Dumper(yaml.SafeDumper):
    """Puts quotes around what `_Loader`, or another program's YAML 1.1 loader, would not read as text."""

    yaml_implicit_resolvers = _resolvers("bool", "null", "int", "float", "timestamp", "merge", "value")


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a subclass of SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{where}{line}: {_one_line(error.problem)}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: not valid YAML: {_one_line(error)}") from None


def _one_line(text: Any) -> str:
    return " ".join(str(text).split())


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)  # not its size: a device or a pipe has none
        text = content.decode("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes; a config is a page or two")
    values = _parse_yaml(text, str(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold sections such as 'train:', not {_short(values)}")
    return values


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"'{override}' is not of the form key=value, for instance train.steps=100")
    node = values
    *parents, last = key.split(".")
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise ConfigError(f"'{key}': '{parent}' is a value, not a section")
    value = _parse_yaml(text, f"override {key}")
    if key in _SECTIONS and isinstance(value, dict) and isinstance(node.get(key), dict):
        value = node[key] | value  # train={steps: 2} sets one key of the file's section, and keeps the others
    node[last] = value


def fields(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """Yields `(dotted key, type, default, description)` of every field, in order."""
    for name, info in section.model_fields.items():
        kind = info.annotation
        if _is_section(kind):
            yield from fields(kind, f"{prefix}{name}.")
        else:
            yield (
                f"{prefix}{name}",
                _show_type(kind),
                info.get_default(call_default_factory=True),
                info.description or "",
            )


def _show_type(kind: Any) -> str:
    """A type as a config's author sees it: `adamw | sgd`, `int | null`, `list[tuple[str, bool]]`."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _show_type(args[0])
    if origin is Literal:
        return " | ".join(map(str, args))
    shown = [_show_type(arg) for arg in args]
    if origin in (Union, UnionType):
        return " | ".join(shown)
    if origin is not None:
        return f"{origin.__name__}[{', '.join(shown)}]"
    return "null" if kind is type(None) else str(kind.__name__)


def _nearest(key: str) -> str | None:
    """The field or section that a misspelt key most likely means: one of the same section if any is near."""
    names = [name for name, *_ in fields()] + sorted(_SECTIONS)
    parent, _, last = key.rpartition(".")
    same = [name for name in names if name.rpartition(".")[2] == last]
    if len(same) == 1:  # the right word in the wrong section
        return same[0]
    for candidates in ([name for name in names if name.rpartition(".")[0] == parent], names):
        by_last = {name.rpartition(".")[2]: name for name in reversed(candidates)}
        if near := difflib.get_close_matches(last, by_last, n=1, cutoff=0.6):
            return by_last[near[0]]
    return None


def _explain(error: Any) -> str:
    key, given = _one_line(".".join(map(str, error["loc"]))), error["input"]
    if error["type"] == "extra_forbidden":
        near = _nearest(key)
        if near == key:  # written flat, with a dot in the key
            section, _, last = key.partition(".")
            return f"unknown key '{key}': a section's keys go below it, as in {section}: {{{last}: ...}}"
        return f"unknown key '{key}'" + (f"; did you mean '{near}'?" if near else "; see `meshtrain config`")
    if error["type"] == "value_error":
        return f"{key}: {error['ctx']['error']}" if key else str(error["ctx"]["error"])
    if error["type"] == "model_type":
        return f"{key}: must be a section with keys of its own, got {_short(given)}"
    text = f"{key}: {error['msg'][0].lower()}{error['msg'][1:]}, got {_short(given)}"
    if error["type"] == "string_type" and isinstance(given, bool | int | float | None):
        text += f""" (YAML reads it so; in quotes it is text: {key}='"{given}"')"""
    if isinstance(given, str) and _FLOAT.match(given):
        text += f" (a text because of its quotes: write {given} without them)"
    return text


def validate(values: dict[str, Any], source: str = "config") -> Config:
    """Makes a `Config` of nested plain values.

    Raises:
        ConfigError: names the source, the key, what is wrong with its value and, for an unknown key, the nearest one.
    """
    try:
        return Config.model_validate(values)
    except pydantic.ValidationError as invalid:
        errors = invalid.errors()
        lines = [f"{source}: {_explain(error)}" for error in errors[:MAX_PROBLEMS]]
        if len(errors) > MAX_PROBLEMS:
            lines.append(f"{source}: and {len(errors) - MAX_PROBLEMS} more problems")
        raise ConfigError("\n".join(lines)) from None


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a config file and applies `key=value` overrides, later ones winning.

    Args:
        path: a YAML file; None starts from the defaults.
        overrides: such as `"mesh.model=2"`; the value is read as YAML.

    Raises:
        ConfigError: one line per problem, naming the key and the file.
    """
    values = _read_file(Path(path)) if path is not None else {}
    for override in overrides:
        _apply_override(values, override)
    source = " + ".join([str(path)] * (path is not None) + ["overrides"] * bool(overrides)) or "config"
    config = validate(values, source)
    if not config.run.name:
        name = Path(path).stem if path is not None else "run"
        config = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    return config


def dump(config: Config) -> str:
    """The config as YAML that `load` reads back to an equal object."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


def flatten(config: Config) -> dict[str, Any]:
    """Every `section.key` with its value as JSON: what two configs are compared by."""
    flat: dict[str, Any] = {}
    for name, part in config.model_dump(mode="json").items():
        flat |= {f"{name}.{key}": value for key, value in part.items()} if isinstance(part, dict) else {name: part}
    return flat
