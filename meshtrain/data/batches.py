"""The contract `batch = f(data, seed, step)`, and the way from rows in a file to one global array.

    batches = Batches(source.tokens, seq_len=256, global_batch=32, seed=0)
    batch = to_global(batches, step=7, sharding=NamedSharding(mesh, batch_spec(mesh)))

A *record* is a window of `seq_len + 1` tokens: `seq_len` inputs and, one to the right, `seq_len` targets. Windows start
every `seq_len` tokens, so the last token of a record is only a target there and the first input of the next record:
each token but the first of the source is a target exactly once an epoch. The fewer than `seq_len` tokens after the last
whole record are not used (`num_unused_tokens`). Records cross document boundaries.

Training sample `i = step * global_batch + row` is position `i % num_records` of epoch `i // num_records`, and each
epoch visits each record once, in an order of its own. So a batch may straddle epochs, nothing is dropped or repeated,
and neither the number of processes nor the mesh takes part: resuming, also elsewhere, is a step number.

Grain was considered. Its iterators carry a state per worker and per process, which this contract does away with; what
would be left of it here is one background thread (`meshtrain.data.prefetch`), so it is not worth a dependency.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from meshtrain.data.permute import permute
from meshtrain.errors import ConfigError, DataError

Rows = slice | NDArray[Any]  # which rows of a global batch: a slice, or their numbers
_MAX_ID = np.iinfo(np.int32).max


class RowReader(Protocol):
    """What `to_global` needs: `Batches`, `EvalBatches`, or a class of your own for other data."""

    @property
    def abstract(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Global shape `[global_batch, ...]` and dtype of each array of a batch."""
        ...

    def rows(self, step: int, rows: slice) -> Mapping[str, NDArray[Any]]:
        """The given rows of the global batch of `step`: each array has shape `[rows, ...]`."""
        ...


def count_records(num_tokens: int, seq_len: int, what: str = "the source", cure: str = "") -> int:
    """How many records of `seq_len + 1` tokens, one every `seq_len`, lie in `num_tokens` tokens.

    Raises:
        DataError: not one; `what` names the tokens and `cure` a way out beside a smaller `seq_len`.
    """
    if num_tokens < seq_len + 1:
        raise DataError(
            f"{what} holds {num_tokens} tokens and one record of data.seq_len={seq_len} needs {seq_len + 1}: "
            f"lower data.seq_len{cure or ' or give more data'}"
        )
    return (num_tokens - 1) // seq_len


