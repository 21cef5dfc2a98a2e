"""Options that several commands share, each declared once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from domino_spec.settings import DraftOptions, Settings, Thinking, setting

if TYPE_CHECKING:
    from domino_spec.decoding import SamplingParams

TargetArgument = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="The target model: a folder, a GGUF file or a hub id."),
]
NoSpeculateOption = Annotated[
    bool, typer.Option("--no-speculate", help="Decode plainly, to compare with.")
]
QUIET = "The text alone: no progress, no statistics."
Accept = Literal["rejection", "match", "coupled"]
EngineName = Literal["auto", "fast", "reference"]
ACCEPT_UNSET = "coupled on the engine, rejection in the reference loop"

_sampling = partial(setting, group="Sampling")
_engine = partial(setting, group="Engine")


class OneDraftOptions(DraftOptions):
    """The same for commands that are about a drafter."""

    draft: str = setting(
        ...,
        "a drafter of any kind: a folder, a safetensors file, a hub id, released:NAME or "
        "lookup[:DEPTH]",
        group="Drafter",
    )


class ChatOptions(Settings):
    """Options of the chat template."""

    system: str | None = setting(None, "a system message", group="Chat template")
    thinking: Thinking = None

    def template_options(self) -> dict[str, Any]:
        """Extra arguments of the chat template."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking}


class SamplingOptions(Settings):
    """Every field of SamplingParams that can be written on a command line."""

    max_new_tokens: int = _sampling(256, "the longest answer", flags=("-n",))
    temperature: float = _sampling(0.0, "0 is greedy", flags=("-t",))
    top_k: int = _sampling(0, "0 is off")
    top_p: float = _sampling(1.0, "1 is off")
    min_p: float = _sampling(0.0, "0 is off")
    repetition_penalty: float = _sampling(1.0, "1 is off")
    presence_penalty: float = _sampling(0.0, "0 is off")
    frequency_penalty: float = _sampling(0.0, "0 is off")
    seed: int | None = _sampling(None, "makes sampling repeatable")
    stop: tuple[str, ...] = _sampling((), "end before this text; repeatable")
    ignore_eos: bool = _sampling(False, "go on past the end of the sequence")
    accept: Accept | None = _sampling(
        None, "how drafts are accepted when sampling", unset=ACCEPT_UNSET
    )

    def params(self) -> SamplingParams:
        """The checked parameters."""
        from domino_spec.decoding import SamplingParams

        return SamplingParams(**dict(self))


class LoopOptions(Settings):
    """Which loop decodes, and how."""

    engine: EngineName = _engine(
        "auto",
        "`fast` is the engine, reference the loop it is checked against; auto takes the engine "
        "where it can run the request",
    )
    pack: bool = _engine(
        True, "on a CPU, keep a second copy of the weights in the order it multiplies fastest"
    )
