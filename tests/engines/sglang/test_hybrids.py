"""Which hidden states SGLang takes of a hybrid target: its own forward, with stand-ins for layers.

Its server, and its kernels of linear attention, need a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip(
    "sglang",
    reason="SGLang is not installed; see tests/engines/requirements-sglang.txt",
)

from sglang.srt.arg_groups.speculative_hook import _handle_dflash
from sglang.srt.layers.communicator import LayerCommunicator
from sglang.srt.models import qwen3_5, qwen3_5_text, qwen3_next, qwen3_vl

HIDDEN, TOKENS = 8, 5
ONE_RANK = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1)
BATCH = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: False))


class OneRank(LayerCommunicator):
    """Adds residuals up, and neither norms nor talks to other ranks."""

    def __init__(self) -> None:
        self._context = None
        self._communicate_simple_fn = lambda hidden_states, **_: hidden_states

    def prepare_attn(self, hidden: Tensor, residual: Tensor | None, *_: Any, **__: Any) -> Any:
        total = hidden if residual is None else hidden + residual
        return total.clone(), total

    prepare_mlp = prepare_attn

    def should_use_reduce_scatter(self, *_: Any) -> bool:
        return False

    should_fuse_mlp_allreduce_with_next_layer = should_use_reduce_scatter
    _post_attn_residual_is_read_only = should_use_reduce_scatter

    def postprocess_layer(self, hidden: Tensor, residual: Tensor, *_: Any) -> Any:
        return hidden, residual


class Mixing(nn.Linear):
    """Stands for attention of either kind, and for an MLP."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, HIDDEN)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return super().forward(hidden_states)


def bare(kind: type, **parts: Any) -> Any:
    """A model of theirs without what its constructor would build."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    vars(made).update(parts)  # before what the class has by the same name
    return made


def layers_of(linear: type, attention: type) -> nn.ModuleList:
    kinds = [linear, linear, linear, attention]
    return nn.ModuleList(
        bare(
            kind,
            layer_communicator=OneRank(),
            mlp=Mixing(),
            **{"self_attention" if kind is attention else "linear_attn": Mixing()},
        )
        for kind in kinds
    )


NEXT = (qwen3_next.Qwen3HybridLinearDecoderLayer, qwen3_next.Qwen3HybridAttentionDecoderLayer)
QWEN3_5 = (qwen3_5.Qwen3_5LinearDecoderLayer, qwen3_5.Qwen3_5AttentionDecoderLayer)
MODELS = {
    "Qwen3NextForCausalLM": (
        qwen3_next.Qwen3NextForCausalLM, qwen3_next.Qwen3NextModel, NEXT
    ),
    "Qwen3_5ForConditionalGeneration": (
        qwen3_5.Qwen3_5ForConditionalGeneration, qwen3_5.Qwen3_5ForCausalLM, QWEN3_5
    ),
    "Qwen3_5ForCausalLM": (
        qwen3_5_text.Qwen3_5ForCausalLM, qwen3_5.Qwen3_5ForCausalLM, QWEN3_5
    ),
}  # fmt: skip


@torch.no_grad()
def captured(name: str, layer_ids: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """What a drafter is given, and the states: of the embeddings, then after each layer."""
    outer, inner, kinds = MODELS[name]
    torch.manual_seed(0)
    model = bare(
        inner,
        layers=layers_of(*kinds),
        embed_tokens=nn.Embedding(TOKENS, HIDDEN),
        norm=lambda hidden, residual: (hidden + residual, None),
        layers_to_capture=[],
        pp_group=ONE_RANK,
        flashinfer_mnnvl_cutedsl_fusion=None,
        _start_layer=0,
        _end_layer=4,
    )
    bare(outer, model=model, pp_group=ONE_RANK).set_dflash_layers_to_capture(layer_ids)
    states = [model.embed_tokens.weight]
    for layer in model.layers:
        layer.register_forward_hook(lambda _, __, output: states.append(output[0] + output[1]))
    _, found = model(torch.arange(TOKENS), None, BATCH)
    return found, states


@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration"])
def test_the_states_are_those_after_the_layers_that_a_drafter_names(name: str) -> None:
    found, states = captured(name, [0, 2])
    assert len(found) == 2
    for state, layer in zip(found, (0, 2), strict=True):
        assert torch.equal(state, states[layer + 1])


def test_of_the_text_alone_they_are_those_before() -> None:
    """sgl-project/sglang#38096: once it fails, `EARLY_STATES` of our backend may go."""
    found, states = captured("Qwen3_5ForCausalLM", [0, 2])
    assert len(found) == 2
    for state, layer in zip(found, (0, 2), strict=True):
        assert torch.equal(state, states[layer])
        assert not torch.equal(state, states[layer + 1])


def test_a_dense_qwen3_vl_cannot_be_told_which_layers() -> None:
    model = bare(qwen3_vl.Qwen3LLMModel)
    outer = bare(qwen3_vl.Qwen3VLForConditionalGeneration, model=model, pp_group=ONE_RANK)
    with pytest.raises(AttributeError, match="set_dflash_layers_to_capture"):
        outer.set_dflash_layers_to_capture([0, 2])


def test_dflash_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="only supports CUDA, NPU and XPU devices"):
        _handle_dflash(SimpleNamespace(device="cpu"))