def abstract_batch(global_batch: int, seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape `[global_batch, seq_len]` and dtype of each array of a batch of records."""
    dtypes = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
    return {name: jax.ShapeDtypeStruct((global_batch, seq_len), dtype) for name, dtype in dtypes.items()}


def _check(tokens: NDArray[Any], seq_len: int, global_batch: int) -> None:
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(f"tokens must be a 1-D integer array, not {tokens.ndim}-D {tokens.dtype}")
    if global_batch < 1 or seq_len < 1:
        raise ConfigError(f"global_batch={global_batch} and seq_len={seq_len} must be at least 1")
    count_records(len(tokens), seq_len)


def _read(tokens: NDArray[Any], seq_len: int, records: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Cuts records out of the tokens; record -1 is padding, of weight 0. Copies one run of tokens for each row."""
    window = np.zeros((len(records), seq_len + 1), np.int32)
    wide = not np.can_cast(tokens.dtype, np.int32)
    for row, record in enumerate(records.tolist()):
        if record < 0:
            continue
        run = tokens[record * seq_len : record * seq_len + seq_len + 1]
        if wide and (run.min() < 0 or run.max() > _MAX_ID):
            raise DataError(f"record {record} holds a token id outside [0, {_MAX_ID}], which int32 cannot take")
        window[row] = run
    weights = np.repeat((records >= 0).astype(np.float32)[:, None], seq_len, axis=1)
    return {"tokens": window[:, :-1].copy(), "targets": window[:, 1:].copy(), "weights": weights}


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
    """The training batches of a token array, without end. See the module's text for records and their order.

    Attributes:
        tokens: 1-D integer array, shape [num_tokens]; may be memory-mapped.
        seq_len: inputs per record.
        global_batch: records per step, over all devices and microbatches.
        seed: of the order, non-negative.

    Raises:
        DataError: the tokens are no 1-D integers, or too few for one record.
    """

    tokens: NDArray[Any]
    seq_len: int
    global_batch: int
    seed: int

    def __post_init__(self) -> None:
        _check(self.tokens, self.seq_len, self.global_batch)

    @property
    def num_records(self) -> int:
        """Records in the source, which is the length of an epoch."""
        return count_records(len(self.tokens), self.seq_len)

    @property
    def num_unused_tokens(self) -> int:
        """Tokens after the last whole record: fewer than `seq_len`, never read."""
        return len(self.tokens) - 1 - self.num_records * self.seq_len

    @property
    def num_tokens_per_batch(self) -> int:
        """Targets in one global batch."""
        return self.global_batch * self.seq_len

    @property
    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Global shape `[global_batch, seq_len]` and dtype of each array of a batch."""
        return abstract_batch(self.global_batch, self.seq_len)

    def record_ids(self, step: int, rows: Rows = slice(None)) -> NDArray[np.int64]:
        """Which records the given rows of the batch of `step` (from 0) hold, shape [rows]."""
        assert step >= 0, "steps count from 0"
        sample = step * self.global_batch + np.arange(self.global_batch, dtype=np.int64)[rows]
        epoch, position = np.divmod(sample, self.num_records)
        return permute(position, epoch, self.num_records, self.seed)

    def rows(self, step: int, rows: Rows = slice(None)) -> dict[str, NDArray[Any]]:
        """The given rows of the global batch of `step`.

        Returns:
            `tokens` and `targets` (int32) and `weights` (float32, all 1), each of shape [rows, seq_len].
        """
        return _read(self.tokens, self.seq_len, self.record_ids(step, rows))


@dataclasses.dataclass(frozen=True, eq=False)
class EvalBatches:
    """The fixed validation set: the first records in order, at most `max_batches` batches of them.

    If there are fewer, the last batch ends in padding rows of weight 0, so that each record counts once in
    `sum(weights * loss) / sum(weights)` taken over all batches together. The number of batches depends on nothing
    local, so all processes run the same number.

    Attributes:
        tokens: 1-D integer array, shape [num_tokens].
        seq_len: inputs per record.
        global_batch: rows per batch, over all devices.
        max_batches: limit of the number of batches.

    Raises:
        DataError: the tokens are no 1-D integers, or too few for one record.
    """

    tokens: NDArray[Any]
    seq_len: int
    global_batch: int
    max_batches: int

    def __post_init__(self) -> None:
        _check(self.tokens, self.seq_len, self.global_batch)
        if self.max_batches < 1:
            raise ConfigError(f"max_batches={self.max_batches} must be at least 1")

    @property
    def num_records(self) -> int:
        """Records of the validation set: those that count, each once."""
        available = count_records(len(self.tokens), self.seq_len)
        return min(available, self.max_batches * self.global_batch)

    @property
    def num_batches(self) -> int:
        """Batches of the validation set; the last may be padded."""
        return -(-self.num_records // self.global_batch)

    @property
    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Global shape `[global_batch, seq_len]` and dtype of each array of a batch."""
        return abstract_batch(self.global_batch, self.seq_len)

    def record_ids(self, step: int, rows: Rows = slice(None)) -> NDArray[np.int64]:
        """Which records the given rows of validation batch `step` (from 0) hold, shape [rows]; -1 is padding."""
        assert 0 <= step < self.num_batches, f"the validation set has {self.num_batches} batches"
        sample = step * self.global_batch + np.arange(self.global_batch, dtype=np.int64)[rows]
        return np.where(sample < self.num_records, sample, -1)

    def rows(self, step: int, rows: Rows = slice(None)) -> dict[str, NDArray[Any]]:
        """The given rows of validation batch `step`.

        Returns:
            `tokens` and `targets` (int32) and `weights` (float32; 0 in padding rows), each of shape [rows, seq_len].
        """
        return _read(self.tokens, self.seq_len, self.record_ids(step, rows))


def _check_divides(global_batch: int, sharding: NamedSharding) -> None:
    axes = sharding.spec[0] if len(sharding.spec) else None
    names = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    num_shards = int(np.prod([sharding.mesh.shape[name] for name in names], dtype=np.int64))
    if global_batch % num_shards:
        raise ConfigError(
            f"train.global_batch={global_batch} records cannot be cut into {num_shards} equal parts over the mesh "
            f"axes {list(names)}: the least batch is {num_shards}; use a multiple of it"
        )


def to_global(reader: RowReader, step: int, sharding: NamedSharding) -> dict[str, jax.Array]:
    """Makes the global arrays of a step; each process reads only the rows that its devices own, each row once.

    Args:
        reader: gives rows of the global batch.
        step: counts from 0.
        sharding: of arrays `[global_batch, ...]`; devices that differ only along other axes share rows.

    Returns:
        For each name of `reader.abstract` one array of the shape and dtype given there.

    Raises:
        ConfigError: the global batch cannot be cut evenly.
    """
    abstract = reader.abstract
    read: dict[tuple[int, int], Mapping[str, NDArray[Any]]] = {}

    def fetch(name: str, index: tuple[slice, ...]) -> NDArray[Any]:
        start, stop, _ = index[0].indices(abstract[name].shape[0])
        if (start, stop) not in read:
            read[start, stop] = reader.rows(step, slice(start, stop))
        return read[start, stop][name][(slice(None), *index[1:])]

    arrays: dict[str, jax.Array] = {}
    for name, aval in abstract.items():
        _check_divides(aval.shape[0], sharding)
        arrays[name] = jax.make_array_from_callback(aval.shape, sharding, partial(fetch, name), aval.dtype)
    return arrays
