"""The native server's configuration, and the address it names.

Nothing here imports torch: what is wrong is refused before anything is loaded.
"""

from __future__ import annotations

import errno
import re
import socket
from contextlib import suppress
from typing import Annotated, Literal

from annotated_types import Ge, Le, MinLen
from pydantic import AfterValidator, Field

from domino_spec.errors import InputError
from domino_spec.settings import Settings

LOOPBACK = "127.0.0.1"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.:\[\]_-]+")
ToolCallParserName = Literal["auto", "hermes", "llama3_json", "mistral", "json", "none"]
ReasoningParserName = Literal["auto", "think", "none"]


def _not_blank(key: str) -> str:
    if not key.strip():
        raise InputError("an API key is empty; expected at least one character.")
    return key


def _is_origin(origin: str) -> str:
    """As a browser writes it: neither a path nor a last slash."""
    if origin != "*" and not _ORIGIN.fullmatch(origin):
        raise InputError(
            f"the origin {origin[:200]!r} is none; expected SCHEME://HOST or SCHEME://HOST:PORT, "
            "such as https://chat.example, or * for every site."
        )
    return origin


_Count = Annotated[int, Ge(1)]


class ServerConfig(Settings):
    """Where the server listens, its keys, and its limits."""

    model: Annotated[str, MinLen(1)]
    """The name by which clients call the model."""
    host: str = LOOPBACK
    port: Annotated[int, Ge(0), Le(65535)] = 8000
    """0 takes any free one."""
    api_keys: tuple[Annotated[str, AfterValidator(_not_blank)], ...] = Field((), repr=False)
    """A request needs one of these; without any, every request is taken."""
    allowed_origins: tuple[Annotated[str, AfterValidator(_is_origin)], ...] = ()
    """Sites whose pages may ask (CORS), `*` for all; without any, no other site's may."""
    strict: bool = False
    """Whether unknown fields of a request are refused; otherwise they are ignored, and named in a
    header of the response."""
    page: bool = True
    """Whether `/` shows the chat page."""
    tool_call_parser: ToolCallParserName = "auto"
    """The format in which the model writes calls; `auto` is what its chat template teaches."""
    reasoning_parser: ReasoningParserName = "auto"
    """How it marks its reasoning; `auto` looks for <think> in its chat template."""
    slots: _Count | None = None
    """Sequences that run at a time; None takes what the memory holds, up to the engine's most."""
    context: _Count | None = None
    """Tokens of a sequence, prompt and output; None is the target's own, as memory allows."""
    max_prompt_tokens: _Count | None = None
    max_new_tokens: _Count | None = None
    """Limits of one sequence; None is what fits into the context."""
    max_choices: _Count = 16
    """Sequences of one request: `n` × prompts."""
    max_queue: Annotated[int, Ge(0)] = 256
    """Sequences that may wait for a slot; more are answered 429."""
    max_body_bytes: Annotated[int, Ge(1024)] = 4 * 1024 * 1024
    max_image_bytes: _Count = 3 * 1024 * 1024
    """Of one image's file, before base64 makes it a third longer."""
    max_image_pixels: _Count = 16 * 1024 * 1024
    """Of all images of a request together, as sent or, if that is more, as the target's processor
    resizes them at least; a small file may hold many."""
    drain_seconds: Annotated[float, Ge(0)] = 30.0
    """How long requests may go on after the server was told to stop."""

    @property
    def public(self) -> bool:
        """Whether other machines can reach it."""
        return self.host not in (LOOPBACK, "localhost", "::1")


def bind_sockets(config: ServerConfig) -> list[socket.socket]:
    """Sockets that hold the address; clients can connect once the server listens on them."""
    found, error = [], OSError()
    with suppress(OSError, UnicodeError):  # a name that is no address
        found = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    bound: list[socket.socket] = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        if config.port == 0 and bound:
            break  # a second one would be given another port
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # or :: would want the port of 0.0.0.0 too
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind(address)
            bound.append(made)
        except OSError as refused:
            made.close()
            error = refused
            if refused.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                for each in bound:
                    each.close()
                bound = []
                break
    if not bound:
        raise address_error(config, error) from error
    return bound


def address_error(config: ServerConfig, error: OSError) -> InputError:
    """What is wrong with the address, and what to do."""
    host, port = config.host, config.port
    if error.errno == errno.EADDRINUSE:
        return InputError(
            f"another program listens on port {port} of {host}; choose another with --port, or 0 "
            "for any that is free."
        )
    if error.errno == errno.EACCES:
        return InputError(
            f"this user may not listen on port {port}; choose one above 1023 with --port."
        )
    return InputError(
        f"this machine has no address {host!r}; expected one of its own with --host, such as "
        "127.0.0.1, or 0.0.0.0 for all of them."
    )
