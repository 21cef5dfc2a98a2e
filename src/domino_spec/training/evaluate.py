"""During training: the tokens a cycle that greedy decoding would give on held-out prompts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from domino_spec.api import DominoDecoder
from domino_spec.api.prompts import end_tokens
from domino_spec.data import Corpus, is_loop
from domino_spec.drafter import DraftModel, DraftModule
from domino_spec.drafters import drafter_of
from domino_spec.evaluation import Continuations, continue_prompts, simulate
from domino_spec.evaluation.runs import greedy_counts
from domino_spec.targets import Target
from domino_spec.training.acceleration import Acceleration
from domino_spec.training.world import World

if TYPE_CHECKING:  # pydantic is not needed to split data
    from domino_spec.training.config import TrainConfig

_BATCH = 64
_SPLIT_SEED = 0


def split_held_out(corpus: Corpus, count: int) -> tuple[Corpus, Corpus]:
    """What is trained on and what is kept from it: the same for every run on this corpus."""
    return corpus.split(held_out=min(count, len(corpus) // 10), seed=_SPLIT_SEED)


def held_out_evaluation(
    config: TrainConfig,
    drafter: DraftModule,
    target: Target,
    tokenizer: Any | None,
    held_out: Corpus,
    *,
    acceleration: Acceleration | None,
    world: World,
) -> Callable[[], dict[str, Any]] | None:
    """A function that measures, or None where nothing is held out or wanted.

    The target's answers are made at the first call and kept. Answers that loop are left out:
    they would flatter any drafter. Several processes hold a part of the drafter each and do not
    evaluate.
    """
    prompts = [
        held_out[i].tokens[: held_out.first_supervised(i)].tolist()
        for i in range(min(config.eval_prompts, len(held_out)))
        if held_out.first_supervised(i) > 0
    ]
    if config.eval_every == 0 or not prompts or not world.alone:
        return None
    known: list[Continuations] = []

    def answers() -> Continuations:
        if not known:
            longest = max(map(len, prompts))
            room = (target.context_length or longest + config.eval_tokens) - longest
            made = continue_prompts(
                target,
                prompts,
                eos=end_tokens(target, tokenizer),
                max_new_tokens=max(1, min(config.eval_tokens, room)),
                batch_size=1 if target.batch_refusal else _BATCH,
            )
            straight = [i for i, answer in enumerate(made.answers) if not is_loop(answer)]
            known.append(made.select(straight or range(len(prompts))))
        return known[0]

    def evaluate() -> dict[str, Any]:
        with acceleration.suspended() if acceleration else nullcontext():
            if not isinstance(drafter, DraftModel):
                return _decoded(drafter, target, tokenizer, answers())
            on = simulate(drafter, target, answers())
            told: dict[str, Any] = {
                "tokens_per_cycle": on.tokens_per_cycle,
                "first_draft_accuracy": on.first_draft_accuracy,
            }
            if drafter.head is not None:
                off = simulate(drafter, target, answers(), head=False)
                told["tokens_per_cycle_head_off"] = off.tokens_per_cycle
        return told

    return evaluate


def _decoded(
    drafter: DraftModule, target: Target, tokenizer: Any | None, answers: Continuations
) -> dict[str, Any]:
    """The same for drafters without a simulation, by decoding."""
    opened = drafter_of(copy.deepcopy(drafter))  # bound weights are rearranged
    # Weights that training changes are not worth a packed copy.
    decoder = DominoDecoder(target, opened, tokenizer, depth=opened.depth, pack=False)
    total = greedy_counts(
        decoder, answers.prompts, max_new_tokens=answers.max_new_tokens, batch_size=_BATCH
    )
    shares = total.acceptance_by_position
    return {
        "tokens_per_cycle": total.tokens_per_cycle,
        "first_draft_acceptance": shares[0] if shares else 0.0,
    }
