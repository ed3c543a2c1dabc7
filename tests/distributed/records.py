"""Writes what this process reads of the first batches: `records.py FOLDER key=value...`, under a launcher."""

import sys
from pathlib import Path

import numpy as np

from meshtrain.config import load
from meshtrain.data import to_global
from meshtrain.distributed.start import start
from meshtrain.trainer import build

NUM_BATCHES = 3


def main() -> None:
    folder, *overrides = sys.argv[1:]
    config = load(None, overrides)
    with start(config) as world:
        job = build(config)
        for index in range(NUM_BATCHES):
            batch = to_global(job.batches, index, job.engine.batch_sharding)
            rows = {}
            for name, array in batch.items():
                for shard in array.addressable_shards:
                    rows[f"{name} {shard.index[0].start or 0}"] = np.asarray(shard.data)
            np.savez(Path(folder) / f"{index}-{world.place.process_id}.npz", **rows)


if __name__ == "__main__":
    main()
