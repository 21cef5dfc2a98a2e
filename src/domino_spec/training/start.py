"""Where a fresh drafter starts: at the scale of the states that the target's lm_head is used to."""

from __future__ import annotations

import torch

from domino_spec.data import Corpus
from domino_spec.drafter import Drafter
from domino_spec.targets import Target, read

_CONVERSATIONS = 16


@torch.no_grad()
def match_output_scale(drafter: Drafter, target: Target, corpus: Corpus) -> None:
    """Set the final norm to the size of each channel of the target's own final states.

    With a norm of ones the first logits are several times too large: the first steps would be
    spent on shrinking them.
    """
    sums = torch.zeros(target.hidden_size, dtype=torch.float64)
    count = 0
    for index in range(min(_CONVERSATIONS, len(corpus))):
        tokens = torch.from_numpy(corpus[index].tokens).long().unsqueeze(0)
        hidden = read(target, tokens, taps=(0,)).hidden
        sums += hidden[0].double().square().sum(dim=0).cpu()
        count += tokens.shape[1]
    norm = drafter.backbone.norm.weight
    norm.copy_((sums / max(1, count)).sqrt().to(norm))
