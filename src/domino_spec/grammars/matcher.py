"""Compiles grammars with llguidance, and follows sequences through them.

A mask has a bit for each token of the target's vocabulary, in 32-bit words; a set bit may follow.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from domino_spec.errors import InputError
from domino_spec.grammars.grammar import Grammar

if TYPE_CHECKING:
    import llguidance

Masks = npt.NDArray[np.int32]

MAX_COMPILED = 64
"""Compiled grammars kept, those used last."""
WALK_SECONDS = 0.05
"""After so long no further drafts of a cycle are walked: all sequences of a batch wait."""
_LIMITS: dict[str, Any] = {
    # Far beyond what schemas and expressions in use take, and a few tens of milliseconds a mask.
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 50_000,
    "verbose_errors": False,
}
_MAX_ERROR_LENGTH = 300


@dataclass(frozen=True)
class Vocabulary:
    """What the target's ids stand for."""

    tokenizer: str
    """The tokenizer as its JSON file says it."""
    rows: int
    """Of the lm_head; those without a token of the tokenizer never follow."""
    ends: tuple[int, ...]
    """Tokens that end a sequence, allowed where the text is complete."""

    @classmethod
    def of(cls, tokenizer: Any | None, *, rows: int, ends: Collection[int]) -> Vocabulary:
        """That of a tokenizer of Transformers."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            found = "none" if tokenizer is None else type(tokenizer).__name__
            raise InputError(
                f"structured outputs need a fast tokenizer, whose tokens have known bytes; found "
                f"{found}."
            )
        names = {int(end): backend.id_to_token(end) for end in ends}
        names = {end: name for end, name in sorted(names.items()) if name is not None}
        if not names:
            raise InputError(
                "structured outputs need an end token, and the target has none: neither its "
                "generation config nor its tokenizer names an eos_token_id."
            )
        state = json.loads(backend.to_str())
        state["truncation"] = state["padding"] = None
        added = {int(entry["id"]): entry for entry in state["added_tokens"]}
        plain = {"normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
        for end, name in names.items():  # or it would be text, and end the sequence in its midst
            known = added.get(end, {"id": end, "content": name, **plain})
            added[end] = {**known, "special": True}
        state["added_tokens"] = [added[token] for token in sorted(added)]
        return cls(json.dumps(state), rows, tuple(names))


def import_llguidance() -> Any:
    """The package, or an error that names it."""
    try:
        import llguidance
    except ImportError as error:
        raise InputError(
            "structured outputs need the llguidance package; pip install 'domino-spec[serve]'."
        ) from error
    return llguidance


def make_tokenizer(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """What llguidance compiles grammars for; takes a second."""
    package = import_llguidance()
    made: llguidance.LLTokenizer
    for rows in (vocabulary.rows, None):  # None where the tokenizer has more tokens than rows
        try:
            made = package.LLTokenizer(
                vocabulary.tokenizer, n_vocab=rows, eos_token=list(vocabulary.ends)
            )
            break
        except ValueError as error:
            if rows is None:
                raise InputError(
                    f"structured outputs cannot be made with this tokenizer: {error}."
                ) from error
    return made


def compile_prototype(tokenizer: llguidance.LLTokenizer, grammar: Grammar) -> llguidance.LLMatcher:
    """A matcher at the beginning; what is wrong with the grammar is an error."""
    package = import_llguidance()
    try:
        source = _source(package, grammar)
    except Exception as error:  # the converter of GBNF has errors of its own, and calls itself
        raise _wrong(grammar, str(error)) from error
    limits = package.LLParserLimits(**_LIMITS)
    matcher: llguidance.LLMatcher
    matcher = package.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # a grammar may also fail at its first token
    if matcher.is_error():
        raise _wrong(grammar, matcher.get_error())
    return matcher


def _source(package: Any, grammar: Grammar) -> str:
    """The grammar as llguidance takes it."""
    if grammar.kind == "json_schema":
        options = {"lenient": True} if grammar.lenient else None
        return str(package.LLMatcher.grammar_from_json_schema(grammar.text, overrides=options))
    if grammar.kind == "regex":
        return str(package.LLMatcher.grammar_from_regex(grammar.text))
    if grammar.kind == "choice":
        # Escaped as in JSON; the one control character that JSON leaves alone is no Lark.
        each = (json.dumps(one, ensure_ascii=False) for one in json.loads(grammar.text))
        rule = "start: " + " | ".join(each).replace("\x7f", "\\x7f")
        return str(package.LLMatcher.grammar_from_lark(rule))
    from llguidance.gbnf_to_lark import any_to_lark

    return str(package.LLMatcher.grammar_from_lark(any_to_lark(grammar.text)))


def _wrong(grammar: Grammar, reason: str) -> InputError:
    return InputError(f"the {grammar.name} cannot be compiled: {_shortened(reason)}.")


def _shortened(reason: str) -> str:
    words = " ".join(reason.replace("<non-verbose/>", "").split()).rstrip(".")
    return words if len(words) <= _MAX_ERROR_LENGTH else f"{words[:_MAX_ERROR_LENGTH]} …"


class GrammarCompiler:
    """Compiles grammars for one vocabulary, each once while it is used; from any thread."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        """The vocabulary is asked for at the first grammar."""
        self._make = vocabulary
        self._lock = threading.Lock()
        self._preparing = threading.Lock()  # which takes seconds; what is known need not wait
        self._vocabulary: Vocabulary | None = None
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()

    @property
    def vocabulary(self) -> Vocabulary:
        """What it compiles for."""
        with self._preparing:
            if self._vocabulary is None:
                import_llguidance()  # before all tokens are read
                self._vocabulary = self._make()
            return self._vocabulary

    def known(self, grammar: Grammar) -> CompiledGrammar | None:
        """The compiled grammar, if it is kept."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
            return found

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The compiled grammar; what is wrong with it is an error that says so."""
        if (found := self.known(grammar)) is not None:
            return found
        vocabulary = self.vocabulary
        with self._preparing:
            if self._tokenizer is None:
                self._tokenizer = make_tokenizer(vocabulary)
            tokenizer = self._tokenizer
        prototype = compile_prototype(tokenizer, grammar)
        words = (tokenizer.vocab_size + 31) // 32
        compiled = CompiledGrammar(grammar, prototype, words=words, ends=vocabulary.ends)
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled


class CompiledGrammar:
    """A grammar for a vocabulary; each sequence has a matcher of its own."""

    def __init__(
        self,
        grammar: Grammar,
        prototype: llguidance.LLMatcher,
        *,
        words: int,
        ends: Collection[int],
    ) -> None:
        self.grammar = grammar
        self.words = words
        """Of a mask."""
        self.ends = frozenset(ends)
        self._prototype = prototype
        self._lock = threading.Lock()

    def matcher(self) -> Matcher:
        """At the beginning."""
        return Matcher(self)

    def begin(self) -> llguidance.LLMatcher:
        """A copy of llguidance's matcher at the beginning."""
        with self._lock:
            return self._prototype.deep_copy()


