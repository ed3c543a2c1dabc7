"""`meshtrain lint`: every finding at once, with its figures, on devices that are not here."""

import argparse
import json
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

from meshtrain.config import Config, load
from meshtrain.errors import ConfigError, RuleError
from meshtrain.layout import Layout, LeafLayout
from meshtrain.lint import Cluster, Report, add_arguments, lint, replicated_axes, replicated_bytes, run
from meshtrain.rules import inspect, place

TRILLION = "model.preset=1t", "data.seq_len=2048", "data.vocab_size=50257", "zero.stage=3", "train.global_batch=128"
RULES_OF_MANY_FAULTS = (
    'model.rules=[["(", []], ["ln_1/.*", [data]], [mlp/up/kernel, [null, model]], [mlp/.*, []], '
    "[wte/embedding, [model, null]], [nothing, []], [attn/bias, [model, null, null]]]"
)


def config(*overrides: str) -> Config:
    return load(None, overrides)


def leaf_of(report: Report, path: str) -> tuple[Layout, LeafLayout]:
    assert report.layout is not None
    return report.layout, report.layout.leaves[path]


def test_a_trillion_parameters_and_their_bytes() -> None:
    report = lint(config(*TRILLION, "mesh.data=128", "mesh.model=8"))
    assert (report.errors, report.warnings) == ((), ())
    layout, kernel = leaf_of(report, "blocks/mlp/up/kernel")
    assert layout.bytes_per_device(kernel) == 128 * 25600 * 102400 * 4 // 1024
    assert (replicated_axes(layout, kernel), replicated_bytes(layout, kernel)) == ((), 0)
    layout, positions = leaf_of(report, "wpe/embedding")  # by its rule whole over model, cut over data
    assert replicated_axes(layout, positions) == ("model",)
    assert replicated_bytes(layout, positions) == 2048 * 25600 * 4 // 128 * 7 // 8
    weights = sum(map(layout.bytes_per_device, layout.leaves.values()))
    assert report.state_bytes is not None
    assert report.state_bytes == pytest.approx(3 * weights, rel=1e-6)  # and two moments


def test_every_fault_is_found_in_one_pass() -> None:
    wrong = "mesh.model=3", "train.sequence_parallel=true", "train.global_batch=33", "devices=12", RULES_OF_MANY_FAULTS
    report = lint(config(*wrong))
    expected = (
        "a global batch of 33 records cannot be cut over data=4",
        "mesh.model=3 does not divide data.seq_len=256: use data.seq_len=255 or 258",
        "rule '(' is not a regular expression",
        "rule 'ln_1/.*': axis 'data' is not for rules",
        "no rule places blocks/attn/out/kernel, blocks/attn/qkv/bias, blocks/attn/qkv/kernel, blocks/ln_2/bias",
        "('model', None, None) has 3 dims, but 'blocks/attn/bias' has 2",
        "'blocks/mlp/up/kernel' dim 2 has size 512, which axis 'model' of size 3 does not divide",
        "'wte/embedding' dim 0 has size 256, which axis 'model' of size 3 does not divide",
    )
    assert len(report.errors) == len(expected)
    for text, found in zip(expected, report.errors, strict=True):
        assert text in found
    assert [text.split()[:4] for text in report.warnings] == [
        ["rule", "'nothing'", "matches", "no"],
        ["'blocks/mlp/up/kernel'", "is", "placed", "by"],
        ["'blocks/mlp/down/kernel'", "(4,", "512,", "128),"],
    ]
    assert "1.0 MB or 30.5% of the model" in report.warnings[2]  # of all of it, also where not all is placed
    assert report.layout is not None
    assert set(report.layout.leaves) == {"blocks/mlp/bias", "blocks/mlp/down/kernel", "blocks/mlp/up/bias"}
    assert report.state_bytes is None  # of a part of the model it would be wrong


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("model.target=models.gpt:GTP",), "did you mean 'GPT'?"),
        (("model.overrides={num_heads: 3}",), "num_heads=3 does not divide dim=128"),
        (("model.overrides={loss_chunks: 3}",), "loss_chunks=3 does not divide seq_len=256"),
        (("mesh.data=3", "devices=8"), "needs 3 devices, and there are 8"),
        (("mesh.model=3", "devices=8"), "mesh.model=3 does not divide the 8 devices"),
        (('optim.decay_rules=[["(", true]]',), "is not a regular expression"),
        (("optim.schedule=wsd", "train.steps=10", "optim.decay_steps=20"), "optim.decay_steps=20 does not fit"),
    ],
)
def test_one_fault(overrides: tuple[str, ...], text: str) -> None:
    (error,) = lint(config(*overrides)).errors
    assert text in error


def test_the_checks_that_need_no_model_run_without_one() -> None:
    errors = lint(config("model.target=nowhere:Model", "train.global_batch=6", "mesh.data=4")).errors
    assert len(errors) == 2
    assert "no module 'nowhere'" in errors[0]
    assert "a global batch of 6 records" in errors[1]


def test_a_weight_that_fell_to_the_default_is_large() -> None:
    rules = "model.rules=[[attn/qkv/.*, [model, null]], [mlp/up/.*, [model]], [.*, []]]"
    report = lint(config("model.preset=gpt2-small", "mesh.data=8", "mesh.model=2", rules))
    assert report.errors == ()
    out, down = report.warnings
    assert out == (
        "'blocks/attn/out/kernel' (12, 12, 64, 768), 28.3 MB or 8.3% of the model, is whole on each of the 2 "
        "devices of 'model' (rule '.*'): cut dim 1 or 2 or 3 over 'model'"
    )
    assert "'blocks/mlp/down/kernel' (12, 3072, 768), 113.2 MB or 33.1% of the model" in down


