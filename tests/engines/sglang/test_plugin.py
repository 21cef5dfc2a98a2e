"""The plugin against SGLang's own plugin loader, registry and config reader."""

from __future__ import annotations

import os
import sys
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from domino_spec.checkpoints import export_drafter
from domino_spec.plugins import sglang as plugin
from tests.checkpoints.helpers import tiny_drafter, with_parameters_as

pytest.importorskip(
    "sglang",
    reason="SGLang is not installed; see tests/engines/requirements-sglang.txt",
)

import sglang.srt.plugins as plugins
from transformers import AutoConfig

SLIDING = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 3}


@pytest.fixture(scope="module")
def registry() -> Any:
    """The real registry, imported after SGLang's loader ran the plugin as an entry point."""
    assert "sglang.srt.models.registry" not in sys.modules
    entry = EntryPoint("domino", "domino_spec.plugins.sglang:register", "sglang.srt.plugins")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(plugin.VARIABLE, raising=False)
        patch.setattr(plugins, "entry_points", lambda *, group: [entry] * (group == entry.group))
        plugins.load_plugins()
        assert os.environ[plugin.VARIABLE] == plugin.MODELS
        from sglang.srt.models.registry import ModelRegistry
    os.environ.pop(plugin.VARIABLE, None)
    return ModelRegistry


def test_the_name_is_sglangs_own_model(registry: Any) -> None:
    from sglang.srt.models.dflash import DFlashDraftModel

    found, name = registry.resolve_model_cls(["DominoDraftModel"])
    assert name == "DominoDraftModel"
    assert found.__mro__[1] is DFlashDraftModel
    assert not [attribute for attribute in vars(found) if not attribute.startswith("__")]
    assert registry.resolve_model_cls(["DFlashDraftModel"])[0] is DFlashDraftModel


TARGETS = {
    "LlamaForCausalLM": True,
    "MistralForCausalLM": True,
    "Phi3ForCausalLM": True,
    "Qwen3ForCausalLM": True,
    "Qwen3MoeForCausalLM": True,
    "Qwen3NextForCausalLM": True,
    "Qwen3_5ForConditionalGeneration": True,
    "Qwen3_5MoeForConditionalGeneration": True,
    "GptOssForCausalLM": True,
    "Qwen2ForCausalLM": False,
    "Olmo2ForCausalLM": False,
    "GraniteForCausalLM": False,
    "Gemma3ForCausalLM": False,
    "Gemma3ForConditionalGeneration": False,
    "Qwen2_5_VLForConditionalGeneration": False,
}
"""Whether SGLang hands a family's hidden states to a drafter, as docs/serving.md says."""


@pytest.mark.parametrize("name", TARGETS)
def test_targets_whose_hidden_states_are_captured(registry: Any, name: str) -> None:
    found, _ = registry.resolve_model_cls([name])
    assert found.__name__ == name
    assert hasattr(found, "set_dflash_layers_to_capture") is TARGETS[name]


def test_a_registry_that_is_already_there_is_told_too(registry: Any) -> None:
    found = registry.models.pop("DominoDraftModel")
    plugin.register()
    assert registry.models["DominoDraftModel"] is found
    assert plugin.VARIABLE not in os.environ


def exported(tmp_path: Any, **changes: Any) -> Any:
    drafter = with_parameters_as(tiny_drafter(**changes), torch.bfloat16)
    return AutoConfig.from_pretrained(export_drafter(drafter, tmp_path / "out", to="sglang"))


@pytest.mark.parametrize("shift", [True, False])
def test_sglang_reads_an_exported_config(shift: bool, tmp_path: Any) -> None:
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    config = exported(tmp_path, shift_label=shift)
    read = parse_dflash_draft_config(draft_hf_config=config)
    assert config.architectures == ["DFlashDraftModel"]
    assert read.is_domino
    assert read.shift_label is shift
    assert (read.pure_draft_prefix_len, read.gru_hidden_dim, read.emb_dim) == (1, 12, 6)
    assert (read.block_size, read.num_target_layers, read.mask_token_id) == (4, 8, 47)
    assert read.resolve_target_layer_ids(target_num_layers=8) == [1, 4, 6]


def test_sglang_reads_a_plain_drafter(tmp_path: Any) -> None:
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    config = exported(tmp_path, head=None, shift_label=False)
    assert not parse_dflash_draft_config(draft_hf_config=config).is_domino


@pytest.mark.parametrize("causal", [True, False])
def test_sglang_sees_the_same_masks(causal: bool, tmp_path: Any) -> None:
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.models.dflash import _get_dflash_layer_attention_params as attention

    config = exported(tmp_path, **SLIDING, causal_window=causal)
    kind = AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY
    assert attention(config, 0) == (-1, AttentionType.ENCODER_ONLY)
    assert attention(config, 1) == (2, kind)
