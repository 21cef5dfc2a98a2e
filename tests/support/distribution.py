"""The distribution of a small target's texts by enumeration, and how far samples are from it."""

from __future__ import annotations

import math
from collections import Counter

import torch

from domino_spec.decoding import SamplingParams

Text = tuple[int, ...]


def enumerated(target, params: SamplingParams, prompt: list[int], count: int) -> dict[Text, float]:
    """Of `count` tokens after the prompt, the first left out: no draft comes before it."""
    chain = params.all_processors(prompt_length=len(prompt))
    texts: dict[Text, float] = {(): 1.0}
    with torch.no_grad():
        for _ in range(count):
            ids = torch.tensor([[*prompt, *text] for text in texts])
            chances = chain(ids, target.model(ids).logits[:, -1]).softmax(-1)
            texts = {
                (*text, token): before * float(chance)
                for (text, before), row in zip(texts.items(), chances, strict=True)
                for token, chance in enumerate(row)
                if chance > 0
            }
    joint: Counter[Text] = Counter()
    for text, chance in texts.items():
        joint[text[1:]] += chance
    return dict(joint)


def deviations(found: Counter[Text], exact: dict[Text, float]) -> float:
    """How far counts are from the distribution, in standard deviations of chi-square."""
    if any(text not in exact for text in found):
        return math.inf
    total = sum(found.values())
    cells = [(found[text], chance * total) for text, chance in exact.items()]
    rare = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5]
    left = sum(wanted for _, wanted in rare)
    if left >= 1:
        cells.append((sum(count for count, _ in rare), left))
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in cells)
    freedom = len(cells) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)
