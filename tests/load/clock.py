"""An event loop whose clock jumps to what is due next: scripted times are exact and cost none."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class Jumping(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing is due: the loop would wait for ever")
        self.now += timeout
        return super().select(0)


def make_loop() -> asyncio.AbstractEventLoop:
    selector = Jumping()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now
    return loop


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(coroutine)
