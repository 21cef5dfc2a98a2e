"""Rows that come, are read, decode and leave in any order, and what each should have written."""

from __future__ import annotations

import pytest

from domino_spec.decoding import NoDrafts, SamplingParams, decode
from tests.engine.runs import script
from tests.support.families import random_prompts
from tests.support.runs import make_rows

TEXTS = random_prompts([40, 35, 50])
SAMPLED = ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05}, {})
PENALTIES = (
    {"repetition_penalty": 1.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -2.0, "repetition_penalty": 0.8},
)


class Alone:
    """What the reference loop writes for a row that has a target to itself."""

    def __init__(self, target):
        self.target = target
        self._known = {}

    def __call__(self, prompt, params):
        key = (tuple(prompt), params)
        if key not in self._known:
            (row,) = make_rows(self.target, [list(prompt)], params)
            self._known[key] = row, list(decode(self.target, NoDrafts(), [row]))
        return self._known[key]


def some_params(rng):
    wanted = {"max_new_tokens": rng.randint(1, 20), "seed": 3}
    if rng.random() < 0.4:
        wanted |= {"temperature": 0.9, "accept": "coupled", **rng.choice(SAMPLED)}
    if rng.random() < 0.5:
        wanted |= rng.choice(PENALTIES)
    if rng.random() < 0.4:
        wanted["logprobs"] = rng.choice([0, 3])
    return SamplingParams(**wanted)


class Crowd:
    """An engine's rows, what was heard of each, and what it should have been."""

    def __init__(self, engine, rng, alone, *, scripted=True):
        """`scripted`: the drafter is right four times in five; it must be told, so no graphs."""
        self.engine, self.rng, self.alone = engine, rng, alone
        self.answers, self.rows, self.heard = [], [], []
        self.admissions, self.left = [], [*TEXTS]
        self.gone, self.reused = set(), 0
        if scripted:
            script(engine, self.answers)

    def join(self):
        """With a beginning that others had, and some tokens of its own."""
        if not self.engine.free:
            return
        base = self.rng.choice(self.left)
        prompt = base[: self.rng.randint(1, len(base))][:80]
        prompt = prompt + [
            self.rng.randrange(self.engine.target.vocab_size) for _ in range(self.rng.randint(0, 5))
        ]
        params = some_params(self.rng)
        expected, _ = self.alone(prompt, params)
        (row,) = make_rows(self.engine.slots, [prompt], params)
        row.index = len(self.rows)
        self.rows.append((row, params))
        self.answers.append(expected.generated)
        self.heard.append([])
        chunk = self.rng.choice([1, 7, 2048])
        self.admissions.append(self.engine.begin(row, params, seed=params.seed, chunk=chunk))
        self.reused += self.admissions[-1].reused > 0

    def read(self):
        if self.admissions:
            admission = self.rng.choice(self.admissions)
            commit = admission.advance()
            if commit is not None:
                self.admissions.remove(admission)
                self.hear([commit])

    def leave(self):
        here = [s.row for s in self.engine._seating.seats]
        if here:
            row = self.rng.choice(here)
            self.engine.release(row)
            self.gone.add(row.index)
            self.left.append(row.prompt + row.generated)
            self.admissions = [each for each in self.admissions if each.row is not row]

    def cycle(self):
        self.hear(self.engine.step())

    def hear(self, commits):
        for commit in commits:
            assert commit.row not in self.gone
            self.heard[commit.row].append(commit)

    def check(self):
        for (row, params), commits in zip(self.rows, self.heard, strict=True):
            expected, whole = self.alone(row.prompt, params)
            tokens = [token for commit in commits for token in commit.tokens]
            assert tokens == row.generated
            if row.index in self.gone:
                assert tokens == expected.generated[: len(tokens)]
                continue
            assert tokens == expected.generated
            scores = [score for commit in commits for score in commit.scores or ()]
            wanted = [score for commit in whole for score in commit.scores or ()]
            assert [s.logprob for s in scores] == pytest.approx(
                [s.logprob for s in wanted], abs=1e-4
            )

    def run(self, turns):
        """So many things happen by chance, then all that is left comes to its end."""
        for _ in range(turns):
            self.rng.choices([self.join, self.read, self.leave, self.cycle], [35, 25, 6, 34])[0]()
        while self.admissions:
            self.read()
        while self.engine.busy:
            self.cycle()
