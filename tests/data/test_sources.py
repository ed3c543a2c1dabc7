"""Opening sources: what is read, what is held out, and what is refused."""

import hashlib
import math
import os
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtrain.config import DataConfig
from meshtrain.data import sources
from meshtrain.data.batches import Batches, EvalBatches
from meshtrain.data.sources import fingerprint, hold_out, open_source, unigram_entropy
from meshtrain.errors import DataError


def _text(**kwargs: Any) -> sources.TokenSource:
    return open_source(DataConfig(source="text", **{"seq_len": 2, **kwargs}), seed=0)


def _tokens(path: Path, **kwargs: Any) -> sources.TokenSource:
    return open_source(DataConfig(source="tokens", paths=[str(path)], **{"seq_len": 2, **kwargs}), seed=0)


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    return root


def _as_text(tokens: np.ndarray | None) -> str:
    assert tokens is not None
    return bytes(tokens).decode()


# ---------------------------------------------------------------- stdlib


def test_stdlib_is_there_and_repeats() -> None:
    config = DataConfig()
    source, again = open_source(config, seed=0), open_source(config, seed=1)
    assert source.val is not None and again.val is not None
    assert source.fingerprint == again.fingerprint
    total = len(source.tokens) + len(source.val)
    assert 2e6 < total < 40e6
    assert 0.05 <= len(source.val) / total < 0.1
    assert (source.vocab_size, source.bytes_per_token) == (256, 1.0)
    assert 2.5 < unigram_entropy(source.tokens) < 3.5  # English prose and code: 4 to 5 bits a byte
    text = source.tokens.tobytes() + source.val.tobytes()
    root = Path(sysconfig.get_paths()["stdlib"])
    assert all((root / name).read_bytes() + b"\0" in text for name in ("abc.py", "json/decoder.py"))


def test_stdlib_skips_noise_and_links_that_lead_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"a.py": "AAA", "pkg/b.py": "BBB", "pkg/sub/c.py": "CCC"}
    skipped = ["test/x.py", "pkg/tests/x.py", "site-packages/x.py", "__pycache__/x.py", "config-3.11-x/x.py"]
    skipped += ["_sysconfigdata_linux.py", "readme.txt", "lib-dynload/x.py"]
    root = _write(tmp_path / "lib", {**kept, **dict.fromkeys(skipped, "NO"), "empty.py": ""})
    _write(tmp_path / "outside", {"secret.py": "SECRET", "folder/secret.py": "SECRET"})
    (root / "link.py").symlink_to(tmp_path / "outside/secret.py")
    (root / "linked").symlink_to(tmp_path / "outside/folder")
    (root / "broken.py").symlink_to(tmp_path / "gone.py")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    source = open_source(DataConfig(val_fraction=0, seq_len=2), seed=0)
    assert _as_text(source.tokens) == "AAA\0BBB\0CCC\0"
    assert source.val is None


