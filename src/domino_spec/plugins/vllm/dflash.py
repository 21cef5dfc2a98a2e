"""Route A, `method: dflash`: vLLM runs the backbone once, the head rolls out inside the logits.

vLLM asks a DFlash drafter for the logits of N positions at once. A Domino drafter answers with
corrected logits: each position's follow the greedy choice before it, so that their arg max is the
greedy rollout. Sampled drafts are drawn from the same logits, position by position: what vLLM then
accepts is still exact, since it knows the distribution each draft came from; only the drafts agree
less with each other than those of route B (`dspark`).
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.platforms import current_platform

from domino_spec.drafter.rollout import rollout
from domino_spec.errors import ConfigError
from domino_spec.plugins.vllm.draft_seeds import salt_drafts
from domino_spec.plugins.vllm.served import ServedHead, Weights
from domino_spec.plugins.vllm.settings import Settings, read_settings, refuse_unserved

logger = init_logger(__name__)


class Backbone(DFlashQwen3Model):  # type: ignore[misc]
    """vLLM's backbone, right on a CPU.

    vLLM norms the context keys of all layers in one call, with one row of weights a layer. Its CPU
    kernel takes the first row for all of them, without a word.
    """

    def _normalize_context_k(self, all_k: Tensor) -> Tensor:
        normed = [layer.self_attn.k_norm(k) for layer, k in zip(self.layers, all_k, strict=True)]
        return torch.stack(normed)  # [layers, tokens, heads, head size]


class ServedDomino(DFlashQwen3ForCausalLM):  # type: ignore[misc]
    """vLLM's DFlash drafter with a head of ours: what both routes share."""

    model_cls = Backbone if current_platform.is_cpu() else DFlashQwen3Model
    plain_cls = DFlashQwen3ForCausalLM
    """vLLM's own class for drafters of the same name that have no head."""
    anchor_predicts = False
    """Whether slot 0 gives a draft and the block has no slot more than drafts."""

    def __new__(cls, *, vllm_config: VllmConfig, prefix: str = "") -> Any:
        """Drafters without a head stay vLLM's own."""
        speculative = vllm_config.speculative_config
        assert speculative is not None
        if read_settings(speculative.draft_model_config.hf_config) is None:
            return cls.plain_cls(vllm_config=vllm_config, prefix=prefix)
        return super().__new__(cls)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        speculative = vllm_config.speculative_config
        settings = read_settings(self.config)
        assert speculative is not None
        assert settings is not None, "plain DFlash drafters are vLLM's own"
        refuse_unserved(vllm_config.model_config.hf_text_config, self.config)
        _refuse_linear_attention(vllm_config)
        if vllm_config.use_v2_model_runner:
            salt_drafts(ServedDomino)
        self.settings: Settings = settings
        self.drafts = int(speculative.num_speculative_tokens)
        warning = settings.check_depth(self.drafts, anchor_predicts=self.anchor_predicts)
        if warning:
            logger.warning(warning)
        vocab_size = vllm_config.model_config.get_vocab_size()
        reduced = self.config.draft_vocab_size
        self.served = ServedHead(
            settings.head,
            hidden_size=self.config.hidden_size,
            vocab_size=vocab_size,
            draft_vocab_size=None if reduced == vocab_size else reduced,
            embed=self._head_embedding,
            base_logits=self._base_logits,
        )
        self._target_logits = LogitsProcessor(vocab_size, scale=self.logits_processor.scale)
        self._own_lm_head = False

    def load_weights(self, weights: Weights) -> None:
        """The head's tensors here, all others where vLLM puts them."""
        rest, names = self.served.take(weights)
        self._own_lm_head = "lm_head.weight" in names
        if self.served.draft_tokens is not None and not self._own_lm_head:
            # vLLM insists on rows of its own for a reduced vocabulary; ours are the target's.
            rest = [(name, tensor) for name, tensor in rest if name != "d2t"]
        super().load_weights(rest)

    def _head_embedding(self, tokens: Tensor) -> Tensor:
        return cast("Tensor", self.model.embed_tokens(tokens))

    def _base_logits(self, hidden: Tensor) -> Tensor:
        tokens = self.served.draft_tokens
        if tokens is None or self._own_lm_head:
            return cast("Tensor", self.logits_processor(self.lm_head, hidden))
        return cast("Tensor", self._target_logits(self.lm_head, hidden))[:, tokens]


