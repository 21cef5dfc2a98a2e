"""The prompts that ablations are measured on, with the target's own answers, made once and kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from domino_spec.api.prompts import end_tokens
from domino_spec.bench.tasks import read_tasks
from domino_spec.data import Corpus
from domino_spec.evaluation import Continuations, PromptSet, Protocol, continue_prompts
from domino_spec.targets import LoadedTarget
from domino_spec.training.evaluate import split_held_out

HELD_OUT = "held-out"
Sets = list[tuple[PromptSet, Continuations]]


def load_sets(files: Sequence[str], folder: str | None, loaded: LoadedTarget, limit: int) -> Sets:
    """Prompts and the target's answers, made once."""
    sets = []
    protocol = Protocol()
    for file in files:
        longest = protocol.longest_for(loaded.target)
        (task,) = read_tasks([file])
        prompts = task.encoded(loaded.tokenizer, longest=longest)
        if limit:
            prompts = PromptSet.of(prompts.name, prompts.prompts[:limit], longest=longest)
        answers = answers_to(
            prompts.name, prompts.prompts, loaded, folder, max_new_tokens=protocol.max_new_tokens
        )
        sets.append((prompts, answers))
    return sets


def answers_to(
    name: str,
    prompts: Sequence[Sequence[int]],
    loaded: LoadedTarget,
    folder: str | None,
    *,
    max_new_tokens: int,
) -> Continuations:
    """The target's greedy answers: those kept in the folder, or made now and kept there."""
    wanted = [list(prompt) for prompt in prompts]
    for path in sorted(Path(folder).glob(f"{name}-*.npz")) if folder else []:
        kept = Continuations.load(path)
        if len(kept.prompts) > len(wanted):
            kept = kept.select(range(len(wanted)))
        if [list(prompt) for prompt in kept.prompts] == wanted:
            return kept
    made = continue_prompts(
        loaded.target,
        wanted,
        eos=end_tokens(loaded.target, loaded.tokenizer),
        max_new_tokens=max_new_tokens,
        batch_size=64,
    )
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        made.save(Path(folder) / f"{name}-{len(wanted)}.npz")
    return made


def held_out_set(
    corpus: Corpus,
    loaded: LoadedTarget,
    held_out: int,
    folder: str | None,
    *,
    max_new_tokens: int = 256,
) -> tuple[PromptSet, Continuations]:
    """Prompts of the conversations that every run keeps from its training."""
    conversations = split_held_out(corpus, held_out)[1]
    prompts = [
        conversations[i].tokens[: conversations.first_supervised(i)].tolist()
        for i in range(len(conversations))
        if conversations.first_supervised(i)
    ]
    tokens = min(max_new_tokens, (loaded.target.context_length or 10**6) - max(map(len, prompts)))
    answers = answers_to(HELD_OUT, prompts, loaded, folder, max_new_tokens=tokens)
    return PromptSet.of(HELD_OUT, prompts, longest=10**6), answers
