"""Bytes as ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshtrain.data.tokenizer import VOCAB_SIZE, decode, encode
from meshtrain.errors import DataError


@given(st.text())
def test_round_trip(text: str) -> None:
    ids = encode(text)
    assert decode(ids) == text
    assert all(0 <= token < VOCAB_SIZE for token in ids)


def test_ids_are_utf8_bytes() -> None:
    assert encode("aé") == [97, 0xC3, 0xA9]


def test_sampled_nonsense_decodes() -> None:
    assert decode([97, 0xC3]) == "a\ufffd"


@pytest.mark.parametrize("token", [-1, 256])
def test_ids_outside_are_refused_not_clamped(token: int) -> None:
    with pytest.raises(DataError, match=f"id {token} at position 1"):
        decode([97, token])


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(DataError, match="character 1"):
        encode("a\ud800")
