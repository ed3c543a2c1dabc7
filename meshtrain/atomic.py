"""Small files that are either the old or the new one, never half of each."""

import os
import uuid
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replaces `path` by a file that holds `text` (UTF-8), in one step.

    The text goes to a new file beside `path`, reaches the disk, and takes the name by a rename: a reader, or a machine
    that comes up after a crash, sees the whole old text or the whole new one. Two writers at once both succeed, and
    one of the texts stays. The file's mode follows the umask, as with `Path.write_text`.

    Raises:
        OSError: the text cannot be written; `path` is then as it was.
    """
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(new, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Makes a rename in `directory` durable: POSIX keeps it in the directory, which has a sync of its own."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
