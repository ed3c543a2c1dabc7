"""Predicted beside measured, as far as it goes without a GPU."""

import dataclasses
import io
from typing import Any

import jax
import pytest
from rich.console import Console

from meshtrain.config import load
from meshtrain.errors import PlanError
from meshtrain.plan import here
from meshtrain.plan.facts import Cluster
from tests.plan.made_facts import made


def test_a_machine_without_a_gpu_is_told_so() -> None:
    with pytest.raises(PlanError, match=r"8 cpu device\(s\).*meshtrain\[cuda13\].*--gpu"):
        here.local_cluster()


@dataclasses.dataclass
class Device:
    device_kind: str
    platform: str = "gpu"
    stats: dict[str, int] | None = None

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


def test_the_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "local_devices", lambda: [Device("NVIDIA H100 80GB HBM3")] * 4)
    assert here.local_cluster() == Cluster("h100", 1, 4)


def test_a_gpu_that_is_not_known_needs_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "local_devices", lambda: [Device("NVIDIA T4")])
    with pytest.raises(PlanError, match="NVIDIA T4.*--gpu-file"):
        here.local_cluster()
    assert here.local_cluster("t4") == Cluster("t4", 1, 1)


def test_the_peak_is_the_largest_of_any_device() -> None:
    devices: list[Any] = [Device("a", stats={"peak_bytes_in_use": n}) for n in (3, 9, 5)]
    assert here.allocator_peak(devices) == 9
    with pytest.raises(PlanError, match="do not count"):
        here.allocator_peak([*devices, Device("a")])


@pytest.mark.slow
def test_three_steps_run_on_what_is_here() -> None:
    seen: list[Any] = []
    config = load("examples/gpt_tiny.yaml", ["mesh.model=2", "zero.stage=3", "train.global_batch=4", "data.seq_len=32"])
    measured = here.measure(config, peak=lambda devices: seen.extend(devices) or 123)  # type: ignore[func-returns-value]
    assert measured.peak_bytes == 123
    assert len(seen) == 8
    assert 0 < measured.step_s < 60


def test_the_table_shows_the_ratio() -> None:
    file = io.StringIO()
    console = Console(file=file, width=100)
    console.print(here.table(made(peak_bytes=8_000_000_000), here.Measured(8_400_000_000, 0.5), 0.4))
    text = file.getvalue()
    assert "8.0 GB" in text
    assert "8.4 GB" in text
    assert "1.050" in text
    assert "1.25" in text
