"""The roofline: each time by hand from the card's figures."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from meshtrain.errors import ConfigError
from meshtrain.plan.estimate import axis_bandwidth, estimate, matrix_rate, nodes_of_groups, ring_bytes, show_seconds
from meshtrain.plan.facts import Cluster, MemoryPart
from meshtrain.plan.gpus import CARDS
from tests.plan.made_facts import FACTS, collective, made

H100 = CARDS["h100"]
RATE, MEMORY, NVLINK = 989.5e12, 3.35232e12, 18 * 25e9


def test_each_part_is_its_amount_by_its_rate() -> None:
    found = estimate(FACTS, H100)
    assert found.compute_s == pytest.approx(40e12 / RATE)
    # 2 microbatches x (3 passes x 4/3 for recomputing x 1e9 / 4 weights of 2 bytes, + 6 GB in and out)
    assert found.memory_s == pytest.approx(2 * (4 * 250e6 * 2 + 2 * 6e9) / MEMORY)
    assert found.optimizer_s == pytest.approx((2 * 3_000_000_008 + 1e9) / MEMORY)
    data, model = found.communication
    # 3 of 4 parts travel. `data` has a stride of 4 and 8 GPUs a node: groups of 4 lie on 2 nodes, 2 GPUs on each.
    assert (data.axis, data.leaves_node, data.overlaps) == ("data", True, True)
    assert data.seconds == pytest.approx(0.75 * 1.5e9 / (2 * 50e9))
    assert (model.axis, model.leaves_node, model.overlaps) == ("model", False, False)
    assert model.seconds == pytest.approx(0.75 * 2 * 96 * 8e6 / NVLINK)


def test_data_hides_behind_compute_and_model_does_not() -> None:
    found = estimate(FACTS, H100)
    data, model = (each.seconds for each in found.communication)
    assert max(found.compute_s, found.memory_s) < 4 * data
    fast = max(found.compute_s, found.memory_s)
    assert found.step_s == pytest.approx(max(fast, data) + model + found.optimizer_s)
    assert found.serial_s == pytest.approx(fast + data + model + found.optimizer_s)
    slow = estimate(made(flops=4e15, model_flops=3e15), H100)  # 4 s of compute: `data` vanishes behind it
    assert slow.step_s == pytest.approx(slow.compute_s + model + slow.optimizer_s)
    assert slow.exposed_s == pytest.approx(model)


def test_speed_and_mfu_follow_from_the_step() -> None:
    found = estimate(FACTS, H100)
    assert found.tokens_per_s == pytest.approx(65_536 / 16 / found.step_s)
    assert found.mfu == pytest.approx(30e12 / RATE / found.step_s)
    alone = made(collectives=(), state={}, memory=(), params=0, flops=30e12)
    assert estimate(alone, H100).mfu == pytest.approx(1.0)  # nothing but products without recomputation


def test_the_network_is_an_assumption_that_can_be_changed() -> None:
    slow = estimate(FACTS, H100, network=5e9)
    assert slow.communication[0].seconds == pytest.approx(10 * estimate(FACTS, H100).communication[0].seconds)
    assert slow.communication[1] == estimate(FACTS, H100).communication[1]
    assert any("5 GB/s" in line and "network" in line for line in slow.assumptions)
    with pytest.raises(ConfigError, match="must be positive, got 0"):
        estimate(FACTS, H100, network=0)


@pytest.mark.parametrize(
    ("axis", "mesh", "gpus_per_node", "nodes"),
    [
        ("model", {"data": 2, "model": 8}, 8, 1),
        ("data", {"data": 2, "model": 8}, 8, 2),
        ("data", {"data": 16, "model": 1}, 8, 2),
        ("model", {"data": 1, "model": 16}, 8, 2),
        ("data", {"data": 4, "model": 2}, 8, 1),
        ("data", {"data": 4, "model": 4}, 8, 2),
        ("model", {"data": 4, "model": 4}, 6, 2),  # the second group straddles
        ("data+model", {"data": 4, "model": 4}, 4, 4),
        ("data", {"data": 2, "pipe": 2, "model": 4}, 8, 2),
        ("pipe", {"data": 2, "pipe": 2, "model": 4}, 8, 1),
    ],
)
def test_nodes_that_a_group_touches(axis: str, mesh: dict[str, int], gpus_per_node: int, nodes: int) -> None:
    assert nodes_of_groups(axis, mesh, gpus_per_node) == nodes


def test_a_whole_node_in_one_group_goes_out_over_all_its_ports() -> None:
    facts = made(mesh={"data": 16, "model": 1})
    assert axis_bandwidth("data", facts, H100, 50e9) == (400e9, True)
    assert axis_bandwidth("data", facts, H100, 100e9) == (NVLINK, True)  # 800 GB/s of ports, but NVLink feeds them
    assert axis_bandwidth("data", made(mesh={"data": 2, "model": 8}), H100, 50e9) == (50e9, True)


def test_a_ring_sends_all_but_its_own_part() -> None:
    assert ring_bytes(collective("all-gather", "data", 4, 3, 100)) == 225
    assert ring_bytes(collective("all-reduce", "data", 4, 3, 100)) == 450
    assert ring_bytes(collective("collective-permute", "data", 2, 3, 100)) == 300
    assert ring_bytes(collective("all-gather", "data", 4, None, 100)) == 75


@pytest.mark.parametrize(
    ("card", "dtype", "rate"),
    [("h100", "bfloat16", 989.5e12), ("h100", "float32", 494.5e12), ("a100-80gb", "float16", 312e12)],
)
def test_matrix_rates_are_the_data_sheets(card: str, dtype: str, rate: float) -> None:
    assert matrix_rate(CARDS[card], dtype) == rate


@pytest.mark.parametrize(("card", "rate"), [("a100-40gb", 300e9), ("h200", 450e9), ("b200", 900e9)])
def test_nvlink_is_half_of_the_data_sheets_total_of_both_directions(card: str, rate: float) -> None:
    assert axis_bandwidth("model", FACTS, CARDS[card], 50e9) == (rate, False)


def test_a_card_of_ones_own_gives_its_rate() -> None:
    own = dataclasses.replace(H100, name="Own Card", matrix_flops=200e12)
    assert matrix_rate(own, "bfloat16") == 200e12
    assert matrix_rate(own, "float32") == 100e12
    with pytest.raises(ConfigError, match=r"'Own Card' in bfloat16 is not known.*`matrix_flops`"):
        matrix_rate(dataclasses.replace(own, matrix_flops=0.0), "bfloat16")


def test_every_input_is_said() -> None:
    said = " ".join(estimate(made(compute="float32", platform="cpu"), H100).assumptions)
    for figure in ("494.5 TFLOP/s", "TF32", "3.35 TB/s", "450 GB/s", "50 GB/s", "`model` do not", "compiled for CPU"):
        assert figure in said, figure
    assert "unknown length" not in said
    unknown = made(collectives=(collective("all-gather", "data", 4, None),))
    assert "unknown length" in " ".join(estimate(unknown, H100).assumptions)


def test_the_table_says_estimate_and_takes_any_text() -> None:
    facts = made(cluster=Cluster("[bold]x", 2, 8), memory=(MemoryPart("[/red]", 1, False),))
    card = dataclasses.replace(H100, name="[/red] card", matrix_flops=1e12)
    console = Console(file=io.StringIO(), width=120)
    console.print(estimate(facts, card).table())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "estimate" in text and "Estimated, not measured" in text and "[/red] card" in text and "tokens/s" in text


def test_json_holds_plain_values() -> None:
    values = json.loads(json.dumps(estimate(FACTS, H100).to_json()))
    assert values["estimated"] is True
    assert values["communication"][0]["axis"] == "data"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.345, "12.3 s"), (0.5, "500 ms"), (0.00123, "1.23 ms"), (4.5e-6, "4.5 us"), (0, "0 us"), (4321.0, "4,321 s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text
