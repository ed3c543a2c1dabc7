"""The process that compiles: a request in, one answer out, both JSON files. `compile.py` starts it.

    python -m meshtrain.plan.worker REQUEST ANSWER

It is a process of its own because the compiler may abort the one it runs in, and because jax reads its environment
once. `compile_facts` is what it does, for a process that is set up already.
"""

import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from meshtrain.config import Config
from meshtrain.engine import Engine
from meshtrain.errors import UserError
from meshtrain.flops import count_flops, model_flops_per_token
from meshtrain.mesh import make_mesh, use_virtual_devices
from meshtrain.plan.buffers import Buffer, peak_buffers
from meshtrain.plan.facts import Cluster, Facts, Platform
from meshtrain.plan.gpus import Card, target_config
from meshtrain.plan.hlo import collectives
from meshtrain.plan.memory import memory_parts, state_parts
from meshtrain.target import load_target
from meshtrain.trainer import make_engine


def compile_facts(config: Config, cluster: Cluster, card: Card, platform: Platform, dump: Path) -> Facts:
    """Compiles a config's training step and reads what it costs. Materializes no array.

    Args:
        card: the cluster's GPU.
        platform: "cuda": for GPUs that are not here; "cpu": on as many virtual devices, which must not exist yet.
        dump: an empty directory for what the compiler writes about the program.

    Raises:
        UserError: the config, its model and the cluster do not fit together.
    """
    started = time.monotonic()
    target = load_target(config)
    mesh = make_mesh(config.mesh.data, config.mesh.model, _devices(cluster, card, platform))
    engine = make_engine(config, target, mesh)
    traced = engine.trace()
    with jax.set_mesh(mesh):
        lowered = traced.lower()
    compiled = lowered.compile(compiler_options={"xla_dump_to": str(dump), "xla_dump_hlo_as_proto": True})
    seconds = time.monotonic() - started
    memory = memory_parts(engine, compiled.memory_analysis(), _buffers(dump))
    shape = dict(mesh.shape)
    return Facts(
        cluster=cluster,
        platform=platform,
        mesh=shape,
        stage=config.zero.stage,
        microbatches=config.train.microbatches,
        compute=config.precision.compute,
        tokens=config.train.global_batch * config.data.seq_len,
        params=engine.layout.num_params,
        shard_params=sum(map(engine.layout.compute_size, engine.layout.leaves.values())),
        state=state_parts(engine.abstract_state()),
        memory=memory,
        peak_bytes=sum(part.bytes for part in memory),
        card_bytes=card.usable_bytes if platform == "cuda" else 0,
        compile_seconds=seconds,
        flops=count_flops(traced.jaxpr, shape),
        model_flops=_model_flops(config, engine, target.sizes),
        collectives=tuple(collectives(compiled.as_text(), shape)),
        weight_shapes={path: leaf.shape for path, leaf in engine.layout.leaves.items()},
    )


def _devices(cluster: Cluster, card: Card, platform: Platform) -> Sequence[jax.Device]:
    if platform == "cpu":
        use_virtual_devices(cluster.num_gpus)
        return jax.devices()
    topology = f"1x{cluster.nodes}x{cluster.gpus_per_node}"
    found = topologies.get_topology_desc(platform="cuda", target_config=target_config(card), topology=topology)
    return list(found.devices)


def _buffers(dump: Path) -> list[Buffer] | None:
    """The temporaries at the peak of the step's program; None where the dump cannot be read."""
    files = list(dump.glob("*jit_train_step*after_optimizations.hlo.pb"))
    try:
        return peak_buffers(files[0].read_bytes()) if len(files) == 1 else None
    except (ValueError, KeyError, OSError):
        return None


def _model_flops(config: Config, engine: Engine, sizes: Any) -> float:
    tokens = config.train.global_batch * config.data.seq_len
    return model_flops_per_token(engine.layout, sizes, config.data.seq_len) * tokens / engine.mesh.size


def main(request: Path, answer: Path) -> None:
    """Answers one request. The user's mistakes are an answer too."""
    asked = json.loads(request.read_text(encoding="utf-8"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a layout's warnings are lint's to show
            facts = compile_facts(
                Config.model_validate(asked["config"]),
                Cluster(**asked["cluster"]),
                Card(**asked["card"] | {"capability": tuple(asked["card"]["capability"])}),
                asked["platform"],
                Path(asked["dump"]),
            )
        found: dict[str, Any] = {"facts": dataclasses.asdict(facts)}
    except UserError as error:
        found = {"error": str(error), "kind": type(error).__name__}
    answer.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
