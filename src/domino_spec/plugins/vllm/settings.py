"""What a draft model's configuration says about its head, checked against what is served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from domino_spec.checkpoints.layouts import ARCHITECTURES, SECTION, read_head
from domino_spec.drafter import HeadConfig
from domino_spec.errors import ConfigError

_PREFIX = "DFlash"
_PLAIN = (None, "dflash")
_FACTORS = (
    "embedding_multiplier", "scale_emb", "logits_scaling", "logit_scale", "dim_model_base",
    "final_logit_softcapping",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A drafter's head and how its block is laid out."""

    head: HeadConfig | None
    shift_label: bool
    block_size: int

    def check_depth(self, drafts: int, *, anchor_predicts: bool) -> str | None:
        """Refuse more slots than the drafter was trained with; a warning for fewer."""
        slots = drafts if anchor_predicts else drafts + 1
        wanted = drafts + self.block_size - slots
        told = (
            f"num_speculative_tokens is {drafts}, which makes blocks of {slots} slots; the drafter "
            f"was trained with {self.block_size}"
        )
        if slots > self.block_size:
            raise ConfigError(f"{told}. Set it to {wanted}.")
        return f"{told} and drafts best with {wanted}." if slots < self.block_size else None


def read_settings(config: Any) -> Settings | None:
    """The settings of a draft model's configuration; None for a plain DFlash drafter."""
    values = config.to_dict()
    section = values.get(SECTION) or {}
    names = values.get("architectures") or ()
    ours = [name for name in names if name in ARCHITECTURES]
    # vLLM may have put a prefix before the checkpoint's own name.
    ours += [
        n for name in names if (n := name.removeprefix(_PREFIX)) != name and n in ARCHITECTURES
    ]
    plain = section.get("projector_type") in _PLAIN and not section.get("shift_label")
    if plain and not set(ours) & set(ARCHITECTURES[1:]):
        return None
    # Only what describes the head; the rest is for vLLM to read.
    kept = {n: values[n] for n in ("emb_dim", "shift_label") if values.get(n) is not None}
    head, shift_label = read_head({"architectures": ours, SECTION: dict(section), **kept})
    block_size = values.get("block_size") or section.get("block_size")
    if not isinstance(block_size, int):
        raise ConfigError(
            f"config.json lacks block_size (found {block_size!r}); set it to the slots a block was "
            "trained with."
        )
    return Settings(head=head, shift_label=shift_label, block_size=block_size)


def refuse_unserved(target: Any, draft: Any) -> None:
    """What vLLM would serve as something else without a word: the drafts would just be wrong.

    The drafter borrows the target's embedding and lm_head as the target itself sees them; the
    plugin takes vLLM's tables, which leave such factors out.
    """
    factors = {
        name: getattr(target, name)
        for name in _FACTORS
        if getattr(target, name, None) not in (None, 1, 1.0)
    }
    if factors:
        stated = ", ".join(f"{name} {value}" for name, value in factors.items())
        raise ConfigError(
            f"the target scales its embeddings or logits ({stated}); the plugin does "
            "not, and drafts would be wrong. Serve it without a drafter, or use domino-spec's own "
            "decoder, which does."
        )
    section = getattr(draft, SECTION, None) or {}
    ids = list(section.get("target_layer_ids") or ())
    if ids != sorted(ids):
        raise ConfigError(
            f"target_layer_ids are {ids}; vLLM joins captured states in the order of the target's "
            "layers, and drafts would be wrong. Use domino-spec's own engine."
        )
    kinds = set(getattr(draft, "layer_types", None) or ())
    if section.get("causal") and len(kinds) > 1:
        raise ConfigError(
            f"{SECTION}.causal is true with layers of {len(kinds)} kinds; vLLM would make the "
            "full ones causal too. Write the folder with `domino export SOURCE OUT --to vllm`."
        )
