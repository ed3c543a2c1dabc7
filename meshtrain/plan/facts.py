"""What compiling a training step for a cluster tells: plain figures, that go through JSON to files and other processes.

Nothing here computes; `compile.py` fills a `Facts`, and the report, the estimate, the budget and the search read it.
"""

import dataclasses
from typing import Any, Literal

from meshtrain.plan.hlo import Collective

Platform = Literal["cuda", "cpu"]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The machines that a step is compiled for.

    Attributes:
        gpu: a name in `meshtrain.plan.gpus.CARDS`, or of a card read from a file.
        nodes: hosts, each with one NVLink domain.
        gpus_per_node: GPUs of one host.
    """

    gpu: str
    nodes: int
    gpus_per_node: int

    @property
    def num_gpus(self) -> int:
        """GPUs in all."""
        return self.nodes * self.gpus_per_node


@dataclasses.dataclass(frozen=True)
class MemoryPart:
    """One part of a GPU's memory at the step's peak.

    Attributes:
        name: such as "parameters", "optimizer state", "gathered weights", "activations".
        bytes: per device.
        estimated: the compiler gives only the sum of several parts, and this share of it is ours.
    """

    name: str
    bytes: int
    estimated: bool


@dataclasses.dataclass(frozen=True)
class Facts:
    """One compiled training step. All sizes are bytes of one device.

    Attributes:
        platform: "cuda": compiled by XLA's GPU compiler for `cluster.gpu`; "cpu": on virtual CPU devices, where state
            and the collectives over `data` are exact and temporaries are not a GPU's.
        mesh: axis name -> size, in mesh order.
        compute: dtype of weights and activations in the step.
        tokens: global, per update.
        params: number of parameters, Psi in the ZeRO paper.
        shard_params: of them, what one device computes with, cut over `model`: the unit of volumes.
        state: bytes at rest by kind: "parameters", "optimizer state", "other" (step, loss scale).
        memory: the parts of the peak; they add up to `peak_bytes`.
        peak_bytes: the compiler's peak, arguments included.
        card_bytes: memory of one card that a program can use; 0 on "cpu".
        compile_seconds: tracing, lowering and compiling.
        flops: floating-point operations of one device per update, recomputation included (counted from the traced
            program, matrix products only).
        model_flops: the same without recomputation, as MFU counts them.
        weight_shapes: shape of each parameter by path, whole.
    """

    cluster: Cluster
    platform: Platform
    mesh: dict[str, int]
    stage: int
    microbatches: int
    compute: str
    tokens: int
    params: int
    shard_params: int
    state: dict[str, int]
    memory: tuple[MemoryPart, ...]
    peak_bytes: int
    card_bytes: int
    compile_seconds: float
    flops: float
    model_flops: float
    collectives: tuple[Collective, ...]
    weight_shapes: dict[str, tuple[int, ...]]

    @property
    def state_bytes(self) -> int:
        """Bytes at rest."""
        return sum(self.state.values())

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the card's memory; None where that is not known."""
        return self.peak_bytes <= self.card_bytes if self.platform == "cuda" else None

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Facts":
        """From what `to_json` gave."""
        return cls(
            **values
            | {
                "cluster": Cluster(**values["cluster"]),
                "memory": tuple(MemoryPart(**part) for part in values["memory"]),
                "collectives": tuple(
                    Collective(**each | {"dims": tuple(each["dims"])}) for each in values["collectives"]
                ),
                "weight_shapes": {path: tuple(shape) for path, shape in values["weight_shapes"].items()},
            }
        )
