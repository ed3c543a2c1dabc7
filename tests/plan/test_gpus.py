"""The figures of cards: those that are known, and those that a user's file describes."""

from pathlib import Path

import pytest

from meshtrain.errors import ConfigError
from meshtrain.mesh import MEMORY_FRACTION
from meshtrain.plan.gpus import CARDS, card, read_card, target_config


def write(path: Path, text: str) -> Path:
    file = path / "card.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("name", sorted(CARDS))
def test_target_config_names_the_card(name: str) -> None:
    text = target_config(CARDS[name])
    assert f'name: "{CARDS[name].name}"' in text
    assert f"device_memory_size: {CARDS[name].memory_bytes} " in text
    assert text.count("{") == text.count("}")


def test_an_unknown_card_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        card("h1000")


def test_usable_memory_is_what_jax_is_let_take() -> None:
    assert CARDS["h100"].usable_bytes == int(MEMORY_FRACTION * 84942979072)


def test_a_file_changes_a_known_card(tmp_path: Path) -> None:
    made = read_card(write(tmp_path, "like: h100\nmemory_bytes: 101000000000\nname: NVIDIA H100 96GB\n"))
    assert (made.memory_bytes, made.name, made.capability) == (101_000_000_000, "NVIDIA H100 96GB", (9, 0))
    assert made.cores == CARDS["h100"].cores


def test_a_file_describes_a_whole_card(tmp_path: Path) -> None:
    text = """
        {capability: [8, 9], cores: 142, fpus_per_core: 128, shared_memory_per_block: 101376, name: NVIDIA L40S,
        shared_memory_per_core: 102400, memory_bytes: 48305799168, bandwidth: 864.0e+9, l2_bytes: 100663296,
        clock_ghz: 2.52, num_links: 0, matrix_flops: 362.0e+12}
    """
    made = read_card(write(tmp_path, text))
    assert (made.capability, made.bandwidth, made.matrix_flops) == ((8, 9), 864e9, 362e12)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("like: h101", "did you mean 'h100'"),
        ("like: h100\nmemory: 3", "unknown 'memory'"),
        ("like: h100\nmemory_bytes: much", "memory_bytes"),
        ("like: h100\nmemory_bytes: -1", "must be positive"),
        ("like: h100\nclock_ghz: .nan", "clock_ghz"),
        ("like: h100\nname: 'a\" b'", "name"),
        ("memory_bytes: 5", "Field required|Missing|missing"),
        ("[1, 2]", "like: h100"),
        ("{", "not a GPU's file"),
        ("!!python/object/apply:os.getcwd []", "not a GPU's file"),
    ],
)
def test_a_file_that_is_no_card_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        read_card(write(tmp_path, text))
    assert "card.yaml" in str(raised.value) or "did you mean" in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.yaml: the GPU's file cannot be read: No such file"):
        read_card(tmp_path / "none.yaml")
