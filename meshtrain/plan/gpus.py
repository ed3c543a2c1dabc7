"""GPUs that are not here: the facts that XLA needs to compile for them.

topology = topologies.get_topology_desc(platform="cuda", target_config=target_config(card("h100")), topology="1x2x8")
"""

import dataclasses
import difflib
import math
import re
from pathlib import Path

import pydantic
import yaml

from meshtrain.errors import ConfigError
from meshtrain.mesh import MEMORY_FRACTION

MAX_BYTES = 1 << 16  # of a card's file


@dataclasses.dataclass(frozen=True)
class Card:
    """One kind of GPU. Figures from NVIDIA's data sheets and from XLA's own descriptions of each card.

    Attributes:
        capability: CUDA compute capability, (major, minor).
        cores: streaming multiprocessors.
        fpus_per_core: float32 lanes of one.
        shared_memory_per_block: bytes a block may ask for.
        shared_memory_per_core: bytes.
        memory_bytes: of the whole card, as the driver reports it.
        bandwidth: bytes per second of its memory.
        l2_bytes: second-level cache.
        clock_ghz: boost clock.
        num_links: NVLink links.
        name: as the driver reports it.
        link_bandwidth: bytes per second of one NVLink link in one direction.
        matrix_flops: dense bfloat16 rate in FLOP/s; 0: by the name's data sheet (`flops.peak_flops`).
    """

    capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    shared_memory_per_block: int
    shared_memory_per_core: int
    memory_bytes: int
    bandwidth: float
    l2_bytes: int
    clock_ghz: float
    num_links: int
    name: str
    link_bandwidth: float = 25e9
    matrix_flops: float = 0.0

    @property
    def usable_bytes(self) -> int:
        """Of its memory, what jax takes for arrays (`mesh.claim_gpu_memory`)."""
        return int(MEMORY_FRACTION * self.memory_bytes)


CARDS = {
    "a100-40gb": Card(
        (8, 0), 108, 64, 166912, 167936, 42331013120, 1.55520e12, 41943040, 1.41, 12, "NVIDIA A100-SXM4-40GB"
    ),
    "a100-80gb": Card(
        (8, 0), 108, 64, 166912, 167936, 85100068864, 2.03904e12, 41943040, 1.41, 12, "NVIDIA A100-SXM4-80GB"
    ),
    "h100": Card(
        (9, 0), 132, 128, 232448, 233472, 84942979072, 3.35232e12, 52428800, 1.98, 18, "NVIDIA H100 80GB HBM3"
    ),
    "h200": Card((9, 0), 132, 128, 232448, 233472, 151397597184, 4.8e12, 52428800, 1.98, 18, "NVIDIA H200 141GB HBM3e"),
    "b200": Card(
        (10, 0), 148, 128, 232448, 233472, 191514411008, 7.67232e12, 132644864, 1.965, 18, "NVIDIA B200", 50e9
    ),
}

_TARGET_CONFIG = """\
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {card.shared_memory_per_block}
  shared_memory_per_core: {card.shared_memory_per_core}
  core_count: {card.cores} fpus_per_core: {card.fpus_per_core} clock_rate_ghz: {card.clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {bandwidth} device_memory_size: {card.memory_bytes} l2_cache_size: {card.l2_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability {major}.{minor}"
  device_address_bits: 64 pcie_bandwidth: 34359738368 ecc_enabled: true name: "{card.name}"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: {card.num_links} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{card.name}"
"""


def card(name: str) -> Card:
    """The card of that name.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if name not in CARDS:
        near = difflib.get_close_matches(name, CARDS, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(CARDS)}"
        raise ConfigError(f"no GPU '{name}' is known; {hint}")
    return CARDS[name]


def read_card(path: Path) -> Card:
    """A card of the user's own: a YAML file with the fields of `Card`, or `like: h100` and what differs.

    Raises:
        ConfigError: the file cannot be read, or is not a card.
    """
    try:
        with path.open("rb") as file:
            values = yaml.safe_load(file.read(MAX_BYTES))
    except OSError as error:
        raise ConfigError(f"{path}: the GPU's file cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not a GPU's file: {str(error).partition(chr(10))[0]}") from None
    fields = {field.name for field in dataclasses.fields(Card)}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a GPU's file: it must hold `like: h100` or all of {', '.join(sorted(fields))}")
    base = values.pop("like", None)
    if unknown := set(values) - fields:
        raise ConfigError(
            f"{path}: unknown {', '.join(map(repr, sorted(map(str, unknown))))}; a card has like, "
            f"{', '.join(sorted(fields))}"
        )
    given = (dataclasses.asdict(card(str(base))) if base is not None else {}) | values
    try:
        made = pydantic.TypeAdapter(Card).validate_python(given)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if problem := _problem(made):
        raise ConfigError(f"{path}: {problem}")
    return made


def _problem(card: Card) -> str:
    """What keeps a card's figures from being a card's; empty if nothing."""
    may_be_zero = ("num_links", "matrix_flops")
    for name, value in dataclasses.asdict(card).items():
        if isinstance(value, int | float) and (
            not math.isfinite(value) or value < 0 or (not value and name not in may_be_zero)
        ):
            return f"{name} must be positive, and is {value}"
    if not re.fullmatch(r"[\w ./+-]+", card.name):
        return f"name may have letters, digits and . / + - only, and is {card.name!r}"
    return ""


def target_config(card: Card) -> str:
    """The text of XLA's `GpuTargetConfigProto` for a card."""
    major, minor = card.capability
    feature = "NONE" if major < 9 else "ACCELERATED_FEATURES"
    return _TARGET_CONFIG.format(card=card, major=major, minor=minor, feature=feature, bandwidth=round(card.bandwidth))
