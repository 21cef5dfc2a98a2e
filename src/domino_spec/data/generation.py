"""Sequences finished by the target, each with a seed of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence

import torch

from domino_spec.api import DominoDecoder
from domino_spec.decoding import SamplingParams
from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding.stopping import at_eos, at_length, at_strings
from domino_spec.errors import DataError

_SEEDS = 2**62


def seed_of(*parts: object) -> int:
    """A seed that depends on these alone, not on who else is in the batch."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _SEEDS


def make_sequence(
    decoder: DominoDecoder,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    index: int,
    end_ids: Collection[int] = (),
    end_text: str = "",
) -> Decoded:
    """A sequence whose draws follow from the parameters' seed alone, whatever its batch."""
    rules = [at_eos({*decoder.eos_token_ids, *end_ids})]
    if end_text:
        rules.append(at_strings([end_text], decoder.tokenizer))
    seed = params.seed_of(0)
    return Decoded(prompt, params, index=index, seed=seed, stop_rules=[*rules, at_length()])


def finish(decoder: DominoDecoder, sequences: Sequence[Decoded]) -> Iterator[Decoded]:
    """Decode sequences, with drafts if the decoder has a drafter; each as it ends."""
    try:
        for output in decoder.run(sequences):
            if output.finish_reason is not None:
                yield output.sequence
    except torch.OutOfMemoryError as error:
        raise DataError(
            f"the device ran out of memory with {len(sequences)} sequences; use a smaller batch "
            "size."
        ) from error
