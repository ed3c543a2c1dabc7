"""`meshtrain prove`: what is right passes, and each planted fault is caught, in the place where it shows."""

import argparse
import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain import prove as prove_module
from meshtrain import step as step_module
from meshtrain import zero as zero_module
from meshtrain.config import Config, load
from meshtrain.errors import ConfigError
from meshtrain.mesh import DATA
from meshtrain.prove import TOLERANCES, Proof, _batch, _check, add_arguments, prove, run, show
from meshtrain.shrink import Twin, _run_sizes
from meshtrain.terminal import Terminal

pytestmark = pytest.mark.xdist_group("prove")


def config(model: str = "Right", *overrides: str, preset: str = "tiny") -> Config:
    """A run of one of `proof_models` on 4 x 2 devices, two microbatches."""
    target = f"{{target: tests.proof_models:{model}, preset: {preset}}}"
    small = "data.seq_len=8", "data.vocab_size=8", "train.microbatches=2", "train.global_batch=16"
    return load(None, [f"model={target}", *small, "mesh.data=4", "mesh.model=2", "zero.stage=2", *overrides])


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the search for smaller sizes: the models here are small already."""

    def shrunk(config: Config, data: int, model: int) -> Twin:
        return Twin(_run_sizes(config, data, model), (), ())

    monkeypatch.setattr(prove_module, "shrink", shrunk)


def failed(proof: Proof) -> set[str]:
    """Kinds of the comparisons that fail."""
    return {check.kind for check in proof.checks if not check.ok}


# ---------------------------------------------------------------- what is right


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("Right", ("zero.stage=2",)),
        pytest.param(
            "Right", ("zero.stage=3", "train.sequence_parallel=true", "optim.clip_norm=null"), marks=pytest.mark.slow
        ),
        pytest.param(
            "Linen", ("zero.stage=1", "mesh.data=2", "mesh.model=4", "optim.name=lion"), marks=pytest.mark.slow
        ),
    ],
)
def test_what_is_right_passes_by_far(model: str, overrides: tuple[str, ...]) -> None:
    proof = prove(config(model, *overrides), steps=2)
    assert proof.ok
    for kind, limit in TOLERANCES.items():
        assert proof.worst(kind).error < limit / 5, kind  # the limits have room
    names = {kind: {check.name for check in proof.checks if check.kind == kind} for kind in TOLERANCES}
    leaves = {"embed/embedding", "up/kernel", "up/bias", "down/kernel", "down/bias", "norm/scale", "norm/bias"}
    assert names["gradient"] == names["parameter"] == leaves
    assert names["loss"] == names["norm"] == {"start", "step 0", "step 1"}
    assert proof.idle == ()
    assert all(check.expected > 0 for check in proof.checks)
    assert any(check.got != check.expected for check in proof.checks)  # two programs, not one run twice


@pytest.mark.usefixtures("fast")
def test_dropout_without_a_field_is_switched_off_and_said() -> None:
    proof = prove(config("Random", "zero.stage=1"), steps=0)
    assert proof.ok
    assert proof.notes == ("the model draws random numbers while it trains: it is proven as it evaluates",)


@pytest.mark.slow
@pytest.mark.usefixtures("fast")
def test_a_gradient_that_is_nothing_but_rounding_passes() -> None:
    proof = prove(config("Stock", "zero.stage=3"), steps=3)
    assert proof.ok
    norms = {check.name: check.expected for check in proof.checks if check.kind == "gradient"}
    assert norms["layers/0/key/bias"] < 1e-5 * norms["layers/0/value/bias"]


@pytest.mark.usefixtures("fast")
def test_what_nothing_is_proven_of_is_named() -> None:
    proof = prove(config("Idle", "zero.stage=1"), steps=0)
    assert proof.ok
    assert proof.idle == ("idle/kernel",)


# ---------------------------------------------------------------- planted faults: the user's model


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("model", ["NoSumOverModel", "LocalWidth", "MeanOfMeans", "PenaltyPerPart", "OverTheBatch"])
def test_a_wrong_model_is_caught(model: str) -> None:
    proof = prove(config(model), steps=0)
    assert not proof.ok
    assert {"loss", "gradient", "norm"} <= failed(proof)
    assert max(check.error / TOLERANCES[check.kind] for check in proof.checks) > 100  # and not by a hair


# ---------------------------------------------------------------- planted faults: our own code


def wrap(monkeypatch: pytest.MonkeyPatch, name: str, fault: Any, *modules: Any) -> None:
    """Replaces a function by `fault(original)` wherever it is used."""
    original = getattr(modules[0], name)
    for module in modules:
        monkeypatch.setattr(module, name, fault(original))


def no_sum_of_gradients(original: Any) -> Any:
    def reduce_scatter(whole: jax.Array, leaf: Any) -> jax.Array:
        return original(jnp.where(jax.lax.axis_index(DATA) == 0, whole, 0), leaf)  # the first device's alone

    return reduce_scatter


def shifted(original: Any) -> Any:
    def all_gather(shard: jax.Array, leaf: Any) -> jax.Array:
        size = jax.lax.axis_size(DATA)
        return original(jax.lax.ppermute(shard, DATA, [(i, (i + 1) % size) for i in range(size)]), leaf)

    return all_gather


def wrong_shard(original: Any) -> Any:
    def reduce_scatter(whole: jax.Array, leaf: Any) -> jax.Array:
        shard, size = original(whole, leaf), jax.lax.axis_size(DATA)
        return jax.lax.ppermute(shard, DATA, [(i, size - 1 - i) for i in range(size)])

    return reduce_scatter


def twice(original: Any) -> Any:
    def make_gradients(model: Any, zero: Any, step: Any) -> Any:
        inner = original(model, zero, step)

        def gradients(*args: Any) -> Any:
            loss_sum, tokens, grads = inner(*args)
            return loss_sum, tokens, {path: grad * step.num_microbatches for path, grad in grads.items()}

        return gradients

    return make_gradients


def only_local(original: Any) -> Any:
    return lambda values, axes: values


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    ("name", "fault", "modules", "stage", "kinds", "hint"),
    [
        ("reduce_scatter", no_sum_of_gradients, (zero_module,), 2, {"gradient"}, ""),
        ("batch_sum", only_local, (step_module,), 1, {"gradient"}, ""),
        ("make_gradients", twice, (prove_module, step_module), 2, {"gradient"}, "2 times too large"),
        ("reduce_scatter", wrong_shard, (zero_module,), 1, {"gradient"}, ""),
        ("all_gather", shifted, (zero_module,), 3, {"loss", "gradient"}, ""),
        ("all_gather", shifted, (zero_module,), 1, {"loss", "gradient"}, ""),
    ],
)
def test_a_fault_in_the_step_is_caught(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: Any, modules: Any, stage: int, kinds: set[str], hint: str
) -> None:
    wrap(monkeypatch, name, fault, *modules)
    proof = prove(config("Right", f"zero.stage={stage}"), steps=0)
    assert not proof.ok
    assert kinds <= failed(proof)
    assert hint in proof.worst("gradient").hint


@pytest.mark.usefixtures("fast")
def test_one_leaf_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest leaf's gradient is not summed: the global norm hardly shows it, the leaf does."""

    def fault(original: Any) -> Any:
        return lambda self, grad, leaf: grad if leaf.path == "norm/bias" else original(self, grad, leaf)

    monkeypatch.setattr(zero_module.Zero, "_reduce_late", fault(zero_module.Zero._reduce_late))
    proof = prove(config("Right", "zero.stage=0"), steps=0)
    assert [check.name for check in proof.checks if check.kind == "gradient" and not check.ok] == ["norm/bias"]
    assert proof.worst("gradient").name == "norm/bias"


