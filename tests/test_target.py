"""From a config to a model: what a target must have, what the run fills in, what is refused."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshtrain.adapters import abstract_params
from meshtrain.config import Config, validate
from meshtrain.errors import ConfigError, ModelError, UserError
from meshtrain.target import Target, load_target
from models.gpt import GPT, PRESETS

BATCH = {
    "tokens": np.arange(12, dtype=np.int32).reshape(2, 6),
    "targets": np.arange(1, 13, dtype=np.int32).reshape(2, 6),
    "weights": np.asarray([[1, 1, 1, 0, 0, 0], [1] * 6], np.float32),
}

HEADER = """
import dataclasses
import flax.linen as nn
import jax, jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

@dataclasses.dataclass(frozen=True)
class Sizes:
    dim: int = 8
    vocab_size: int = 16
    scale: float = 1.0
    bias: bool = False
    kind: str = "plain"
    num_kv_heads: int | None = None

PRESETS = {"small": Sizes(), "wide": Sizes(dim=32)}
"""

NNX = """
class Mine(nnx.Module):
    presets = PRESETS
    rules = (("embed/embedding", P("model", None)), (".*", P()))

    def __init__(self, sizes, *, rngs):
        self.embed = nnx.Embed(sizes.vocab_size, sizes.dim, rngs=rngs)
        self.out = nnx.Linear(sizes.dim, sizes.vocab_size, rngs=rngs)

    def __call__(self, tokens):
        return self.out(self.embed(tokens))
"""

LINEN = """
class Mine(nn.Module):
    sizes: Sizes
    presets = PRESETS
    rules = [("embedding", P("model", None)), (".*", P())]

    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(self.sizes.vocab_size)(nn.Embed(self.sizes.vocab_size, self.sizes.dim)(tokens))
"""

LOSS = """
    def loss(self, batch):
        logits = self(batch["tokens"])
        return jnp.sum(logits) * 0 + 7.0, jnp.sum(batch["weights"])
