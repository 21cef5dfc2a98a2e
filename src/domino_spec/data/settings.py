"""Settings of `domino data synth` and `domino data answer`; a folder keeps to one set of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import model_validator

from domino_spec.errors import InputError
from domino_spec.settings import Settings, setting

if TYPE_CHECKING:
    from domino_spec.decoding import SamplingParams

Count = Annotated[int, Ge(1)]
Temperature = Annotated[float, Ge(0)]
TopP = Annotated[float, Gt(0), Le(1), setting(1.0, "1 is off")]
TopK = Annotated[int, Ge(0), setting(0, "0 is off")]
Seed = Annotated[int, setting(0, "decides every draw")]
PartSize = Annotated[Count, setting(
    256, "prompts a part file; a stopped run loses those of unfinished ones")]  # fmt: skip


class SynthSettings(Settings):
    """How prompts are drawn."""

    temperature: float = setting(1.0, "of every draw", flags=("-t",))
    top_p: TopP
    top_k: TopK
    min_tokens: Count = setting(4, "shorter prompts are dropped")
    max_tokens: Count = setting(
        256, "messages that have not ended by then are dropped; openings of texts end there"
    )
    seed: Seed
    part_size: PartSize

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.temperature <= 0:
            raise InputError(
                f"temperature is {self.temperature}; greedy drawing gives one prompt only. "
                "Expected more than 0."
            )
        if self.min_tokens > self.max_tokens:
            raise InputError(
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}; expected the "
                "smaller one first."
            )
        return self

    def params(self, candidate: int) -> SamplingParams:
        """The sampling of one candidate: its seed does not depend on its batch."""
        from domino_spec.data.generation import seed_of
        from domino_spec.decoding import SamplingParams

        return SamplingParams(
            max_new_tokens=self.max_tokens + 1,  # the end token
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=seed_of(self.seed, "prompt", candidate),
            accept="coupled",  # the same text from the engine and from the reference loop
        )


class AnswerSettings(Settings):
    """How answers are drawn and written."""

    max_new_tokens: Count = setting(512, "longer answers are cut", flags=("-n",))
    temperatures: Annotated[tuple[Temperature, ...], MinLen(1)] = setting(
        (0.0,), "repeatable: each prompt gets one, decided by the seed",
        flags=("--temperature", "-t"),
    )  # fmt: skip
    top_p: TopP
    top_k: TopK
    seed: Seed
    part_size: PartSize
    format: Literal["shards", "jsonl"] = setting("shards", "token shards, or conversations")

    def params(self, temperature: float, seed: int) -> SamplingParams:
        """The sampling of one answer."""
        from domino_spec.decoding import SamplingParams

        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=seed,
            accept="coupled",  # the same text from the engine and from the reference loop
        )

    def temperature_of(self, index: int) -> float:
        """Which temperature a prompt gets."""
        from domino_spec.data.generation import seed_of

        return self.temperatures[seed_of(self.seed, "temperature", index) % len(self.temperatures)]
