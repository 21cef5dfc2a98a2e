"""Stands in for CUDA graphs on a CPU."""

import torch


class Replays:
    """In place of `GraphRecorder`: a replay runs the work again, over what all others left."""

    def __init__(self):
        self.outputs = []
        self.ran = None

    def can_record(self, work):
        work()
        self.ran = work
        return True

    def record(self, work, *, large=False):
        assert not large or self.ran is work, "nothing may be compiled during a capture"
        output = work()
        self.outputs.append(output)
        return _Replay(self, work, output), output

    def spoil(self):
        for output in self.outputs:
            for tensor in _tensors(output):
                tensor.fill_(torch.nan if tensor.is_floating_point() else -1)


class _Replay:
    def __init__(self, recorder, work, output):
        self.recorder, self.work, self.output = recorder, work, output

    def replay(self):
        self.recorder.spoil()
        for old, new in zip(_tensors(self.output), _tensors(self.work()), strict=True):
            old.copy_(new)


def _tensors(output):
    """Those of a result: a tensor, or an object that holds some."""
    if isinstance(output, torch.Tensor):
        return [output]
    values = output if isinstance(output, (tuple, list)) else vars(output).values()
    return [tensor for value in values if value is not None for tensor in _tensors(value)]
