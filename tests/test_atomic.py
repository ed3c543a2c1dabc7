"""A reader sees the old text or the new one."""

import os
import threading
from pathlib import Path

import pytest

from meshtrain import atomic


def test_replaces_the_text_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    atomic.write_text(path, "old\n")
    atomic.write_text(path, "né\n")
    assert path.read_bytes() == "né\n".encode()
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_write_that_fails_keeps_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    atomic.write_text(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        atomic.write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_the_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        atomic.write_text(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_readers_beside_writers_see_whole_texts(tmp_path: Path) -> None:
    path = tmp_path / "a"
    texts = [str(i) * 5000 for i in range(4)]
    atomic.write_text(path, texts[0])

    def write(text: str) -> None:
        for _ in range(5):
            atomic.write_text(path, text)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    seen = {path.read_text()}
    while any(thread.is_alive() for thread in threads):
        seen.add(path.read_text())
    assert seen <= set(texts)
    assert os.listdir(tmp_path) == ["a"]
