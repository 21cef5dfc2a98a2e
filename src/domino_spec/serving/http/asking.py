"""From a checked body to sequences: one a choice, each with its own seed."""

from __future__ import annotations

import asyncio
import inspect
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from domino_spec.decoding import SamplingParams
from domino_spec.decoding import Sequence as Decoded
from domino_spec.serving.http.asked import Asked, ChatAsked, CompletionAsked
from domino_spec.serving.http.errors import ApiError, blaming

if TYPE_CHECKING:
    from domino_spec.serving.service import Service

_SEEDS = 2**62
_LONG = 200_000
"""Characters from which on a prompt waits for other long ones."""
_GREEDY_BELOW = 1e-5
"""Logits divided by less leave float32's range; the likeliest token has all the weight anyway."""


def check_model(asked: Asked, service: Service) -> None:
    """Refuse a name that is not served, as OpenAI does."""
    if asked.model != service.settings.model:
        raise ApiError(
            404,
            f"there is no model {asked.model[:200]!r} here; this server has "
            f"{service.settings.model!r}.",
            code="model_not_found",
            param="model",
        )


class Asking:
    """Bodies in, sequences out. Prompts are encoded in threads: the event loop does not wait."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._long = asyncio.Semaphore(1)

    async def chat(self, asked: ChatAsked) -> list[Decoded]:
        """The sequences of a chat."""
        service = self._service
        check_model(asked, service)
        _check_count(asked, 1, service)
        template = str(getattr(service.tokenizer, "chat_template", None) or "")
        options = asked.chat_template_kwargs or {}
        _check_options(options, template, service.tokenizer)
        messages = [_message(message, template) for message in _turns(asked)]
        size = sum(len(message["content"]) for message in messages)
        with blaming("messages"):
            prompt = await self._encoded(size, service.encode_chat, messages, options)
        return make_sequences(asked, [prompt], service, field="messages")

    async def completion(self, asked: CompletionAsked) -> list[Decoded]:
        """The sequences of plain prompts: all choices of the first, then all of the next."""
        service = self._service
        check_model(asked, service)
        _check_count(asked, len(asked.prompts), service)
        prompts: list[tuple[int, ...]] = []
        with blaming("prompt"):
            for prompt in asked.prompts:
                if isinstance(prompt, str):
                    prompts.append(await self._encoded(len(prompt), service.encode_text, prompt))
                else:
                    prompts.append(tuple(prompt))
        return make_sequences(asked, prompts, service, field="prompt")

    async def _encoded(
        self, size: int, encode: Callable[..., tuple[int, ...]], *given: Any
    ) -> tuple[int, ...]:
        if size <= _LONG:
            return await asyncio.to_thread(encode, *given)
        async with self._long:  # each takes seconds and a hundred times its own size
            return await asyncio.to_thread(encode, *given)


def make_sequences(
    asked: Asked, prompts: Sequence[tuple[int, ...]], service: Service, *, field: str
) -> list[Decoded]:
    """As many sequences a prompt as choices are wanted; `field` is where the prompts stood."""
    first = secrets.randbelow(_SEEDS) if asked.seed is None else asked.seed
    each = [prompt for prompt in prompts for _ in range(asked.n or 1)]
    sequences = []
    for choice, prompt in enumerate(each):
        params = _params(asked, _room(asked, len(prompt), service), (first + choice) % _SEEDS)
        with blaming(field):
            sequences.append(
                service.sequence(
                    prompt,
                    params,
                    index=choice,
                    speculate=asked.ours.speculate,
                    reuse=asked.ours.reuse,
                )
            )
    return sequences


def _params(asked: Asked, max_new_tokens: int, seed: int) -> SamplingParams:
    temperature = 1.0 if asked.temperature is None else asked.temperature
    wanted = asked.scores
    if wanted is None and asked.ours.blocks:
        wanted = 0  # a block tells how probable its tokens were
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_k=max(asked.top_k or 0, 0),
        top_p=1.0 if asked.top_p is None else asked.top_p,
        min_p=asked.min_p or 0.0,
        repetition_penalty=asked.repetition_penalty or 1.0,
        presence_penalty=asked.presence_penalty or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        seed=seed,
        stop=asked.stops,
        ignore_eos=bool(asked.ignore_eos),
        logprobs=wanted,
    )


def _room(asked: Asked, prompt: int, service: Service) -> int:
    """What is asked for, else all that fits; the service refuses what does not fit."""
    if asked.most_tokens is not None:
        return asked.most_tokens
    limits = service.limits
    return max(1, min(limits.max_new_tokens, limits.context - prompt))


def _check_count(asked: Asked, prompts: int, service: Service) -> None:
    most, count = service.settings.max_choices, prompts * (asked.n or 1)
    if count > most:
        param = "n" if (asked.n or 1) > 1 else "prompt"
        raise ApiError(
            400,
            f"{count} answers are asked for; this server gives at most {most} to one request.",
            code="invalid_value",
            param=param,
        )


def _check_options(options: Mapping[str, Any], template: str, tokenizer: Any) -> None:
    """Refuse what the template would not look at, and what is not the template's.

    Who could set the arguments of `apply_chat_template` itself could bring a template of its own,
    which is a program.
    """
    if not options:
        return
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    for name in options:
        known = name.isidentifier() and re.search(rf"\b{name}\b", template)
        if name in taken or not known:
            raise ApiError(
                400,
                f"the model's chat template has no variable {name[:80]!r} that a request may set.",
                code="unknown_parameter",
                param=f"chat_template_kwargs.{name[:80]}",
            )


def _turns(asked: ChatAsked) -> list[dict[str, str]]:
    return [
        {"role": message.role, "content": message.text}
        | ({"name": message.name} if message.name is not None else {})
        for message in asked.messages
    ]


def _message(message: dict[str, str], template: str) -> dict[str, str]:
    """OpenAI calls the system's turns the developer's; most templates know the old name only."""
    if message["role"] == "developer" and "developer" not in template:
        return {**message, "role": "system"}
    return message
