"""Loads what a command was pointed at, saying so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from domino_spec.cli.options import ChatOptions, DraftOptions, TargetOptions
from domino_spec.cli.voice import Voice
from domino_spec.errors import TargetError

if TYPE_CHECKING:
    from domino_spec.api import DominoDecoder


def load_decoder(
    voice: Voice,
    target: str,
    target_options: TargetOptions,
    draft_options: DraftOptions,
    chat_options: ChatOptions,
) -> DominoDecoder:
    """A decoder with a tokenizer; a drafter that is not there is found out first."""
    from domino_spec.api import DominoDecoder
    from domino_spec.checkpoints.locate import locate
    from domino_spec.targets import load_target

    arguments = target_options.arguments()
    draft = draft_options.draft
    if draft is not None:
        voice.status(f"finding drafter {draft}")
        locate(draft, revision=draft_options.draft_revision)
    voice.status(f"loading target {target}")
    loaded = load_target(target, **arguments)
    if loaded.tokenizer is None:
        raise TargetError(
            f"{target} came without a tokenizer, so text cannot be read; expected tokenizer files "
            "beside its weights. Save the model's tokenizer there."
        )
    return DominoDecoder.from_pretrained(
        loaded,
        draft,
        draft_revision=draft_options.draft_revision,
        shift_label=draft_options.shift_label,
        depth=draft_options.depth,
        candidates=draft_options.candidates,
        chat_options=chat_options.template_options(),
    )
