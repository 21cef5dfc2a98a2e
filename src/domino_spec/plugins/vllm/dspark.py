"""Route B, `method: dspark` (V2 runner): drafts are sampled in turn, each seeing the last.

vLLM's DSpark speculator asks for base logits once and then, N times, for the embedding of the token
just drawn and a bias made from it. A Domino head fits: the embedding is one step of its GRU, the
bias its correction. So sampled drafts agree with each other as they do in our own decoder.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM

from domino_spec.drafter.heads import Head
from domino_spec.errors import ConfigError
from domino_spec.plugins.vllm.dflash import ServedDomino
from domino_spec.plugins.vllm.settings import Settings

_ANCHOR_FIELDS = ("sample_from_anchor", "dspark_bonus_anchor")


class DominoForDSpark(ServedDomino):
    """A Domino drafter that speaks the DSpark speculator's language."""

    plain_cls = Qwen3DSparkForCausalLM

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        speculative = vllm_config.speculative_config
        assert speculative is not None
        config = speculative.draft_model_config.hf_config
        self.anchor_predicts = anchor_predicts(config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _check_layout(self.settings, config)
        self.model.confidence_head = None
        self._step = 0
        self._projected: Tensor | None = None
        self._state: Tensor | None = None

    @property
    def _head(self) -> Head:
        head = self.served.head
        if head is None:
            raise ConfigError("a drafter without a head has nothing to sample in turn; use dflash.")
        return head

    def compute_draft_logits(self, hidden_states: Tensor) -> Tensor:
        """Base logits of all drafts, [blocks * drafts, output vocabulary]; a new block begins."""
        head = self._head
        blocks = hidden_states.shape[0] // self.drafts
        self._projected = head.project_hidden(hidden_states).view(blocks, self.drafts, -1)
        self._state = head.initial_state(blocks, hidden_states)
        self._step = 0
        return self._base_logits(hidden_states)

    def markov_embed(self, token_ids: Tensor) -> Tensor:
        """The head's state after one more token."""
        assert self._state is not None
        self._state = self._head.step(token_ids, self._state, self._head_embedding)
        return self._state

    def markov_bias(self, markov_embed: Tensor) -> Tensor:
        """The correction of the next draft: nothing for the leading ones that have none."""
        index, projected = self._next()
        if index < self._head.prefix_len:
            width = self._head.output_weight.shape[0]
            return markov_embed.new_zeros(markov_embed.shape[0], width)
        return self._head.correction(projected, markov_embed)

    def apply_markov_bias_gathered(
        self, markov_embed: Tensor, logits: Tensor, values: Tensor, index: Tensor
    ) -> Tensor:
        """The same for the best candidates only (`dspark_draft_topk`)."""
        step, projected = self._next()
        if step >= self._head.prefix_len:
            values = values + self._head.correction(projected, markov_embed, index)
        return logits.scatter_(1, index, values.to(logits.dtype))

    def map_draft_to_target(self, draft_ids: Tensor) -> Tensor:
        """Target ids of drafted columns."""
        tokens = self.served.draft_tokens
        return draft_ids if tokens is None else tokens[draft_ids]

    def _next(self) -> tuple[int, Tensor]:
        assert self._projected is not None
        index = self._step
        self._step += 1
        return index, self._projected[:, index]

    def load_weights(self, weights: Any) -> None:
        """Also the map of a reduced vocabulary, which the speculator reads from the model."""
        super().load_weights(weights)
        tokens = self.served.draft_tokens
        if tokens is not None and self.draft_id_to_target_id is not None:
            columns = torch.arange(len(tokens), device=tokens.device)
            self.draft_id_to_target_id.data.copy_(tokens - columns)
        if tokens is not None and not self._own_lm_head:
            # vLLM lends the target's lm_head only to drafters that name the whole vocabulary.
            self.config.draft_vocab_size = self.served.vocab_size


def anchor_predicts(config: Any) -> bool:
    """Whether slot 0 gives the first draft: stated in one of two ways, by version."""
    return bool(getattr(config, _ANCHOR_FIELDS[0], True)) and not cast(
        "bool", getattr(config, _ANCHOR_FIELDS[1], False)
    )


def _check_layout(settings: Settings, config: Any) -> None:
    """Both fields must be right: each version of vLLM reads one and does not know the other."""
    sample = bool(getattr(config, _ANCHOR_FIELDS[0], True))
    bonus = bool(getattr(config, _ANCHOR_FIELDS[1], False))
    shift = settings.shift_label
    if (sample, bonus) == (shift, not shift):
        return
    raise ConfigError(
        f"shift_label is {shift}, so config.json must say {_ANCHOR_FIELDS[0]} {shift} and "
        f"{_ANCHOR_FIELDS[1]} {not shift}; it says {sample} and {bonus}. Write the folder again "
        "with `domino export SOURCE OUT --to vllm-dspark`."
    )
