"""Where tokens come from: `open_source(config, seed)` turns `config.data` into a training and a validation array.

| source | tokens | validation |
|---|---|---|
| `stdlib` | the bytes of Python's own standard library (`.py` files) | held-out files |
| `text` | the bytes of the files that `data.paths` matches | held-out files; of a single file its tail |
| `tokens` | one `.npy` file, or a raw little-endian one with `data.dtype` | the tail |
| `random` | uniform ids, for benchmarks | the tail |

Files are joined in the order of their relative paths, and a zero byte, which text does not hold, ends each. Which files
are held out depends only on their relative paths and sizes, so it is the same everywhere and in every run. Training and
validation are two arrays without a common token, so no record can reach over. Single files are memory-mapped; several
text files are read into memory, so bring what is larger than that as one `tokens` file.
"""

import dataclasses
import glob
import hashlib
import os
import platform
import sysconfig
import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshtrain.config import DataConfig
from meshtrain.data.batches import count_records
from meshtrain.data.permute import hash64
from meshtrain.errors import DataError

Tokens = NDArray[Any]  # 1-D, of an integer type

CHUNK = 1 << 20  # tokens looked at together where a whole file is checked
MAX_VOCAB = 1 << 31  # ids are int32 on the device
RANDOM_TOKENS = 1 << 22  # nominal length of the random source
RANDOM_RECORDS = 64  # and the fewest records that it has, however long they are

# Tests, vendored or generated tables, and packages that are not part of the library: mostly noise to a language model.
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "ensurepip",
        "idlelib",
        "lib-dynload",
        "lib2to3",
        "site-packages",
        "test",
        "tests",
    }
)
# These differ between machines with the same Python.
SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
# What numpy lets through for damaged headers: it reads them with Python's tokenizer.
_NPY_ERRORS = (OSError, ValueError, EOFError, OverflowError, TypeError, SyntaxError, tokenize.TokenError)


@dataclasses.dataclass(frozen=True, eq=False)
class TokenSource:
    """Token ids to train on and to evaluate on.

    Attributes:
        tokens: training ids, shape [num_tokens], memory-mapped where they are a file.
        val: validation ids, shape [num_val_tokens]; None with `val_fraction=0`.
        vocab_size: all ids lie in `[0, vocab_size)`; checked when the source is opened.
        description: one line for people.
        fingerprint: identity of both arrays, see `fingerprint`.
        bytes_per_token: to turn a loss in nats per token into bits per byte,
            `loss / log(2) / bytes_per_token`; None where it is not known.
    """

    tokens: Tokens
    val: Tokens | None
    vocab_size: int
    description: str
    fingerprint: str
    bytes_per_token: float | None


@dataclasses.dataclass(frozen=True)
class _File:
    """A file of a corpus: its relative path with `/`, where it is, and its size in bytes."""

    name: str
    path: str
    size: int


@dataclasses.dataclass(frozen=True, eq=False)
class _Parts:
    """An opened source before its lengths are checked."""

    train: Tokens
    val: Tokens | None
    description: str
    bytes_per_token: float | None


def open_source(config: DataConfig, seed: int) -> TokenSource:
    """Opens the source that a config names.

    Args:
        config: the `data` section.
        seed: of the `random` source's ids; the others, and what is held out, do not depend on it.

    Raises:
        DataError: a file or glob is missing or empty, an id is not in `[0, vocab_size)`, or training or validation are
            too short for one record of `seq_len + 1` tokens.
    """
    if config.vocab_size > MAX_VOCAB:
        raise DataError(f"data.vocab_size={config.vocab_size}: ids are 32-bit integers, so at most {MAX_VOCAB}")
    if config.source == "stdlib":
        parts = _open_stdlib(config)
    elif config.source == "text":
        parts = _open_text(config)
    elif config.source == "tokens":
        parts = _open_tokens(config)
    else:
        parts = _open_random(config, seed)
    count_records(len(parts.train), config.seq_len, f"data.source={config.source}: the training part")
    if parts.val is not None:
        cure = ", raise data.val_fraction, or set it to 0 for no evaluation"
        count_records(len(parts.val), config.seq_len, f"data.source={config.source}: the validation part", cure)
    return TokenSource(
        tokens=parts.train,
        val=parts.val,
        vocab_size=config.vocab_size,
        description=parts.description,
        fingerprint=fingerprint(parts.train, parts.val),
        bytes_per_token=parts.bytes_per_token,
    )


def unigram_entropy(tokens: Tokens) -> float:
    """Entropy of the token frequencies in nats per token: the loss of a model that knows only these frequencies.

    Args:
        tokens: non-negative ids, shape [num_tokens], at least one; read in chunks.
    """
    counts = np.zeros(0, np.int64)
    for start in range(0, len(tokens), CHUNK):
        new = np.bincount(tokens[start : start + CHUNK].astype(np.int64), minlength=len(counts))
        new[: len(counts)] += counts
        counts = new
    share = counts[counts > 0] / len(tokens)
    return float(-(share * np.log(share)).sum())


