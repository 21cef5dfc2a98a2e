"""Options that several commands share, each declared once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from domino_spec.errors import InputError
from domino_spec.settings import Candidates, Depth, ShiftLabel

if TYPE_CHECKING:
    import torch

    from domino_spec.decoding import SamplingParams
    from domino_spec.targets.load import DtypeRule

_TARGET = "Target"
_DRAFTER = "Drafter"
_SAMPLING = "Sampling"
_CHAT = "Chat template"

TargetArgument = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="The target model: a folder, a GGUF file or a hub id."),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout and nothing else there.")
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="The text alone: no progress, no statistics.")
]
NoSpeculateOption = Annotated[
    bool, typer.Option("--no-speculate", help="Decode plainly, to compare with.")
]


class Dtype(StrEnum):
    """Types a target can be loaded in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    def resolved(self) -> torch.dtype | str:
        """As the loader takes it."""
        import torch

        dtype: torch.dtype | str = "auto" if self is Dtype.AUTO else getattr(torch, self.value)
        return dtype


class TargetDtype(StrEnum):
    """The same, and what is fastest where the target runs."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FASTEST = "fastest"

    def resolved(self) -> torch.dtype | str | DtypeRule:
        """As the loader takes it."""
        if self is not TargetDtype.FASTEST:
            return Dtype(self.value).resolved()
        from domino_spec.api.dtypes import fastest_dtype

        return fastest_dtype


class Accept(StrEnum):
    """Rules for accepting a draft when sampling; all are exact."""

    REJECTION = "rejection"
    MATCH = "match"
    COUPLED = "coupled"


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """How the target is loaded."""

    revision: Annotated[
        str | None, typer.Option(help="The target's hub revision.", rich_help_panel=_TARGET)
    ] = None
    dtype: Annotated[
        TargetDtype | None,
        typer.Option(
            help="Type of the weights; unset: float32 on a CPU, else the checkpoint's own (a GGUF "
            "file's: bfloat16); fastest measures a CPU once.",
            rich_help_panel=_TARGET,
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda, cuda:1, ...; unset: a GPU if any.", rich_help_panel=_TARGET),
    ] = None
    device_map: Annotated[
        str | None,
        typer.Option(
            help="Spread over devices: auto, or a JSON object (needs accelerate).",
            rich_help_panel=_TARGET,
        ),
    ] = None
    attn_implementation: Annotated[
        str | None,
        typer.Option(help="Attention of the target, such as sdpa.", rich_help_panel=_TARGET),
    ] = None
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run modelling code that the target brings along.",
            rich_help_panel=_TARGET,
        ),
    ] = False

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `load_target`."""
        return {
            "revision": self.revision,
            "dtype": None if self.dtype is None else self.dtype.resolved(),
            "device": checked_device(self.device),
            "device_map": _device_map(self.device_map),
            "attn_implementation": self.attn_implementation,
            "trust_remote_code": self.trust_remote_code,
        }


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """Which drafter, and how much it drafts."""

    draft: Annotated[
        str | None,
        typer.Option(
            help="The drafter: a folder, a safetensors file, a hub id or released:NAME; without "
            "one decoding is plain.",
            rich_help_panel=_DRAFTER,
        ),
    ] = None
    draft_revision: Annotated[
        str | None, typer.Option(help="The drafter's hub revision.", rich_help_panel=_DRAFTER)
    ] = None
    shift_label: ShiftLabel = None
    depth: Depth = None
    candidates: Candidates = None


@dataclass(frozen=True, kw_only=True)
class AnyDraftOptions(DraftOptions):
    """The same for commands that take every kind of drafter."""

    draft: Annotated[
        str | None,
        typer.Option(
            help="A drafter of any kind: a folder, a safetensors file, a hub id, released:NAME or "
            "lookup[:DEPTH].",
            rich_help_panel=_DRAFTER,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of the chat template."""

    system: Annotated[str | None, typer.Option(help="A system message.", rich_help_panel=_CHAT)] = (
        None
    )
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking",
            help="Switch a template that knows enable_thinking; unset: its own default.",
            rich_help_panel=_CHAT,
        ),
    ] = None

    def template_options(self) -> dict[str, Any]:
        """Extra arguments of the chat template."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking}


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Every field of SamplingParams that can be written on a command line."""

    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", rich_help_panel=_SAMPLING)
    ] = 256
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=_SAMPLING)
    ] = 0.0
    top_k: Annotated[int, typer.Option(help="0 is off.", rich_help_panel=_SAMPLING)] = 0
    top_p: Annotated[float, typer.Option(help="1 is off.", rich_help_panel=_SAMPLING)] = 1.0
    min_p: Annotated[float, typer.Option(help="0 is off.", rich_help_panel=_SAMPLING)] = 0.0
    repetition_penalty: Annotated[
        float, typer.Option(help="1 is off.", rich_help_panel=_SAMPLING)
    ] = 1.0
    presence_penalty: Annotated[
        float, typer.Option(help="0 is off.", rich_help_panel=_SAMPLING)
    ] = 0.0
    frequency_penalty: Annotated[
        float, typer.Option(help="0 is off.", rich_help_panel=_SAMPLING)
    ] = 0.0
    seed: Annotated[
        int | None,
        typer.Option(help="Makes sampling repeatable.", rich_help_panel=_SAMPLING),
    ] = None
    stop: Annotated[
        list[str],
        typer.Option(help="End before this text; repeatable.", rich_help_panel=_SAMPLING),
    ] = field(default_factory=list)
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Go on past the end of the sequence.", rich_help_panel=_SAMPLING
        ),
    ] = False
    accept: Annotated[
        Accept | None,
        typer.Option(
            help="How drafts are accepted when sampling; unset: coupled on the engine, rejection "
            "in the reference loop.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None

    def params(self) -> SamplingParams:
        """The checked parameters."""
        from domino_spec.decoding import SamplingParams

        accept = None if self.accept is None else self.accept.value
        values = {**vars(self), "stop": tuple(self.stop), "accept": accept}
        return SamplingParams(**values)


def checked_device(name: str | None) -> str | None:
    """Refuse a device that is not there before anything is loaded."""
    if name is None:
        return None
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(
            f"device is {name!r}; expected cpu, cuda or cuda:0, for example."
        ) from error
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InputError(
            f"device is {name!r} but torch sees {count} GPUs here; use --device cpu, or a torch "
            "built for your GPU."
        )
    return name


def _device_map(value: str | None) -> Any:
    if value is None or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise InputError(
            f"device-map is {value!r}, which is not valid JSON ({error}); expected auto or an "
            "object of module names and devices."
        ) from error


_ENGINE = "Engine"


class EngineName(StrEnum):
    """Which loop decodes."""

    AUTO = "auto"
    FAST = "fast"
    REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """Which loop decodes, and how."""

    engine: Annotated[
        EngineName,
        typer.Option(
            help="fast is the engine, reference the loop it is checked against; auto takes the "
            "engine where it can run the request.",
            rich_help_panel=_ENGINE,
        ),
    ] = EngineName.AUTO
    pack: Annotated[
        bool,
        typer.Option(
            help="On a CPU, keep a second copy of the weights in the order it multiplies fastest.",
            rich_help_panel=_ENGINE,
        ),
    ] = True

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `DominoDecoder`."""
        return {"engine": self.engine.value, "pack": None if self.pack else False}
