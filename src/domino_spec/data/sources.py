"""Reads every kind of source into one collector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from domino_spec.checkpoints import tokenizer_fingerprint
from domino_spec.data.chat import CUT, ChatEncoder, messages_of, up_to_last_answer
from domino_spec.data.collect import EMPTY, Collector
from domino_spec.data.files import (
    SHARD_FILES,
    TEXT_FILES,
    Place,
    find_places,
    read_rows,
    read_text,
    source_of,
)
from domino_spec.data.report import BadRow
from domino_spec.data.shards import read_shard
from domino_spec.errors import DataError

_SHORTEST_PIECE = 2


class SourceReader:
    """Turns files into token ids with what is to be learnt of them."""

    def __init__(
        self,
        collector: Collector,
        tokenizer: Any | None,
        *,
        messages_field: str | None = None,
        text_field: str | None = None,
        chat_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._collector = collector
        self._tokenizer = tokenizer
        self._messages_field = messages_field
        self._text_field = text_field
        self._chat_options = chat_options
        self._encoder: ChatEncoder | None = None
        self._sha256: str | None = None

    def read(self, sources: Sequence[str | Path]) -> None:
        """Read sources in order until there is enough."""
        if not sources:
            raise DataError("no data were named; give files, folders or hf:name.")
        for place in [place for source in sources for place in find_places(source)]:
            if self._collector.full:
                return
            if place.suffix in SHARD_FILES:
                self._read_shard(place)
            elif place.suffix in TEXT_FILES:
                self._add_text(read_text(place.path), place.name, place.path)
            else:
                self._read_rows(place)

    def _read_shard(self, place: Place) -> None:
        shard = read_shard(place.path)
        self._check_tokenizer(shard.tokenizer_sha256, place)
        self._collector.add_flat(
            shard.tokens, shard.lengths, shard.prompt_lengths, shard.sources, place.path
        )

    def _check_tokenizer(self, made_with: str | None, place: Place) -> None:
        if made_with is None or self._tokenizer is None:
            return
        if self._sha256 is None:
            self._sha256 = tokenizer_fingerprint(self._tokenizer)
        if made_with != self._sha256:
            raise DataError(
                f"{place.path} was made with another tokenizer ({made_with[:12]}, this target's is "
                f"{self._sha256[:12]}), so its ids mean other text; make shards with this target."
            )

    def _read_rows(self, place: Place) -> None:
        for where, row in read_rows(place, on_broken=self._collector.bad.add):
            try:
                self._add_row(row, place, where)
            except BadRow as reason:
                self._collector.bad.add(str(reason), where)
            if self._collector.full:
                return

    def _add_row(self, row: Mapping[str, Any], place: Place, where: str) -> None:
        text = row.get(self._text_field or "text")
        messages = None
        if not (self._text_field and text is not None):
            messages = messages_of(row, self._messages_field)
        if messages is not None:
            chat = self._chats().encode(up_to_last_answer(messages))
            if row.get("finish_reason") == CUT:
                chat = self._chats().without_end(chat)
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
        tokens = np.array(self._tokens(text), dtype=np.int64)
        size = self._collector.max_length or len(tokens)
        for start in range(0, len(tokens), size):
            piece = tokens[start : start + size]
            if (len(piece) >= _SHORTEST_PIECE or not start) and not self._collector.full:
                learnt = np.ones(len(piece), dtype=np.bool_)
                self._collector.add(piece, learnt, source, where)

    def _tokens(self, text: str) -> list[int]:
        return [int(token) for token in self._need()(text)["input_ids"]]

    def _chats(self) -> ChatEncoder:
        if self._encoder is None:
            self._encoder = ChatEncoder(self._need(), self._chat_options)
        return self._encoder

    def _need(self) -> Any:
        if self._tokenizer is None:
            raise DataError(
                "the data are text but the target came without a tokenizer; save its tokenizer "
                "beside its weights, or give token shards."
            )
        return self._tokenizer
