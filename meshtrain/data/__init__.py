"""Token sources, and the pure function from step to global batch."""

from meshtrain.data.batches import Batches, EvalBatches, RowReader, abstract_batch, to_global
from meshtrain.data.prefetch import prefetch
from meshtrain.data.sources import TokenSource, open_source, unigram_entropy

__all__ = [
    "Batches",
    "EvalBatches",
    "RowReader",
    "TokenSource",
    "abstract_batch",
    "open_source",
    "prefetch",
    "to_global",
    "unigram_entropy",
]
