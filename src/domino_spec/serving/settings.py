"""What a server is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass

from domino_spec.errors import InputError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where it listens, who may ask, and how much."""

    model: str
    """The name by which clients call the model."""
    host: str = LOOPBACK
    port: int = 8000
    """0 takes any free one."""
    api_keys: tuple[str, ...] = ()
    """Who has none of these is refused; without any, everybody may ask."""
    page: bool = True
    """Whether `/` shows the chat page."""
    slots: int | None = None
    """Rows decoded together; None takes what the memory holds, up to the engine's most."""
    context: int | None = None
    """Tokens a row may have, prompt and answer; None is the target's own, as memory allows."""
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    """What one answer may ask for; None is what fits into the context."""
    max_choices: int = 16
    """Answers to one prompt (`n`), or prompts in one request."""
    max_queue: int = 256
    """Rows that may wait for a slot; more are answered 429."""
    max_body_bytes: int = 4 * 1024 * 1024
    drain_seconds: float = 30.0
    """How long running answers may go on after the server was told to stop."""

    def __post_init__(self) -> None:
        if not self.model:
            raise InputError("the model's name is empty; expected what clients will call it.")
        if not 0 <= self.port <= 65535:
            raise InputError(f"port is {self.port}; expected 0 (any) to 65535.")
        if any(not key.strip() for key in self.api_keys):
            raise InputError("an API key is empty; expected at least one character.")
        for name in ("slots", "context", "max_prompt_tokens", "max_new_tokens", "max_choices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; expected 1 or more.")
        if self.max_queue < 0:
            raise InputError(f"max_queue is {self.max_queue}; expected 0 or more.")
        if self.max_body_bytes < 1024:
            raise InputError(
                f"max_body_bytes is {self.max_body_bytes}; expected 1024 or more: a shorter body "
                "holds no request."
            )
        if not self.drain_seconds >= 0:
            raise InputError(f"drain_seconds is {self.drain_seconds}; expected 0 or more.")

    @property
    def public(self) -> bool:
        """Whether other machines can reach it."""
        return self.host not in (LOOPBACK, "localhost", "::1")
