"""A corpus in memory: conversations from files of any kind, checked, tokenised, laid out flat."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from domino_spec.checkpoints import tokenizer_fingerprint
from domino_spec.data.chat import CUT, BoolArray, ChatEncoder, messages_of, up_to_last_answer
from domino_spec.data.files import (
    SHARD_FILES,
    TEXT_FILES,
    Place,
    find_places,
    read_rows,
    read_text,
    source_of,
)
from domino_spec.data.report import BadRow, BadRowCounter, DataReport, bad_lines
from domino_spec.data.shards import TokenArray, read_shard
from domino_spec.errors import DataError

EMPTY = "it is empty"
OUTSIDE = "it holds token ids outside the vocabulary"
NOTHING_LEARNT = "no assistant token lies within the maximum length"
NO_ROOM = "its prompt is longer than itself"
_HASHED_AT_ONCE = 1 << 22
_SHORTEST_PIECE = 2


@dataclass(frozen=True)
class Example:
    """Token ids of a conversation, and which of them the target wrote: only those are learnt."""

    tokens: npt.NDArray[np.int32]  # [n]
    supervised: BoolArray  # [n]
    source: str = ""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class _Flat:
    """Conversations back to back, each array in the corpus's own order."""

    tokens: TokenArray  # [total]
    supervised: BoolArray  # [total]
    lengths: npt.NDArray[np.int64]  # [conversations]
    source_ids: npt.NDArray[np.int32]  # [conversations]
    cut: BoolArray  # [conversations]

    def select(self, wanted: BoolArray) -> _Flat:
        """Some of the conversations."""
        mask = np.repeat(wanted, self.lengths)
        return _Flat(
            self.tokens[mask],
            self.supervised[mask],
            self.lengths[wanted],
            self.source_ids[wanted],
            self.cut[wanted],
        )

    @classmethod
    def joined(cls, parts: Sequence[_Flat], dtype: type[np.integer]) -> _Flat:
        """All of them, ids in the smallest type that holds them."""
        types = {
            "tokens": dtype,
            "supervised": np.bool_,
            "lengths": np.int64,
            "source_ids": np.int32,
            "cut": np.bool_,
        }
        return cls(**{
            name: np.concatenate([np.zeros(0, kind), *(getattr(part, name) for part in parts)])
            for name, kind in types.items()
        })  # fmt: skip


