"""Seeds of sampled drafts on vLLM's V2 runner, apart from those that verify them.

vLLM draws by a hash of seed, position and token. Up to 0.28 drafts and the tokens that replace
rejected drafts get the same noise, so what replaces a draft depends on it and outputs do not follow
the target (vllm#54282). Later versions shift the drafts' positions; a seed of their own besides
changes nothing there, since the streams need only be distinct.
"""

from __future__ import annotations

import inspect
from functools import cache, wraps
from typing import Any

from torch import Tensor, nn

_SALT = 0x452821E638D01377
"""Digits of pi, other ones than in `decoding.noise`."""
_STRIDE = 0x9E3779B97F4A7C1
"""How far apart the seeds of a request's cycles lie: digits of the golden ratio."""


def draft_seeds(seeds: Tensor, rows: Tensor, starts: Tensor) -> Tensor:
    """Seeds [slots] where those of `rows` [batch] are salted for cycles at `starts` [batch].

    Block verification looks at drafts that it does not accept: drawn once more in the next cycle,
    with the same noise, they would not be independent of that.
    """
    own = seeds.clone()
    own[rows] = (seeds[rows] ^ _SALT) + starts.long() * _STRIDE
    return own


@cache
def salt_drafts(ours: type[nn.Module]) -> None:
    """Have the V2 runner's speculator draw the drafts of our models with `draft_seeds`."""
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    propose = DFlashSpeculator.propose
    signature = inspect.signature(propose)

    @wraps(propose)
    def salted(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(self, *args, **kwargs)
        if isinstance(self.model, ours) and self.draft_logits is not None:
            given = call.arguments
            batch = given["input_batch"]
            rows = batch.idx_mapping[: batch.num_reqs]
            starts = batch.seq_lens[: batch.num_reqs] - given["num_rejected"]  # [batch] tokens kept
            given["seeds"] = draft_seeds(given["seeds"], rows, starts)
        return propose(*call.args, **call.kwargs)

    DFlashSpeculator.propose = salted