class Matcher:
    """Where one sequence is in its grammar: after the tokens it has committed."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        self.words = compiled.words
        self._compiled = compiled
        self._state = compiled.begin()
        self._committed: list[int] = []

    @property
    def ended(self) -> bool:
        """Whether the text is complete and nothing can follow it."""
        return bool(self._state.is_stopped())

    def is_end(self, token: int) -> bool:
        """Whether the token ends a sequence."""
        return token in self._compiled.ends

    def commit(self, token: int) -> None:
        """Go on by a token that the sequence has committed."""
        if not self._state.consume_token(token):
            raise InputError(
                f"the {self._compiled.grammar.name} does not allow the token {token} as number "
                f"{len(self._committed) + 1} of the output: {_shortened(self._state.get_error())}."
            )
        self._committed.append(token)

    def fill(self, mask: Masks) -> None:
        """Write the mask [words] of the next token."""
        self._state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._state.is_error():
            if "NoExtension" in self._state.get_error():
                raise InputError(
                    f"the {self._compiled.grammar.name} leaves no token after "
                    f"{len(self._committed)} tokens of the output: no token of the target begins "
                    "what must follow."
                )
            raise InputError(
                f"the {self._compiled.grammar.name} became too complex after "
                f"{len(self._committed)} tokens of the output: "
                f"{_shortened(self._state.get_error())}. Simplify it."
            )
        # llguidance takes the name of a special token in text that is forced for the token.
        ends = any(mask[end // 32] >> end % 32 & 1 for end in self._compiled.ends)
        if ends and not self._state.is_accepting():
            raise InputError(
                f"the {self._compiled.grammar.name} asks for the name of an end token after "
                f"{len(self._committed)} tokens of the output, which cannot be written as text."
            )

    def walk(self, drafts: Sequence[int], masks: Masks) -> int:
        """Write the masks [n, words] after the committed tokens and after each further draft.

        Ends at the first draft that the grammar does not allow, which cannot be accepted, and gives
        how many drafts may be accepted at most. The state is the same as before.
        """
        self.fill(masks[0])
        started, walked, reach = time.perf_counter(), 0, len(drafts)
        for place, draft in enumerate(drafts):
            if time.perf_counter() - started > WALK_SECONDS:
                reach = place
                break
            if not self._state.try_consume_tokens([draft]):
                break
            walked += 1
            if self._state.is_stopped() and not self._state.is_error():
                break
            try:
                self.fill(masks[place + 1])
            except InputError:  # the draft may never be committed: then nothing is wrong
                self._restore()
                return place
        if walked:
            self._state.rollback(walked)
        return reach

    def _restore(self) -> None:
        """The state anew: one that has failed stays so."""
        self._state = self._compiled.begin()
        self._state.consume_tokens(self._committed)
