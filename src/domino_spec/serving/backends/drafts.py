"""A drafter as a folder that an engine reads: its own, or one exported into the cache."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from domino_spec import __version__
from domino_spec.api.lm_head import lm_head_rows
from domino_spec.cache import cache_folder
from domino_spec.checkpoints import (
    Description,
    TargetFacts,
    describe,
    export_drafter,
    find_format,
    load_drafter,
    require_fit,
)
from domino_spec.checkpoints.files import (
    CONFIG_FILE,
    FLOAT_DTYPES,
    WEIGHTS_SUFFIX,
    CheckpointFiles,
    locate,
)
from domino_spec.checkpoints.tensors import LM_HEAD
from domino_spec.drafter import DrafterConfig
from domino_spec.drafters.facts import read_target_facts
from domino_spec.errors import InputError
from domino_spec.serving.backends.args import ServeArgs
from domino_spec.serving.backends.backend import Backend

_FINGERPRINT_LENGTH = 16
_UNUSUAL = re.compile(r"[^\w.-]+")


@dataclass(frozen=True, kw_only=True)
class ServedDraft:
    """A drafter's folder, there or to be written."""

    folder: Path
    config: DrafterConfig
    is_own: bool
    """Whether the drafter is served from where it lies."""
    target_architectures: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def depth(self, wanted: int | None, engine: str) -> int:
        """Drafts a cycle: the block less its anchor, or as few as are wanted."""
        most = self.config.default_depth
        if wanted is not None and not 1 <= wanted <= most:
            raise InputError(
                f"depth is {wanted}; {engine} gives 1 to {most} drafts a cycle with this drafter "
                f"(blocks of {self.config.block_size}); for none use --no-speculate."
            )
        return most if wanted is None else wanted

    @property
    def is_there(self) -> bool:
        """Whether it can be served now."""
        return (self.folder / CONFIG_FILE).is_file()


def plan_draft(args: ServeArgs, backend: Backend) -> ServedDraft:
    """Which folder an engine will be given; refuses what does not fit or cannot be expressed."""
    assert args.drafter is not None
    facts = _facts(args)
    described = describe(args.drafter, **_how(args, facts))
    warnings = require_fit(described.config, described.provenance, facts)
    files = locate(args.drafter, revision=args.draft_revision)
    form = find_format(backend.form)
    is_own = _serves_as_it_is(files, described, backend)
    if not (is_own and backend.plugin_reads):
        form.check(described.config, _dtype(backend) or torch.bfloat16)
    folder = files.config.parent.absolute()
    if not is_own:
        more: dict[str, Any] = {"shift_label": args.shift_label}
        if form.wants_lm_head(described.config):
            more["target"] = _target_state(args.target, facts.revision)
        name = _UNUSUAL.sub("-", args.drafter.rstrip("/").split("/")[-1].split(":")[-1])
        name = f"{name}-{backend.form}-{_fingerprint(files, backend, more)}"
        folder = cache_folder() / "served" / name
    return ServedDraft(
        folder=folder,
        config=described.config,
        is_own=is_own,
        target_architectures=facts.architectures,
        warnings=tuple(map(str, warnings)),
    )


def write_draft(args: ServeArgs, backend: Backend, planned: ServedDraft) -> None:
    """Export the drafter into its folder, whole or not at all."""
    assert args.drafter is not None
    checkpoint = load_drafter(args.drafter, **_how(args, _facts(args)))
    rows = None
    if find_format(backend.form).wants_lm_head(checkpoint.config):
        rows = lm_head_rows(
            checkpoint,
            args.target,
            revision=args.revision,
            trust_remote_code=args.trust_remote_code,
        )
    export_drafter(
        checkpoint.drafter,
        planned.folder,
        to=backend.form,
        dtype=_dtype(backend),
        provenance=checkpoint.provenance,
        lm_head=rows,
    )


def _dtype(backend: Backend) -> torch.dtype | None:
    return None if backend.draft_dtype is None else getattr(torch, backend.draft_dtype)


def _facts(args: ServeArgs) -> TargetFacts:
    return read_target_facts(
        args.target,
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        thinking=args.thinking,
    )


def _how(args: ServeArgs, facts: TargetFacts) -> dict[str, Any]:
    return {
        "revision": args.draft_revision,
        "shift_label": args.shift_label,
        "num_target_layers": facts.num_layers,
    }


def _serves_as_it_is(files: CheckpointFiles, described: Description, backend: Backend) -> bool:
    """Whether a folder already says, in the same words, all that the form would say."""
    stated, config = files.read_config(), described.config
    names = stated.get("architectures") or []
    if not names or not set(names) <= set(backend.architectures):
        return False
    dtype = backend.draft_dtype or str(stated.get("dtype"))
    wanted = json.loads(json.dumps(find_format(backend.form).config(config, dtype=dtype)))
    if any(stated.get(key) != wanted[key] for key in wanted.keys() - {"architectures"}):
        return False
    if backend.draft_dtype is not None and {FLOAT_DTYPES.get(d) for d in described.dtypes} != {
        dtype
    }:
        return False
    if config.draft_vocab_size is not None and LM_HEAD not in described.ignored_tensors:
        return False
    names = {path.name for path in files.config.parent.glob(f"*{WEIGHTS_SUFFIX}")}
    return names == {path.name for path in files.weights}


def _target_state(target: str, revision: str | None) -> list[Any]:
    """What tells one state of a target's files from another, without reading them."""
    path = Path(target).expanduser()
    if not path.exists():
        return [target, revision]
    stats = [(one.name, one.stat()) for one in sorted(path.iterdir())] if path.is_dir() else []
    return [str(path.resolve()), [[name, at.st_size, at.st_mtime_ns] for name, at in stats]]


def _fingerprint(files: CheckpointFiles, backend: Backend, more: Mapping[str, Any]) -> str:
    """Of all that the exported folder follows from."""
    seen = hashlib.sha256()
    said = {"version": __version__, "form": backend.form, "dtype": str(backend.draft_dtype), **more}
    seen.update(json.dumps(said, sort_keys=True).encode())
    for path in (files.config, *files.weights):
        with path.open("rb") as file:
            seen.update(hashlib.file_digest(file, "sha256").digest())
    return seen.hexdigest()[:_FINGERPRINT_LENGTH]
