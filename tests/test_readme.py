"""The README's script runs as it is written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_script_runs_and_learns() -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "embed/embedding" in done.stdout
    loss = float(re.search(r"loss (\d+\.\d+)", done.stdout)[1])
    assert loss < 3.0


def test_every_file_that_it_names_is_there() -> None:
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"\b(?:examples|meshtrain|models|tests|docs)/[\w./-]+\w", text):
        assert (ROOT / path).exists(), path
