"""Drafters that know the answer, half know it, or work against it."""

from __future__ import annotations

import torch

from domino_spec.decoding import PlainDecoding


class ScriptedDrafter(PlainDecoding):
    """Proposes from a known continuation of each sequence, spoiled as its subclass likes."""

    kind = "scripted"
    max_depth = None

    def __init__(self, answers: list[list[int]], *, depth: int, vocab: int) -> None:
        self.answers = answers
        self.default_depth = depth
        self.vocab = vocab
        super().__init__()

    def unsupported_reason(self, device):
        return "its script looks at the reference loop's sequences"

    def propose(self, anchors, *, slots, starts, depth, sampler):
        drafts = []
        for sequence in sampler.sequences:
            done = len(sequence.output)
            known = self.answers[sequence.index][done : done + depth]
            known = known + [0] * (depth - len(known))
            drafts.append([self.spoil(done, j, token) for j, token in enumerate(known)])
        return torch.tensor(drafts)

    def spoil(self, done: int, index: int, token: int) -> int:
        return token


class Oracle(ScriptedDrafter):
    """Always right."""


class Good(ScriptedDrafter):
    """Right four times in five."""

    def spoil(self, done, index, token):
        return token if (done * 31 + index * 17) % 5 else (token + 1) % self.vocab


class WrongAtFourth(ScriptedDrafter):
    """Right three times, then never accepted: every cycle takes a part of its block back."""

    def spoil(self, done, index, token):
        return (token + 1) % self.vocab if index == 3 else token


class Adversarial(ScriptedDrafter):
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
