"""The console that everything is printed on."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

PIPE_WIDTH = 150  # characters, where the output is no terminal


class Terminal(Console):
    """A console that leaves it to the command line what happens when the reader of its output goes away."""

    def on_broken_pipe(self) -> None:
        """Called while a `BrokenPipeError` is handled."""
        raise


def wide_terminal() -> Terminal:
    """A console for wide tables: where the output is no terminal it has `PIPE_WIDTH` characters."""
    console = Terminal()
    return console if console.is_terminal else Terminal(width=PIPE_WIDTH)


def command_name(argv0: str) -> str:
    """How this program can be started again from the same prompt: `meshtrain`, or its path if that is not on PATH.

    Args:
        argv0: `sys.argv[0]`.
    """
    path = Path(argv0)
    if path.suffix == ".py":  # python -m meshtrain.cli
        return f"{shlex.quote(show_path(Path(sys.executable).absolute()))} -m meshtrain.cli"
    found = shutil.which(path.name)
    if not path.is_file():  # a name that the shell found, or a notebook
        return path.name if found else "meshtrain"
    if found is not None and os.path.samefile(found, path):
        return path.name
    return shlex.quote(show_path(path.absolute()))


def command_line(*words: str) -> str:
    """A command to copy, in which the last of several `key=value` of one key stands alone."""
    return shlex.join(last_of_each_key(words))


def last_of_each_key(words: Iterable[str]) -> list[str]:
    """The words in order, without the `key=value` that a later one of the same key overrides."""
    last = {word.partition("=")[0] if "=" in word else word: word for word in words}
    return list(last.values())


def show_path(path: Path) -> str:
    """A path as a person at this prompt would write it: relative, if it lies below the working directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
