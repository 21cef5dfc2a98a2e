"""The ids of a vocabulary that neither text nor a target's answers hold."""

from __future__ import annotations

import re
from typing import Any

# Names that vocabularies are filled up with: <unused12>, [UNUSED_TOKEN_3], <dummy00001>, ...
_UNUSED = re.compile(r"[<\[].*(unused|dummy|placeholder).*\d.*[>\]]", re.IGNORECASE)
_RESERVED = re.compile(r"[<\[].*reserved.*\d.*[>\]]", re.IGNORECASE)


def spare_tokens(tokenizer: Any, vocab_size: int) -> list[int]:
    """Ids without a token, then unused tokens, then reserved ones; told by their names.

    A GGUF file lists the rows after the tokenizer's last token as [PAD<id>]: they come first, in
    the order they have without a name, so that both forms of a model yield the same id. Of unused
    and reserved tokens the last comes first: fine-tuning takes them from the beginning.
    """
    vocabulary = {i: str(t) for t, i in tokenizer.get_vocab().items() if t != f"[PAD{i}]"}
    last = max(vocabulary, default=-1)
    without = [*range(last + 1, vocab_size), *(i for i in range(last) if i not in vocabulary)]
    descending = sorted(vocabulary, reverse=True)
    unused = [i for i in descending if _UNUSED.fullmatch(vocabulary[i])]
    reserved = [i for i in descending if _RESERVED.fullmatch(vocabulary[i])]
    # A tokenizer may have more ids than its model has rows.
    return [i for i in dict.fromkeys([*without, *unused, *reserved]) if i < vocab_size]


def special_tokens(tokenizer: Any) -> list[int]:
    """Ids of special tokens, the named ones and those that were only marked so."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    marked = [i for i, token in added.items() if getattr(token, "special", False)]
    return sorted({*marked, *getattr(tokenizer, "all_special_ids", [])})