def test_a_weight_that_zero_cannot_cut_is_large() -> None:
    report = lint(config("model.preset=gpt2-small", "mesh.data=7", "train.global_batch=7"))
    assert len(report.warnings) == 4  # the four kernels; 7 divides no dim of any other either, and those are small
    assert "'blocks/mlp/up/kernel'" in "".join(report.warnings)
    assert all("rests whole on each of the 7 devices of 'data', no dim divides by data=7" in w for w in report.warnings)
    assert lint(config("model.preset=gpt2-small", "mesh.data=8")).warnings == ()


def test_stage_0_of_a_large_model_is_one_warning() -> None:
    (warning,) = lint(config("model.preset=gpt2-small", "mesh.data=8", "zero.stage=0")).warnings
    assert warning.startswith("zero.stage=0 keeps all of the state on each of the 8 devices of 'data', 341.8 MB")
    assert lint(config("mesh.data=8", "zero.stage=0")).warnings == ()  # 3 MB: not worth a word


def test_a_model_without_named_points() -> None:
    target = "model={target: tests.proof_models:Linen}", "data.vocab_size=8", "data.seq_len=8"
    (warning,) = lint(config(*target, "mesh.model=2", "devices=8", "train.sequence_parallel=true")).warnings
    assert warning.startswith(
        "train.sequence_parallel does nothing: tests.proof_models:Linen names no point 'residual'"
    )
    assert lint(config(*target, "mesh.model=2", "devices=8")).warnings == ()


def test_a_parameter_that_is_never_read() -> None:
    target = "model={target: tests.proof_models:Idle}", "data.vocab_size=8", "data.seq_len=8", "mesh.data=2"
    (warning,) = lint(config(*target)).warnings
    assert warning == "the loss never reads 'idle/kernel', so it is not trained: remove it, or use it"


@pytest.mark.parametrize(
    "rules",
    [
        [("up", P("data"))],
        [("up", P("model", None, None)), (".*", P())],
        [("up", P("model"))],
        [(".*", P("model"))],
        [("(", P())],
        [("up", None)],
    ],
)
def test_what_placing_refuses_first_is_among_the_findings(rules: list[Any]) -> None:
    params = {path: jax.ShapeDtypeStruct((4, 5), "float32") for path in ("a/up", "a/down")}
    sizes = {"data": 2, "model": 2}
    with pytest.raises(RuleError) as refused:
        place(rules, params, sizes)
    found = inspect(rules, params, sizes)
    assert str(refused.value) in found.errors
    for path in found.good_paths:  # and what it calls good can be placed
        assert path in place(found.good_rules, {path: params[path]}, sizes).by_path


def test_the_cluster_s_nodes() -> None:
    report = lint(config(*TRILLION, "mesh.model=8"), Cluster(nodes=16, gpus_per_node=8))
    assert report.layout is not None
    assert dict(report.layout.mesh.shape) == {"data": 16, "model": 8}
    assert report.warnings == ()
    crossing = lint(config(*TRILLION, "mesh.model=8"), Cluster(nodes=32, gpus_per_node=4))
    assert any("mesh.model=8 leaves the node of 4 devices" in text for text in crossing.warnings)


# ---------------------------------------------------------------- the command


def arguments(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(args)


def test_exit_codes_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    dead = "model.rules=[[nothing, []], [.*, []]]"
    assert run(config("mesh.data=4"), arguments("--strict")) == 0
    assert run(config("mesh.data=4", dead), arguments()) == 0
    assert run(config("mesh.data=4", dead), arguments("--strict")) == 1
    assert run(config("mesh.data=5"), arguments()) == 1
    capsys.readouterr()
    assert run(config("mesh.data=4", "mesh.model=2"), arguments("--json")) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (shown["mesh"], shown["stage"], shown["params"]) == ({"data": 4, "model": 2}, 1, 858_880)
    assert (shown["errors"], shown["warnings"]) == ([], [])
    (leaf,) = [leaf for leaf in shown["leaves"] if leaf["path"] == "blocks/mlp/up/bias"]
    assert leaf == {
        "path": "blocks/mlp/up/bias", "shape": [4, 512], "dtype": "float32", "rule": "mlp/up/bias",
        "compute": [[], ["model"]], "storage": [[], ["model", "data"]], "bytes_per_device": 1024,
        "replicated_bytes": 0, "replicated_over": [], "why_replicated": "",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="must be at least 1"):
        run(config(), arguments("--gpus-per-node", "0"))


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run(config("mesh.data=4", "mesh.model=2", "model.rules=[[nothing, []], [.*, []]]"), arguments())
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if "wpe/embedding" in line)
    cells = "wpe/embedding 256 x 128 .* - - data - 32.8 kB 16.4 kB over model"
    assert row.split() == cells.split()
    assert "warning  rule 'nothing' matches no parameter" in out
    assert "warning  'blocks/mlp/up/kernel' (4, 128, 512), 1.0 MB or 30.5% of the model, is whole on each" in out
    assert out.endswith("no errors, 3 warnings\n")
