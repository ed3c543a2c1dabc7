"""The bring-your-own scripts run from top to bottom, learn, and get back from a checkpoint what they saved."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("kind", "stage", "model_axis"),
    [("nnx", 3, 2), ("linen", 2, 4), ("function", 1, 2), ("nnx", 0, 1)],
)
def test_bring_your_own(kind: str, stage: int, model_axis: int) -> None:
    script = ROOT / "examples" / f"bring_your_own_{kind}.py"
    command = [sys.executable, str(script), f"--stage={stage}", f"--model-axis={model_axis}"]
    run = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "Warning" not in run.stderr, run.stderr
    assert f"data={8 // model_axis} x model={model_axis}, ZeRO stage {stage}" in run.stdout
    losses = [float(text) for text in re.findall(r"step +\d+  loss ([\d.]+)", run.stdout)]
    assert losses[0] > 3.3 and losses[-1] < 1.0  # from above the log of the vocabulary, 3.5, to tokens that are copied
    before, after = re.findall(r"saving and restoring  loss (\S+)", run.stdout)
    assert before == after and float(after) < 1.0
