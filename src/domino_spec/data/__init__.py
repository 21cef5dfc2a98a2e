"""Training data: reading, packing, and answers made by the target itself."""

from typing import TYPE_CHECKING

from domino_spec.lazy import lazy_attributes

if TYPE_CHECKING:
    from domino_spec.data.corpus import Corpus as Corpus
    from domino_spec.data.corpus import Example as Example
    from domino_spec.data.corpus import load_corpus as load_corpus
    from domino_spec.data.generation import is_loop as is_loop
    from domino_spec.data.packing import Batch as Batch
    from domino_spec.data.packing import PackedBatches as PackedBatches
    from domino_spec.data.packing import plan_epoch as plan_epoch
    from domino_spec.data.shards import Shard as Shard
    from domino_spec.data.shards import read_shard as read_shard
    from domino_spec.data.shards import write_shard as write_shard
else:
    __getattr__ = lazy_attributes(
        __name__,
        {
            "corpus": "Corpus Example load_corpus",
            "generation": "is_loop",
            "packing": "Batch PackedBatches plan_epoch",
            "shards": "Shard read_shard write_shard",
        },
    )
