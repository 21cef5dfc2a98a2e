"""A corpus in memory: flat, compact, any conversation at once."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from domino_spec.data.collect import Collector, Flat
from domino_spec.data.examples import BoolArray, Example
from domino_spec.data.report import DataReport, bad_lines
from domino_spec.data.sources import SourceReader
from domino_spec.errors import DataError

_HASHED_AT_ONCE = 1 << 22


class Corpus:
    """Conversations with random access; `load_corpus` reads one from files."""

    def __init__(self, flat: Flat, report: DataReport) -> None:
        self._flat = flat
        self.report = report
        self.lengths: npt.NDArray[np.int64] = np.diff(flat.offsets)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        if not -len(self) <= index < len(self):
            raise IndexError(f"conversation {index} of {len(self)}")
        index %= len(self)
        flat = self._flat
        start, end = int(flat.offsets[index]), int(flat.offsets[index + 1])
        return Example(
            tokens=flat.tokens[start:end].astype(np.int32),
            supervised=flat.supervised[start:end],
            source=flat.source_names[flat.source_ids[index]],
        )

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all conversations in their order, whatever they were read from."""
        digest = hashlib.sha256(self.lengths.astype("<i8").tobytes())
        tokens, supervised = self._flat.tokens, self._flat.supervised
        for start in range(0, len(tokens), _HASHED_AT_ONCE):
            digest.update(tokens[start : start + _HASHED_AT_ONCE].astype("<i4").tobytes())
        digest.update(np.packbits(supervised).tobytes())
        return digest.hexdigest()

    def split(self, *, held_out: int, seed: int) -> tuple[Corpus, Corpus]:
        """A part to train on and `held_out` conversations kept from it, chosen by their content.

        Conversations that share a prompt stay on one side as far as the count allows.
        """
        if not 0 <= held_out < len(self):
            raise DataError(
                f"{held_out} conversations are to be held out of {len(self)}; expected fewer than "
                "there are."
            )
        chosen = np.zeros(len(self), dtype=np.bool_)
        for group in self._groups_in_hash_order(seed):
            if len(group) <= held_out - int(chosen.sum()):
                chosen[group] = True
            if chosen.sum() == held_out:
                break
        rest = np.flatnonzero(~chosen)[: held_out - int(chosen.sum())]
        chosen[rest] = True  # only prompts with more answers than there is room for are left
        return self._part(~chosen), self._part(chosen)

    def token_counts(self, vocab_size: int, *, learnt: bool = True) -> npt.NDArray[np.int64]:
        """How often each token id is learnt, or stands anywhere, [vocab_size]."""
        tokens = self._flat.tokens
        counts = np.bincount(
            tokens[self._flat.supervised] if learnt else tokens, minlength=vocab_size
        )
        if len(counts) > vocab_size:
            raise DataError(
                f"the corpus holds the token id {len(counts) - 1}; expected ids below {vocab_size}."
            )
        return counts.astype(np.int64)

    def first_supervised(self, index: int) -> int:
        """Where a conversation's first learnt token stands."""
        start, end = self._flat.offsets[index], self._flat.offsets[index + 1]
        return int(self._flat.supervised[start:end].argmax())

    def _groups_in_hash_order(self, seed: int) -> list[list[int]]:
        groups: dict[bytes, list[int]] = {}
        key = hashlib.sha256(str(seed).encode()).digest()
        for index in range(len(self)):
            start, end = int(self._flat.offsets[index]), int(self._flat.offsets[index + 1])
            prompt = self.first_supervised(index) or end - start
            content = self._flat.tokens[start : start + prompt].astype("<i4").tobytes()
            digest = hashlib.blake2b(content, digest_size=16, key=key).digest()
            groups.setdefault(digest, []).append(index)
        return [groups[digest] for digest in sorted(groups)]

    def _part(self, wanted: BoolArray) -> Corpus:
        flat = self._flat
        mask = np.repeat(wanted, self.lengths)
        ends = np.cumsum(self.lengths[wanted], dtype=np.int64)
        part = Flat(
            tokens=flat.tokens[mask],
            supervised=flat.supervised[mask],
            offsets=np.concatenate((np.zeros(1, dtype=np.int64), ends)),
            source_ids=flat.source_ids[wanted],
            source_names=flat.source_names,
            cut=flat.cut[wanted],
        )
        unlearnt, bad = self.report.unlearnt_turns, self.report.bad
        report = dataclasses.replace(part.report(), unlearnt_turns=unlearnt, bad=bad)
        return Corpus(part, report)


def load_corpus(
    sources: Sequence[str],
    *,
    tokenizer: Any | None,
    vocab_size: int,
    max_length: int | None = None,
    limit: int | None = None,
    messages_field: str | None = None,
    text_field: str | None = None,
    chat_options: Mapping[str, Any] | None = None,
) -> Corpus:
    """Read conversations, texts and token shards; rows that are no good are counted, not fatal.

    A source is a file, a folder, a glob or `hf:name[:split]`. Chats go through the tokenizer's
    own template, told `chat_options`. The fields name columns that are not called as usual.
    """
    if max_length is not None and max_length < 2:
        raise DataError(f"max_length is {max_length}; expected 2 tokens or more.")
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}; expected 1 conversation or more, or none at all.")
    collector = Collector(vocab_size=vocab_size, max_length=max_length, limit=limit)
    reader = SourceReader(
        collector,
        tokenizer,
        messages_field=messages_field,
        text_field=text_field,
        chat_options=chat_options,
    )
    reader.read(sources)
    flat = collector.result()
    report = flat.report(collector.bad, unlearnt=collector.unlearnt_turns)
    if not report.conversations:
        reasons = "; ".join(bad_lines(report.bad)) or "the files hold no rows"
        raise DataError(
            f"nothing to train on in {', '.join(map(str, sources))}: {reasons}. Give conversations "
            "with assistant turns, texts or token shards made for this target."
        )
    return Corpus(flat, report)
