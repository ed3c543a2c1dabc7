"""Compiles a run's training step for a cluster that is not here, in a process of its own.

    facts = compile_step(load("config.yaml"), Cluster("h100", nodes=16, gpus_per_node=8))

XLA can compile for GPUs on a machine without any, given the figures of the card (`gpus.py`) and the compiler's own
files (the extra `plan`). Where they are not installed, the step is compiled on as many virtual CPU devices instead.
"""

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from meshtrain import errors
from meshtrain.config import Config
from meshtrain.errors import MeshError, PlanError, UserError
from meshtrain.plan.facts import Cluster, Facts, Platform
from meshtrain.plan.gpus import Card
from meshtrain.plan.gpus import card as known_card

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
INSTALL = "pip install 'meshtrain[plan]'"
_ERRORS = {kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type)}
_XLA_FLAGS = (
    "--xla_gpu_autotune_level=0",  # there is no GPU to try kernels on
    "--xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false",  # with jax 0.12 it aborts from 16 hosts on
    "--xla_gpu_enable_latency_hiding_scheduler=true",
)


def compile_step(config: Config, cluster: Cluster, *, card: Card | None = None, timeout_s: float = 600.0) -> Facts:
    """Compiles the step that `meshtrain train` would run with this config on that cluster.

    Args:
        card: the cluster's GPU; None: the known one of that name.
        timeout_s: after which the compiler is stopped.

    Raises:
        UserError: the config, its model and the cluster do not fit together.
        PlanError: the compiler failed, was killed, or took too long.
    """
    card = card or known_card(cluster.gpu)
    check_mesh(config, cluster)
    with tempfile.TemporaryDirectory(prefix="meshtrain-plan-") as name:
        folder = Path(name)
        (folder / "dump").mkdir()
        request = {
            "config": config.model_dump(mode="json"),
            "cluster": dataclasses.asdict(cluster),
            "card": dataclasses.asdict(card),
            "platform": platform(),
            "dump": str(folder / "dump"),
        }
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        answer = _run(folder, timeout_s)
    if "error" in answer:
        raise _ERRORS.get(answer["kind"], UserError)(answer["error"])
    return Facts.from_json(answer["facts"])


def platform() -> Platform:
    """What steps are compiled for: "cuda" if the plugin is installed."""
    return "cuda" if any(importlib.util.find_spec(name) for name in PLUGINS) else "cpu"


def check_mesh(config: Config, cluster: Cluster) -> None:
    """Checks that the config's mesh has as many devices as the cluster.

    Raises:
        MeshError: it has not, or the cluster has none.
    """
    if cluster.nodes < 1 or cluster.gpus_per_node < 1:
        raise MeshError(f"a cluster of {cluster.nodes} x {cluster.gpus_per_node} GPUs has none: give at least one each")
    data, model = config.mesh.data, config.mesh.model
    if data == -1 and cluster.num_gpus % model == 0:
        return
    if data * model != cluster.num_gpus:
        needs = "does not divide them" if data == -1 else f"with mesh.data={data} needs {data * model}"
        raise MeshError(
            f"{cluster.nodes} x {cluster.gpus_per_node} = {cluster.num_gpus} GPUs were given, and mesh.model={model} "
            f"{needs}: change --nodes and --gpus-per-node, or set mesh.data=-1 (all that are left) and a mesh.model "
            "that divides them"
        )


def _run(folder: Path, timeout_s: float) -> dict[str, Any]:
    """The worker's answer to the request in a folder."""
    answer, log = folder / "answer.json", folder / "log"
    command = [sys.executable, "-m", "meshtrain.plan.worker", str(folder / "request.json"), str(answer)]
    with log.open("wb") as stream:
        process = subprocess.Popen(  # noqa: S603
            command, env=_environment(), stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise PlanError(
                f"the compiler took longer than {timeout_s:.0f} s and was stopped: a model that is not scanned over "
                "its layers takes long; give it more time, or scan the layers"
            ) from None
        finally:
            process.kill()
            process.wait()
    if code == 0 and answer.exists():
        return dict(json.loads(answer.read_text(encoding="utf-8")))
    raise PlanError(_explain(code, log.read_text(encoding="utf-8", errors="replace")))


def _environment() -> dict[str, str]:
    """Ours, with jax on CPU only (with the plugin it would look for a GPU), and the flags before the user's."""
    flags = [*_XLA_FLAGS, os.environ.get("XLA_FLAGS", "")]
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # what is not compiled tells nothing
        "XLA_FLAGS": " ".join(flag for flag in flags if flag),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),  # where the user's model lies
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }


def _explain(code: int, log: str) -> str:
    """One line for a worker that ended without an answer."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    told = next((line for line in reversed(lines) if _tells(line)), lines[-1] if lines else "it said nothing")
    last = told if len(told) <= 300 else f"{told[:300]}..."
    if code == -signal.SIGKILL:
        return (
            "the compiler was killed, most likely because this machine has too little memory (a large model takes "
            "about 2 GB): close other programs, or compile on a larger machine"
        )
    if "ptxas" in log and "not" in log:
        return f"the assembler for GPUs, ptxas, is missing or does not work ({last}): {INSTALL}"
    if "Failed to load" in log and "cudnn" in log.lower():
        return f"cuDNN, which attention on GPUs needs, is missing ({last}): {INSTALL}"
    if "Unknown flag" in log or "Unknown flags" in log:
        return f"XLA_FLAGS holds a flag that this version of XLA does not know: {last}"
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return f"the compiler ended {how}: {last}; a smaller mesh or another layout may compile; please report this"


def _tells(line: str) -> bool:
    """Whether a line of a log is more than a frame of a stack trace or a note of the logger."""
    return any(word in line for word in ("Error", "error:", "Check failed", "F0000", "Unknown flag"))
