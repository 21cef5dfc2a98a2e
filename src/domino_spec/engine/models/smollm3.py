"""SmolLM3: Llama, of whose layers every fourth knows no positions (NoPE)."""

from __future__ import annotations

import torch
from transformers import SmolLM3ForCausalLM

from domino_spec.engine.models.base import Rotary
from domino_spec.engine.models.llama import LlamaModel


class SmolLM3Model(LlamaModel):
    """Llama's layers; those without positions are turned by no angle."""

    reference_class = SmolLM3ForCausalLM

    def rotary_tables(self, capacity: int) -> list[Rotary]:
        """The configuration says which layers rotate."""
        tables = super().rotary_tables(capacity)
        cos, sin = tables[0]
        unturned = (torch.ones_like(cos), torch.zeros_like(sin))
        rotates = self._config.no_rope_layers
        return [table if rotates[index] else unturned for index, table in enumerate(tables)]