def fingerprint(
    train: Tokens, val: Tokens | None, full: int = 1 << 26, num_blocks: int = 64, block: int = 1 << 16
) -> str:
    """SHA-256 over the ids and lengths of both arrays: equal data gives the same text on every machine.

    It does not depend on how ids are stored (bytes, uint16, .npy, byte order), only on their values. Of an array longer
    than `full` tokens only the length and `num_blocks` evenly spaced blocks of `block` tokens, the first and the last
    among them, are read: an edit in place between those blocks goes unseen.
    """
    digest = hashlib.sha256(b"meshtrain tokens 1")
    for tokens in (train, val):
        length = -1 if tokens is None else len(tokens)
        digest.update(f"|{length}|".encode())
        if tokens is None:
            continue
        if length <= full:
            starts, size = list(range(0, length, CHUNK)), CHUNK
        else:
            starts, size = [index * (length - block) // (num_blocks - 1) for index in range(num_blocks)], block
        for start in starts:
            digest.update(tokens[start : start + size].astype("<u4").tobytes())
    return digest.hexdigest()


def hold_out(sizes: Mapping[str, int], fraction: float) -> frozenset[str]:
    """Chooses validation files: in the order of a hash of their names, until they hold `fraction` of the bytes.

    Files larger than that share are passed over; if all are, the smallest file is held out. One file always stays for
    training. The choice is the same for equal names and sizes, on every machine and for every seed.

    Args:
        sizes: size in bytes by name, at least two.
        fraction: share of the bytes to hold out, in (0, 1).
    """
    assert len(sizes) >= 2, "with one file, nothing is left to train on"
    target = fraction * sum(sizes.values())
    order = sorted(sizes, key=lambda name: hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest())
    held: list[str] = []
    held_bytes = 0
    for name in order:
        if held_bytes < target and sizes[name] <= target and len(held) < len(sizes) - 1:
            held.append(name)
            held_bytes += sizes[name]
    return frozenset(held or [min(order, key=lambda name: sizes[name])])


def _join(files: Sequence[_File]) -> Tokens:
    """The bytes of the files, a zero byte after each."""
    joined = np.zeros(sum(file.size + 1 for file in files), np.uint8)
    start = 0
    for file in files:
        try:
            with open(file.path, "rb") as stream:
                num_read = stream.readinto(joined.data[start : start + file.size])
        except OSError as error:
            raise DataError(f"{file.path}: cannot be read: {error.strerror or error}") from None
        if num_read != file.size:
            raise DataError(f"{file.path}: held {file.size} bytes and now {num_read}: it changes while it is read")
        start += file.size + 1
    joined.flags.writeable = False
    return joined


def _split_files(files: Sequence[_File], config: DataConfig, what: str) -> _Parts:
    held = frozenset[str]()
    if config.val_fraction > 0:
        held = hold_out({file.name: file.size for file in files}, config.val_fraction)
    train = _join([file for file in files if file.name not in held])
    val = _join([file for file in files if file.name in held]) if held else None
    _check_ids(train, config, "the joined training files")
    description = f"{what}, {len(files)} files: {_megabytes(len(train))} to train on"
    if val is not None:
        _check_ids(val, config, "the joined validation files")
        description += f", {_megabytes(len(val))} in {len(held)} files held out"
    return _Parts(train, val, description, bytes_per_token=1.0)


def _split_tail(tokens: Tokens, val_fraction: float) -> tuple[Tokens, Tokens | None]:
    cut = len(tokens) - int(len(tokens) * val_fraction)
    return tokens[:cut], tokens[cut:] if val_fraction > 0 else None


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f} MB"


def _check_ids(tokens: Tokens, config: DataConfig, where: str) -> None:
    """Refuses ids outside `[0, vocab_size)`; reads the array in chunks, or not at all if its type rules them out.

    Raises:
        DataError: gives the first such id, its position and the vocabulary's size.
    """
    limits = np.iinfo(tokens.dtype)
    if limits.min >= 0 and limits.max < config.vocab_size:
        return
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        if chunk.min() >= 0 and chunk.max() < config.vocab_size:
            continue
        position = int(np.flatnonzero((chunk < 0) | (chunk >= config.vocab_size))[0])
        raise DataError(
            f"{where}: token id {chunk[position]} at position {start + position} is not in [0, {config.vocab_size}): "
            f"raise data.vocab_size={config.vocab_size}, or check the file's dtype and tokenizer"
        )


def _stdlib_files(root: str) -> list[_File]:
    real_root = os.path.realpath(root)
    files = []
    for folder, folders, names in os.walk(real_root):  # does not enter symbolic links
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("config-")]
        for name in names:
            path = os.path.join(folder, name)
            inside = os.path.realpath(path).startswith(real_root + os.sep)
            if name.endswith(".py") and not name.startswith(SKIPPED_FILES) and inside and os.path.isfile(path):
                files.append(_File(Path(path).relative_to(real_root).as_posix(), path, os.path.getsize(path)))
    return sorted((file for file in files if file.size), key=lambda file: file.name)


