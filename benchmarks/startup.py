"""How long it takes from the launch until the first update is done, and where the time goes.

For 1, 4 and 16 processes, on one machine: a first start with nothing compiled, and a second one that finds the compiled
step in the cache and a checkpoint to restore. Each process measures itself; the slowest counts, as it does in a job.

    python benchmarks/startup.py [--processes 1,4,16] [--json FILE]
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BEGUN = "STARTUP_BEGUN"  # when the launcher starts the processes, seconds since the epoch
PARTS = ("import", "join", "devices and data", "restore", "first update")
OVERRIDES = (
    "model.overrides={num_layers: 2, dim: 64, num_heads: 4, unroll: 1}",
    *("data.seq_len=64", "train.global_batch=16", "log.progress=none", "launch.join=600"),
)


def measure_one(folder: Path) -> None:
    """What each process runs: the stages of `meshtrain train`, one by one."""
    clock = [float(os.environ[BEGUN])]
    from meshtrain.checkpoint import Checkpointer
    from meshtrain.config import load
    from meshtrain.data import to_global
    from meshtrain.distributed.start import start
    from meshtrain.trainer import build

    clock.append(time.time())
    config = load(None, [*OVERRIDES, f"run.dir={folder}"])
    with start(config) as world:
        clock.append(time.time())
        job = build(config)
        clock.append(time.time())
        with Checkpointer(folder / "checkpoints", 1) as checkpoints:
            step = checkpoints.latest()
            engine = job.engine
            state = engine.init() if step is None else checkpoints.restore(step, engine.abstract_state())
            clock.append(time.time())
            state, metrics = engine.step(state, to_global(job.batches, int(state.step), engine.batch_sharding))
            float(metrics["loss"])
            clock.append(time.time())
            checkpoints.save(int(state.step), state)
            checkpoints.wait()
        spent = {name: clock[i + 1] - clock[i] for i, name in enumerate(PARTS)}
        found = world.gather("figures", spent | {"all": clock[-1] - clock[0]})
        if world.is_main:
            (folder / "figures.json").write_text(json.dumps(found))


def measure(num: int, folder: Path) -> dict[str, float]:
    """Starts `num` processes once; the slowest process's seconds of each part."""
    from meshtrain.launch.local import Launch, environments

    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    envs = [env | cache | {BEGUN: str(time.time())} for env in environments(num, devices=1)]
    code = Launch([sys.executable, __file__, "--one", str(folder)], num, envs).run()
    if code:
        raise SystemExit(code)
    figures = json.loads((folder / "figures.json").read_text())
    return {name: max(each[name] for each in figures) for name in figures[0]}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", default="1,4,16", metavar="N,N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure_one(args.one)
        return
    rows: list[dict[str, Any]] = []
    for num in map(int, args.processes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            for start in ("first", "second"):
                rows.append({"processes": num, "start": start, **measure(num, Path(folder))})
    print(f"| processes | start | {' | '.join(PARTS)} | all |")
    print(f"|{'---|' * (len(PARTS) + 3)}")
    for row in rows:
        seconds = " | ".join(f"{row[name]:.1f}" for name in (*PARTS, "all"))
        print(f"| {row['processes']} | {row['start']} | {seconds} |")
    if args.json:
        args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
