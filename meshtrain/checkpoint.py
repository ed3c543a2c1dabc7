"""Checkpoints: the logical arrays of a state, stored under names, restored onto any layout.

    with Checkpointer(run.checkpoints, keep=3) as checkpointer:
        checkpointer.save(10, state, {"tokens": 4096})      # returns once the state may change
        state = checkpointer.restore(10, abstract_state)    # straight into the shardings of abstract_state

A checkpoint knows no mesh, no ZeRO stage and no Python class: it is a flat dict of named arrays
(`params/blocks/mlp/up/kernel`, `opt_state/1/0/mu/blocks/mlp/up/kernel`) and one JSON header with the shape and dtype of
each. Orbax's stable `AsyncCheckpointer` moves the bytes and publishes `<directory>/<step>/` by a rename. Which steps
there are, which of them stay and what fits a run is decided here, from the disk, because Orbax's manager keeps a list
in memory that goes stale, casts and drops leaves without a word, and deletes in place, so that a kill leaves a half
checkpoint under a whole one's name.

Every process of a job calls `save`, `restore`, `wait` and `close`, in the same order.
"""

import contextlib
import json
import logging
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from meshtrain.errors import CheckpointError

PyTree: TypeAlias = Any
JSON: TypeAlias = None | bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"]

FORMAT = 1  # of the header; a reader refuses any other
_HEADER_FILE = "_CHECKPOINT_METADATA"  # Orbax writes it last but for the rename that publishes the step
_STEP_NAME = re.compile(r"0|[1-9][0-9]*")
_TEMPORARY_NAME = re.compile(r"[0-9]+\.(orbax-checkpoint-tmp.*|pruned)")
_SHOWN = 5  # differences that an error lists before it only counts

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves and restores the checkpoints of one run. A context manager: leaving it waits for the last save.

    Args:
        directory: holds one directory per step, `<directory>/<step>/`; made by the first save.
        keep: how many of the newest checkpoints stay, at least 1.

    Raises:
        CheckpointError: `keep` is less than 1.
    """

    def __init__(self, directory: Path | str, keep: int = 3) -> None:
        if keep < 1:
            raise CheckpointError(f"checkpoint.keep={keep}: at least 1 checkpoint must stay")
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True))
        self._pending: int | None = None
        self._saved: set[int] = set()

    def save(self, step: int, state: PyTree, meta: Mapping[str, JSON] | None = None) -> None:
        """Starts to save `state` as checkpoint `step` and returns when every array may be changed or donated.

        Waits for the save before it first. The checkpoint is listed by `steps` once all of it is on disk; only then
        are older ones pruned. Saving a step again that this object has saved does nothing.

        Args:
            step: updates done, at least 0; names the directory.
            state: a tree of `jax.Array`, typed PRNG keys included, on any layout. Nodes may be dicts, lists, tuples,
                NamedTuples or registered dataclasses; only the names on the path to a leaf are stored.
            meta: a JSON object that `meta` gives back; None stores an empty one.

        Raises:
            CheckpointError: the save before this one failed (its step is named); a leaf cannot be stored (its name is
                given); two leaves have one name; `step` was saved by another run; or the disk refuses.
        """
        if step < 0:
            raise CheckpointError(f"checkpoint of step {step}: a step is at least 0")
        self._finish()
        path = self.directory / str(step)
        there = _read_header(path) is not None
        if there and step in self._saved:
            return
        if there:
            raise CheckpointError(f"{path}: is there already, from an earlier run; move it away to save step {step}")
        leaves = _named_leaves(state)
        header = _make_header(step, leaves, meta or {})
        arrays = {name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in leaves.items()}
        try:
            if jax.process_index() == 0:
                self._clear(path)
            self._orbax.save(path, args=ocp.args.PyTreeSave(arrays), custom_metadata={"meshtrain": header})
        except Exception as error:
            self._drain()
            raise CheckpointError(f"{path}: the checkpoint of step {step} cannot be saved: {_reason(error)}") from error
        self._pending = step

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order, read from disk at each call.

        Raises:
            CheckpointError: the directory is there but cannot be read.
        """
        return [step for step, path in self._step_directories() if _read_header(path) is not None]

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return max(self.steps(), default=None)

    def leftovers(self) -> list[str]:
        """Names under the directory that are no complete checkpoint: killed saves, half copies, other files."""
        complete = {str(step) for step in self.steps()}
        return sorted({path.name for path in _listdir(self.directory)} - complete)

    def meta(self, step: int) -> dict[str, Any]:
        """What `save` was given as `meta`.

        Raises:
            CheckpointError: `step` has no complete checkpoint.
        """
        meta: dict[str, Any] = self._header(step)["meta"]
        return meta

    def restore(self, step: int, target: PyTree) -> PyTree:
        """Reads checkpoint `step` straight into the layout of `target`.

        Args:
            step: one of `steps`.
            target: a tree of `jax.ShapeDtypeStruct`, each with its sharding, on any mesh of this job.

        Returns:
            A tree like `target` of `jax.Array`, with exactly the shapes, dtypes and shardings asked for. The arrays own
            their buffers, so a step may donate them.

        Raises:
            CheckpointError: there is no such complete checkpoint; its names, shapes or dtypes differ from the target's
                (the first few are listed, nothing has been read); a target has no sharding or one that does not divide
                its shape; or stored data cannot be read.
        """
        self._finish()
        stored = self._header(step)["leaves"]
        leaves = _named_leaves(target)
        path = self.directory / str(step)
        if problems := _differences(stored, leaves):
            raise CheckpointError(f"{path} does not fit this run: {_first(problems)}")
        wanted = {name: _as_stored(leaf) for name, leaf in leaves.items()}
        restore_args = {
            name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=True)
            for name, leaf in wanted.items()
        }
        try:
            arrays = self._orbax.restore(path, args=ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args))
        except Exception as error:
            raise CheckpointError(f"{path}: the stored data cannot be read: {_reason(error)}") from error
        restored = [_as_asked(arrays.pop(name), leaf, stored[name]) for name, leaf in leaves.items()]
        return jax.tree.unflatten(jax.tree.structure(target), restored)

    def wait(self) -> None:
        """Returns when no save is under way.

        Raises:
            CheckpointError: the last save failed; its step is named, and it is not listed.
        """
        self._finish()

    def close(self) -> None:
        """Waits as `wait` does, then lets go of Orbax's threads.

        Raises:
            CheckpointError: the last save failed; its step is named, and it is not listed.
        """
        try:
            self._finish()
        finally:
            self._orbax.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except CheckpointError as failure:  # the first error is the one to show; this one goes with it
            error.add_note(str(failure))

    def _finish(self) -> None:
        """Waits for the save under way and, when it stands on disk, prunes."""
        step, self._pending = self._pending, None
        if step is None:
            return
        path = self.directory / str(step)
        error = self._drain()
        if error is not None:
            raise CheckpointError(f"{path}: the checkpoint of step {step} was not saved: {_reason(error)}") from error
        if jax.process_index() == 0:
            if _read_header(path) is None:
                raise CheckpointError(f"{path}: the checkpoint of step {step} was not saved: it is not on disk")
            self._prune(step)
        self._saved.add(step)

    def _drain(self) -> Exception | None:
        """Waits until Orbax does nothing more; returns the first error, if any.

        Each of its threads reports its error by one raise: one left over would pass for the next save's.
        """
        first: Exception | None = None
        while True:
            try:
                self._orbax.wait_until_finished()
                return first
            except Exception as error:
                first = first or error

    def _prune(self, saved: int) -> None:
        """Deletes all but the newest `keep`. `saved` stays even below newer ones of an abandoned continuation."""
        for step in self.steps()[: -self._keep]:
            if step != saved:
                path = self.directory / str(step)
                pruned = path.with_name(f"{step}.pruned")
                path.rename(pruned)  # first: a deletion that is killed half-way must not look like a checkpoint
                shutil.rmtree(pruned, ignore_errors=True)

    def _clear(self, path: Path) -> None:
        """Removes what killed saves and deletions left, and moves an incomplete directory out of `path`."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for entry in _listdir(self.directory):
            if _TEMPORARY_NAME.fullmatch(entry.name):
                shutil.rmtree(entry)
        with contextlib.suppress(OSError):  # an empty directory holds nothing to keep
            path.rmdir()
        if path.exists() or path.is_symlink():
            aside = path.with_name(f"{path.name}.incomplete-{time.time_ns()}")
            path.rename(aside)
            logger.warning("%s was no complete checkpoint and is now %s; delete it if nobody needs it", path, aside)

    def _step_directories(self) -> list[tuple[int, Path]]:
        """Step and path of each real directory named by an integer. A link could lead out of the run: not taken."""
        return sorted(
            (int(path.name), path)
            for path in _listdir(self.directory)
            if _STEP_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        )

    def _header(self, step: int) -> dict[str, Any]:
        if step in (steps := self.steps()):
            header = _read_header(self.directory / str(step))
            if header is not None and header["format"] == FORMAT:
                return header
            if header is not None:
                raise CheckpointError(f"{self.directory / str(step)}: of format {header['format']}, not {FORMAT}")
        found = f"complete: {steps or 'none'}; other names there: {self.leftovers() or 'none'}"
        raise CheckpointError(f"{self.directory}: no complete checkpoint of step {step} ({found})")


def _listdir(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read: {_reason(error)}") from None


def _read_header(path: Path) -> dict[str, Any] | None:
    """The header of the checkpoint at `path`, or None where there is no complete one."""
    if path.is_symlink():
        return None
    try:
        record = json.loads((path / _HEADER_FILE).read_bytes())
        header = record["custom_metadata"]["meshtrain"]
        committed = record["commit_timestamp_nsecs"]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    except OSError as error:  # it may be complete: to pass over it would repeat the training in silence
        raise CheckpointError(f"{path}: cannot be read: {_reason(error)}") from None
    return header if committed and isinstance(header, dict) and "format" in header else None


def _make_header(step: int, leaves: Mapping[str, jax.Array], meta: Mapping[str, JSON]) -> dict[str, Any]:
    """The JSON that goes with the arrays: a deep copy, because the file is written after `save` has returned."""
    described = {name: _describe(name, leaf) for name, leaf in leaves.items()}
    try:
        text = json.dumps({"format": FORMAT, "step": step, "leaves": described, "meta": meta})
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint of step {step}: meta must be a JSON object: {error}") from None
    header: dict[str, Any] = json.loads(text)
    return header


def _describe(name: str, leaf: Any) -> dict[str, JSON]:
    """Dtype, shape and, of typed keys, the implementation, as the header has them."""
    if not isinstance(leaf, jax.Array):
        raise CheckpointError(f"'{name}' is a {type(leaf).__name__}: a state holds jax.Array leaves only")
    if leaf.size == 0:
        raise CheckpointError(f"'{name}' has shape {leaf.shape}: an array without elements cannot be stored")
    described: dict[str, JSON] = {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}
    if _is_key(leaf):
        implementation = jax.random.key_impl(leaf)
        if not isinstance(implementation, str):
            raise CheckpointError(
                f"'{name}' has keys of an unnamed implementation: use jax.random.key(seed, impl=name)"
            )
        described["impl"] = implementation
    return described


def _named_leaves(tree: PyTree) -> dict[str, Any]:
    """Each leaf under the `/`-joined keys, attributes and indices that lead to it, in the tree's order.

    A dict key may itself hold `/`: `{"params": {"mlp/up": x}}` and `{"params": {"mlp": {"up": x}}}` store the same.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not name:
            raise CheckpointError("a state must be a dict or other container of named arrays, not a single array")
        if name in leaves:
            raise CheckpointError(f"two leaves of the state are called '{name}': rename one")
        leaves[name] = leaf
    if not leaves:
        raise CheckpointError("the state holds no arrays")
    return leaves


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _differences(stored: Mapping[str, Any], leaves: Mapping[str, Any]) -> list[str]:
    """What keeps a checkpoint from being restored as asked, one phrase each, missing names first."""
    problems = [f"'{name}' is not in the checkpoint" for name in leaves if name not in stored]
    problems += [f"'{name}' is in the checkpoint only" for name in stored if name not in leaves]
    for name, leaf in leaves.items():
        if name in stored:
            there = f"{stored[name]['dtype']}{stored[name]['shape']}"
            here = f"{leaf.dtype}{list(leaf.shape)}"
            if there != here:
                problems.append(f"'{name}' is stored as {there}, this run has {here}")
            problems += _sharding_problem(name, leaf)
    return problems


