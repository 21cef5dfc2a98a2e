"""OLMo 3: OLMo 2 with sliding windows, whose layers have rotary positions of their own."""

from __future__ import annotations

from transformers import Olmo3ForCausalLM

from domino_spec.engine.models.olmo2 import Olmo2Model


class Olmo3Model(Olmo2Model):
    """OLMo 2's layers."""

    reference_class = Olmo3ForCausalLM
    rotary_by_kind = True
