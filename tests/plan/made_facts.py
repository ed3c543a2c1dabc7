"""A small compiled step made by hand, for the tests of what reads one."""

import dataclasses
from typing import Any

from meshtrain.plan.facts import Cluster, Facts, MemoryPart
from meshtrain.plan.hlo import Collective


def collective(op: str, axis: str, size: int, count: int | None = 1, num_bytes: int = 1_000_000) -> Collective:
    source = f"{op} (models/gpt.py:{size})"
    return Collective(op, axis, size, count, num_bytes, num_bytes // 2, "bf16", False, False, source, "main")


FACTS = Facts(
    cluster=Cluster("h100", nodes=2, gpus_per_node=8),
    platform="cuda",
    mesh={"data": 4, "model": 4},
    stage=1,
    microbatches=2,
    compute="bfloat16",
    tokens=65_536,
    params=1_000_000_000,
    shard_params=250_000_000,
    state={"parameters": 1_000_000_000, "optimizer state": 2_000_000_000, "other": 8},
    memory=(
        MemoryPart("parameters", 1_000_000_000, False),
        MemoryPart("optimizer state", 2_000_000_008, False),
        MemoryPart("activations", 6_000_000_000, True),
    ),
    peak_bytes=9_000_000_008,
    card_bytes=80_000_000_000,
    compile_seconds=5.25,
    flops=40e12,
    model_flops=30e12,
    collectives=(
        collective("all-gather", "data", 4, 1, 500_000_000),
        collective("reduce-scatter", "data", 4, 1, 1_000_000_000),
        collective("all-reduce", "model", 4, 96, 8_000_000),
    ),
    weight_shapes={"blocks/up/kernel": (24, 1024, 4096)},
)


def made(**changes: Any) -> Facts:
    return dataclasses.replace(FACTS, **changes)
