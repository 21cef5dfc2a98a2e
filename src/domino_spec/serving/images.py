"""Pixel values of prompts that wait: hundreds of megabytes each, made of files of a few."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor, Future
from threading import Lock
from typing import Any

from domino_spec.api.images import ImageChat


class ImagePrompt:
    """A prompt with images, to be encoded again for each prefill (`DeferredInputs`)."""

    def __init__(self, chat: ImageChat, slot: PixelSlot) -> None:
        self._chat = chat
        self._slot = slot

    def make(self) -> Mapping[str, Any]:
        """The same that it was accepted with."""
        return self._chat.encode()[1]

    def prepare(self) -> None:
        """From the engine's thread: its sequence is next."""
        self._slot.claim(self)

    def take(self) -> Mapping[str, Any]:
        """From the engine's thread, for a prefill."""
        return self._slot.take(self)


class PixelSlot:
    """Holds the pixel values of one prompt that waits, and of no other.

    It is the one that the engine says is next; until it says so, the one that was accepted last.
    So an idle server makes them once, and a busy one makes the next ones while it decodes.
    """

    def __init__(self, thread: Executor) -> None:
        """`thread` is where they are made, one after the other."""
        self._thread = thread
        self._lock = Lock()
        self._holder: ImagePrompt | None = None
        self._made: Future[Mapping[str, Any]] | None = None
        self._claimed = False

    def offer(self, prompt: ImagePrompt, made: Mapping[str, Any]) -> None:
        """What was made to accept a prompt; thrown away if the engine waits for another's."""
        future: Future[Mapping[str, Any]] = Future()
        future.set_result(made)
        with self._lock:
            if not self._claimed:
                self._holder, self._made = prompt, future

    def claim(self, prompt: ImagePrompt) -> None:
        """Begin to make them, if they are not there."""
        with self._lock:
            if self._holder is not prompt:
                if self._made is not None:
                    self._made.cancel()
                self._holder, self._made = prompt, self._thread.submit(prompt.make)
            self._claimed = True

    def take(self, prompt: ImagePrompt) -> Mapping[str, Any]:
        """Wait for them. Another holder may have been cancelled, unless it is claimed again."""
        with self._lock:
            self._claimed = False
            made = None
            if self._holder is prompt:
                made, self._holder, self._made = self._made, None, None
        return (made or self._thread.submit(prompt.make)).result()
