"""Small twins: what they keep of a layout, and that they are small."""

import math

import pytest

from meshtrain.config import Config, load
from meshtrain.errors import UserError
from meshtrain.layout import Layout
from meshtrain.lint import path_pattern
from meshtrain.shrink import _lay_out, shrink, shrink_mesh

TRILLION = (
    "model.preset=1t", "data.seq_len=2048", "data.vocab_size=50257", "zero.stage=3", "train.global_batch=256",
    "train.microbatches=2", "train.sequence_parallel=true", "precision.compute=bfloat16",
)  # fmt: skip


def layout(config: Config) -> Layout:
    return _lay_out(config, config.mesh.data, config.mesh.model)


@pytest.mark.parametrize(
    ("wanted", "small"),
    [
        ((1, 1), (1, 1)),
        ((4, 2), (4, 2)),
        ((1, 8), (1, 8)),
        ((128, 8), (4, 2)),
        ((2, 64), (2, 4)),
        ((64, 1), (8, 1)),
        ((3, 8), (3, 2)),  # each divides
        ((6, 6), (3, 2)),
        ((11, 1), (8, 1)),  # nothing below 11 divides it
    ],
)
def test_a_mesh_keeps_each_axis(wanted: tuple[int, int], small: tuple[int, int]) -> None:
    assert shrink_mesh(*wanted) == small


@pytest.mark.slow
def test_a_trillion_parameters_have_a_twin() -> None:
    config = load(None, TRILLION)
    twin = shrink(config, 128, 8)
    large, small = _lay_out(config, 128, 8), layout(twin.config)
    assert large.num_params > 1e12
    assert small.num_params < 2e5
    assert (twin.config.mesh.data, twin.config.mesh.model) == (4, 2)
    assert twin.moved == ()
    assert list(small.leaves) == list(large.leaves)
    for path, leaf in small.leaves.items():
        other = large.leaves[path]
        assert (leaf.rule, leaf.compute_spec, leaf.storage_spec) == (other.rule, other.compute_spec, other.storage_spec)
        assert (leaf.num_stacked, leaf.num_model_shards > 1) == (other.num_stacked, other.num_model_shards > 1), path
        stacked, dims = leaf.shape[: leaf.num_stacked], leaf.shape[leaf.num_stacked :]
        assert all(size >= 2 for size in stacked)
        assert all(size >= min(8, old) for size, old in zip(dims, other.shape[leaf.num_stacked :], strict=True)), path
    table, vocab = small.leaves["wte/embedding"].shape[0], twin.config.data.vocab_size
    assert vocab % 2 == 1
    assert table > vocab  # padded, as the large one is
    assert twin.config.train.sequence_parallel
    assert twin.config.data.seq_len % 2 == 0
    assert (twin.config.train.microbatches, twin.config.train.global_batch) == (2, 16)
    assert twin.config.precision.compute == "float32"
    assert "mesh: 128 x 8 -> 4 x 2" in twin.changes
    assert "num_layers: 128 -> 2" in twin.changes


def test_dropout_is_switched_off_and_named() -> None:
    overrides = "model.overrides={dropout: 0.1, dim: 16, num_layers: 2, num_heads: 2, vocab_multiple: 2, unroll: 1}"
    twin = shrink(load(None, [overrides, "data.seq_len=8", "data.vocab_size=9"]), 2, 1)
    assert twin.config.model.overrides["dropout"] == 0.0
    assert "dropout: 0.1 -> 0.0" in twin.changes


def test_a_user_s_own_model() -> None:
    target = "model={target: tests.proof_models:Right, preset: wide}"
    config = load(None, [target, "data.seq_len=32", "data.vocab_size=64", "zero.stage=1"])
    twin = shrink(config, 4, 2)
    small, large = layout(twin.config), _lay_out(config, 4, 2)
    assert {path: leaf.storage_spec for path, leaf in small.leaves.items()} == {
        path: leaf.storage_spec for path, leaf in large.leaves.items()
    }
    assert math.prod(small.leaves["up/kernel"].shape) <= 8 * 16
    assert twin.config.data.vocab_size == 8


def test_layers_in_a_list_become_two() -> None:
    target = "model={target: tests.proof_models:Stock, preset: deep}"
    twin = shrink(load(None, [target, "data.seq_len=8", "data.vocab_size=8", "zero.stage=1"]), 2, 4)
    small = layout(twin.config)
    assert {path.split("/")[1] for path in small.leaves if path.startswith("layers/")} == {"0", "1"}
    assert small.leaves["layers/1/key/kernel"].shape == (64, 8, 8)  # of (96, 12, 8): no dim below 8


def test_what_is_wrong_at_full_size_is_an_error() -> None:
    with pytest.raises(UserError, match="'blocks/attn/out/kernel' dim 1 has size 4, which axis 'model' of size 8"):
        shrink(load(None, []), 1, 8)


def test_numbers_in_a_path_are_one_pattern() -> None:
    assert path_pattern("blocks/3/up_2/kernel") == "blocks/*/up_2/kernel"
