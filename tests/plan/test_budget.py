"""Budgets: what grew fails, what shrank is said, what is not a budget is refused in one line."""

from pathlib import Path

import pytest
import yaml

from meshtrain.errors import ConfigError
from meshtrain.plan.budget import check, write
from meshtrain.plan.facts import Cluster
from tests.plan.made_facts import FACTS, collective, made


@pytest.fixture
def budget(tmp_path: Path) -> Path:
    path = tmp_path / "budget.yaml"
    write(path, FACTS)
    return path


def test_the_file_holds_what_a_step_costs(budget: Path) -> None:
    assert yaml.safe_load(budget.read_text()) == {
        "for": {"gpu": "h100", "nodes": 2, "gpus_per_node": 8, "platform": "cuda"},
        "peak_bytes": 9_000_000_008,
        "state_bytes": 3_000_000_008,
        "axes": {
            "data": {"bytes": 1_500_000_000, "collectives": {"all-gather": 1, "reduce-scatter": 1}},
            "model": {"bytes": 2 * 96 * 8_000_000, "collectives": {"all-reduce": 96}},
        },
    }


def test_the_same_step_is_within_it(budget: Path) -> None:
    assert check(budget, FACTS) == ([], [])


def test_the_peak_has_one_percent_to_spare(budget: Path) -> None:
    assert check(budget, made(peak_bytes=9_090_000_008)).grown == []
    assert check(budget, made(peak_bytes=9_090_000_009)).grown == [
        "peak_bytes: 9,000,000,008 -> 9,090,000,009 bytes (+90.0 MB)"
    ]


def test_one_byte_of_state_is_too_much(budget: Path) -> None:
    grown = check(budget, made(state=FACTS.state | {"other": 9})).grown
    assert grown == ["state_bytes: 3,000,000,008 -> 3,000,000,009 bytes (+1 B)"]


def test_one_collective_more_is_too_much(budget: Path) -> None:
    more = made(collectives=(*FACTS.collectives, collective("all-to-all", "model", 4, 2, 10)))
    assert check(budget, more).grown == [
        "model bytes: 1,536,000,000 -> 1,536,000,020 bytes (+20 B)",
        "model all-to-all: 0 -> 2 per step",
    ]


def test_a_collective_along_a_new_axis_is_too_much(budget: Path) -> None:
    more = made(collectives=(*FACTS.collectives, collective("all-reduce", "data+model", 16, 1, 4)))
    assert check(budget, more).grown == [
        "data+model bytes: 0 -> 8 bytes (+8 B)",
        "data+model all-reduce: 0 -> 1 per step",
    ]


def test_what_became_smaller_could_be_tightened(budget: Path) -> None:
    result = check(budget, made(collectives=FACTS.collectives[1:], peak_bytes=9_000_000_000))
    assert result.grown == []
    assert result.smaller == [
        "could be tightened: peak_bytes: 9,000,000,008 -> 9,000,000,000 bytes (-8 B)",
        "could be tightened: data bytes: 1,500,000,000 -> 1,000,000,000 bytes (-500.0 MB)",
        "could be tightened: data all-gather: 1 -> 0 per step",
    ]


def test_a_loop_of_unknown_length_shows(budget: Path) -> None:
    unknown = made(collectives=(collective("all-gather", "data", 4, None, 500_000_000), *FACTS.collectives[1:]))
    assert check(budget, unknown).grown == ["data all-gather of unknown count: 0 -> 1 per step"]


def test_a_budget_for_other_machines_is_refused(budget: Path) -> None:
    with pytest.raises(ConfigError, match="for 2 x 8 h100, and the step was compiled for 4 x 8 h200, compiled for CPU"):
        check(budget, made(cluster=Cluster("h200", 4, 8), platform="cpu"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must hold keys"),
        ("peak_bytes: [", "not a budget"),
        ("- 1", "must hold keys"),
        ("peak_bytes: 1", "its keys must be"),
        ("!!python/object/apply:os.system [ls]", "not a budget"),
        ("for: {}\npeak_bytes: 1\nstate_bytes: 1\naxes: {}", "'for' must say"),
        ("[" * 5000, "not a budget"),
        ("#" + "x" * 70_000, "larger than 65536 bytes"),
    ],
)
def test_what_is_not_a_budget_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "b.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem) as error:
        check(path, FACTS)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("peak_bytes: 9000000008", "peak_bytes: much", "'peak_bytes' must be a whole number"),
        ("peak_bytes: 9000000008", "peak_bytes: -1", "'peak_bytes' must be a whole number"),
        ("all-reduce: 96", "all-reduce: true", "'model all-reduce' must be a whole number"),
        ("    bytes: 1500000000\n", "", "axis 'data' must have bytes"),
    ],
)
def test_a_damaged_budget_names_the_place(budget: Path, old: str, new: str, problem: str) -> None:
    text = budget.read_text()
    assert old in text
    budget.write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=problem):
        check(budget, FACTS)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        check(tmp_path, FACTS)
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        write(tmp_path / "none" / "b.yaml", FACTS)
    (tmp_path / "latin").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="not a budget"):
        check(tmp_path / "latin", FACTS)
