"""What is printed to be copied."""

import sys
from pathlib import Path

import pytest

from meshtrain.terminal import command_line, command_name, last_of_each_key, show_path


def test_the_last_of_a_key_stands_in_its_first_place() -> None:
    assert last_of_each_key(["a.yaml", "x=1", "y=2", "x=3"]) == ["a.yaml", "x=3", "y=2"]
    assert command_line("a b.yaml", "x=[1, 2]", "x=1") == "'a b.yaml' x=1"


def test_a_program_that_is_not_on_path_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "meshtrain-test"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert command_name(str(program)) == "bin/meshtrain-test"
    monkeypatch.setenv("PATH", str(program.parent))
    assert command_name(str(program)) == "meshtrain-test"
    assert command_name("/elsewhere/meshtrain/cli.py").endswith(" -m meshtrain.cli")
    assert Path(sys.executable).name in command_name("cli.py")


def test_paths_are_relative_below_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert show_path(tmp_path / "runs" / "x") == "runs/x"
    assert show_path(tmp_path.parent) == str(tmp_path.parent)
