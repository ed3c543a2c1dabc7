"""Eight virtual CPU devices for every test, set before jax is first imported."""

import importlib.metadata
import os
import tempfile

import pytest

# Tests compile much and compute little: LLVM's optimizations cost more than they save. With jax 0.10.2 three steps
# compile in 7.6 s with the first three of these flags alone, in 4.2 s with all. XLA's own passes, which decide about
# sharding and collectives, stay as they are.
FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if importlib.metadata.version("jaxlib").startswith("0.10."):  # newer ones do not know it
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# One engine's step is compiled by many tests: the first to compile it in this session keeps it for all workers, which
# inherit the folder's name. Tests about a cold start name a folder of their own.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="meshtrain-tests-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says loudly what could not be tested on this machine."""
    skipped = {str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", [])}
    for text in sorted(text.removeprefix("Skipped: ") for text in skipped if "no SLURM" in text):
        terminalreporter.write_line(f"#### NOT TESTED: {text}", red=True, bold=True)
