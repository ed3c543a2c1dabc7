"""Compiles the tiny GPT's training step for eight H100s that are not here, and prints its collectives as JSON.

Run as a process of its own: the compiler may abort it, and its environment must be set before jax starts.
"""

import dataclasses
import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 --xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false"

import jax
import numpy as np
import optax
from jax.experimental import topologies

from meshtrain import Precision, from_nnx, initialize, make_mesh
from meshtrain.plan.gpus import card, target_config
from meshtrain.plan.hlo import collectives
from models.gpt import GPT, RULES, GPTConfig

data, model, stage = map(int, sys.argv[1:4])
SIZES = GPTConfig(num_layers=4, dim=256, num_heads=8, vocab_size=1000, seq_len=128, dtype="bfloat16", kernel="xla")
devices = topologies.get_topology_desc(
    platform="cuda", target_config=target_config(card("h100")), topology="1x1x8"
).devices
kinds = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
batch = {name: jax.ShapeDtypeStruct((16, SIZES.seq_len), kind) for name, kind in kinds.items()}
engine = initialize(
    from_nnx(lambda rngs: GPT(SIZES, rngs=rngs), GPT.loss),
    batch,
    mesh=make_mesh(data, model, devices),
    rules=RULES,
    optimizer=optax.sgd(1e-3),
    stage=stage,
    precision=Precision.make("bfloat16"),
    sequence_parallel=True,
)
compiled = engine.lower().compile()
found = [dataclasses.asdict(each) for each in collectives(compiled.as_text(), dict(engine.mesh.shape))]
print(json.dumps(found))
