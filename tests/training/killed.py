"""`python -m tests.training.killed OUT STEP`: a run on bigrams that is killed after a step."""

import os
import signal
import sys
import tempfile
from pathlib import Path

import torch

from domino_spec.training import train
from tests.training.helpers import bigram_corpus, loaded_bigrams, ready


class Killer:
    def __init__(self, step: int) -> None:
        self._step = step

    def report(self, step, values):
        if step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self):
        pass


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, step = Path(sys.argv[1]), int(sys.argv[2])
    corpus = bigram_corpus(Path(tempfile.mkdtemp(dir=out.parent)))
    train(ready(out, corpus, loaded_bigrams(), Killer(step), log_every=1))