def _open_stdlib(config: DataConfig) -> _Parts:
    root = sysconfig.get_paths()["stdlib"]
    files = _stdlib_files(root)
    if len(files) < 2:
        raise DataError(
            f"data.source=stdlib: this Python's standard library has no .py files under {root} (stripped or zipped): "
            "set data.source=text and data.paths to files of your own"
        )
    return _split_files(files, config, f"Python {platform.python_version()}'s standard library")


def _text_files(patterns: Sequence[str]) -> list[_File]:
    """The files that any of the globs matches, sorted; each once, so that no link puts one into both parts."""
    paths: set[str] = set()
    for pattern in patterns:
        matches = glob.glob(os.path.expanduser(pattern), recursive=True)
        found = {os.path.abspath(path) for path in matches if os.path.isfile(path) and os.path.getsize(path)}
        if not found:
            reason = "files that are all empty or only folders (end it in /**/* for a folder)" if matches else "nothing"
            raise DataError(f"data.paths: '{pattern}' matches {reason}, seen from {os.getcwd()}")
        paths |= found
    # Names are relative to the deepest common folder: a corpus that moves keeps its order and its held-out files.
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    files: dict[tuple[int, int], _File] = {}
    for name, path in sorted((Path(path).relative_to(root).as_posix(), path) for path in paths):
        status = os.stat(path)
        files.setdefault((status.st_dev, status.st_ino), _File(name, path, status.st_size))
    return list(files.values())


def _open_text(config: DataConfig) -> _Parts:
    if not config.paths:
        raise DataError("data.paths is empty: data.source=text needs globs, for instance ['corpus/**/*.txt']")
    files = _text_files(config.paths)
    if len(files) > 1:
        return _split_files(files, config, f"text of {', '.join(config.paths)}")
    try:
        tokens = np.memmap(files[0].path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"{files[0].path}: cannot be read: {error}") from None
    _check_ids(tokens, config, files[0].path)
    train, val = _split_tail(tokens, config.val_fraction)
    description = f"text of {files[0].path}: {_megabytes(len(train))} to train on"
    if val is not None:
        description += f", its last {_megabytes(len(val))} held out"
    return _Parts(train, val, description, bytes_per_token=1.0)


def _map_npy(path: str, dtype: str | None) -> Tokens:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except _NPY_ERRORS as error:
        raise DataError(f"{path}: not a .npy file that can be mapped: {error}") from None
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        held = f"a {tokens.ndim}-D {tokens.dtype} array" if isinstance(tokens, np.ndarray) else "an archive"
        raise DataError(f"{path}: holds {held}; tokens are a 1-D array of integers")
    if dtype is not None and tokens.dtype != np.dtype(dtype):
        raise DataError(
            f"{path}: holds {tokens.dtype} and data.dtype={dtype}: leave data.dtype out, .npy names its own"
        )
    return tokens


def _map_raw(path: str, dtype: str | None) -> Tokens:
    if dtype is None:
        raise DataError(f"{path}: a raw token file does not say its element type: set data.dtype")
    kind = np.dtype(dtype).newbyteorder("<")
    size = os.path.getsize(path)
    if size % kind.itemsize:
        raise DataError(
            f"{path}: {size} bytes are no multiple of {kind.itemsize} (data.dtype={dtype}): cut or not {dtype}"
        )
    try:
        return np.memmap(path, dtype=kind, mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be mapped: {error}") from None


def _open_tokens(config: DataConfig) -> _Parts:
    if len(config.paths) != 1:
        raise DataError(f"data.paths has {len(config.paths)} entries: data.source=tokens reads exactly one file")
    path = os.path.expanduser(config.paths[0])
    if not os.path.isfile(path):
        raise DataError(f"data.paths: there is no file '{path}', seen from {os.getcwd()}")
    if os.path.getsize(path) == 0:
        raise DataError(f"{path}: is empty")
    tokens = (_map_npy if path.endswith(".npy") else _map_raw)(path, config.dtype)
    _check_ids(tokens, config, path)
    train, val = _split_tail(tokens, config.val_fraction)
    description = f"{path}: {len(train):,} {tokens.dtype.name} tokens to train on"
    if val is not None:
        description += f", the last {len(val):,} held out"
    return _Parts(train, val, description, bytes_per_token=None)


def _open_random(config: DataConfig, seed: int) -> _Parts:
    """Ids that are a function of seed and position alone, so a record is one of seed and record number."""
    length = max(RANDOM_TOKENS, RANDOM_RECORDS * (config.seq_len + 1))
    tokens = np.empty(length, np.min_scalar_type(config.vocab_size - 1))
    for start in range(0, length, CHUNK):
        bits = hash64(seed, np.arange(start, min(start + CHUNK, length))) >> np.uint64(32)
        # Multiply and shift (Lemire 2019): uniform but for a bias below vocab_size / 2**32.
        tokens[start : start + CHUNK] = (bits * np.uint64(config.vocab_size)) >> np.uint64(32)
    tokens.flags.writeable = False
    train, val = _split_tail(tokens, config.val_fraction)
    description = f"random: {len(train):,} uniform ids below {config.vocab_size}"
    if val is not None:
        description += f", {len(val):,} held out"
    return _Parts(train, val, description, bytes_per_token=None)
