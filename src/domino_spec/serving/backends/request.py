"""What a server is asked to be, whichever engine it runs on."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from domino_spec.errors import InputError
from domino_spec.serving.settings import LOOPBACK, ServerSettings

GGUF_SUFFIX = ".gguf"
_OPTIONS = {"api_keys": "--api-key", "speculate": "--no-speculate", "target": "TARGET"}
_PASSED_ON = "options behind --"
_SETTINGS = (
    "host", "port", "api_keys", "page", "slots", "context", "max_prompt_tokens", "max_new_tokens",
    "max_choices", "max_queue", "max_body_bytes", "drain_seconds",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServeRequest:
    """One command line for every backend; None leaves a choice to it.

    A backend translates every field or refuses it by name; a test goes through them all.
    """

    target: str
    revision: str | None = None
    dtype: str | None = None
    device: str | None = None
    device_map: str | None = None
    attn_implementation: str | None = None
    trust_remote_code: bool = False

    draft: str | None = None
    draft_revision: str | None = None
    shift_label: bool | None = None
    depth: int | None = None
    candidates: int | None = None
    speculate: bool = True
    """Without it a drafter is left out, as if none had been named."""

    thinking: bool | None = None
    pack: bool | None = None

    host: str = LOOPBACK
    port: int = 8000
    model_name: str | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    page: bool | None = None
    slots: int | None = None
    context: int | None = None
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    max_choices: int | None = None
    max_queue: int | None = None
    max_body_bytes: int | None = None
    drain_seconds: float | None = None

    tensor_parallel: int | None = None
    memory_share: float | None = None
    """Of a GPU's memory, for weights and cache together."""
    engine_python: str | None = None
    """The Python beside which the backend's engine is installed."""
    passed_on: tuple[str, ...] = ()
    """Arguments for the backend's own command line, as they are."""

    def __post_init__(self) -> None:
        if self.tensor_parallel is not None and self.tensor_parallel < 1:
            raise InputError(f"tensor_parallel is {self.tensor_parallel}; expected 1 or more.")
        if self.memory_share is not None and not 0 < self.memory_share <= 1:
            raise InputError(
                f"memory_share is {self.memory_share}; expected a part of the GPU's memory above 0 "
                "and up to 1, such as 0.9."
            )
        if self.passed_on and not self.passed_on[0].startswith("-"):
            raise InputError(
                f"{self.passed_on[0]!r} follows the target; expected options, or -- and what the "
                "backend's own command line is to be given."
            )
        if self.draft is None:
            idle = [
                option(name)
                for name in ("draft_revision", "shift_label", "depth", "candidates")
                if getattr(self, name) is not None
            ]
            if idle:
                raise InputError(f"{', '.join(idle)} without --draft; name the drafter, or drop.")
        self.settings()

    @property
    def name(self) -> str:
        """By which clients call the model: what was asked for, or the target's own short name."""
        if self.model_name is not None:
            return self.model_name
        path = Path(self.target).expanduser()
        name = path.resolve().name if path.exists() else self.target.rstrip("/").split("/")[-1]
        return name.removesuffix(GGUF_SUFFIX) or self.target

    @property
    def drafter(self) -> str | None:
        """The drafter that is to be used, if any."""
        return self.draft if self.speculate else None

    def settings(self) -> ServerSettings:
        """For our own server; also what checks the values for every other one."""
        given = {name: getattr(self, name) for name in _SETTINGS}
        return ServerSettings(
            model=self.name, **{name: value for name, value in given.items() if value is not None}
        )

    def given(self) -> dict[str, Any]:
        """The fields that say something, by name."""
        return {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if getattr(self, one.name) != one.default
        }


def option(name: str) -> str:
    """How the command line spells a field."""
    if name == "passed_on":
        return _PASSED_ON
    return _OPTIONS.get(name, "--" + name.replace("_", "-"))


def refuse_fields(request: ServeRequest, backend: str, instead: dict[str, str]) -> None:
    """Refuse what a backend lacks, each by its name and with what to do instead."""
    wrong = [f"{option(name)} ({instead[name]})" for name in request.given() if name in instead]
    if wrong:
        raise InputError(f"--backend {backend} has no {', no '.join(wrong)}.")
