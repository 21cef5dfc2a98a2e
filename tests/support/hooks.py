"""Logits hooks that turn every target away from what it would say."""

from __future__ import annotations

import torch


def ban_by_prefix(prompt, output, logits):
    """Bans a third of the tokens, another third after each prefix."""
    logits[(sum(prompt) + sum(output)) % 3 :: 3] = -torch.inf
    return logits


def forced_start(_prompt, output, logits):
    """The output begins with 7, 3, 11."""
    forced = (7, 3, 11)
    if len(output) < len(forced):
        kept = logits[forced[len(output)]].clone()
        logits.fill_(-torch.inf)
        logits[forced[len(output)]] = kept
    return logits


class MinTokens:
    """These tokens come after so many others only."""

    def __init__(self, count, ends):
        self.count, self.ends = count, list(ends)

    def __call__(self, _prompt, output, logits):
        if len(output) < self.count:
            logits[self.ends] = -torch.inf
        return logits


class Grammar:
    """(even odd odd)*: an automaton that knows no way on after a token it did not allow."""

    states = {"start": ("even", "odd"), "odd": ("odd", "last"), "last": ("odd", "start")}

    def __call__(self, _prompt, output, logits):
        state = "start"
        for token in output:
            wanted, following = self.states[state]
            if token % 2 != (wanted == "odd"):
                raise ValueError(f"{token} is not {wanted}")
            state = following
        allowed = slice(int(self.states[state][0] == "odd"), None, 2)
        found = torch.full_like(logits, -torch.inf)
        found[allowed] = logits[allowed]
        return found


HOOKS = {
    "ban": ban_by_prefix,
    "forced": forced_start,
    "min": MinTokens(9, range(0, 40, 3)),
    "grammar": Grammar(),
}