class Corpus:
    """Conversations with random access; `load_corpus` reads one from files."""

    def __init__(
        self, flat: _Flat, names: Sequence[str], *, bad: Mapping[str, Any], unlearnt_turns: int
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
    collector = Collector(vocab_size=vocab_size, max_length=max_length, limit=limit)
    reader = _Reader(collector, tokenizer, messages_field, text_field, chat_options)
    for place in [place for source in sources for place in find_places(source)]:
        if collector.full:
            break
        reader.read(place)
    corpus = collector.corpus()
    if not len(corpus):
        reasons = "; ".join(bad_lines(corpus.report.bad)) or "the files hold no rows"
        raise DataError(
            f"nothing to train on in {', '.join(map(str, sources))}: {reasons}. Give conversations "
            "with assistant turns, texts or token shards made for this target."
        )
    return corpus


class Collector:
    """Gathers conversations that are good, counts those that are not, by reason."""

    def __init__(
        self, *, vocab_size: int, max_length: int | None = None, limit: int | None = None
    ) -> None:
        self.vocab_size, self.max_length = vocab_size, max_length
        self.bad = BadRowCounter()
        self.unlearnt_turns = 0
        self._limit = limit
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
        flat = _Flat.joined(self._parts, self._dtype)
        bad = self.bad.result()
        return Corpus(flat, list(self._names), bad=bad, unlearnt_turns=self.unlearnt_turns)

    def add(
        self, tokens: Sequence[int] | TokenArray, supervised: BoolArray, source: str, where: str
    ) -> None:
        """Take one conversation, cut if need be."""
        ids = np.asarray(tokens, dtype=np.int64)
        learnt = supervised[: self.max_length]
        if not len(ids):
            self.bad.add(EMPTY, where)
        elif ids.min() < 0 or ids.max() >= self.vocab_size:
            self.bad.add(OUTSIDE, where)
        elif not learnt.any():
            self.bad.add(NOTHING_LEARNT, where)
        else:
            self._take(ids[: self.max_length], learnt, [len(learnt)], [source], [len(ids)])

    def add_shard(
        self,
        tokens: TokenArray,
        lengths: npt.NDArray[np.int64],
        prompt_lengths: npt.NDArray[np.int64],
        sources: Sequence[str],
        where: str,
    ) -> None:
        """Take a shard's conversations at once."""
        starts = np.cumsum(lengths) - lengths
        kept = np.minimum(lengths, self.max_length or np.iinfo(np.int64).max)
        good = lengths > 0
        largest = np.zeros(len(lengths), dtype=np.int64)
        smallest = np.zeros(len(lengths), dtype=np.int64)
        if good.any():
            largest[good] = np.maximum.reduceat(tokens, starts[good])
            smallest[good] = np.minimum.reduceat(tokens, starts[good])
        good = np.ones(len(lengths), dtype=np.bool_)
        for reason, wrong in (
            (EMPTY, lengths <= 0),
            (OUTSIDE, (largest >= self.vocab_size) | (smallest < 0)),
            (NO_ROOM, (prompt_lengths > lengths) | (prompt_lengths < 0)),
            (NOTHING_LEARNT, prompt_lengths >= kept),
        ):
            found = good & wrong
            if found.any():
                first = f"{where}, row {int(found.argmax()) + 1}"
                self.bad.add(reason, first, int(found.sum()))
            good &= ~wrong
        if self._limit is not None:
            good &= np.cumsum(good) <= self._limit - self._count
        positions = np.arange(len(tokens)) - np.repeat(starts, lengths)
        mask = np.repeat(good, lengths) & (positions < np.repeat(kept, lengths))
        learnt = positions >= np.repeat(prompt_lengths, lengths)
        names = [str(source) for source, wanted in zip(sources, good, strict=True) if wanted]
        self._take(tokens[mask], learnt[mask], kept[good], names, lengths[good])

    def _take(
        self,
        tokens: TokenArray,
        learnt: BoolArray,
        kept: npt.ArrayLike,
        sources: Sequence[str],
        lengths: npt.ArrayLike,
    ) -> None:
        ids = [self._names.setdefault(source, len(self._names)) for source in sources]
        kept = np.asarray(kept, dtype=np.int64)
        self._count += len(kept)
        source_ids = np.array(ids, dtype=np.int32)
        cut = kept < np.asarray(lengths)
        self._parts.append(_Flat(tokens.astype(self._dtype), learnt, kept, source_ids, cut))


class _Reader:
    """Turns files into token ids with what is to be learnt of them."""

    def __init__(
        self,
        collector: Collector,
        tokenizer: Any | None,
        messages_field: str | None,
        text_field: str | None,
        chat_options: Mapping[str, Any] | None,
    ) -> None:
        self._collector, self._given_tokenizer = collector, tokenizer
        self._messages_field, self._text_field = messages_field, text_field
        self._chat_options = chat_options

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

    def read(self, place: Place) -> None:
        """Take what a file or a data set holds, until there is enough."""
        if place.suffix in SHARD_FILES:
            self._read_shard(place)
            return
        if place.suffix in TEXT_FILES:
            self._add_text(read_text(place.path), place.name, place.path)
            return
        for where, row in read_rows(place, on_broken=self._collector.bad.add):
            try:
                self._add_row(row, place, where)
            except BadRow as reason:
                self._collector.bad.add(str(reason), where)
            if self._collector.full:
                return

    def _read_shard(self, place: Place) -> None:
        shard = read_shard(Path(place.path))
        made_with = shard.tokenizer_sha256
        if None not in (made_with, self._given_tokenizer) and made_with != self._tokenizer_sha256:
            raise DataError(
                f"{place.path} was made with another tokenizer ({str(made_with)[:12]}, this "
                f"target's is {self._tokenizer_sha256[:12]}), so its ids mean other text; make "
                "shards with this target."
            )
        self._collector.add_shard(
            shard.tokens, shard.lengths, shard.prompt_lengths, shard.sources, place.path
        )

    def _add_row(self, row: Mapping[str, Any], place: Place, where: str) -> None:
        text = row.get(self._text_field or "text")
        messages = None
        if not (self._text_field and text is not None):
            messages = messages_of(row, self._messages_field)
        if messages is not None:
            chat = self._chats.encode(up_to_last_answer(messages))
            if row.get("finish_reason") == CUT:
                chat = self._chats.without_end(chat)
            self._collector.unlearnt_turns += chat.unlearnt_turns
            self._collector.add(chat.tokens, chat.supervised, source_of(row, place), where)
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
            self._collector.bad.add(EMPTY, where)
            return
        tokens = np.array(self._tokenizer(text)["input_ids"], dtype=np.int64)
        size = self._collector.max_length or len(tokens)
        for start in range(0, len(tokens), size):
            piece = tokens[start : start + size]
            if (len(piece) >= _SHORTEST_PIECE or not start) and not self._collector.full:
                learnt = np.ones(len(piece), dtype=np.bool_)
                self._collector.add(piece, learnt, source, where)
