"""The layout: for every parameter, where it is used and where it rests.

    layout = make_layout(shapes, rules, mesh, stage=2)
    print(layout)

*Compute spec*: how the whole weight lies over `model` while the step uses it; the rules say so. *Storage spec*: how it
rests between steps, optimizer state alike. For ZeRO stages >= 1 that is the compute spec with one dim cut over `data`
as well, the same for every stage: stages differ in the flow inside the step (`zero.py`), not in what rests where.
"""

import dataclasses
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from meshtrain.mesh import DATA
from meshtrain.rules import axes_of, num_shards, place


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """One parameter's place. Dims are counted from the end, so that they hold inside a scan over stacked layers too.

    Attributes:
        zero_dim: the dim (negative) that ZeRO cuts over `data`; None: it rests replicated over `data`.
        num_model_shards: into how many parts `model` cuts that same dim already (1: it is whole there).
        num_stacked: leading dims that the model scans over.
        why_replicated: why ZeRO does not cut it; empty if it does.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rule: str
    compute_spec: P
    zero_dim: int | None
    num_model_shards: int
    num_stacked: int
    why_replicated: str

    @property
    def storage_spec(self) -> P:
        """The compute spec with `data` added (innermost) to the ZeRO dim."""
        if self.zero_dim is None:
            return self.compute_spec
        entries = list(self.compute_spec)
        axes = (*axes_of(entries[self.zero_dim]), DATA)
        entries[self.zero_dim] = axes if len(axes) > 1 else DATA
        return P(*entries)

    @property
    def view_shape(self) -> tuple[int, ...]:
        """Shape in which the parameter enters the step: a ZeRO dim that `model` cuts too is split in `(model, rest)`.

        The split is local to every device, and `data` then has a dim of its own to cut.
        """
        if self.num_model_shards == 1 or self.zero_dim is None:
            return self.shape
        dim = len(self.shape) + self.zero_dim
        size = self.shape[dim] // self.num_model_shards
        return (*self.shape[:dim], self.num_model_shards, size, *self.shape[dim + 1 :])

    @property
    def view_spec(self) -> P:
        """How the view lies over `model` alone."""
        if len(self.view_shape) == len(self.shape):
            return self.compute_spec
        assert self.zero_dim is not None
        dim = len(self.shape) + self.zero_dim
        return P(*self.compute_spec[: dim + 1], None, *self.compute_spec[dim + 1 :])

    @property
    def manual_spec(self) -> P:
        """How the view is cut over `data` alone: the `in_specs` of the step's `shard_map`."""
        entries: list[str | None] = [None] * len(self.view_shape)
        if self.zero_dim is not None:
            entries[self.zero_dim] = DATA
        return P(*entries)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of every parameter on one mesh."""

    mesh: Mesh
    stage: int
    leaves: dict[str, LeafLayout]
    warnings: tuple[str, ...]

    @property
    def num_params(self) -> int:
        """Number of parameters (elements), Psi in the ZeRO paper."""
        return sum(math.prod(leaf.shape) for leaf in self.leaves.values())

    def compute_size(self, leaf: LeafLayout) -> int:
        """Elements of a parameter that one device computes with: whole over `data`, cut over `model` by its rule."""
        return math.prod(leaf.shape) // math.prod(num_shards(entry, self.mesh.shape) for entry in leaf.compute_spec)

    def bytes_per_device(self, leaf: LeafLayout) -> int:
        """Bytes that one device holds of a parameter at rest (float32)."""
        parts = math.prod(num_shards(entry, self.mesh.shape) for entry in leaf.storage_spec)
        return math.prod(leaf.shape) * leaf.dtype.itemsize // parts

    def sharding(self, path: str) -> NamedSharding:
        """How a parameter rests."""
        return NamedSharding(self.mesh, self.leaves[path].storage_spec)

    def shardings(self) -> dict[str, NamedSharding]:
        """How each parameter rests."""
        return {path: self.sharding(path) for path in self.leaves}

    def spec_like(self, path: str, shape: tuple[int, ...]) -> P:
        """Where optimizer state of a parameter rests: as the parameter if the shapes agree, else cut where it divides.

        Adafactor's factored moments, for instance, have fewer dims than their parameter.
        """
        leaf = self.leaves[path]
        if shape == leaf.shape:
            return leaf.storage_spec
        num_data = self.mesh.shape[DATA]
        free = [dim for dim in range(leaf.num_stacked, len(shape)) if shape[dim] % num_data == 0 and shape[dim] > 1]
        if self.stage == 0 or num_data == 1 or not free:
            return P()
        chosen = max(free, key=lambda dim: shape[dim])
        return P(*(DATA if dim == chosen else None for dim in range(len(shape))))

    def table(self) -> Table:
        """The layout as a rich table."""
        return _table(self)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=150, color_system=None, force_jupyter=False)
        console.print(self.table())
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()


def make_layout(
    params: Mapping[str, jax.ShapeDtypeStruct],
    rules: Sequence[tuple[str, Any]],
    mesh: Mesh,
    stage: int,
    num_stacked: Mapping[str, int] | None = None,
) -> Layout:
    """Lays out every parameter.

    Args:
        params: shape and dtype by path.
        rules: `(path regex, spec of the trailing dims)`, see `meshtrain.rules`.
        mesh: with a `data` and a `model` axis, either of which may have size 1.
        stage: ZeRO stage, 0 to 3.
        num_stacked: by path, how many leading dims the model scans over (0 where absent). ZeRO leaves those whole.

    Raises:
        RuleError: the rules do not fit; see `meshtrain.rules.place`.
    """
    placed = place(rules, params, mesh.shape)
    leaves = {}
    for path, placement in placed.by_path.items():
        stacked = (num_stacked or {}).get(path, 0)
        dim, parts, why = _zero_dim(placement.shape, placement.spec, stacked, mesh.shape, stage)
        dtype = np.dtype(params[path].dtype)
        leaves[path] = LeafLayout(
            path, placement.shape, dtype, placement.rule, placement.spec, dim, parts, stacked, why
        )
    return Layout(mesh, stage, leaves, placed.warnings)


def _zero_dim(
    shape: tuple[int, ...], spec: P, num_stacked: int, axis_sizes: Mapping[str, int], stage: int
) -> tuple[int | None, int, str]:
    """The dim that ZeRO cuts, how many parts `model` cuts it into already, and if none: why.

    A dim that is whole is preferred, the largest first; a dim that `model` cuts serves too if its parts divide.
    """
    num_data = axis_sizes[DATA]
    if stage == 0:
        return None, 1, "ZeRO stage 0"
    if num_data == 1:
        return None, 1, "data axis of size 1"
    if len(shape) <= num_stacked:
        return None, 1, "scalar"
    parts = [num_shards(entry, axis_sizes) for entry in spec]
    fits = [dim for dim in range(num_stacked, len(shape)) if shape[dim] and shape[dim] // parts[dim] % num_data == 0]
    if not fits:
        return None, 1, f"no dim divides by data={num_data}"
    dim = max(fits, key=lambda dim: (parts[dim] == 1, shape[dim]))
    return dim - len(shape), parts[dim], ""


def show_spec(spec: P) -> str:
    """A spec in few characters: `- model+data -`."""
    return " ".join("+".join(axes_of(entry)) or "-" for entry in spec) or "(scalar)"


def show_bytes(count: float) -> str:
    """A byte count with its unit, in powers of 1000: `3.2 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _table(layout: Layout) -> Table:
    sizes = " x ".join(f"{name}={size}" for name, size in layout.mesh.shape.items())
    total = sum(layout.bytes_per_device(leaf) for leaf in layout.leaves.values())
    table = Table(
        title=f"Layout on {sizes}, ZeRO stage {layout.stage}: {layout.num_params:,} parameters, "
        f"{show_bytes(total)} of float32 weights per device",
        caption="compute: over which axes each dim is cut while the step uses the weight; rest: between steps",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("parameter", no_wrap=True)  # in one piece, so that it can be searched for
    for name in ("shape", "rule", "compute", "rest"):
        table.add_column(name, overflow="fold")
    table.add_column("per device", justify="right")
    why = any(leaf.why_replicated for leaf in layout.leaves.values())
    if why:
        table.add_column("replicated over data because", overflow="fold")
    for path, leaves in _alike(layout.leaves.values()).items():
        leaf = leaves[0]
        table.add_row(
            escape(path),
            " x ".join(map(str, leaf.shape)) or "()",
            escape(leaf.rule),
            show_spec(leaf.compute_spec),
            show_spec(leaf.storage_spec),
            show_bytes(sum(map(layout.bytes_per_device, leaves))),
            *[leaf.why_replicated] * why,
        )
    return table


def _alike(leaves: Iterable[LeafLayout]) -> dict[str, list[LeafLayout]]:
    """Parameters that differ in nothing but a number in their path, such as `blocks/3/up/kernel`, as one row."""
    groups: dict[Any, list[LeafLayout]] = {}
    for leaf in leaves:
        pattern = re.sub(r"(?<![^/])\d+(?![^/])", "*", leaf.path)
        groups.setdefault((pattern, dataclasses.replace(leaf, path="")), []).append(leaf)
    rows = {}
    for (pattern, _), group in groups.items():
        rows[group[0].path if len(group) == 1 else f"{pattern} ({len(group)} alike)"] = group
    return rows