class DominoForDFlash(ServedDomino):
    """A Domino, Markov or shifted DFlash drafter for vLLM's DFlash proposer and speculator."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        _refuse_stale_graphs(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._tokens: Tensor | None = None
        self._hidden: Tensor | None = None

    def forward(
        self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """The backbone, keeping its block: the logits need its anchors, and slot 0 if shifted."""
        hidden = cast("Tensor", super().forward(input_ids, positions, inputs_embeds))
        self._tokens, self._hidden = input_ids, hidden
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Corrected logits of all drafts, [blocks * drafts, the target's vocabulary]."""
        assert self._tokens is not None
        assert self._hidden is not None
        blocks, odd = divmod(hidden_states.shape[0], self.drafts)
        slots = self.drafts + 1
        if odd or blocks * slots > len(self._tokens):
            raise ConfigError(
                f"vLLM asked for {hidden_states.shape[0]} drafts for {len(self._tokens)} slots; "
                f"expected {self.drafts} for each block of {slots}. Either max_num_seqs × {slots} "
                "is more than max_num_batched_tokens (lower the one or raise the other), or the "
                "number of speculative tokens changes, which is not supported with Domino."
            )
        block = self._hidden[: blocks * slots].view(blocks, slots, -1)
        hidden = block[:, : self.drafts] if self.settings.shift_label else block[:, 1:]
        anchors = self._tokens[: blocks * slots].view(blocks, slots)[:, 0]
        return self.served.spread(self._rolled_out(hidden, anchors)).flatten(0, 1)

    def get_top_tokens(self, hidden_states: Tensor) -> Tensor:
        """vLLM's shortcut under tensor parallelism; the rollout needs whole logits anyway."""
        return self.compute_logits(hidden_states).argmax(dim=-1)

    def _rolled_out(self, hidden: Tensor, anchors: Tensor) -> Tensor:
        made: Tensor | None = None  # [blocks, drafts, output vocabulary]

        def choose(index: int, logits: Tensor, _tokens: Tensor | None) -> Tensor:
            nonlocal made
            if made is None:
                made = logits.new_empty(len(logits), self.drafts, logits.shape[-1])
            made[:, index] = logits
            return logits.argmax(dim=-1)

        # The embedding and the lm_head are vLLM's, used by the served head: no target is needed.
        roll = partial(rollout, self.served, cast("Any", None))
        roll(hidden=hidden, anchor_tokens=anchors, choose=choose)
        assert made is not None
        return made


def _refuse_stale_graphs(vllm_config: VllmConfig) -> None:
    """The V1 runner may replay a captured forward without running it: the kept block is then old.

    The V2 runner captures forward and logits in one graph, where the block stays the graph's own.
    """
    eager = vllm_config.model_config is not None and vllm_config.model_config.enforce_eager
    if not current_platform.is_cuda_alike() or vllm_config.use_v2_model_runner or eager:
        return
    raise ConfigError(
        "Domino on vLLM's V1 runner works without CUDA graphs only. Set "
        "VLLM_USE_V2_MODEL_RUNNER=1 (recommended), or pass --enforce-eager."
    )


def _refuse_linear_attention(vllm_config: VllmConfig) -> None:
    """On a CPU vLLM would start, and fail at the first request."""
    kinds = getattr(vllm_config.model_config.hf_text_config, "layer_types", None) or ()
    if not current_platform.is_cpu() or "linear_attention" not in kinds:
        return
    if vllm_config.model_config.dtype != torch.bfloat16:
        raise ConfigError(
            "the target has linear attention, for which vLLM on a CPU takes bfloat16 alone: say "
            f"--dtype bfloat16 (found {vllm_config.model_config.dtype})."
        )
    aligned = getattr(vllm_config.cache_config, "mamba_cache_mode", None) == "align"
    if aligned and not vllm_config.use_v2_model_runner:
        raise ConfigError(
            "prefix caching is on and the target has linear attention, whose states vLLM's V1 "
            "runner caches with Triton, which has no CPU: say --no-enable-prefix-caching."
        )
