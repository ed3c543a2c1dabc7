"""The run's schema: a YAML file plus `key=value` overrides become one frozen, validated `Config`.

    config = load("examples/gpt_tiny.yaml", ["mesh.model=2", "zero.stage=2"])
    config.mesh.model  # 2

Every field has a default that serves and a description; `meshtrain config` prints both. YAML is read with PyYAML's
safe loader, made stricter in three ways: a key given twice is an error, aliases are an error (they can expand without
bound), and `1e-3` is a number, as in YAML 1.2, where YAML 1.1 reads text.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field

from meshtrain.errors import ConfigError

MAX_BYTES = 1 << 20  # a config file is a page or two; more is a mistake or an attack


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no silent conversion between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunConfig(Section):
    """Where the run lives and what makes it repeatable."""

    name: str = Field("", description="Name of the run's directory; empty takes the config file's name")
    dir: str = Field("runs", description="Folder that holds the run directories")
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of parameters, dropout and data order")


class ModelConfig(Section):
    """Which model is trained, and where its parameters lie."""

    target: str = Field("models.gpt:GPT", description="The model's class as 'package.module:Class'")
    preset: str = Field("tiny", description="Name of one of the model's presets")
    overrides: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="Fields that replace the preset's, for instance {num_layers: 6}"
    )
    rules: list[tuple[str, list[str | list[str] | None]]] | None = Field(
        None, description="Placement rules as [path regex, [axes]] pairs; null takes the model's own"
    )


class DataConfig(Section):
    """Where tokens come from and how they are cut into records of `seq_len + 1` tokens."""

    source: Literal["stdlib", "text", "tokens", "random"] = Field(
        "stdlib", description="stdlib: Python's own sources; text: files by glob; tokens: a token file; random"
    )
    paths: list[str] = Field(default_factory=list, description="Globs of text files, or the one token file")
    dtype: Literal["uint8", "uint16", "uint32"] | None = Field(
        None, description="Element type of a raw token file; null for .npy, which names its own"
    )
    seq_len: int = Field(256, ge=1, description="Tokens the model sees per record")
    val_fraction: float = Field(0.05, ge=0, lt=1, description="Share of the source held out for evaluation")
    vocab_size: int = Field(256, ge=2, description="Token ids lie in [0, vocab_size); bytes need 256")
    prefetch: int = Field(2, ge=0, description="Batches prepared ahead of the step")


class MeshConfig(Section):
    """The sizes of the mesh axes. Their product is the number of devices."""

    data: int = Field(-1, description="Size of the data axis (ZeRO shards over it); -1 takes all devices left")
    model: int = Field(1, ge=1, description="Size of the tensor-parallel axis")


class ZeroConfig(Section):
    """ZeRO (Rajbhandari et al. 2020): what is sharded over the data axis."""

    stage: int = Field(1, ge=0, le=3, description="0: nothing; 1: optimizer state; 2: + gradients; 3: + parameters")


class OptimConfig(Section):
    """The optimizer and the learning-rate schedule. Steps are optimizer updates, never microbatches."""

    name: Literal["adamw", "sgd", "lion", "adafactor", "muon", "lamb"] = Field("adamw", description="Optimizer")
    lr: float = Field(1e-3, ge=0, description="Peak learning rate")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine", description="Decay after the warm-up; wsd: warmup-stable-decay"
    )
    warmup_steps: int = Field(0, ge=0, description="Updates from 0 up to the peak rate")
    decay_steps: int | None = Field(None, ge=1, description="wsd: length of the last decay; null takes a tenth")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="Final rate as a share of the peak")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay (0: none)")
    decay_rules: list[tuple[str, bool]] | None = Field(
        None, description="Which parameters decay, as [path regex, bool]; null takes the built-in list"
    )
    clip_norm: float | None = Field(1.0, gt=0, description="Limit of the global gradient norm; null: no clipping")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment (sgd: the momentum)")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="Term that keeps the division finite")
    moment_dtype: Literal["float32", "bfloat16"] = Field("float32", description="Type of the first moment")


class TrainConfig(Section):
    """The training loop."""

    steps: int = Field(1000, ge=1, description="Optimizer updates in the whole run")
    global_batch: int = Field(32, ge=1, description="Records per update, over all devices and microbatches")
    microbatches: int = Field(1, ge=1, description="Parts that each device cuts its batch into")
    remat: Literal["none", "dots", "full"] = Field("none", description="What the backward pass computes again")
    sequence_parallel: bool = Field(False, description="Shard the residual stream's sequence dim over model")
    eval_every: int = Field(100, ge=0, description="Updates between evaluations (0: only at the end)")
    eval_batches: int = Field(8, ge=1, description="Batches of the fixed validation set")
    log_every: int = Field(10, ge=1, description="Updates between log lines")


class PrecisionConfig(Section):
    """Number formats. Master weights and optimizer state are float32."""

    compute: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Type of weights and activations inside the step"
    )
    reduce: Literal["float32", "compute"] = Field("float32", description="Type in which gradients are reduced")
    loss_scale: float = Field(32768.0, ge=1, description="float16: first loss scale (dynamic afterwards)")
    loss_scale_window: int = Field(1000, ge=1, description="float16: finite updates before the scale doubles")


class CheckpointConfig(Section):
    """Orbax checkpoints under the run directory."""

    every: int = Field(500, ge=0, description="Updates between checkpoints (0: only at the end)")
    keep: int = Field(3, ge=1, description="How many of the newest checkpoints stay")


class LogConfig(Section):
    """Where figures go beside the terminal and metrics.jsonl."""

    tensorboard: bool = Field(False, description="Write TensorBoard events (extra: tensorboard)")
    wandb_project: str = Field("", description="Weights & Biases project; empty: none (extra: wandb)")
    progress: Literal["auto", "live", "plain", "none"] = Field(
        "auto", description="Terminal output; auto: live on a terminal, plain lines elsewhere"
    )


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
    devices: int = Field(0, ge=0, le=4096, description="Virtual CPU devices to make; 0 takes the machine's own")

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


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without aliases and duplicate keys, and with YAML 1.2 floats."""

    yaml_implicit_resolvers: ClassVar[Any] = {
        first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:float"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.constructor.ConstructorError(
                None, None, "an alias (*name) is not allowed in a config: write the value out", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (list, dict)):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key}' is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"),
    list("-+0123456789."),
)


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a subclass of SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{where}{line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply for a config") from None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes; a config is a page or two")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    values = _parse_yaml(text, str(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold sections such as 'train:', not a {type(values).__name__}")
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
    node[last] = _parse_yaml(text, f"override {key}")


def fields(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """Yields `(dotted key, type, default, description)` of every field, in order."""
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from fields(kind, f"{prefix}{name}.")
        else:
            shown = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
            shown = shown.replace("typing.Literal", "").replace("typing.", "")
            yield f"{prefix}{name}", shown, info.get_default(call_default_factory=True), info.description or ""


def _explain(error: Any, source: str) -> str:
    key = ".".join(str(part) for part in error["loc"] if not str(part).startswith(("function-", "lax-", "constrained")))
    if error["type"] == "extra_forbidden":
        known = [name for name, *_ in fields()]
        known += sorted({name.split(".")[0] for name in known if "." in name})
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5) or difflib.get_close_matches(
            key.split(".")[-1], [name.split(".")[-1] for name in known], n=1, cutoff=0.6
        )
        full = next((name for name in known if near and (name == near[0] or name.endswith("." + near[0]))), None)
        return f"{source}: unknown key '{key}'" + (f"; did you mean '{full}'?" if full else "; see `meshtrain config`")
    if error["type"] == "value_error":
        return f"{source}: {error['ctx']['error']}"
    given = error["input"]
    text = f"{source}: {key}: {error['msg'][0].lower()}{error['msg'][1:]}, got {given!r}"
    if isinstance(given, str) and re.fullmatch(r"[-+0-9.eE]+", given):
        text += f" (a text because of its quotes: write {given} without them)"
    return text


def validate(values: dict[str, Any], source: str = "config") -> Config:
    """Makes a `Config` of nested plain values.

    Raises:
        ConfigError: names the source, the key, what is wrong with its value and, for an unknown key, the nearest one.
    """
    try:
        return Config.model_validate(values)
    except pydantic.ValidationError as errors:
        # A union reports each of its members; the first problem of each key says enough.
        lines = list({error["loc"][:2]: _explain(error, source) for error in reversed(errors.errors())}.values())
        raise ConfigError("\n".join(reversed(lines))) from None


def _lists_to_tuples(values: Any) -> Any:
    """YAML has no tuples: the pairs of `model.rules` and `optim.decay_rules` are lists there."""
    for section, key in (("model", "rules"), ("optim", "decay_rules")):
        part = values.get(section)
        if isinstance(part, dict) and isinstance(part.get(key), list):
            part[key] = [tuple(pair) if isinstance(pair, list) else pair for pair in part[key]]
    return values


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
    config = validate(_lists_to_tuples(values), source)
    if not config.run.name:
        name = Path(path).stem if path is not None else "run"
        config = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    return config


def dump(config: Config) -> str:
    """The config as YAML that `load` reads back to an equal object."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
