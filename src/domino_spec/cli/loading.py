"""Loads what a command was pointed at, saying so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from domino_spec.cli.loop_options import LoopOptions
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
    loop_options: LoopOptions | None = None,
) -> DominoDecoder:
    """A decoder with a tokenizer; what is wrong with the drafter is found out first."""
    options = (target_options, [draft_options], chat_options, loop_options)
    return load_decoders(voice, target, *options)[0]


def load_decoders(
    voice: Voice,
    target: str,
    target_options: TargetOptions,
    drafts: Sequence[DraftOptions],
    chat_options: ChatOptions,
    loop_options: LoopOptions | None = None,
) -> list[DominoDecoder]:
    """A decoder for each drafter, all with one target."""
    from domino_spec.api import DominoDecoder
    from domino_spec.targets import load_target

    arguments = target_options.arguments()
    for draft_options in drafts:
        if draft_options.draft is not None:
            voice.status(f"finding drafter {draft_options.draft}")
            _check_drafter(target, target_options, draft_options)
    voice.status(f"loading target {target}")
    loaded = load_target(target, **arguments)
    if loaded.tokenizer is None:
        raise TargetError(
            f"{target} came without a tokenizer, so text cannot be read; expected tokenizer files "
            "beside its weights. Save the model's tokenizer there."
        )
    return [
        DominoDecoder.from_pretrained(
            loaded,
            draft_options.draft,
            draft_revision=draft_options.draft_revision,
            shift_label=draft_options.shift_label,
            depth=draft_options.depth,
            candidates=draft_options.candidates,
            chat_options=chat_options.template_options(),
            **(loop_options or LoopOptions()).arguments(),
        )
        for draft_options in drafts
    ]


def _check_drafter(target: str, target_options: TargetOptions, draft_options: DraftOptions) -> None:
    """All that config files and headers tell, before a large target is loaded."""
    from domino_spec.api.arguments import checked_candidates, checked_depth
    from domino_spec.checkpoints import describe
    from domino_spec.targets import load_config

    assert draft_options.draft is not None
    config = load_config(
        target,
        revision=target_options.revision,
        trust_remote_code=target_options.trust_remote_code,
    )
    described = describe(
        draft_options.draft,
        revision=draft_options.draft_revision,
        shift_label=draft_options.shift_label,
        num_target_layers=getattr(config.get_text_config(), "num_hidden_layers", None),
    )
    checked_depth(draft_options.depth, described.config)
    checked_candidates(draft_options.candidates)


def named(source: str) -> str:
    """A target or drafter without the machine's own paths."""
    return Path(source).resolve().name if Path(source).exists() else source
