"""The comparison of two compiled steps, line by line."""

import io

from rich.console import Console

from meshtrain.config import load
from meshtrain.plan.diff import Line, diff, lines
from meshtrain.plan.estimate import estimate
from meshtrain.plan.facts import MemoryPart
from meshtrain.plan.gpus import CARDS
from tests.plan.made_facts import FACTS, collective, made

OTHER = made(
    mesh={"data": 8, "model": 2},
    memory=(*FACTS.memory[:2], MemoryPart("activations", 3_000_000_000, True), MemoryPart("gradients", 500, False)),
    peak_bytes=6_000_000_508,
    collectives=(*FACTS.collectives[:2], collective("all-reduce", "model", 2, 48, 8_000_000)),
)


def test_equal_steps_differ_in_nothing() -> None:
    config, time = load(None), estimate(FACTS, CARDS["h100"])
    found = list(lines(FACTS, FACTS, config, config, time, time))
    assert {line.change for line in found} == {""}
    assert "config" not in {line.section for line in found}


def test_of_the_configs_the_keys_that_differ() -> None:
    a, b = load(None), load(None, ["zero.stage=3", "model.overrides.num_layers=6", "run.name=other"])
    found = [line for line in lines(FACTS, FACTS, a, b) if line.section == "config"]
    assert found == [
        Line("config", "run.name", "run", "other", "differs"),
        Line("config", "zero.stage", "1", "3", "differs"),
        Line("config", "model.overrides.num_layers", "-", "6", "differs"),
    ]


def test_memory_volumes_and_collectives() -> None:
    found = {(line.section, line.name): line for line in lines(FACTS, OTHER)}
    assert found["mesh", "axes"][2:] == ("data=4 x model=4", "data=8 x model=2", "differs")
    assert found["memory", "activations"][2:] == ("6.0 GB", "3.0 GB", "-50.0 %")
    assert found["memory", "gradients"][2:] == ("0 B", "500 B", "new")
    assert found["memory", "parameters"].change == ""
    assert found["memory", "peak"][2:] == ("9.0 GB", "6.0 GB", "-33.3 %")
    assert found["sent per step", "over model"][2:] == ("1.5 GB", "768.0 MB", "-50.0 %")
    assert found["collectives", "model all-reduce"][2:] == ("96", "48", "-50.0 %")
    assert found["collectives", "data all-gather"].change == ""


def test_the_estimates_are_compared() -> None:
    a, b = (estimate(facts, CARDS["h100"]) for facts in (FACTS, made(flops=80e12)))
    found = {line.name: line for line in lines(FACTS, FACTS, None, None, a, b) if line.section == "estimate"}
    assert found["compute"].change == "+100.0 %"
    assert found["optimizer"].change == ""
    assert found["tokens/s per GPU"].change.startswith("-")


def test_the_table_shows_every_line() -> None:
    console = Console(file=io.StringIO(), width=120)
    a, b = load(None), load(None, ["run.name='[/red]'"])
    console.print(diff(FACTS, OTHER, a, b, names=("a.yaml", "[/b].yaml")))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("2 x 8 h100", "a.yaml", "[/b].yaml", "[/red]", "activations", "-50.0 %", "over model", "data=8"):
        assert part in text, part
