"""The service that HTTP handlers call: prompts in, streams of outputs out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from domino_spec import __version__
from domino_spec.api.prompts import check_ids
from domino_spec.decoding import SamplingParams, StopRule
from domino_spec.decoding import Sequence as Decoded
from domino_spec.decoding.params import TOKEN_FIELDS
from domino_spec.errors import InputError, TargetError
from domino_spec.grammars import Grammar, Matcher
from domino_spec.serving.config import ServerConfig
from domino_spec.serving.engine_client import EngineClient, OutputStream
from domino_spec.serving.errors import ContextLengthError, at_param
from domino_spec.serving.middleware import CLIENT
from domino_spec.serving.protocol import ServerInfo
from domino_spec.serving.tokenization import PromptEncoder

RuleMaker = Callable[[Any, SamplingParams], StopRule]
"""Makes a stop rule of the target's tokenizer and a sequence's parameters, where it is decoded."""


@dataclass(frozen=True)
class Limits:
    """What one sequence may take."""

    context: int
    """Prompt and output."""
    max_prompt_tokens: int
    max_new_tokens: int


@dataclass(frozen=True)
class ServedModel:
    """What handlers know of the target and its drafter. It can be pickled."""

    tokenizer: Any
    chat_options: Mapping[str, Any]
    ends: frozenset[int]
    """End-of-sequence tokens."""
    vocab_size: int
    limits: Limits
    speculates: bool
    draft_name: str | None
    device: str
    dtype: str
    image_refusal: str | None
    """Why prompts hold no images; None if they may."""


class StartedGrammar(Protocol):
    """A grammar that was compiled, here or in the engine's process."""

    grammar: Grammar

    def matcher(self) -> Matcher:
        """For one sequence."""


class Grammars(Protocol):
    """Compiles grammars of requests."""

    async def compile(self, grammar: Grammar) -> StartedGrammar:
        """What is wrong with it is an error."""

    def close(self) -> None:
        """Compile nothing more."""


class Service:
    """A model on an engine, open to many callers at once."""

    def __init__(
        self,
        model: ServedModel,
        config: ServerConfig,
        *,
        engine: EngineClient,
        make_sequence: Callable[..., Decoded],
        grammars: Grammars,
        load_processor: Callable[[], Any],
    ) -> None:
        """`make_sequence` takes a prompt, its parameters, and as options those of `Sequence`, the
        special tokens `kept` in its text, and `rules`, makers of further stop rules.
        `load_processor` gives the target's processor of images.
        """
        self.config = config
        self.engine = engine
        self.tokenizer, self.limits = model.tokenizer, model.limits
        self.created = int(time.time())
        self._model = model
        self._make_sequence, self._load_processor = make_sequence, load_processor
        self._grammars = grammars
        self.compile_grammar = grammars.compile
        self._prompts = PromptEncoder(self.tokenizer, max_tokens=self.limits.max_prompt_tokens)

    # For handlers -------------------------------------------------------------------------------

    def drain(self, seconds: float | None = None) -> None:
        """Take nothing new; requests may go on for a while."""
        self.engine.drain(self.config.drain_seconds if seconds is None else seconds)

    async def stop(self, seconds: float | None = None) -> None:
        """Drain, and wait until the last request has ended."""
        self.drain(seconds)
        await asyncio.to_thread(self.engine.join)
        self._grammars.close()
        await asyncio.to_thread(self._prompts.close)

    def info(self) -> ServerInfo:
        """What /v1/domino tells."""
        return ServerInfo(
            model=self.config.model,
            draft=self._model.draft_name,
            speculates=self._model.speculates,
            slots=self.engine.slots,
            context=self.limits.context,
            version=__version__,
            device=self._model.device,
            dtype=self._model.dtype,
        )

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A text's tokens, as the tokenizer begins one."""
        return await self._prompts.encode_text(
            text, add_special_tokens=add_special_tokens, client=CLIENT.get()
        )

    async def decode_tokens(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones by their names."""
        return await self._prompts.decode(tokens)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        *,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Messages through the target's chat template; a request's options override ours."""
        most = self.limits.max_prompt_tokens
        if len(messages) > most:  # refused before the template is rendered, which takes seconds
            raise ContextLengthError(
                f"the prompt has {len(messages)} messages, each of a token or more; this server "
                f"takes {most} tokens. Shorten it."
            )
        given = {**self._model.chat_options, **options}
        return await self._prompts.encode_chat(
            messages, given, add_special_tokens=add_special_tokens, client=CLIENT.get()
        )

    async def encode_images(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> tuple[list[int], dict[str, Any]]:
        """Messages with images through the target's processor, in a thread."""
        if (reason := self._model.image_refusal) is not None:
            raise InputError(reason)
        return await self._prompts.encode_images(
            messages,
            {**self._model.chat_options, **options},
            processor=self._processor,
            max_bytes=self.config.max_image_bytes,
            max_pixels=self.config.max_image_pixels,
            client=CLIENT.get(),
        )

    def _processor(self) -> Any:
        try:
            return self._load_processor()
        except TargetError as error:  # of the server's own, which its log tells in full
            raise InputError(f"this server reads no images: {error}") from error

    def sequence(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        kept: Mapping[int, str] | None = None,
        rules: Sequence[RuleMaker] = (),
        **options: Any,
    ) -> Decoded:
        """A sequence for one choice; `options` are those of `Sequence`.

        `kept` are special tokens that are part of its text, `rules` makers of further stop rules.
        """
        self._check(len(prompt), params.max_new_tokens)
        check_ids(prompt, self._model.vocab_size)
        for name in TOKEN_FIELDS:
            with at_param(name):
                params.check_vocabulary(self._model.vocab_size, (name,))
        how = {"kept": kept, "rules": rules, "seed": params.seed_of(0), "eos": self._model.ends}
        return self._make_sequence(prompt, params, **how, **options)

    def submit(self, sequences: Sequence[Decoded], *, client: str) -> OutputStream:
        """Queue these sequences. Call it in the event loop that will read their outputs."""
        for sequence in sequences:
            sequence.client = client
        return self.engine.stream(sequences)

    def _check(self, prompt: int, new: int) -> None:
        limits = self.limits
        if prompt > limits.max_prompt_tokens:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens; this server takes {limits.max_prompt_tokens}. "
                "Shorten it."
            )
        if new > limits.max_new_tokens:
            raise ContextLengthError(
                f"{new} new tokens are requested; this server gives {limits.max_new_tokens}. "
                "Request fewer.",
                param="max_tokens",
            )
        if prompt + new > limits.context:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens and {new} new ones are requested, together more "
                f"than the context of {limits.context}. Shorten the prompt, or request at most "
                f"{limits.context - prompt}."
            )
