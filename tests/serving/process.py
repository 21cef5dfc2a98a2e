"""Servers in a process of their own, slow enough to be interrupted: `python -m ... SECONDS...`."""

import sys
import time

from domino_spec.engine.engine import Engine
from domino_spec.serving.config import ServerConfig
from domino_spec.serving.server import serve
from tests.serving.live import tiny_decoder

if __name__ == "__main__":
    quick = Engine.step

    def step(engine):
        time.sleep(0.02)
        return quick(engine)

    Engine.step = step  # type: ignore[method-assign]
    for seconds in map(float, sys.argv[1:]):  # the next one once the last one has ended
        settings = ServerConfig(model="tiny", port=0, slots=4, context=200, drain_seconds=seconds)
        code = serve(tiny_decoder(), settings, log=lambda line: print(line, flush=True))
        if code:
            sys.exit(code)