@pytest.mark.parametrize("make", ["missing", "zip", "compiled"])
def test_a_stripped_or_zipped_stdlib_is_refused(make: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "python311.zip"
    if make == "zip":
        root.write_bytes(b"PK")
    if make == "compiled":
        _write(root, {"abc.pyc": "x", "json/decoder.pyc": "x"})
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    with pytest.raises(DataError, match=r"no .py files under .*python311.zip .*data.source=text"):
        open_source(DataConfig(), seed=0)


# ---------------------------------------------------------------- held-out files


@given(
    st.dictionaries(st.text(min_size=1, max_size=8), st.integers(1, 10**6), min_size=2, max_size=40),
    st.floats(0.001, 0.999),
)
@settings(deadline=None, max_examples=100)
def test_hold_out_leaves_both_sides_files(sizes: dict[str, int], fraction: float) -> None:
    held = hold_out(sizes, fraction)
    assert 0 < len(held) < len(sizes)
    assert held <= set(sizes)
    target, num_bytes = fraction * sum(sizes.values()), sum(sizes[name] for name in held)
    assert num_bytes < 2 * target or held == {min(sizes, key=lambda name: sizes[name])} or len(held) == 1
    assert hold_out(dict(reversed(sizes.items())), fraction) == held


def test_hold_out_is_a_fixed_choice_near_the_fraction() -> None:
    sizes = {f"file{number}.txt": 100 for number in range(200)}
    held = hold_out(sizes, 0.1)
    assert len(held) == 20
    first = min(sizes, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert first in held


def test_hold_out_of_large_files_takes_the_smallest() -> None:
    assert hold_out({"a": 1000, "b": 999, "c": 1001}, 0.05) == {"b"}


# ---------------------------------------------------------------- text


def test_text_files_are_joined_in_order_and_some_held_out(tmp_path: Path) -> None:
    _write(tmp_path, {"b/two.txt": "two", "a.txt": "one", "b/c/three.txt": "three", "z.md": "no", "empty.txt": ""})
    whole = _text(paths=[f"{tmp_path}/**/*.txt"], val_fraction=0)
    assert _as_text(whole.tokens) == "one\0three\0two\0"
    assert whole.val is None and whole.bytes_per_token == 1.0
    split = _text(paths=[f"{tmp_path}/**/*.txt"], val_fraction=0.3)
    names = _as_text(split.tokens).split("\0")[:-1], _as_text(split.val).split("\0")[:-1]
    assert sorted(names[0] + names[1]) == ["one", "three", "two"] and all(names)


def test_a_moved_corpus_keeps_its_split_and_fingerprint(tmp_path: Path) -> None:
    files = {f"{number % 3}/{number}.txt": f"text number {number}" for number in range(20)}
    here, there = _write(tmp_path / "here", files), _write(tmp_path / "some/where/else", files)
    first = _text(paths=[f"{here}/**/*.txt"], val_fraction=0.2)
    second = _text(paths=[f"{there}/1/*.txt", f"{there}/**/*.txt"], val_fraction=0.2)
    np.testing.assert_array_equal(first.tokens, second.tokens)
    np.testing.assert_array_equal(first.val, second.val)
    assert first.fingerprint == second.fingerprint


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    """A link would otherwise put the same text into training and validation."""
    _write(tmp_path, {"a.txt": "aaaa", "b.txt": "bbbb"})
    (tmp_path / "c.txt").symlink_to(tmp_path / "a.txt")
    os.link(tmp_path / "b.txt", tmp_path / "d.txt")
    source = _text(paths=[f"{tmp_path}/*.txt", f"{tmp_path}/a.txt"], val_fraction=0)
    assert _as_text(source.tokens) == "aaaa\0bbbb\0"


def test_a_single_text_file_is_mapped_and_its_tail_held_out(tmp_path: Path) -> None:
    _write(tmp_path, {"a.txt": "0123456789"})
    source = _text(paths=[f"{tmp_path}/a.txt"], val_fraction=0.3)
    assert isinstance(source.tokens, np.memmap) and isinstance(source.val, np.memmap)
    assert (_as_text(source.tokens), _as_text(source.val)) == ("0123456", "789")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [("*.md", "matches nothing"), ("folder", "only folders"), ("none*.txt", "all empty"), ("gone/**/*.txt", "nothing")],
)
def test_globs_without_text_are_refused_by_name(pattern: str, reason: str, tmp_path: Path) -> None:
    _write(tmp_path, {"a.txt": "aaaa", "folder/a.txt": "a", "none1.txt": "", "none2.txt": ""})
    with pytest.raises(DataError, match=reason) as error:
        _text(paths=[f"{tmp_path}/a.txt", f"{tmp_path}/{pattern}"])
    assert f"'{tmp_path}/{pattern}'" in str(error.value)


def test_text_needs_paths() -> None:
    with pytest.raises(DataError, match=r"data\.paths is empty"):
        _text()


def test_bytes_outside_a_small_vocabulary_are_refused(tmp_path: Path) -> None:
    _write(tmp_path, {"a.txt": "plain", "b.txt": "caf\u00e9", "c.txt": "plain"})
    with pytest.raises(DataError, match=r"token id 195 at position 3 is not in \[0, 128\)"):
        _text(paths=[f"{tmp_path}/b.txt"], vocab_size=128)
    with pytest.raises(DataError, match=r"joined training files: token id 195 at position 9 .*vocab_size=128"):
        _text(paths=[f"{tmp_path}/*.txt"], vocab_size=128, val_fraction=0)
    assert _text(paths=[f"{tmp_path}/a.txt"], vocab_size=128, val_fraction=0).vocab_size == 128


# ---------------------------------------------------------------- token files


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_raw_and_npy_files_hold_the_same_source(dtype: str, tmp_path: Path) -> None:
    ids = np.arange(200).astype(dtype)
    ids.astype(np.dtype(dtype).newbyteorder("<")).tofile(tmp_path / "ids.bin")
    np.save(tmp_path / "ids.npy", ids)
    raw, npy = _tokens(tmp_path / "ids.bin", dtype=dtype), _tokens(tmp_path / "ids.npy")
    for source in (raw, npy):
        assert isinstance(source.tokens, np.memmap) and source.val is not None
        np.testing.assert_array_equal(source.tokens, np.arange(190))
        np.testing.assert_array_equal(source.val, np.arange(190, 200))
        assert source.bytes_per_token is None
    assert raw.fingerprint == npy.fingerprint


def test_npy_of_other_types(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(100, dtype=">i8"))
    np.testing.assert_array_equal(_tokens(tmp_path / "ids.npy", val_fraction=0).tokens, np.arange(100))
    assert _tokens(tmp_path / "ids.npy", val_fraction=0).val is None


@pytest.mark.parametrize("position", [0, 7, 1 << 20, (3 << 20) + 5])
@pytest.mark.parametrize(("bad", "vocab_size"), [(256, 256), (60000, 300), (-1, 256)])
def test_an_id_outside_the_vocabulary_is_named(bad: int, vocab_size: int, position: int, tmp_path: Path) -> None:
    ids = np.zeros((3 << 20) + 6, np.int16 if bad < 0 else np.uint16)
    ids[position:] = 5
    ids[position] = bad
    np.save(tmp_path / "ids.npy", ids)
    with pytest.raises(
        DataError, match=rf"ids.npy: token id {bad} at position {position} is not in \[0, {vocab_size}\)"
    ):
        _tokens(tmp_path / "ids.npy", vocab_size=vocab_size)


def test_the_largest_id_is_allowed(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.full(100, 299, np.uint16))
    assert _tokens(tmp_path / "ids.npy", vocab_size=300).vocab_size == 300


def test_wrong_token_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"x" * 101)
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "text.npy").write_bytes(b"not an array at all")
    np.save(tmp_path / "grid.npy", np.zeros((10, 10), np.uint16))
    np.save(tmp_path / "real.npy", np.zeros(100, np.float32))
    np.save(tmp_path / "good.npy", np.zeros(100, np.uint16))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "good.npy").read_bytes()[:-10])
    np.savez(tmp_path / "archive.npz", np.zeros(100, np.uint16))
    (tmp_path / "archive.npz").rename(tmp_path / "archive.npy")
    for name, dtype, message in [
        ("odd.bin", "uint16", "101 bytes are no multiple of 2"),
        ("odd.bin", None, "set data.dtype"),
        ("empty.bin", "uint16", "empty"),
        ("text.npy", None, "not a .npy file"),
        ("grid.npy", None, "2-D uint16"),
        ("real.npy", None, "1-D float32"),
        ("cut.npy", None, "not a .npy file that can be mapped"),
        ("archive.npy", None, "an archive"),
        ("good.npy", "uint32", "holds uint16 and data.dtype=uint32"),
        ("gone.bin", "uint16", "there is no file"),
        ("", "uint16", "there is no file"),
    ]:
        with pytest.raises(DataError, match=message) as error:
            _tokens(tmp_path / name, dtype=dtype)
        assert str(tmp_path / name) in str(error.value)
    with pytest.raises(DataError, match=r"2 entries: data\.source=tokens reads exactly one"):
        open_source(DataConfig(source="tokens", paths=["a", "b"]), seed=0)


