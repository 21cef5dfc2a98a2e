"""Stands in for CUDA graphs on a CPU."""

import torch


class Replays:
    """In place of `Recorder`: a replay runs the work again and writes over what all others left."""

    def __init__(self):
        self.outputs = []

    def record(self, work):
        output = work()
        self.outputs.append(output)
        return _Replay(self, work, output), output

    def spoil(self):
        for output in self.outputs:
            output.fill_(torch.nan if output.is_floating_point() else -1)


class _Replay:
    def __init__(self, recorder, work, output):
        self.recorder, self.work, self.output = recorder, work, output

    def replay(self):
        self.recorder.spoil()
        self.output.copy_(self.work())
