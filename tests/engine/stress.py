"""Randomised stress tests: requests arrive, decode and are aborted by chance.

Whatever happens, each sequence must get what the reference loop gives it alone.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from domino_spec.decoding import Drafter, SamplingParams, decode
from domino_spec.drafters import LookupDrafter, drafter_of
from domino_spec.targets import Target
from tests.engine.runs import script
from tests.support.baselines import knowing_eagle3, knowing_medusa
from tests.support.families import randomise
from tests.support.hooks import HOOKS
from tests.support.pair import bigram_target, knowing_drafter, knowing_markov_drafter, successor
from tests.support.runs import make_sequences

KINDS = ("domino", "markov", "medusa", "eagle3", "lookup")
_RING = 4
SAMPLED = ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05}, {})
PENALTIES = (
    {"repetition_penalty": 1.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -2.0, "repetition_penalty": 0.8},
)

BIASES = (
    {"logit_bias": {3: 2.5, 5: -100, 8: 1.0}},
    {"min_tokens": 1, "stop_token_ids": tuple(range(0, 12, 2))},
    {"logit_bias": {4: 100}, "prompt_logprobs": 2},
)


def table_for(kind: str, size: int) -> Tensor:
    """For each token the next one; in rings, so that prompt lookup finds what it looks for."""
    if kind != "lookup":
        return successor(size)
    places = torch.arange(size)
    return places - places % _RING + (places + 1) % _RING


def disturbed_target(table: Tensor, *, disturbance: float = 0.05) -> Target:
    """It mostly follows a table: drafts that know the table are accepted and rejected."""
    target = bigram_target(table)
    for layer in target.layers:
        randomise(layer.self_attn.o_proj, disturbance, seed=1)
        randomise(layer.mlp.down_proj, disturbance, seed=2)
    return target


def drafter_for(kind: str, table: Tensor, *, head_dim: int = 10) -> Drafter:
    """One that knows the table alone; prompt lookup knows what the sequence has said."""
    if kind == "domino":
        known = knowing_drafter(shift=True, prefix=0, table=table, head_dim=head_dim)
    elif kind == "markov":
        known = knowing_markov_drafter(shift=True)
    elif kind == "lookup":
        return LookupDrafter(depth=3, longest=2)
    elif kind == "medusa":
        known = knowing_medusa(table=table)
    else:
        known = knowing_eagle3(size=len(table))
    return drafter_of(known)


class Alone:
    """What the reference loop gives a sequence that has a target to itself."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._known = {}

    def __call__(self, prompt, params):
        key = (tuple(prompt), params)
        if key not in self._known:
            (sequence,) = make_sequences([prompt], params, seed=params.seed)
            outputs = list(decode(self.target, None, [sequence]))
            scores = [score for output in outputs for score in output.scores or ()]
            self._known[key] = sequence.output, scores
        return self._known[key]


def some_params(rng) -> SamplingParams:
    wanted = {"max_new_tokens": rng.randint(1, 20), "seed": 3}
    if rng.random() < 0.4:
        wanted |= {"temperature": 0.9, "accept": "coupled", **rng.choice(SAMPLED)}
    if rng.random() < 0.5:
        wanted |= rng.choice(PENALTIES)
    if rng.random() < 0.3:
        wanted |= rng.choice(BIASES)
    if rng.random() < 0.4:
        wanted["logprobs"] = rng.choice([0, 3])
    if rng.random() < 0.3:
        wanted["hooks"] = rng.choice(list(HOOKS.values()))
    return SamplingParams(**wanted)


class StressTest:
    """An engine's sequences, what it gave each, and what it should have been."""

    def __init__(self, engine, rng, alone, *, scripted=False, plain=0.3) -> None:
        """`scripted` drafts are right four times in five; a share `plain` wants no drafts."""
        self.engine, self.rng, self.alone = engine, rng, alone
        self._plain = plain
        self.sequences, self.outputs, self.aborted = [], [], set()
        self._answers = []
        size = engine.target.vocab_size
        self._texts = [[rng.randrange(size) for _ in range(n)] for n in (40, 35, 50)]
        if scripted:
            script(engine, self._answers)

    @property
    def reused(self) -> int:
        """Sequences of whose prompt a part was in the caches."""
        return sum(sequence.cached > 0 for sequence in self.sequences)

    def add(self) -> None:
        """With a beginning that others had, and some tokens of its own."""
        if self.engine.waiting > 3:
            return
        base = self.rng.choice(self._texts)
        prompt = base[: self.rng.randint(1, len(base))][:80]
        size = self.engine.target.vocab_size
        prompt = prompt + [self.rng.randrange(size) for _ in range(self.rng.randint(0, 5))]
        params = some_params(self.rng)
        (sequence,) = make_sequences(
            [prompt],
            params,
            first=len(self.sequences),
            seed=params.seed,
            client=self.rng.choice("ab"),
            speculate=self.rng.random() >= self._plain,
            reuse=self.rng.random() < 0.9,
        )
        self.sequences.append(sequence)
        self.outputs.append([])
        self._answers.append(self.alone(prompt, params)[0])
        self.engine.add_request(sequence)

    def abort(self) -> None:
        """One that waits, is in prefill or decodes."""
        here = [*self.engine.scheduler.running, *self.engine.scheduler.waiting]
        if here:
            sequence = self.rng.choice(here)
            self.engine.abort(sequence)
            self.aborted.add(sequence.index)
            self._texts.append(sequence.prompt + sequence.output)

    def step(self) -> None:
        for output in self.engine.step():
            assert output.error is None
            assert output.sequence.index not in self.aborted
            self.outputs[output.sequence.index].append(output)

    def run(self, turns: int) -> None:
        """So many things happen by chance, then all that is left comes to its end."""
        for _ in range(turns):
            self.rng.choices([self.add, self.abort, self.step], [35, 9, 60])[0]()
        while self.engine.busy:
            self.step()

    def check(self) -> None:
        """Every sequence got what it gets alone, or the beginning of it if it was aborted."""
        assert (self.engine.running, self.engine.waiting) == (0, 0)
        for sequence, outputs in zip(self.sequences, self.outputs, strict=True):
            expected, scores = self.alone(sequence.prompt, sequence.params)
            tokens = [token for output in outputs for token in output.tokens]
            assert tokens == sequence.output
            if not sequence.speculate:
                assert sequence.stats.drafted == 0
            if sequence.index in self.aborted:
                assert tokens == expected[: len(tokens)]
                continue
            assert tokens == expected
            found = [score.logprob for output in outputs for score in output.scores or ()]
            assert found == pytest.approx([score.logprob for score in scores], abs=1e-4)