def test_damaged_npy_headers_are_refused(tmp_path: Path) -> None:
    """Each of these makes numpy raise an error of another type."""
    np.save(tmp_path / "good.npy", np.zeros(100, np.uint16))
    good = (tmp_path / "good.npy").read_bytes()
    for old, new in [(b"(100,)", b"(100, "), (b"(100,)", b"(999,)"), (b"'<u2'", b"'O8' "), (b"{'desc", b",'desc")]:
        (tmp_path / "ids.npy").write_bytes(good.replace(old, new))
        with pytest.raises(DataError, match=r"ids\.npy: not a \.npy file"):
            _tokens(tmp_path / "ids.npy")
    (tmp_path / "ids.npy").write_bytes(good[:60])
    with pytest.raises(DataError, match=r"ids\.npy: not a \.npy file"):
        _tokens(tmp_path / "ids.npy")


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (os.mkdir, (str(tmp_path / "sprung"),))

    np.save(tmp_path / "ids.npy", np.array([Trap()] * 10, object), allow_pickle=True)
    with pytest.raises(DataError, match=r"ids\.npy"):
        _tokens(tmp_path / "ids.npy")
    assert not (tmp_path / "sprung").exists()


def test_vocabularies_beyond_int32_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"at most {2**31}"):
        open_source(DataConfig(source="random", vocab_size=2**31 + 1), seed=0)


