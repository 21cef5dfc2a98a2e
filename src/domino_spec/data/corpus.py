"""A corpus in memory: conversations from files of any kind, checked, tokenised, laid out flat."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from domino_spec.checkpoints import tokenizer_fingerprint
from domino_spec.data.chat import CUT, BoolArray, ChatEncoder, messages_of, up_to_last_answer
from domino_spec.data.files import (
    SHARD_FILES,
    TEXT_FILES,
    BadRow,
    BadRows,
    Place,
    find_places,
    read_rows,
    read_text,
    source_of,
)
from domino_spec.data.shards import TokenArray, read_shard
from domino_spec.errors import DataError

EMPTY = "it is empty"
OUTSIDE = "it holds token ids outside the vocabulary"
NOTHING_LEARNT = "no assistant token lies within the maximum length"
NO_ROOM = "its prompt is longer than itself"
_HASHED_AT_ONCE = 1 << 22
_SHORTEST_PIECE = 2
_SHOWN = 8


@dataclass(frozen=True)
class Example:
    """Token ids of a conversation, and which of them the target wrote: only those are learnt."""

    tokens: npt.NDArray[np.int32]  # [n]
    supervised: BoolArray  # [n]
    source: str = ""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class DataReport:
    """Counts of a corpus. `bad` rows are those of the reading, which a split does not divide."""

    conversations: int
    tokens: int
    supervised_tokens: int
    cut: int
    """Conversations longer than the maximum length, kept up to it."""
    unlearnt_turns: int
    """Assistant turns that the chat template rewrites later on: kept, but not learnt."""
    sources: dict[str, int]
    bad: BadRows

    def lines(self) -> list[str]:
        """For people; what was left out comes from `bad`."""
        lines = [
            f"{self.conversations:,} conversations, {self.tokens:,} tokens, "
            f"{self.supervised_tokens:,} of them learnt"
        ]
        if len(self.sources) > 1:
            named = sorted(self.sources.items(), key=lambda item: -item[1])
            parts = [f"{name or 'unnamed'} {count:,}" for name, count in named[:_SHOWN]]
            rest = f" and {len(named) - _SHOWN:,} others" if len(named) > _SHOWN else ""
            lines.append("from " + ", ".join(parts) + rest)
        if self.cut:
            lines.append(f"{self.cut:,} cut at the maximum length")
        if self.unlearnt_turns:
            lines.append(
                f"{self.unlearnt_turns:,} assistant turns not learnt: the chat template writes "
                "them differently in the history"
            )
        return lines


class _Flat(NamedTuple):
    """Conversations back to back, each array in the corpus's own order."""

    tokens: TokenArray  # [total]
    supervised: BoolArray  # [total]
    lengths: npt.NDArray[np.int64]  # [conversations]
    source_ids: npt.NDArray[np.int32]  # [conversations]
    cut: BoolArray  # [conversations]

    def select(self, wanted: BoolArray) -> _Flat:
        """Some of the conversations."""
        mask, rest = np.repeat(wanted, self.lengths), tuple[Any, ...](self[2:])
        return _Flat(self.tokens[mask], self.supervised[mask], *(part[wanted] for part in rest))


