"""The report: its figures in a terminal and as JSON, whichever compiler they come from."""

import dataclasses
import io
import json
from typing import Any

from rich.console import Console

from meshtrain.plan.estimate import estimate
from meshtrain.plan.facts import Facts
from meshtrain.plan.gpus import CARDS
from meshtrain.plan.report import Report
from meshtrain.plan.traffic import findings
from tests.plan.made_facts import FACTS, collective, made


def report(facts: Facts = FACTS) -> Report:
    return Report(facts, estimate(facts, CARDS["h100"]), findings(facts))


def shown(facts: Facts = FACTS, width: int = 150) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(report(facts).render())
    return file.getvalue()


def lines_with(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if word in line]


# ---------------------------------------------------------------- to read


def test_memory_is_shown_part_by_part_against_the_card() -> None:
    text = shown()
    assert "1,000,000,000 parameters on 2 x 8 h100: mesh data=4 x model=4, ZeRO stage 1, bfloat16" in text
    assert "65,536 tokens per update in 2 microbatches; compiled in 5.2 s" in text
    activations = lines_with(text, "activations")[0]
    assert "6.0 GB" in activations and "share estimated" in activations
    optimizer = lines_with(text, "optimizer state")[0]
    assert "2.0 GB" in optimizer and "estimated" not in optimizer
    peak = lines_with(text, "the compiler's")[0]
    assert "peak" in peak and "9.0 GB" in peak
    card = lines_with(text, "the card ")[0]
    assert "80.0 GB" in card
    assert "fits: 71.0 GB to spare" in text


def test_what_does_not_fit_says_by_how_much() -> None:
    assert "does not fit: 2.5 GB too much" in shown(made(peak_bytes=82_500_000_000))


def test_exactly_full_fits() -> None:
    assert "fits: 0 B to spare" in shown(made(peak_bytes=FACTS.card_bytes))


def test_communication_is_shown_by_kind_and_summed_by_axis() -> None:
    text = shown()
    (gather,) = lines_with(text, "all-gather")
    assert "data" in gather and "500.0 MB" in gather and "bf16" in gather
    reduce = next(line for line in lines_with(text, "all-reduce") if "96" in line)
    assert "8.0 MB" in reduce
    sums = text.partition("Sums by mesh axis")[2]
    (model,) = [line for line in sums.splitlines() if line.split()[:1] == ["model"] and "inside a node" in line]
    (data,) = [line for line in sums.splitlines() if line.split()[:1] == ["data"] and "spans 2 nodes" in line]
    assert data.split()[1:5] == ["1.5", "GB", "3", "2"]  # sent, in psi, ZeRO's
    assert model.split()[1:3] == ["1.5", "GB"]  # 96 all-reduces of 8 MB, each reduced and gathered


def test_one_gpu_sends_nothing() -> None:
    assert "one GPU sends nothing" in shown(made(mesh={"data": 1, "model": 1}, collectives=()))


def test_virtual_devices_say_what_is_not_a_gpus_and_what_to_install() -> None:
    text = shown(made(platform="cpu", card_bytes=0))
    assert "state and the collectives over data are exact, temporaries are not a GPU's" in " ".join(text.split())
    assert "pip install 'meshtrain[plan]'" in text
    assert "not known without the GPU's compiler" in text
    assert "the card" not in text.partition("Communication")[0]


def test_unexpected_traffic_is_pointed_at() -> None:
    moved = made(collectives=(*FACTS.collectives, collective("all-to-all", "model", 4, 24, 4_000_000)))
    found = findings(moved)
    assert found
    text = " ".join(shown(moved).split())
    for finding in found:
        assert f"look at: {finding}" in text


def test_a_narrow_terminal_loses_no_figure() -> None:
    text = shown(width=80)
    for figure in ("9.0 GB", "80.0 GB", "500.0 MB", "71.0 GB"):
        assert figure in text


def test_what_the_compiler_names_is_not_markup() -> None:
    odd = dataclasses.replace(FACTS.collectives[0], source="gather ([bold]mine.py:3)")
    assert "[bold]mine.py:3" in shown(made(collectives=(odd,)), width=220)


# ---------------------------------------------------------------- to compute with


def test_json_has_the_promised_keys_and_values() -> None:
    values: dict[str, Any] = json.loads(json.dumps(report().to_json()))
    expected = {
        "gpu": "h100",
        "mesh": {"data": 4, "model": 4},
        "params": 1_000_000_000,
        "state_bytes": 3_000_000_008,
        "peak_bytes": 9_000_000_008,
        "card_bytes": 80_000_000_000,
        "fits": True,
        "compile_seconds": 5.25,
    }
    assert {key: values[key] for key in expected} == expected
    first = values["collectives"][0]
    assert {key: first[key] for key in ("axis", "op", "count", "bytes", "in_loop", "source")} == {
        "axis": "data",
        "op": "all-gather",
        "count": 1,
        "bytes": 500_000_000,
        "in_loop": False,
        "source": "all-gather (models/gpt.py:4)",
    }
    assert set(values["volume"]) == {"data", "model"}


def test_json_volume_is_in_psi_of_a_model_shard() -> None:
    """0.5 GB gathered and 1 GB reduced, of 2 bytes each: 3 times the 250 million weights of a shard; ZeRO's is 2."""
    volume = report().to_json()["volume"]["data"]
    assert volume["psi"] == 3
    assert volume["zero_psi"] == 2
    assert volume["bytes"] == 1_500_000_000
    assert (volume["nodes"], volume["leaves_node"]) == (2, True)


def test_json_of_virtual_devices_does_not_claim_to_fit() -> None:
    values = report(made(platform="cpu", card_bytes=0)).to_json()
    assert values["fits"] is None
    assert values["card_bytes"] is None
