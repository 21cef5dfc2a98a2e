"""Server-sent events out of bytes, however the network cuts them."""

from __future__ import annotations

from collections.abc import Iterator


class EventStream:
    """Gives the data of each event as soon as its last byte is there.

    Bytes are kept until a line is whole, so a character cut in two is none the worse.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[str]:
        """Events that these bytes complete; UnicodeDecodeError where one is not UTF-8."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    event, self._data = b"\n".join(self._data), []
                    yield event.decode("utf-8")
                continue
            name, _, value = line.partition(b":")
            if name == b"data":  # comments (nothing before the colon), ids and names say nothing
                self._data.append(value.removeprefix(b" "))
