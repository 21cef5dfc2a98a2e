"""Decoding: the reference loop and the parts it is made of."""

from domino_spec.decoding.drafter import Drafter, DraftSampler, PlainDecoding
from domino_spec.decoding.loop import decode
from domino_spec.decoding.params import SamplingParams
from domino_spec.decoding.processors import LogitsHook
from domino_spec.decoding.sampling import Sampler, make_sampler
from domino_spec.decoding.sequence import (
    Sequence,
    SequenceOutput,
    Status,
    StopRule,
    TokenScore,
    merged,
)
from domino_spec.decoding.stats import AcceptanceStats, RunStats
from domino_spec.decoding.text import TextStream
from domino_spec.grammars import Grammar

__all__ = [
    "AcceptanceStats",
    "DraftSampler",
    "Drafter",
    "Grammar",
    "LogitsHook",
    "PlainDecoding",
    "RunStats",
    "Sampler",
    "SamplingParams",
    "Sequence",
    "SequenceOutput",
    "Status",
    "StopRule",
    "TextStream",
    "TokenScore",
    "decode",
    "make_sampler",
    "merged",
]
