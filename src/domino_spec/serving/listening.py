"""The address, taken before anything is loaded: whoever cannot have it hears so at once."""

from __future__ import annotations

import errno
import socket

from domino_spec.errors import InputError
from domino_spec.serving.settings import ServerSettings


def take_address(settings: ServerSettings) -> list[socket.socket]:
    """Sockets that hold the address; nobody can connect before the server listens on them."""
    host, port = settings.host, settings.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise _nobody_here(host) from error
    taken: list[socket.socket] = []
    refused: OSError | None = None
    for family, kind, protocol, _, place in dict.fromkeys(found):
        try:
            taken.append(_bind(family, kind, protocol, place))
        except OSError as error:
            refused = error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                _close(taken)
                raise why_not(settings, error) from error
        if port == 0 and taken:
            break  # a second one would be given another port
    if not taken:
        raise why_not(settings, refused) from refused
    return taken


def why_not(settings: ServerSettings, error: OSError | None) -> InputError:
    """What is wrong with the address, and what to do."""
    host, port = settings.host, settings.port
    if error is not None and error.errno == errno.EADDRINUSE:
        return InputError(
            f"another program listens on port {port} of {host}; choose another with --port, or 0 "
            "for any that is free."
        )
    if error is not None and error.errno == errno.EACCES:
        return InputError(
            f"this user may not listen on port {port}; choose one above 1023 with --port."
        )
    return _nobody_here(host)


def _nobody_here(host: str) -> InputError:
    return InputError(
        f"this machine has no address {host!r}; expected one of its own with --host, such as "
        "127.0.0.1, or 0.0.0.0 for all of them."
    )


def _bind(family: int, kind: int, protocol: int, place: object) -> socket.socket:
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # or :: would want the port of 0.0.0.0 too
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(place)  # type: ignore[arg-type]
    except OSError:
        made.close()
        raise
    return made


def _close(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()