"""

names = (f"users_own_{i}" for i in itertools.count())


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a user's module beside the config and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def module(source: str) -> str:
        name = next(names)
        (tmp_path / f"{name}.py").write_text(HEADER + source)
        return name

    return module


def config_for(target: str, preset: str = "small", **sections: Any) -> Config:
    sections["data"] = {"vocab_size": 16, "seq_len": 6} | sections.get("data", {})
    sections["model"] = {"target": target, "preset": preset} | sections.get("model", {})
    return validate(sections)


def refusal(config: Config, kind: type[UserError] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        load_target(config)
    assert type(caught.value) is kind and "\n" not in str(caught.value)
    return str(caught.value)


def evaluate(target: Target) -> tuple[dict[str, Any], float, float]:
    """`(parameters, loss sum, weight sum)` of a freshly initialized target."""
    params = target.model.init(jax.random.key(0), BATCH)
    loss, weight = target.model.loss(params, jax.tree.map(jnp.asarray, BATCH), None)
    return params, float(loss), float(weight)


# ---------------------------------------------------------------- what works


@pytest.mark.parametrize(("source", "table"), [(NNX, "embed/embedding"), (LINEN, "Embed_0/embedding")])
def test_a_users_own_class_works(module: Any, source: str, table: str) -> None:
    target = load_target(config_for(f"{module(source)}:Mine"))
    assert target.rules[0][1] == P("model", None) and target.rules[-1] == (".*", P())
    params, loss, weight = evaluate(target)
    assert params[table].shape == (16, 8)
    assert weight == 9.0
    kernel, bias = (next(x for path, x in params.items() if path.endswith(name)) for name in ("kernel", "bias"))
    logits = params[table][BATCH["tokens"]] @ kernel + bias
    log_probs = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), BATCH["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(loss, -(log_probs * BATCH["weights"]).sum(), rtol=1e-5)


@pytest.mark.parametrize("source", [NNX, LINEN])
def test_a_class_may_have_its_own_loss(module: Any, source: str) -> None:
    _, loss, weight = evaluate(load_target(config_for(f"{module(source + LOSS)}:Mine")))
    assert (loss, weight) == (7.0, 9.0)


def test_a_preset_and_overrides_size_the_model(module: Any) -> None:
    name = f"{module(NNX)}:Mine"
    overrides = {"dim": 4, "scale": 2, "bias": True, "kind": "other", "num_kv_heads": 2, "vocab_size": 32}
    sizes = load_target(config_for(name, "wide", model={"overrides": overrides})).sizes
    assert {key: getattr(sizes, key) for key in overrides} == overrides
    assert load_target(config_for(name, "wide")).sizes.dim == 32
    assert load_target(config_for(name, "small")).sizes.dim == 8


def test_the_run_fills_in_what_it_decides() -> None:
    sections = {
        "train": {"remat": "full"},
        "precision": {"compute": "bfloat16"},
        "data": {"vocab_size": 99, "seq_len": 7},
    }
    sizes = load_target(config_for("models.gpt:GPT", "tiny", **sections)).sizes
    assert (sizes.vocab_size, sizes.seq_len, sizes.dtype, sizes.remat) == (99, 7, "bfloat16", "full")
    assert sizes.dim == PRESETS["tiny"].dim
    overrides = {"seq_len": 9, "vocab_size": 99, "dtype": "float32", "remat": "dots"}
    sizes = load_target(config_for("models.gpt:GPT", "tiny", model={"overrides": overrides}, **sections)).sizes
    assert (sizes.vocab_size, sizes.seq_len, sizes.dtype, sizes.remat) == (99, 9, "float32", "dots")
    assert PRESETS["tiny"].dtype == "float32"  # a preset is never changed


def test_a_model_without_a_size_that_the_run_decides_is_left_alone(module: Any) -> None:
    sizes = load_target(config_for(f"{module(NNX)}:Mine", precision={"compute": "bfloat16"})).sizes
    assert not hasattr(sizes, "dtype") and not hasattr(sizes, "seq_len")


def test_rules_of_the_config_replace_the_classs(module: Any) -> None:
    name = f"{module(NNX)}:Mine"
    target = load_target(config_for(name, model={"rules": [("kernel", [None, "model"]), (".*", [])]}))
    assert target.rules == (("kernel", P(None, "model")), (".*", P()))
    assert load_target(config_for(name, model={"rules": []})).rules == ()


def test_the_default_config_names_a_model_that_is_there() -> None:
    target = load_target(Config())
    assert target.rules == GPT.rules
    assert "wte/embedding" in abstract_params(target.model, BATCH)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "target", ["models.gpt", "models.gpt.GPT", "models.gpt:", ":GPT", "", "..gpt:GPT", "my model:X"]
)
def test_a_target_must_name_a_module_and_a_class(target: str) -> None:
    assert refusal(config_for(target)) == f"model.target='{target}' must be of the form 'package.module:Class'"


@pytest.mark.parametrize(
    ("target", "missing"),
    [("nowhere:GPT", "nowhere"), ("models.nowhere:GPT", "models.nowhere"), ("nowhere.gpt:GPT", "nowhere")],
)
def test_a_missing_module_is_named(target: str, missing: str) -> None:
    message = refusal(config_for(target))
    assert message.startswith(f"model.target='{target}': there is no module '{missing}' here")
    assert "run from the folder" in message


@pytest.mark.parametrize(("source", "error"), [("import no_such_package", ImportError), ("1 / 0", ZeroDivisionError)])
def test_a_fault_inside_the_users_module_is_shown_as_it_is(module: Any, source: str, error: type[Exception]) -> None:
    """It is a bug to be traced, and not a wrong name in the config."""
    with pytest.raises(error) as caught:
        load_target(config_for(f"{module(source)}:Mine"))
    assert not isinstance(caught.value, UserError)


def test_a_missing_class_names_the_nearest_one(module: Any) -> None:
    assert (
        refusal(config_for("models.gpt:GTP"))
        == "model.target='models.gpt:GTP': no class 'GTP' there; did you mean 'GPT'?"
    )
    assert "no class 'PRESETS' there" in refusal(config_for("models.gpt:PRESETS"))  # there, and no class
    assert "no class 'Xyz' there; there are none" in refusal(config_for(f"{module('')}:Xyz"))
    assert "no class 'Xyz' there; there are Mine" in refusal(config_for(f"{module(NNX)}:Xyz"))


@pytest.mark.parametrize("target", ["pathlib:Path", "models.gpt:GPTConfig"])
def test_a_class_that_is_no_module_is_refused(target: str) -> None:
    assert refusal(config_for(target), ModelError) == f"model.target={target} is not a Flax module class (nnx or linen)"


@pytest.mark.parametrize("presets", ["", "    presets = {}\n", "    presets = 3\n"])
def test_a_class_without_presets_is_refused(module: Any, presets: str) -> None:
    name = f"{module(NNX.replace('    presets = PRESETS' + chr(10), presets))}:Mine"
    assert refusal(config_for(name), ModelError) == f"{name} has no `presets`, a dict from name to a dataclass of sizes"


@pytest.mark.parametrize("preset", ["{}", "Sizes"])
def test_a_preset_that_is_no_dataclass_is_refused(module: Any, preset: str) -> None:
    name = f"{module(NNX.replace('presets = PRESETS', f'presets = dict(small={preset})'))}:Mine"
    assert refusal(config_for(name), ModelError) == f"{name}: the preset 'small' is not an instance of a dataclass"


def test_a_missing_preset_names_the_nearest_or_all(module: Any) -> None:
    name = f"{module(NNX)}:Mine"
    assert refusal(config_for(name, "smal")) == "model.preset='smal': no such preset; did you mean 'small'?"
    assert refusal(config_for(name, "zzz")) == "model.preset='zzz': no such preset; there are small, wide"


def test_a_class_without_rules_needs_some_in_the_config(module: Any) -> None:
    source = "\n".join(line for line in NNX.splitlines() if not line.startswith("    rules"))
    name = f"{module(source)}:Mine"
    assert refusal(config_for(name)) == f"{name} has no `rules`: give model.rules in the config"
    assert load_target(config_for(name, model={"rules": [(".*", [])]})).rules == ((".*", P()),)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"dimm": 4}, "model.overrides.dimm: {name} has no such field; did you mean 'dim'?"),
        ({"zzz": 4}, "there are dim, vocab_size, scale, bias, kind, num_kv_heads"),
        ({"dim": "4"}, "model.overrides.dim='4' must be of type int"),
        ({"dim": 4.0}, "model.overrides.dim=4.0 must be of type int"),
        ({"dim": True}, "model.overrides.dim=True must be of type int"),
        ({"bias": 1}, "model.overrides.bias=1 must be of type bool"),
        ({"scale": True}, "model.overrides.scale=True must be of type float"),
        ({"kind": 3}, "model.overrides.kind=3 must be of type str"),
        ({"vocab_size": 15}, "model.overrides.vocab_size=15 is less than data.vocab_size=16"),
    ],
)
def test_a_wrong_override_is_named(module: Any, overrides: dict[str, Any], expected: str) -> None:
    name = f"{module(NNX)}:Mine"
    assert expected.format(name=name) in refusal(config_for(name, model={"overrides": overrides}))


def test_a_model_shorter_than_the_data_is_refused() -> None:
    message = refusal(config_for("models.gpt:GPT", "tiny", model={"overrides": {"seq_len": 5}}))
    assert message == "model.overrides.seq_len=5 is less than data.seq_len=6"


def test_remat_that_the_model_cannot_carry_out_is_refused(module: Any) -> None:
    name = f"{module(NNX)}:Mine"
    message = refusal(config_for(name, train={"remat": "full"}))
    assert message == f"train.remat=full: {name} has no field 'remat' to carry it out"


def test_what_the_models_sizes_refuse_is_passed_on() -> None:
    message = refusal(config_for("models.gpt:GPT", "tiny", model={"overrides": {"num_heads": 3}}), ModelError)
    assert message == "GPT: num_heads=3 does not divide dim=128"
