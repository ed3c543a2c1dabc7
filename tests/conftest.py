"""Eight virtual CPU devices for every test, set before jax is first imported."""

import os

# Tests compile much and compute little: LLVM's optimizations cost more than they save. XLA's own passes, which decide
# about sharding and collectives, stay as they are.
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
os.environ.setdefault("JAX_PLATFORMS", "cpu")