def _sharding_problem(name: str, leaf: Any) -> list[str]:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return [f"'{name}' has no sharding in the target"]
    try:
        sharding.shard_shape(tuple(leaf.shape))
    except ValueError as error:
        return [f"'{name}' cannot be laid out as asked ({error})"]
    return []


def _first(problems: Sequence[str]) -> str:
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "; ".join(problems[:_SHOWN]) + more


def _as_stored(leaf: Any) -> jax.ShapeDtypeStruct:
    """The target of the array that is stored for `leaf`: typed keys are stored as their integers."""
    if not _is_key(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):  # the integers of one key, the last dim, stay together
        spec = PartitionSpec(*sharding.spec, *(None,) * (len(data.shape) - len(sharding.spec)))
        sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _as_asked(array: jax.Array, leaf: Any, stored: Mapping[str, Any]) -> jax.Array:
    devices: Any = array.sharding.device_set
    if all(device.platform == "cpu" for device in devices):
        # There, Orbax's arrays share the memory of NumPy arrays, and XLA copies instead of donating such memory.
        array = jnp.copy(array)
    if not _is_key(leaf):
        return array
    keys: jax.Array = jax.device_put(jax.random.wrap_key_data(array, impl=stored["impl"]), leaf.sharding)
    return keys


def _reason(error: BaseException) -> str:
    """The error's first line: storage libraries add pages of their own internals."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
