"""Loads what a command was pointed at, saying so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from domino_spec.cli.options import ChatOptions, DraftOptions, LoopOptions, TargetOptions
from domino_spec.cli.voice import Voice
from domino_spec.errors import InputError, TargetError

if TYPE_CHECKING:
    from domino_spec.api import DominoDecoder
    from domino_spec.drafters import Drafter
    from domino_spec.targets import LoadedTarget


def load_decoder(
    voice: Voice,
    target: str,
    target_options: TargetOptions,
    draft_options: DraftOptions,
    chat_options: ChatOptions,
    loop_options: LoopOptions | None = None,
) -> DominoDecoder:
    """A decoder with a tokenizer; what is wrong with the drafter is found out first."""
    if draft_options.draft is not None:
        _check_drafter(target, target_options, draft_options)
    elif loop_options is not None:
        voice.note(
            "no drafter, so decoding is plain; --draft lookup drafts from the text itself, for any "
            "model, and `domino train` makes a better drafter"
        )
    loaded = _load_target(voice, target, target_options)
    return _decoder(loaded, draft_options, chat_options, loop_options)


def load_drafter(
    voice: Voice,
    target: str,
    target_options: TargetOptions,
    draft_options: DraftOptions,
    chat_options: ChatOptions,
) -> tuple[DominoDecoder, Drafter]:
    """The target alone, and a drafter of any kind for it."""
    _check_drafter(target, target_options, draft_options)
    loaded = _load_target(voice, target, target_options)
    plain = _decoder(loaded, DraftOptions(draft=None), chat_options)
    return plain, _opened(loaded, draft_options, chat_options)


def load_compared(
    voice: Voice,
    target: str,
    target_options: TargetOptions,
    drafts: Sequence[DraftOptions],
    chat_options: ChatOptions,
    loop_options: LoopOptions,
    *,
    any_kind: bool,
) -> tuple[DominoDecoder, list[DominoDecoder]]:
    """The target alone, and a decoder with each drafter of whatever kind.

    Without `any_kind` those that are no block drafters are refused, before anything is loaded.
    """
    from domino_spec.drafters.registry import is_block_drafter

    for options in drafts:
        assert options.draft is not None
        _check_drafter(target, target_options, options)
        if not any_kind and not is_block_drafter(options.draft, revision=options.draft_revision):
            raise InputError(
                f"{options.draft} is no block drafter and cannot be simulated with these "
                "settings; decode for real with --decode, and leave --no-head out."
            )
    loaded = _load_target(voice, target, target_options)
    plain = _decoder(loaded, DraftOptions(draft=None), chat_options, loop_options)
    return plain, [_decoder(loaded, options, chat_options, loop_options) for options in drafts]


def _load_target(voice: Voice, target: str, target_options: TargetOptions) -> LoadedTarget:
    from domino_spec.targets import load_target

    voice.status(f"loading target {target}")
    loaded = load_target(target, **target_options.arguments())
    if loaded.tokenizer is None:
        raise TargetError(
            f"{target} came without a tokenizer, so text cannot be read; expected tokenizer files "
            "next to its weights. Save the model's tokenizer there."
        )
    return loaded


def _decoder(
    loaded: LoadedTarget,
    draft_options: DraftOptions,
    chat_options: ChatOptions,
    loop_options: LoopOptions | None = None,
) -> DominoDecoder:
    from domino_spec.api import DominoDecoder

    return DominoDecoder.from_pretrained(
        loaded,
        draft_options.draft,
        draft_revision=draft_options.draft_revision,
        shift_label=draft_options.shift_label,
        depth=draft_options.depth,
        candidates=draft_options.candidates,
        chat_options=chat_options.template_options(),
        **(loop_options or LoopOptions()).arguments(),
    )


def _opened(
    loaded: LoadedTarget, draft_options: DraftOptions, chat_options: ChatOptions
) -> Drafter:
    from domino_spec.drafters import open_drafter

    assert draft_options.draft is not None
    return open_drafter(
        draft_options.draft,
        loaded,
        depth=draft_options.depth,
        candidates=draft_options.candidates,
        shift_label=draft_options.shift_label,
        revision=draft_options.draft_revision,
        chat_options=chat_options.template_options(),
    )


def _check_drafter(target: str, target_options: TargetOptions, draft_options: DraftOptions) -> None:
    """All that config files and headers tell, before a large target is loaded."""
    from domino_spec.decoding.drafter import check_depth
    from domino_spec.drafter.names import PLAIN
    from domino_spec.drafters.block import check_candidates
    from domino_spec.drafters.registry import describe_fitting_drafter

    assert draft_options.draft is not None
    if draft_options.draft == PLAIN:
        return
    described = describe_fitting_drafter(
        draft_options.draft,
        target,
        revision=target_options.revision,
        trust_remote_code=target_options.trust_remote_code,
        draft_revision=draft_options.draft_revision,
        shift_label=draft_options.shift_label,
    )
    most = None if described.config is None else described.config.max_depth
    check_depth(draft_options.depth, described.drafts, most, what=described.words)
    check_candidates(draft_options.candidates)


def require_places(
    voice: Voice,
    target: str,
    *,
    revision: str | None = None,
    base: str | None = None,
    drafts: Iterable[str | None] = (),
    draft_revision: str | None = None,
    prompts: Iterable[str] = (),
    data: Iterable[str] = (),
    out: str | Path | None = None,
) -> None:
    """Refuse what is missing at once: importing what would load the rest takes seconds."""
    from domino_spec.data.files import PROMPT_FILES, find_places
    from domino_spec.settings import require_folder
    from domino_spec.targets.place import require_target

    require_target(target, revision=revision, base=base)
    if out is not None:
        require_folder(out)
    for source in prompts:
        if Path(source).suffix:  # else the name of a built-in set, or a folder
            find_places(source, kinds=PROMPT_FILES)
    for source in data:
        find_places(source)
    for draft in drafts:
        if draft is not None:
            require_drafter(voice, draft, revision=draft_revision)


def require_drafter(voice: Voice, draft: str, *, revision: str | None = None) -> None:
    """Refuse a drafter that cannot be found; one on the hub is downloaded."""
    from domino_spec.checkpoints.files import locate

    voice.status(f"finding drafter {draft}")
    locate(draft, revision=revision)


def checkpoints_among(drafts: Iterable[str | None]) -> list[str]:
    """Those that have files: all but `plain`, `lookup` and other kinds by name, `NAME:OPTIONS`."""
    from domino_spec.drafter.names import has_no_files

    def by_name(draft: str) -> bool:  # the registry, which needs PyTorch, knows which there are
        return ":" in draft and "/" not in draft and not draft.startswith("released:")

    return [d for d in drafts if d is not None and not has_no_files(d) and not by_name(d)]
