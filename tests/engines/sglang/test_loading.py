"""SGLang's own draft model takes every weight of an exported drafter."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from domino_spec.checkpoints import export_drafter
from domino_spec.checkpoints.write import public_tensors
from tests.checkpoints.helpers import tiny_drafter, with_parameters_as

pytest.importorskip(
    "sglang",
    reason="SGLang is not installed; see tests/engines/requirements-sglang.txt",
)

from safetensors.torch import load_file
from transformers import AutoConfig

STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""What SGLang keeps as one matrix."""


@pytest.fixture
def single_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One rank, bfloat16, and a name for the rotary kernel, which never runs here."""
    from sglang.srt.runtime_context import get_parallel

    kernels = SimpleNamespace(rotary_embedding=None)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", kernels)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with get_parallel().override(tp_size=1, tp_rank=0):
        yield
    torch.set_default_dtype(before)


def expected(name: str, ours: dict[str, Tensor]) -> Tensor:
    for stacked, parts in STACKED.items():
        if stacked in name:
            return torch.cat([ours[name.replace(stacked, part)] for part in parts])
    return ours[name]


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize(
    "changes", [{}, {"shift_label": False}, {"head": None, "shift_label": False}]
)
def test_every_weight_arrives(changes: dict[str, Any], tmp_path: Path) -> None:
    from domino_spec.plugins.sglang.models.domino import DominoDraftModel

    drafter = with_parameters_as(tiny_drafter(**changes), torch.bfloat16)
    folder = export_drafter(drafter, tmp_path / "out", to="sglang")
    model = DominoDraftModel(AutoConfig.from_pretrained(folder))
    model.load_weights(load_file(folder / "model.safetensors").items())
    ours = public_tensors(drafter)
    theirs = dict(model.named_parameters())
    for name, weight in theirs.items():
        assert torch.equal(weight, expected(name, ours)), name
    assert sum(w.numel() for w in theirs.values()) == sum(w.numel() for w in ours.values())
    if drafter.head is not None:
        assert model.shift_label is drafter.config.shift_label
