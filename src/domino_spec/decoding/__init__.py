"""Decoding: the reference loop and the parts it is made of."""

from domino_spec.decoding.loop import decode
from domino_spec.decoding.params import SamplingParams
from domino_spec.decoding.proposers import (
    DominoProposer,
    DraftChoices,
    NoDrafts,
    Proposal,
    Proposer,
)
from domino_spec.decoding.sampling import Sampler, make_sampler
from domino_spec.decoding.scores import TokenScore
from domino_spec.decoding.sequence import Sequence, SequenceOutput, Status, StopRule
from domino_spec.decoding.stats import RowStats, RunStats
from domino_spec.decoding.text import TextStream

__all__ = [
    "DominoProposer",
    "DraftChoices",
    "NoDrafts",
    "Proposal",
    "Proposer",
    "RowStats",
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
]
