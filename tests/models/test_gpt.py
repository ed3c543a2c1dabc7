"""GPT: sizes of the presets, causality, the padded vocabulary, and the switches that must not change a number."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshtrain import from_nnx, make_layout, make_mesh
from meshtrain.adapters import abstract_params
from meshtrain.errors import ModelError
from models.gpt import GPT, PRESETS, RULES, GPTConfig
from tests.tiny_gpt import SIZES, make_batch


@functools.cache
def model(**changes) -> GPT:
    return GPT(dataclasses.replace(SIZES, **changes), rngs=nnx.Rngs(params=0, default=1))


def shapes(sizes: GPTConfig) -> dict[str, jax.ShapeDtypeStruct]:
    batch = {name: jax.ShapeDtypeStruct((1, sizes.seq_len), jnp.int32) for name in ("tokens", "targets", "weights")}
    return abstract_params(from_nnx(lambda rngs: GPT(sizes, rngs=rngs), GPT.loss), batch)


@pytest.mark.parametrize(
    ("preset", "millions"),
    [
        ("gpt2-small", 124.4),  # as published, Radford et al. 2019 (their table 2 leaves out the embeddings' share)
        ("gpt2-medium", 354.8),
        ("gpt2-large", 774.0),
        ("gpt2-xl", 1557.6),
        ("zero-8b", 8.32e3),
        ("zero-13b", 12.7e3),
        ("zero-100b", 101.1e3),
        ("zero-170b", 171.1e3),
        ("gpt3-175b", 174.6e3),
        ("1t", 1008e3),
    ],
)
def test_presets_have_the_published_sizes(preset: str, millions: float) -> None:
    sizes = PRESETS[preset]
    padding = (sizes.padded_vocab_size - sizes.vocab_size) * sizes.dim
    count = sum(math.prod(leaf.shape) for leaf in shapes(sizes).values()) - padding
    assert count / 1e6 == pytest.approx(millions, rel=2e-3)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_rules_place_every_preset_and_no_rule_is_idle(preset: str) -> None:
    heads = PRESETS[preset].num_heads
    model_size = next(size for size in (8, 4, 2, 1) if heads % size == 0)
    mesh = make_mesh(1, model_size, jax.devices()[:model_size])
    assert make_layout(shapes(PRESETS[preset]), RULES, mesh, stage=1).warnings == ()


def test_a_position_sees_only_those_before_it() -> None:
    tokens = jnp.asarray(make_batch()["tokens"][:1])
    changed = tokens.at[0, 9].set((tokens[0, 9] + 1) % SIZES.vocab_size)
    before, after = model()(tokens), model()(changed)
    np.testing.assert_array_equal(before[0, :9], after[0, :9])
    assert (before[0, 9:] != after[0, 9:]).any(axis=-1).all()


def test_logits_of_padding_ids_are_the_least() -> None:
    logits = model()(jnp.asarray(make_batch()["tokens"]))
    assert logits.shape[-1] == 64
    assert (logits[..., 61:] == jnp.finfo(jnp.float32).min).all()
    assert (jnp.argmax(logits, -1) < 61).all()


def test_the_loss_is_that_of_the_logits() -> None:
    batch = {name: jnp.asarray(value) for name, value in make_batch().items()}
    log_p = jax.nn.log_softmax(model()(batch["tokens"])[..., : SIZES.vocab_size])
    expected = -(jnp.take_along_axis(log_p, batch["targets"][..., None], -1)[..., 0] * batch["weights"]).sum()
    loss_sum, num_tokens = model().loss(batch)
    assert float(loss_sum) == pytest.approx(float(expected), rel=1e-6)
    assert float(num_tokens) == batch["weights"].sum()


@pytest.mark.parametrize(
    "changes", [{"remat": "dots"}, {"remat": "full"}, {"loss_chunks": 4}, {"unroll": 2}], ids=lambda c: next(iter(c))
)
def test_switches_that_change_no_number(changes: dict) -> None:
    def gradients(gpt: GPT):
        graph, state = nnx.split(gpt)
        loss, grads = jax.value_and_grad(lambda s: nnx.merge(graph, s).loss(make_batch())[0])(state)
        return float(loss), {path: np.asarray(var.get_value()) for path, var in nnx.to_flat_state(grads)}

    loss, grads = gradients(model())
    other_loss, other = gradients(model(**changes))
    assert other_loss == pytest.approx(loss, rel=1e-6)
    largest = max(np.abs(value).max() for value in grads.values())
    for path, value in grads.items():
        np.testing.assert_allclose(other[path], value, rtol=1e-5, atol=1e-6 * largest, err_msg=str(path))


def test_residual_layers_start_smaller() -> None:
    params = model().blocks
    scale = 0.02 / (2 * SIZES.num_layers) ** 0.5
    assert np.std(params.attn.out.kernel[...]) == pytest.approx(scale, rel=0.1)
    assert np.std(params.mlp.down.kernel[...]) == pytest.approx(scale, rel=0.1)
    assert np.std(params.mlp.up.kernel[...]) == pytest.approx(0.02, rel=0.1)
    assert not np.array_equal(params.mlp.up.kernel[...][0], params.mlp.up.kernel[...][1])  # layers differ


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "num_heads=5 does not divide dim=32"),
        ({"loss_chunks": 3}, "loss_chunks=3 does not divide seq_len=16"),
        ({"dropout": 1.0}, r"dropout=1.0 must lie in \[0, 1\)"),
        ({"dropout": -1}, r"dropout=-1 must lie in \[0, 1\)"),
        ({"num_layers": 0}, "num_layers=0 must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit(changes: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        dataclasses.replace(SIZES, **changes)