# ---------------------------------------------------------------- random


def test_random_ids_are_a_function_of_seed_and_position() -> None:
    config = DataConfig(source="random", vocab_size=1000, val_fraction=0)
    first, again, other = open_source(config, 1), open_source(config, 1), open_source(config, 2)
    longer = open_source(DataConfig(source="random", vocab_size=1000, val_fraction=0, seq_len=1 << 17), 1)
    assert len(first.tokens) == sources.RANDOM_TOKENS < len(longer.tokens)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    np.testing.assert_array_equal(first.tokens, longer.tokens[: len(first.tokens)])
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert np.mean(first.tokens == other.tokens) < 0.002


def test_random_ids_are_uniform() -> None:
    source = open_source(DataConfig(source="random", vocab_size=50257), 0)
    assert source.tokens.dtype == np.uint16 and source.bytes_per_token is None
    counts = np.bincount(source.tokens, minlength=50257)
    expected = len(source.tokens) / 50257
    assert len(counts) == 50257
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - 50256) < 4 * math.sqrt(2 * 50256)  # a fixed number: cannot fail by chance


# ---------------------------------------------------------------- lengths, leaks, figures


@pytest.mark.parametrize(("num_tokens", "val_fraction", "part"), [(10, 0.0, "training"), (30, 0.2, "validation")])
def test_too_short_for_one_record(num_tokens: int, val_fraction: float, part: str, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.zeros(num_tokens, np.uint8))
    held = 10 if part == "training" else 6
    with pytest.raises(DataError, match=rf"{part} part holds {held} tokens and one record of data.seq_len=10 needs 11"):
        _tokens(tmp_path / "ids.npy", seq_len=10, val_fraction=val_fraction)


