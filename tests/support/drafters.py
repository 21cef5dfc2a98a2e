"""Proposers that know the answer, half know it, or work against it."""

from __future__ import annotations

import torch

from domino_spec.decoding import Proposal


class ScriptedProposer:
    """Proposes from a known continuation of each sequence, spoiled as its subclass likes."""

    taps = ()

    def __init__(self, answers: list[list[int]], *, depth: int, vocab: int) -> None:
        self.answers = answers
        self.depth = depth
        self.vocab = vocab

    def begin(self, rows):
        pass

    def observe(self, taps, counts):
        pass

    def select(self, rows):
        pass

    def propose(self, sequences, depth):
        drafts = []
        for sequence in sequences:
            done = len(sequence.output)
            known = self.answers[sequence.index][done : done + depth]
            known = known + [0] * (depth - len(known))
            drafts.append([self.spoil(done, j, token) for j, token in enumerate(known)])
        return Proposal(torch.tensor(drafts), [None] * len(sequences))

    def spoil(self, done: int, index: int, token: int) -> int:
        return token


class Oracle(ScriptedProposer):
    """Always right."""


class Good(ScriptedProposer):
    """Right four times in five."""

    def spoil(self, done, index, token):
        return token if (done * 31 + index * 17) % 5 else (token + 1) % self.vocab


class Adversarial(ScriptedProposer):
    """Wrong in every way: at once, after a right prefix, with special ids."""

    def spoil(self, done, index, token):
        turn = done % 4
        if turn == 0:
            return (token + 1) % self.vocab  # always wrong
        if turn == 1:
            return token if index < done % self.depth else self.vocab - 1  # the mask id
        if turn == 2:
            return 2 if index % 2 else token  # an end-of-sequence id in the middle
        return 0
