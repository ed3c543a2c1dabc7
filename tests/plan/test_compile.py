"""Steps compiled in a process of their own: the figures on virtual CPU devices, and every way in which it may end."""

import importlib.util
import sys
from pathlib import Path

import pytest

from meshtrain.config import Config, load
from meshtrain.errors import ConfigError, MeshError, ModelError, PlanError, RuleError
from meshtrain.mesh import make_mesh
from meshtrain.plan import compile as compiling
from meshtrain.plan.compile import check_mesh, compile_step, platform
from meshtrain.plan.facts import Cluster, Facts
from meshtrain.state import state_bytes_per_device
from meshtrain.target import load_target
from meshtrain.trainer import make_engine

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "gpt_tiny.yaml"
NODE = Cluster("h100", 1, 8)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the plugin or without."""
    monkeypatch.setattr(compiling, "platform", lambda: "cpu")
    monkeypatch.syspath_prepend(str(ROOT))


def tiny(*overrides: str) -> Config:
    return load(TINY, ["data.source=random", *overrides])


def user_model(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Config:
    """A config whose model's module is of that text, found as a user's own is: on the path of this process."""
    (folder / "their_model.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    return tiny("model.target=their_model:Model", "model.preset=tiny")


@pytest.mark.slow
def test_a_step_on_virtual_devices_has_exact_state_and_data_collectives() -> None:
    """The facts are those of the engine that training makes; ZeRO-2 with two microbatches sends 1 + 2 psi."""
    config = tiny("mesh.model=2", "zero.stage=2", "train.microbatches=2")
    facts = compile_step(config, NODE)
    engine = make_engine(config, load_target(config), make_mesh(4, 2))
    assert facts.mesh == {"data": 4, "model": 2}
    assert facts.params == engine.layout.num_params
    assert facts.state_bytes == state_bytes_per_device(engine.abstract_state())
    assert facts.peak_bytes == sum(part.bytes for part in facts.memory) > facts.state_bytes
    assert (facts.platform, facts.fits, facts.card_bytes) == ("cpu", None, 0)
    assert (facts.stage, facts.microbatches, facts.tokens) == (2, 2, 8 * 256)
    sums = dict.fromkeys(("all-gather", "reduce-scatter"), 0)
    for each in facts.collectives:
        if each.axis == "data" and each.op in sums:
            sums[each.op] += each.volume_elements
    held = sum(4 * shape_size(leaf) for leaf in engine.abstract_state().params.values())
    psi = 4 * held // 4  # elements of a model shard: what rests on one device, in float32, times the data shards
    assert sums == {"all-gather": psi, "reduce-scatter": 2 * psi}
    # Nothing is recomputed; the formula counts biases and scales too, which no product reads.
    assert facts.model_flops == pytest.approx(facts.flops, rel=0.01)
    assert Facts.from_json(facts.to_json()) == facts


def shape_size(leaf: object) -> int:
    size = 1
    for dim in leaf.sharding.shard_shape(leaf.shape):  # type: ignore[attr-defined]
        size *= dim
    return size


@pytest.mark.slow
def test_a_cluster_larger_than_any_machine() -> None:
    """512 virtual devices: as many as the GPUs, on a machine of any size."""
    facts = compile_step(tiny("mesh.model=4", "train.global_batch=128"), Cluster("h100", 64, 8))
    assert facts.mesh == {"data": 128, "model": 4}


@pytest.mark.parametrize(
    ("overrides", "kind", "told"),
    [
        (["mesh.model=8"], RuleError, "4 heads|does not divide|divide"),
        (["train.global_batch=9"], ConfigError, "9 records"),
        (["model.target=models.gpt:None"], ConfigError, "no class 'None' there"),
    ],
)
def test_the_users_mistakes_come_back_as_their_own_errors(overrides: list[str], kind: type, told: str) -> None:
    with pytest.raises(kind, match=told):
        compile_step(tiny(*overrides), NODE)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import os\nos.abort()", "the compiler ended by SIGABRT"),
        ("import os\nos.kill(os.getpid(), 9)", "too little memory"),
        ("import os\nos._exit(3)", "exit code 3: it said nothing"),
        ("import sys\nsys.exit('ptxas was not found')", r"ptxas, is missing .* pip install 'meshtrain\[plan\]'"),
        ("raise RuntimeError('broken')", "broken"),
        ("import time\ntime.sleep(60)", "longer than 6 s"),
    ],
)
def test_a_compiler_that_ends_early_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str
) -> None:
    config = user_model(tmp_path, monkeypatch, text)
    with pytest.raises((PlanError, ModelError), match=told) as raised:
        compile_step(config, NODE, timeout_s=6 if "sleep" in text else 120)
    assert "\n" not in str(raised.value)
    assert "Traceback" not in str(raised.value)


def test_an_unknown_flag_of_the_user_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    with pytest.raises(PlanError, match="XLA_FLAGS holds a flag .*xla_no_such_flag"):
        compile_step(tiny(), NODE)


@pytest.mark.parametrize(
    ("overrides", "nodes", "told"),
    [
        (["mesh.model=3"], 1, "1 x 8 = 8 GPUs were given, and mesh.model=3 does not divide them"),
        (["mesh.data=4"], 1, "mesh.model=1 with mesh.data=4 needs 4"),
        ([], 0, "has none"),
    ],
)
def test_a_mesh_of_another_size_is_refused_before_compiling(overrides: list[str], nodes: int, told: str) -> None:
    with pytest.raises(MeshError, match=told):
        check_mesh(tiny(*overrides), Cluster("h100", nodes, 8))


def test_a_mesh_that_fits_is_let_pass() -> None:
    check_mesh(tiny("mesh.model=2"), NODE)
    check_mesh(tiny("mesh.model=2", "mesh.data=4"), NODE)


def test_the_platform_follows_from_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: sys if name == "jax_cuda13_plugin" else None)
    assert platform() == "cuda"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert platform() == "cpu"
