"""Training data: reading, packing, and answers made by the target itself."""

from domino_spec.data.corpus import Corpus, load_corpus
from domino_spec.data.examples import Example
from domino_spec.data.loops import is_loop
from domino_spec.data.packing import Batch, PackedBatches, plan_epoch
from domino_spec.data.report import BadRows, DataReport
from domino_spec.data.shards import Shard, read_shard, write_shard

__all__ = [
    "BadRows",
    "Batch",
    "Corpus",
    "DataReport",
    "Example",
    "PackedBatches",
    "Shard",
    "is_loop",
    "load_corpus",
    "plan_epoch",
    "read_shard",
    "write_shard",
]
