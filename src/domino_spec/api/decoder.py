"""DominoDecoder: a target and a drafter, ready to generate."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from domino_spec.api.dtypes import DtypeChoice, dtype_rule
from domino_spec.api.notices import DraftWatch, tell_reference
from domino_spec.api.prompts import Prompt, end_tokens, split_prompts
from domino_spec.api.results import Generation, StreamedToken
from domino_spec.api.sequences import make_sequences, params_per_sequence
from domino_spec.checkpoints import Provenance, TargetFacts
from domino_spec.decoding import (
    Drafter,
    RunStats,
    SamplingParams,
    SequenceOutput,
    TextStream,
    TokenScore,
    decode,
)
from domino_spec.decoding import Sequence as Decoded
from domino_spec.drafters import open_drafter
from domino_spec.drafters.facts import target_facts
from domino_spec.drafters.registry import describe_fitting_drafter, is_named
from domino_spec.engine.engine import Engine
from domino_spec.engine.models import unsupported_reason
from domino_spec.engine.models.base import hooked_modules
from domino_spec.engine.sampling import unsupported_reason as unsupported_request
from domino_spec.errors import InputError
from domino_spec.grammars import GrammarCompiler, Vocabulary
from domino_spec.settings import Quantize
from domino_spec.targets import LoadedTarget, Target, load_target

EngineChoice = Literal["auto", "fast", "reference"]


_OUT_OF_MEMORY = "it ran out of memory"
_FALLBACK_BATCH = 8
"""Sequences at a time in the reference loop after the engine ran out of memory: it pads them."""


class DominoDecoder:
    """Generates with a target model, several tokens a cycle, exactly as the target alone would."""

    def __init__(
        self,
        target: Target | Any,
        drafter: Drafter | nn.Module | str | Path | None,
        tokenizer: Any | None = None,
        *,
        provenance: Provenance | None = None,
        revision: str | None = None,
        draft_revision: str | None = None,
        shift_label: bool | None = None,
        depth: int | None = None,
        tree: int | None = None,
        candidates: int | None = None,
        draft_window: int | None = None,
        draft_sinks: int | None = None,
        remeasure: bool = False,
        chat_options: Mapping[str, Any] | None = None,
        engine: EngineChoice = "auto",
        pack: bool | None = None,
        processor: Any | None = None,
    ) -> None:
        """Combine loaded parts; `from_pretrained` loads a target by its name too.

        `drafter` is whatever `drafters.open_drafter` takes; None decodes plainly. `depth` is the
        number of drafts a cycle, `tree` that of a tree up to `depth` deep; by default the engine
        chooses chains or trees by cost, up to the drafter's own depth, and `tree=0` leaves it
        chains. `candidates` limits a head to each draft's best base candidates. A block drafter
        reads the newest `draft_window` tokens of its context and the first `draft_sinks`; 0 is all,
        None what its configuration says.
        `remeasure` does not read the costs that were kept. `chat_options` go to the chat template.
        `engine` is `fast`, `reference` or `auto`, which takes the engine where it can; on a CPU it
        keeps a packed copy of the weights unless `pack` is False. `processor` is
        Transformers' of a vision-language target, for chats with images.
        """
        loaded = LoadedTarget.of(target)
        self.target = loaded.target
        self.tokenizer = tokenizer
        self._processor = processor
        self._load_processor: Callable[[], Any] | None = None
        self.revision = revision
        self.chat_options = dict(chat_options or {})
        self.drafter: Drafter | None = None
        if drafter is not None:
            opened = open_drafter(
                drafter,
                LoadedTarget(self.target, tokenizer, loaded.source, revision),
                depth=depth,
                tree=tree,
                candidates=candidates,
                draft_window=draft_window,
                draft_sinks=draft_sinks,
                shift_label=shift_label,
                revision=draft_revision,
                provenance=provenance,
                chat_options=chat_options,
            )
            self.drafter = opened if opened.drafts else None
        if self.drafter is not None:
            provenance = self.drafter.provenance
            if self.drafter.model is not None:
                self.drafter.model.to(self.target.device).eval()
        self.provenance = provenance or Provenance()
        self.grammars = GrammarCompiler(self._vocabulary)
        self.depth = 0 if self.drafter is None else self.drafter.depth
        self.candidates = None if self.drafter is None else self.drafter.candidates
        self.window = None if self.drafter is None else self.drafter.window
        self.adapts = depth is None and not tree and self.speculates
        """Whether the engine may draft less than `depth`."""
        if engine not in get_args(EngineChoice):
            choices = ", ".join(map(repr, get_args(EngineChoice)))
            raise InputError(f"engine is {engine!r}; expected one of {choices}.")
        self.choice: EngineChoice = engine
        self._drafting = self.drafter if self.depth else None
        self._engine_options: dict[str, Any] = {
            "adaptive": self.adapts, "remeasure": remeasure, "pack": pack, "tree": tree
        }  # fmt: skip
        self._engine: Engine | None = None
        self._weights: Any = None
        """The weights that the engine has: another state of them makes it anew."""
        self._reason: tuple[Any, str | None] | None = None
        self._watch = DraftWatch(self.drafter, self.target)
        self._told: set[str] = set()
        if engine == "fast":
            self._refuse(self.unsupported_reason())

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | LoadedTarget | Target | PreTrainedModel,
        draft: str | Path | nn.Module | Drafter | None,
        *,
        tokenizer: Any | None = None,
        revision: str | None = None,
        draft_revision: str | None = None,
        dtype: DtypeChoice = None,
        device: str | torch.device | None = None,
        device_map: Any | None = None,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        quantize: Quantize | None = None,
        shift_label: bool | None = None,
        depth: int | None = None,
        tree: int | None = None,
        candidates: int | None = None,
        draft_window: int | None = None,
        draft_sinks: int | None = None,
        remeasure: bool = False,
        chat_options: Mapping[str, Any] | None = None,
        engine: EngineChoice = "auto",
        pack: bool | None = None,
        processor: Any | None = None,
    ) -> DominoDecoder:
        """Load a target and a drafter from folders, files or hub ids; loaded ones are taken too.

        `draft="lookup"` drafts from the text itself, for any target; `draft=None` decodes plainly.
        `shift_label` answers for a checkpoint that does not say.
        `dtype="fastest"` measures on a CPU what multiplies faster, float32 or bfloat16.
        `quantize` keeps the target's weights in few bits, as `load_target` does.
        """
        if isinstance(target, LoadedTarget):
            loaded = target
        elif isinstance(target, (str, Path)):
            if isinstance(draft, (str, Path)) and not is_named(draft):
                describe_fitting_drafter(
                    draft,
                    target,
                    revision=revision,
                    trust_remote_code=trust_remote_code,
                    draft_revision=draft_revision,
                    shift_label=shift_label,
                )
            loaded = load_target(
                target,
                revision=revision,
                dtype=dtype_rule(dtype),
                device=device,
                device_map=device_map,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                quantize=quantize,
            )
        else:
            loaded = LoadedTarget.of(target)
        decoder = cls(
            loaded.target,
            draft,
            tokenizer if tokenizer is not None else loaded.tokenizer,
            revision=loaded.revision,
            draft_revision=draft_revision,
            shift_label=shift_label,
            depth=depth,
            tree=tree,
            candidates=candidates,
            draft_window=draft_window,
            draft_sinks=draft_sinks,
            remeasure=remeasure,
            chat_options=chat_options,
            engine=engine,
            pack=pack,
            processor=processor,
        )
        decoder._load_processor = loaded.load_processor
        return decoder

    @property
    def processor(self) -> Any:
        """The target's processor of images, loaded at the first need."""
        if self._processor is None:
            if self._load_processor is None:
                raise InputError(
                    "the prompt holds images but the target came without a processor; pass "
                    "processor=AutoProcessor.from_pretrained(...)."
                )
            self._processor = self._load_processor()
        return self._processor

    @property
    def speculates(self) -> bool:
        """Whether there is a drafter."""
        return self.drafter is not None

    @property
    def config(self) -> Any:
        """The drafter's configuration; None where it has none."""
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
        per_sequence = params_per_sequence(params, overrides, len(many))
        stats = RunStats()
        sequences = self._sequences(many, per_sequence, stats, speculate=speculate)
        scores: dict[int, list[TokenScore]] = {sequence.index: [] for sequence in sequences}
        for output in self.run(sequences, stats):
            scores[output.sequence.index] += output.scores or ()
        results = [self._finished(s, stats, scores[s.index]) for s in sequences]
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
        per_sequence = params_per_sequence(params, overrides, 1)
        stats = RunStats()
        sequences = self._sequences(many, per_sequence, stats, speculate=speculate)
        return self._stream(self.run(sequences, stats), stats, per_sequence[0])

    # Inside -----------------------------------------------------------------------------------

    def _stream(
        self, outputs: Iterator[SequenceOutput], stats: RunStats, params: SamplingParams
    ) -> Iterator[StreamedToken]:
        text = None if self.tokenizer is None else TextStream.of(self.tokenizer, params)
        for output in outputs:
            for position, token in enumerate(output.tokens):
                last = position == len(output.tokens) - 1
                reason = output.finish_reason if last else None
                piece = "" if text is None else text.push(*output.sequence.in_text([token]))
                if reason and text is not None:
                    piece += text.finish()
                accepted = position < output.accepted
                yield StreamedToken(token, piece, accepted, output.cycle, reason, stats)

    def run(
        self,
        sequences: Sequence[Decoded],
        stats: RunStats | None = None,
        *,
        more: Callable[[], Decoded | None] | None = None,
    ) -> Generator[SequenceOutput, None, None]:
        """Decode sequences on the engine, and after them in the reference loop what it cannot run.

        Decides now, decodes as the result is iterated. `more` gives the engine further sequences
        while it runs, as for `Engine.stream`; errors of memory are then the caller's.
        """
        stats = RunStats() if stats is None else stats
        on_engine, in_loop, reason = self._place(sequences)
        if reason is not None and more is not None:
            raise InputError(
                f"sequences can be added to the engine alone, which cannot run this: {reason}. "
                "Give all of them at once."
            )
        stats.engine_reason = reason
        if reason is None:
            stats.engine = "fast"
        elif on_engine:
            stats.engine = "both"
        return self._run(on_engine, in_loop, stats, more)

    @property
    def engine(self) -> Engine:
        """This decoder's engine, shared by all its callers; made at the first need."""
        state = self._weights_state()
        if self._engine is None or state != self._weights:
            self._engine = None  # its caches go before new ones come, unless a stream has it
            self._engine = Engine(self.target, self._drafting, **self._engine_options)
            self._weights = self._weights_state()
        return self._engine

    def make_engine(self, **options: Any) -> Engine:
        """An engine of the caller's own, set up as this decoder's; the weights are shared."""
        return Engine(self.target, self._drafting, **self._engine_options, **options)

    def unsupported_reason(self) -> str | None:
        """What keeps this target and drafter off the engine, in words; None if nothing does."""
        if self.choice == "reference":
            return "engine='reference' was asked for"
        state = self._weights_state()
        if self._reason is None or self._reason[0] != state:
            reason = unsupported_reason(self.target)
            if reason is not None:
                reason = f"as for the target, {reason}"
            elif self._drafting is not None:
                reason = self._drafting.unsupported_reason(self.target.device)
            self._reason = (state, reason)
        return self._reason[1]

    def _weights_state(self) -> Any:
        """What hooks the target's modules; where every weight lies, how often it was written."""
        drafter = None if self.drafter is None else self.drafter.model
        models = [self.target.model] if drafter is None else [self.target.model, drafter]
        weights = (weight for model in models for weight in model.parameters())
        places = ((w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights)
        return tuple(hooked_modules(self.target.model)), tuple(places)

    def _place(
        self, sequences: Sequence[Decoded]
    ) -> tuple[Sequence[Decoded], Sequence[Decoded], str | None]:
        """The sequences of the engine, those of the reference loop, and why there are such.

        That is said once, or raised where the engine is wanted.
        """
        if self.choice == "reference":
            return (), sequences, "engine='reference' was asked for"
        if any(sequence.sampler is not None for sequence in sequences):
            kept = "the scores of every token are kept"
            if self.choice == "fast":
                self._refuse(kept)
            return (), sequences, kept
        asked = {each: reason for each in sequences if (reason := unsupported_request(each))}
        rest = [each for each in sequences if each not in asked]
        found = self.unsupported_reason() or (self._no_room_reason(rest) if rest else None)
        if found is not None:
            rest = []
        elif asked:
            found = f"as for the request, {next(iter(asked.values()))}"
        if self.choice == "fast":
            self._refuse(found)
        elif found is not None and sequences:
            self._tell(found)
        if rest and asked:
            share = f"{len(asked)} of {len(sequences)} requests"
            return rest, list(asked), f"as for {share}, {next(iter(asked.values()))}"
        return rest, sequences if found else (), found

    def _no_room_reason(self, sequences: Sequence[Decoded]) -> str | None:
        try:
            return self.engine.no_room_reason(sequences)
        except torch.OutOfMemoryError:  # as the engine was made
            if self.choice == "fast":
                raise
            return _OUT_OF_MEMORY

    def _refuse(self, reason: str | None) -> None:
        if reason is not None:
            raise InputError(
                f"engine is 'fast', but the engine cannot run this: {reason}. With 'auto' the "
                "reference loop does."
            )

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            tell_reference(reason)

    def _run(
        self,
        on_engine: Sequence[Decoded],
        in_loop: Sequence[Decoded],
        stats: RunStats,
        more: Callable[[], Decoded | None] | None,
    ) -> Generator[SequenceOutput, None, None]:
        try:
            if on_engine or more is not None:
                yield from self._on_engine(on_engine, stats, more)
            if in_loop:
                if on_engine:
                    stats.engine = "both"
                yield from self._in_loop(in_loop, stats)
        finally:
            self._watch.end(stats)

    def _on_engine(
        self,
        sequences: Sequence[Decoded],
        stats: RunStats,
        more: Callable[[], Decoded | None] | None,
    ) -> Generator[SequenceOutput, None, None]:
        engine = self.engine
        speculates = self._drafting is not None and (
            more is not None or any(s.speculate for s in sequences)
        )
        failed = False
        try:
            with closing(engine.stream(sequences, stats, more=more)) as outputs:
                for output in outputs:
                    if output.error is not None:
                        raise output.error
                    yield output
                    self._watch.look(stats, engine.policy if speculates else None)
        except torch.OutOfMemoryError:
            began = more is not None or any(sequence.output for sequence in sequences)
            if self.choice == "fast" or began:
                raise
            failed = True
        if failed:  # outside the except: an error holds what was made before it
            del engine
            self._engine = None
            stats.engine, stats.engine_reason = "reference", _OUT_OF_MEMORY
            self._tell(stats.engine_reason)
            for sequence in sequences:
                sequence.finish_reason = sequence.error = None
            for start in range(0, len(sequences), _FALLBACK_BATCH):
                yield from self._in_loop(sequences[start : start + _FALLBACK_BATCH], stats)

    def _in_loop(
        self, sequences: Sequence[Decoded], stats: RunStats
    ) -> Generator[SequenceOutput, None, None]:
        text = [sequence for sequence in sequences if not sequence.multimodal_inputs]
        batches = [text] if text else []
        batches += [[sequence] for sequence in sequences if sequence.multimodal_inputs]
        for batch in batches:
            speculate = any(sequence.speculate for sequence in batch)
            drafter = self._drafting if speculate else None
            for output in decode(self.target, drafter, batch, stats):
                yield output
                self._watch.look(stats, None)

    def _sequences(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        stats: RunStats,
        *,
        speculate: bool,
    ) -> list[Decoded]:
        return make_sequences(
            prompts,
            params,
            self.target,
            self.tokenizer,
            processor=lambda: self.processor,
            chat_options=self.chat_options,
            ends=self.eos_token_ids,
            grammars=self.grammars,
            run=stats,
            speculate=speculate,
        )

    @property
    def eos_token_ids(self) -> set[int]:
        """What ends a sequence: the generation config's ids, else the tokenizer's."""
        return end_tokens(self.target, self.tokenizer)

    def _vocabulary(self) -> Vocabulary:
        """What grammars are compiled for."""
        rows, ends = self.target.vocab_size, self.eos_token_ids
        return Vocabulary.of(self.tokenizer, rows=rows, ends=ends)

    def _finished(self, sequence: Decoded, stats: RunStats, scores: list[TokenScore]) -> Generation:
        text, params = None, sequence.params
        if self.tokenizer is not None:
            stream = TextStream.of(self.tokenizer, params)
            pieces = [stream.push(token) for token in sequence.in_text(sequence.output)]
            text = "".join(pieces) + stream.finish()
        assert sequence.finish_reason is not None
        return Generation(
            prompt_tokens=sequence.prompt,
            tokens=sequence.output,
            text=text,
            finish_reason=sequence.finish_reason,
            stats=sequence.stats,
            run=stats,
            scores=None if params.logprobs is None else scores,
            prompt_scores=sequence.prompt_scores,
        )
