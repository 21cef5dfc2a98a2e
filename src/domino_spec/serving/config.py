"""The native server's configuration, and the address it names.

Nothing here imports torch: what is wrong is refused before anything is loaded.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

from domino_spec.errors import InputError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where the server listens, its keys, and its limits."""

    model: str
    """The name by which clients call the model."""
    host: str = LOOPBACK
    port: int = 8000
    """0 takes any free one."""
    api_keys: tuple[str, ...] = ()
    """A request needs one of these; without any, every request is taken."""
    page: bool = True
    """Whether `/` shows the chat page."""
    slots: int | None = None
    """Sequences that run at a time; None takes what the memory holds, up to the engine's most."""
    context: int | None = None
    """Tokens of a sequence, prompt and output; None is the target's own, as memory allows."""
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    """Limits of one sequence; None is what fits into the context."""
    max_choices: int = 16
    """Sequences of one request: `n` × prompts."""
    max_queue: int = 256
    """Sequences that may wait for a slot; more are answered 429."""
    max_body_bytes: int = 4 * 1024 * 1024
    drain_seconds: float = 30.0
    """How long requests may go on after the server was told to stop."""

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


def bind_sockets(config: ServerConfig) -> list[socket.socket]:
    """Sockets that hold the address; clients can connect once the server listens on them."""
    host, port = config.host, config.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise address_error(config, None) from error
    bound: list[socket.socket] = []
    refused: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            bound.append(_bind(family, kind, protocol, address))
        except OSError as error:
            refused = error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                for each in bound:
                    each.close()
                raise address_error(config, error) from error
        if port == 0 and bound:
            break  # a second one would be given another port
    if not bound:
        raise address_error(config, refused) from refused
    return bound


def address_error(config: ServerConfig, error: OSError | None) -> InputError:
    """What is wrong with the address, and what to do."""
    host, port = config.host, config.port
    if error is not None and error.errno == errno.EADDRINUSE:
        return InputError(
            f"another program listens on port {port} of {host}; choose another with --port, or 0 "
            "for any that is free."
        )
    if error is not None and error.errno == errno.EACCES:
        return InputError(
            f"this user may not listen on port {port}; choose one above 1023 with --port."
        )
    return InputError(
        f"this machine has no address {host!r}; expected one of its own with --host, such as "
        "127.0.0.1, or 0.0.0.0 for all of them."
    )


def _bind(family: int, kind: int, protocol: int, address: object) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # or :: would want the port of 0.0.0.0 too
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)  # type: ignore[arg-type]
    except OSError:
        made.close()
        raise
    return made