@pytest.mark.usefixtures("fast")
def test_a_fault_in_the_update_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight decay twice in the wanted layout: only the parameters show it."""

    def fault(original: Any) -> Any:
        def make_engine(config: Config, target: Any, mesh: Any) -> Any:
            optim = config.optim.model_copy(update={"weight_decay": 0.2 if mesh.size > 1 else 0.1})
            return original(config.model_copy(update={"optim": optim}), target, mesh)

        return make_engine

    wrap(monkeypatch, "make_engine", fault, prove_module)
    proof = prove(config("Right"), steps=1)
    assert failed(proof) == {"parameter"}
    decayed = {check.name for check in proof.checks if check.kind == "parameter" and not check.ok}
    assert decayed == {"embed/embedding", "up/kernel", "down/kernel"}


# ---------------------------------------------------------------- the parts


def test_shards_of_the_batch_count_unequal_numbers_of_tokens() -> None:
    batch = _batch(config(), 4, 0)
    counts = batch["weights"].reshape(4, -1).sum(axis=1)
    assert len(set(counts)) == 4
    assert batch["weights"].sum(axis=1).min() >= 1  # a row without tokens would be 0 / 0 in a mean
    assert not np.array_equal(batch["tokens"], _batch(config(), 4, 1)["tokens"])


@pytest.mark.parametrize(
    ("got", "hint"),
    [([4.0, 8.0], "4 times too large: mesh.data"), ([0.25, 0.5], "4 times too small: mesh.data"), ([4.0, 9.0], "")],
)
def test_a_difference_that_is_a_factor_names_it(got: list[float], hint: str) -> None:
    causes = {"4 times too large: mesh.data": 4.0, "4 times too small: mesh.data": 0.25}
    assert _check("gradient", "w", np.array(got), np.array([1.0, 2.0]), causes).hint == hint


def test_what_is_not_finite_fails() -> None:
    check = _check("loss", "step 0", float("nan"), 1.0, {})
    assert not check.ok
    assert check.error == np.inf


def test_a_zero_gradient_is_judged_by_its_neighbours() -> None:
    zero = np.zeros(4)
    assert _check("gradient", "key/bias", zero + 1e-9, zero, {}, floor=1e-2).ok
    assert not _check("gradient", "key/bias", zero + 1e-6, zero, {}, floor=1e-2).ok


# ---------------------------------------------------------------- the command


def arguments(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(args)


@pytest.mark.usefixtures("fast")
def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("XLA_FLAGS", "")
    right = prove(config("Right"), steps=0)
    monkeypatch.setattr(prove_module, "prove", lambda config, steps: right)
    assert run(config(), arguments()) == 0
    out = capsys.readouterr().out
    assert "data=4 x model=2, ZeRO stage 2, beside one device" in out
    assert "proven: 9 comparisons; the worst gradient is that of" in out
    assert run(config(), arguments("--json")) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["ok"], len(shown["checks"]), shown["mesh"]) == (True, 9, {"data": 4, "model": 2})

    first = dataclasses.replace(right.checks[0], error=np.inf, got=np.nan)
    wrong = dataclasses.replace(right, checks=(first, *right.checks[1:]), idle=("a/b",))
    monkeypatch.setattr(prove_module, "prove", lambda config, steps: wrong)
    assert run(config(), arguments("--all")) == 1
    out = capsys.readouterr().out
    assert "this layout computes something else: 1 of 9 comparisons fail; the worst is the loss of start" in out
    assert "no gradient, so nothing is proven of a/b" in out
    assert run(config(), arguments("--json")) == 1
    assert json.loads(capsys.readouterr().out)["checks"][0]["error"] is None
    with pytest.raises(ConfigError, match="--steps 0 must be at least 1"):
        run(config(), arguments("--steps", "0"))


@pytest.mark.usefixtures("fast")
def test_one_device_proves_nothing_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    proof = prove(config("Right", "mesh.data=1", "mesh.model=1", "train.microbatches=1"), steps=0)
    show(proof, Terminal(width=200))
    assert proof.ok
    assert "the config asks for one device" in capsys.readouterr().out