class Corpus:
    """Conversations with random access; `load_corpus` reads one from files."""

    def __init__(
        self, flat: _Flat, names: Sequence[str], *, bad: BadRows, unlearnt_turns: int
    ) -> None:
        self._flat, self._names = flat, tuple(names)
        self.lengths = flat.lengths
        self._ends = np.cumsum(flat.lengths, dtype=np.int64)
        counts = Counter(flat.source_ids.tolist())
        self.report = DataReport(
            conversations=len(self.lengths),
            tokens=len(flat.tokens),
            supervised_tokens=int(flat.supervised.sum()),
            cut=int(flat.cut.sum()),
            unlearnt_turns=unlearnt_turns,
            sources={self._names[index]: counts[index] for index in sorted(counts)},
            bad=bad,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        if not -len(self) <= index < len(self):
            raise IndexError(f"conversation {index} of {len(self)}")
        index %= len(self)
        place = self._place(index)
        return Example(
            tokens=self._flat.tokens[place].astype(np.int32),
            supervised=self._flat.supervised[place],
            source=self._names[self._flat.source_ids[index]],
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
        return int(self._flat.supervised[self._place(index)].argmax())

    def _place(self, index: int) -> slice:
        end = int(self._ends[index])
        return slice(end - int(self.lengths[index]), end)

    def _groups_in_hash_order(self, seed: int) -> list[list[int]]:
        groups: dict[bytes, list[int]] = {}
        key = hashlib.sha256(str(seed).encode()).digest()
        for index in range(len(self)):
            tokens = self._flat.tokens[self._place(index)]
            prompt = self.first_supervised(index) or len(tokens)
            content = tokens[:prompt].astype("<i4").tobytes()
            digest = hashlib.blake2b(content, digest_size=16, key=key).digest()
            groups.setdefault(digest, []).append(index)
        return [groups[digest] for digest in sorted(groups)]

    def _part(self, wanted: BoolArray) -> Corpus:
        report = self.report
        return Corpus(
            self._flat.select(wanted),
            self._names,
            bad=report.bad,
            unlearnt_turns=report.unlearnt_turns,
        )


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
    own template, with `chat_options`. The fields name columns that are not called as usual.
    """
    if max_length is not None and max_length < 2:
        raise DataError(f"max_length is {max_length}; expected 2 tokens or more.")
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}; expected 1 conversation or more, or none at all.")
    if not sources:
        raise DataError("no data were named; give files, folders or hf:name.")
    collector = Collector(
        vocab_size=vocab_size,
        max_length=max_length,
        limit=limit,
        tokenizer=tokenizer,
        messages_field=messages_field,
        text_field=text_field,
        chat_options=chat_options,
    )
    for place in [place for source in sources for place in find_places(source)]:
        if not collector.full:
            collector.read(place)
    corpus = collector.corpus()
    if not len(corpus):
        reasons = "; ".join(corpus.report.bad.lines()) or "the files hold no rows"
        raise DataError(
            f"nothing to train on in {', '.join(map(str, sources))}: {reasons}. Give conversations "
            "with assistant turns, texts or token shards made for this target."
        )
    return corpus


class Collector:
    """Gathers conversations that are good, counts those that are not, by reason."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_length: int | None = None,
        limit: int | None = None,
        tokenizer: Any | None = None,
        messages_field: str | None = None,
        text_field: str | None = None,
        chat_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.vocab_size, self.max_length = vocab_size, max_length
        self._limit, self._given_tokenizer = limit, tokenizer
        self._messages_field, self._text_field = messages_field, text_field
        self._chat_options = chat_options
        self._bad, self._unlearnt_turns = BadRows(), 0
        self._dtype: type[np.integer] = np.uint16 if vocab_size <= 2**16 else np.int32
        self._count = 0
        self._parts: list[_Flat] = []
        self._names: dict[str, int] = {}

    @property
    def full(self) -> bool:
        """Whether as many conversations are here as were asked for."""
        return self._limit is not None and self._count >= self._limit

    def corpus(self) -> Corpus:
        """Everything gathered."""
        types = (self._dtype, np.bool_, np.int64, np.int32, np.bool_)
        empty = _Flat(*(np.zeros(0, kind) for kind in types))
        flat = _Flat(*map(np.concatenate, zip(empty, *self._parts, strict=True)))
        names = list(self._names)
        return Corpus(flat, names, bad=self._bad, unlearnt_turns=self._unlearnt_turns)

    def add(
        self, tokens: Sequence[int] | TokenArray, supervised: BoolArray, source: str, where: str
    ) -> None:
        """Take one conversation, cut if need be."""
        ids = np.asarray(tokens, dtype=np.int64)
        self._take(ids, supervised, np.array([len(ids)]), [source], where, {})

    def read(self, place: Place) -> None:
        """Take what a file or a data set holds, until there is enough."""
        if place.suffix in SHARD_FILES:
            self._read_shard(place)
        elif place.suffix in TEXT_FILES:
            self._add_text(read_text(place.path), place.name, place.path)
        else:
            for where, row in read_rows(place, self._bad):
                try:
                    self._add_row(row, place, where)
                except BadRow as reason:
                    self._bad.add(str(reason), where)
                if self.full:
                    return

    @cached_property
    def _tokenizer(self) -> Any:
        if self._given_tokenizer is None:
            raise DataError(
                "the data are text but the target came without a tokenizer; save its tokenizer "
                "next to its weights, or give token shards."
            )
        return self._given_tokenizer

    @cached_property
    def _chats(self) -> ChatEncoder:
        return ChatEncoder(self._tokenizer, self._chat_options)

    @cached_property
    def _tokenizer_sha256(self) -> str:
        return tokenizer_fingerprint(self._tokenizer)

    def _take(
        self,
        tokens: TokenArray,  # [total], conversations back to back
        supervised: BoolArray,  # [total]
        lengths: npt.NDArray[np.int64],  # [conversations]
        sources: Sequence[str],
        where: str,
        wrong: Mapping[str, BoolArray],  # [conversations] each: further reasons to leave one out
    ) -> None:
        """Take conversations, each cut at the maximum length, and count those that are no good."""
        starts = np.cumsum(lengths) - lengths
        kept = np.minimum(lengths, self.max_length or np.iinfo(np.int64).max)
        positions = np.arange(len(tokens)) - np.repeat(starts, lengths)
        inside = positions < np.repeat(kept, lengths)
        filled = lengths > 0
        outside, learnt = np.zeros((2, len(lengths)), dtype=np.bool_)
        if filled.any():
            bad_ids = (tokens < 0) | (tokens >= self.vocab_size)
            outside[filled] = np.logical_or.reduceat(bad_ids, starts[filled])
            learnt[filled] = np.logical_or.reduceat(supervised & inside, starts[filled])
        good = np.ones(len(lengths), dtype=np.bool_)
        reasons = {EMPTY: ~filled, OUTSIDE: outside, **wrong, NOTHING_LEARNT: ~learnt}
        for reason, holds in reasons.items():
            found = good & holds
            if found.any():
                row = f", row {int(found.argmax()) + 1}" if wrong else ""
                self._bad.add(reason, where + row, int(found.sum()))
            good &= ~holds
        if self._limit is not None:
            good &= np.cumsum(good) <= self._limit - self._count
        mask = np.repeat(good, lengths) & inside
        names = [str(source) for source, wanted in zip(sources, good, strict=True) if wanted]
        ids = [self._names.setdefault(name, len(self._names)) for name in names]
        self._count += len(ids)
        self._parts.append(
            _Flat(
                tokens[mask].astype(self._dtype),
                supervised[mask],
                kept[good],
                np.array(ids, dtype=np.int32),
                kept[good] < lengths[good],
            )
        )

    def _read_shard(self, place: Place) -> None:
        shard = read_shard(Path(place.path))
        made_with = shard.tokenizer_sha256
        if None not in (made_with, self._given_tokenizer) and made_with != self._tokenizer_sha256:
            raise DataError(
                f"{place.path} was made with another tokenizer ({str(made_with)[:12]}, this "
                f"target's is {self._tokenizer_sha256[:12]}), so its ids mean other text; make "
                "shards with this target."
            )
        lengths, prompts = shard.lengths, shard.prompt_lengths
        positions = np.arange(len(shard.tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        supervised = positions >= np.repeat(prompts, lengths)
        wrong = {NO_ROOM: (prompts > lengths) | (prompts < 0)}
        self._take(shard.tokens, supervised, lengths, shard.sources, place.path, wrong)

    def _add_row(self, row: Mapping[str, Any], place: Place, where: str) -> None:
        text = row.get(self._text_field or "text")
        messages = None
        if not (self._text_field and text is not None):
            messages = messages_of(row, self._messages_field)
        if messages is not None:
            chat = self._chats.encode(up_to_last_answer(messages))
            if row.get("finish_reason") == CUT:
                chat = self._chats.without_end(chat)
            self._unlearnt_turns += chat.unlearnt_turns
            self.add(chat.tokens, chat.supervised, source_of(row, place), where)
        elif isinstance(text, str):
            self._add_text(text, source_of(row, place), where)
        elif "turns" in row:
            raise DataError(
                f"{where} holds prompts alone (`turns`), nothing to learn from; let the target "
                "answer them first: domino data answer TARGET FILE --out FOLDER."
            )
        else:
            names = ", ".join(sorted(map(str, row))[:6])
            raise BadRow(f"it has neither messages nor conversations nor text (found {names})")

    def _add_text(self, text: str, source: str, where: str) -> None:
        """A text is learnt as a whole, in pieces of the maximum length."""
        if not text.strip():
            self._bad.add(EMPTY, where)
            return
        tokens = np.array(self._tokenizer(text)["input_ids"], dtype=np.int64)
        size = self.max_length or len(tokens)
        for start in range(0, len(tokens), size):
            piece = tokens[start : start + size]
            if (len(piece) >= _SHORTEST_PIECE or not start) and not self.full:
                self.add(piece, np.ones(len(piece), dtype=np.bool_), source, where)
