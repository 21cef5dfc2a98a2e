"""SGLang without a GPU: see tests/engines/requirements-sglang.txt."""

from __future__ import annotations

import importlib.util

import torch

_OPERATORS = ("nms", "qnms")


def _make_torchvision_importable() -> None:
    """Its wheel is linked against CUDA: without that, only its operators are missing."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in _OPERATORS:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)


_KEPT: list[torch.library.Library] = []

if importlib.util.find_spec("sglang") and importlib.util.find_spec("torchvision"):
    _make_torchvision_importable()
