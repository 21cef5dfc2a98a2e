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
from domino_spec.decoding.rows import Commit, Row, StopRule
from domino_spec.decoding.sampling import Sampler, make_sampler
from domino_spec.decoding.scores import TokenScore
from domino_spec.decoding.stats import RowStats, RunStats
from domino_spec.decoding.text import TextStream
from domino_spec.decoding.verifier import RowCache, Verifier

__all__ = [
    "Commit",
    "DominoProposer",
    "DraftChoices",
    "NoDrafts",
    "Proposal",
    "Proposer",
    "Row",
    "RowCache",
    "RowStats",
    "RunStats",
    "Sampler",
    "SamplingParams",
    "StopRule",
    "TextStream",
    "TokenScore",
    "Verifier",
    "decode",
    "make_sampler",
]
