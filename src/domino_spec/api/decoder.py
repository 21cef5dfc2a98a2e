"""DominoDecoder: a target and a drafter, ready to generate."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel

from domino_spec.api.arguments import checked_candidates, checked_depth, params_per_row
from domino_spec.api.dtypes import DtypeChoice, dtype_rule
from domino_spec.api.facts import target_facts
from domino_spec.api.notices import MismatchWarning
from domino_spec.api.paths import EngineChoice, Paths
from domino_spec.api.prompts import Prompt, end_tokens, split_prompts
from domino_spec.api.results import Generation, StreamedToken
from domino_spec.api.rows import make_rows
from domino_spec.checkpoints import (
    Checkpoint,
    Provenance,
    TargetFacts,
    load_drafter,
    require_fit,
)
from domino_spec.decoding import (
    Commit,
    Proposer,
    Row,
    RunStats,
    SamplingParams,
    TextStream,
    TokenScore,
)
from domino_spec.drafter import Drafter, DrafterConfig
from domino_spec.errors import InputError
from domino_spec.fast.engine import Engine
from domino_spec.targets import LoadedTarget, Target, load_target


class DominoDecoder:
    """Generates with a target model, several tokens a cycle, exactly as the target alone would."""

    def __init__(
        self,
        target: Target | Any,
        drafter: Drafter | None,
        tokenizer: Any | None = None,
        *,
        provenance: Provenance | None = None,
        revision: str | None = None,
        depth: int | None = None,
        candidates: int | None = None,
        chat_options: Mapping[str, Any] | None = None,
        engine: EngineChoice = "auto",
        pack: bool | None = None,
    ) -> None:
        """Combine loaded parts; `from_pretrained` loads them first.

        `depth` is the number of drafts a cycle; by default the engine chooses it by cost, up to
        block size - 1. `candidates` limits the head to each slot's best base candidates.
        `chat_options` go to the chat template. `engine` is `fast`, `reference` or `auto`, which
        takes the engine where it can; on a CPU it keeps a packed copy of the weights unless
        `pack` is False.
        """
        target = LoadedTarget.of(target).target
        if drafter is not None and not isinstance(drafter, Drafter):
            raise InputError(
                f"the drafter is {type(drafter).__name__}; expected a Drafter. To load one from a "
                "path or hub id use DominoDecoder.from_pretrained."
            )
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.provenance = provenance or Provenance()
        self.revision = revision
        self.chat_options = dict(chat_options or {})
        self.depth = checked_depth(depth, None if drafter is None else drafter.config)
        self.adapts = depth is None and drafter is not None
        """Whether the engine may draft less than `depth`."""
        self.candidates = checked_candidates(candidates)
        if drafter is not None:
            for check in require_fit(drafter.config, self.provenance, self.facts()):
                warnings.warn(str(check), MismatchWarning, stacklevel=2)
            drafter.to(target.device).eval()
        self._paths = Paths(
            target, drafter, engine=engine, depth=depth, candidates=candidates, pack=pack
        )

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | LoadedTarget | Target | PreTrainedModel,
        draft: str | Path | Drafter | None,
        *,
        tokenizer: Any | None = None,
        revision: str | None = None,
        draft_revision: str | None = None,
        dtype: DtypeChoice = None,
        device: str | torch.device | None = None,
        device_map: Any | None = None,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        shift_label: bool | None = None,
        depth: int | None = None,
        candidates: int | None = None,
        chat_options: Mapping[str, Any] | None = None,
        engine: EngineChoice = "auto",
        pack: bool | None = None,
    ) -> DominoDecoder:
        """Load a target and a drafter from folders, files or hub ids; loaded ones are taken too.

        `draft=None` decodes plainly. `shift_label` answers for a checkpoint that does not say.
        `dtype="fastest"` measures on a CPU what multiplies faster, float32 or bfloat16.
        """
        if isinstance(target, LoadedTarget):
            loaded = target
        elif isinstance(target, (str, Path)):
            loaded = load_target(
                target,
                revision=revision,
                dtype=dtype_rule(dtype),
                device=device,
                device_map=device_map,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
            )
        else:
            loaded = LoadedTarget.of(target)
        checkpoint: Checkpoint | None = None
        if isinstance(draft, (str, Path)):
            checkpoint = load_drafter(
                draft,
                revision=draft_revision,
                shift_label=shift_label,
                num_target_layers=loaded.target.num_layers,
                dtype=loaded.target.dtype,
                device=loaded.target.device,
            )
        return cls(
            loaded.target,
            checkpoint.drafter if checkpoint else draft,  # type: ignore[arg-type]
            tokenizer if tokenizer is not None else loaded.tokenizer,
            provenance=checkpoint.provenance if checkpoint else None,
            revision=loaded.revision,
            depth=depth,
            candidates=candidates,
            chat_options=chat_options,
            engine=engine,
            pack=pack,
        )

    @property
    def config(self) -> DrafterConfig | None:
        """The drafter's configuration."""
        return None if self.drafter is None else self.drafter.config

    def facts(self) -> TargetFacts:
        """What a drafter must agree with."""
        return target_facts(self.target, self.tokenizer, self.revision, self.chat_options)

    @overload
    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        **overrides: Any,
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: bool = True,
        **overrides: Any,
    ) -> list[Generation]: ...

    @overload
    def generate(
        self,
        prompts: Tensor,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: bool = True,
        **overrides: Any,
    ) -> Generation | list[Generation]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: bool = True,
        **overrides: Any,
    ) -> Generation | list[Generation]:
        """Finish one prompt (a Generation) or a batch (a list of them).

        Text is continued as it is, messages go through the chat template, ids are taken as
        they are. `overrides` are fields of SamplingParams. `speculate=False` decodes plainly.
        """
        many, single = split_prompts(prompts)
        per_row = params_per_row(params, overrides, len(many))
        rows = self._rows(many, per_row)
        stats = RunStats()
        scores: dict[int, list[TokenScore]] = {row.index: [] for row in rows}
        for commit in self.run(rows, stats, params=per_row, speculate=speculate):
            scores[commit.row] += commit.scores or ()
        results = [
            self._finished(row, row_params, stats, scores[row.index])
            for row, row_params in zip(rows, per_row, strict=True)
        ]
        return results[0] if single else results

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        **overrides: Any,
    ) -> Iterator[StreamedToken]:
        """Yield one prompt's tokens as their blocks are committed."""
        many, single = split_prompts(prompt)
        if not single:
            raise InputError("a stream takes one prompt; use generate for a batch.")
        per_row = params_per_row(params, overrides, 1)
        stats = RunStats()
        commits = self.run(self._rows(many, per_row), stats, params=per_row, speculate=speculate)
        return self._stream(commits, stats, per_row[0])

    # Inside -----------------------------------------------------------------------------------

    def _stream(
        self, commits: Iterator[Commit], stats: RunStats, params: SamplingParams
    ) -> Iterator[StreamedToken]:
        text = TextStream(self.tokenizer, params.stop) if self.tokenizer is not None else None
        for commit in commits:
            for position, token in enumerate(commit.tokens):
                last = position == len(commit.tokens) - 1
                reason = commit.finish_reason if last else None
                piece = "" if text is None else text.push(token)
                if reason and text is not None:
                    piece += text.finish()
                accepted = position < commit.accepted
                yield StreamedToken(token, piece, accepted, commit.cycle, reason, stats)

    def run(
        self,
        rows: Sequence[Row],
        stats: RunStats,
        *,
        params: Sequence[SamplingParams] | None = None,
        speculate: bool = True,
    ) -> Iterator[Commit]:
        """Decode prepared rows; without their parameters only the reference loop can."""
        return self._paths.run(rows, params, stats, speculate=speculate)

    def proposer(self, *, speculate: bool = True) -> Proposer:
        """A fresh source of drafts for one run of the reference loop."""
        return self._paths.proposer(speculate=speculate)

    def why_not_engine(self) -> str | None:
        """What keeps this pair off the engine, in words; None if nothing does."""
        return self._paths.why_not()

    def make_engine(self, *, slots: int, capacity: int, reuse: bool = False) -> Engine:
        """An engine of the caller's own, set up as this decoder's; the weights are shared."""
        return self._paths.make_engine(slots=slots, capacity=capacity, reuse=reuse)

    def _rows(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Row]:
        return make_rows(
            prompts,
            params,
            self.target,
            self.tokenizer,
            chat_options=self.chat_options,
            ends=self.eos_token_ids,
        )

    @property
    def eos_token_ids(self) -> set[int]:
        """What ends a sequence: the generation config's ids, else the tokenizer's."""
        return end_tokens(self.target, self.tokenizer)

    def _finished(
        self, row: Row, params: SamplingParams, stats: RunStats, scores: list[TokenScore]
    ) -> Generation:
        text = None
        if self.tokenizer is not None:
            stream = TextStream(self.tokenizer, params.stop)
            pieces = [stream.push(token) for token in row.generated]
            text = "".join(pieces) + stream.finish()
        assert row.finish_reason is not None
        return Generation(
            prompt_tokens=row.prompt,
            tokens=row.generated,
            text=text,
            finish_reason=row.finish_reason,
            stats=row.stats,
            run=stats,
            scores=None if params.logprobs is None else scores,
        )