@given(num_tokens=st.integers(60, 900), val_fraction=st.floats(0.1, 0.8), seq_len=st.integers(1, 5))
@settings(deadline=None, max_examples=25)
def test_no_training_record_holds_a_validation_token(
    tmp_path_factory: pytest.TempPathFactory, num_tokens: int, val_fraction: float, seq_len: int
) -> None:
    path = tmp_path_factory.mktemp("leak") / "ids.npy"
    np.save(path, np.arange(num_tokens, dtype=np.uint16))  # each id is its own position
    source = _tokens(path, vocab_size=1000, seq_len=seq_len, val_fraction=val_fraction)
    assert source.val is not None
    batches = Batches(source.tokens, seq_len, 16, seed=0)
    steps = range(-(-batches.num_records // 16))
    train = {int(t) for step in steps for name in ("tokens", "targets") for t in batches.rows(step)[name].ravel()}
    val_batches = EvalBatches(source.val, seq_len, 16, max_batches=999)
    val = set[int]()
    for step in range(val_batches.num_batches):
        batch = val_batches.rows(step)
        val |= {int(t) for name in ("tokens", "targets") for t in batch[name][batch["weights"] > 0]}
    assert train and val and not train & val
    assert max(train) < min(val)
    assert len(source.val) == int(num_tokens * val_fraction)


def test_no_held_out_file_is_trained_on(tmp_path: Path) -> None:
    files = {f"{number}.txt": f"<{number}>" * 20 for number in range(10, 40)}
    _write(tmp_path, files)
    source = _text(paths=[f"{tmp_path}/*.txt"], val_fraction=0.2)
    train, val = _as_text(source.tokens), _as_text(source.val)
    sides = [(text in train, text in val) for text in files.values()]
    assert all(in_train != in_val for in_train, in_val in sides)
    assert sum(in_val for _, in_val in sides) == 6


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=300))
@settings(deadline=None, max_examples=30)
def test_fingerprint_is_of_values(ids: list[int]) -> None:
    array = np.array(ids, np.int64)
    assert fingerprint(array, None) == fingerprint(array.astype(">u2"), None)
    assert fingerprint(array, None) != fingerprint(array, array[:0])
    assert fingerprint(array[:-1], array[-1:]) != fingerprint(array, None)
    changed = array.copy()
    changed[len(ids) // 2] += 1
    assert fingerprint(array, None) != fingerprint(changed, None)


def test_fingerprint_does_not_change_between_versions() -> None:
    assert fingerprint(np.arange(5, dtype=np.uint8), None) == (
        "c276b298465f02c3d1e2f0bfb205827bb034f8c0027c297f72ac45c9a3728fe8"
    )


def test_fingerprint_of_long_arrays_samples_blocks() -> None:
    ids = np.arange(1000, dtype=np.uint16)

    def changed(position: int) -> bool:
        other = ids.copy()
        other[position] += 1
        sampled = [fingerprint(array, None, full=999, num_blocks=4, block=10) for array in (ids, other)]
        return sampled[0] != sampled[1]

    assert [changed(position) for position in (0, 9, 10, 330, 339, 340, 989, 990, 999)] == [
        *(True, True, False),
        *(True, True, False),
        *(False, True, True),
    ]
    assert fingerprint(ids, None, full=999) != fingerprint(ids[:-1], None, full=998)


@pytest.mark.parametrize("num_tokens", [1, 4, (1 << 20) + 8])
def test_unigram_entropy(num_tokens: int) -> None:
    even = np.resize(np.array([3, 0, 7, 9], np.uint8), num_tokens)
    assert unigram_entropy(even) == pytest.approx(0 if num_tokens == 1 else math.log(4), abs=1e-12)


def test_unigram_entropy_of_uneven_frequencies() -> None:
    assert unigram_entropy(np.array([1, 1, 1, 2])) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    growing = np.concatenate([np.zeros(1 << 20, np.uint16), np.full(1 << 20, 60000, np.uint16)])  # a new id per chunk
    assert unigram_entropy(growing) == pytest.approx(math.log(2), abs=1e-12)
