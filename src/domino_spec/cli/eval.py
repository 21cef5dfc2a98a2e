"""`domino eval`: the acceptance length a drafter gives, under the standard measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from domino_spec.cli.loading import checkpoints_among, load_compared, require_places
from domino_spec.cli.options import (
    Accept,
    ChatOptions,
    DraftOptions,
    EngineName,
    JsonOption,
    LoopOptions,
    TargetArgument,
    TargetOptions,
)
from domino_spec.cli.render import bar_line
from domino_spec.cli.voice import Voice, speaking
from domino_spec.settings import Candidates, Depth, ShiftLabel

if TYPE_CHECKING:
    from domino_spec.api import DominoDecoder
    from domino_spec.bench.tasks import Task
    from domino_spec.evaluation import Measurement, PromptSet, Protocol

_PROMPTS = "Prompts"
_DRAFTER = "Drafter"
_HOW = "Measurement"


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Where prompts come from."""

    prompts: Annotated[
        list[str],
        typer.Option(
            help='maths, code, chat (built in), JSON lines of {"turns": [...]}, of which the first '
            "is asked, or hf:NAME[:SPLIT]; repeatable.",
            rich_help_panel=_PROMPTS,
        ),
    ] = field(default_factory=list)
    data: Annotated[
        list[str],
        typer.Option(
            help="The prompts of a corpus' conversations: files, folders, globs; repeatable.",
            rich_help_panel=_PROMPTS,
        ),
    ] = field(default_factory=list)
    held_out: Annotated[
        int | None,
        typer.Option(
            help="Of --data only what training holds out: this many, at most a tenth.",
            rich_help_panel=_PROMPTS,
        ),
    ] = None
    limit: Annotated[
        int | None, typer.Option(help="Prompts a set, from the first.", rich_help_panel=_PROMPTS)
    ] = None


@dataclass(frozen=True, kw_only=True)
class EvaluatedOptions:
    """Which drafters, and how much they draft."""

    draft: Annotated[
        list[str],
        typer.Option(
            help="A drafter of any kind: a folder, a safetensors file, a hub id, released:NAME, "
            "lookup[:DEPTH] or plain; repeatable.",
            rich_help_panel=_DRAFTER,
        ),
    ]
    shift_label: ShiftLabel = None
    depth: Depth = None
    candidates: Candidates = None
    head: Annotated[
        bool,
        typer.Option(
            "--head/--no-head",
            help="Whether the head corrects the base logits.",
            rich_help_panel=_DRAFTER,
        ),
    ] = True

    def each(self) -> list[DraftOptions]:
        """The options of one drafter after the other."""
        return [
            DraftOptions(
                draft=draft,
                shift_label=self.shift_label,
                depth=self.depth,
                candidates=self.candidates,
            )
            for draft in self.draft
        ]


@dataclass(frozen=True, kw_only=True)
class MeasurementOptions:
    """How acceptance is measured."""

    decode: Annotated[
        bool,
        typer.Option(
            "--decode",
            help="Decode for real; unset: simulate it, with the same result when greedy.",
            rich_help_panel=_HOW,
        ),
    ] = False
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=_HOW)
    ] = 0.0
    seed: Annotated[int, typer.Option(help="Prompt i draws from it + i.", rich_help_panel=_HOW)] = 0
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", rich_help_panel=_HOW)] = (
        256
    )
    engine: Annotated[
        EngineName,
        typer.Option(
            help="fast is the engine, reference the loop through Transformers; auto: the engine "
            "where it can run the pair.",
            rich_help_panel=_HOW,
        ),
    ] = EngineName.AUTO
    accept: Annotated[
        Accept | None,
        typer.Option(
            help="How --decode accepts sampled drafts; unset: coupled on the engine, rejection in "
            "the reference loop.",
            rich_help_panel=_HOW,
        ),
    ] = None
    batch_size: Annotated[
        int,
        typer.Option(help="Prompts decoded together in the reference loop.", rich_help_panel=_HOW),
    ] = 16
    continuations: Annotated[
        Path | None,
        typer.Option(
            help="A folder that keeps the target's answers for the next simulation.",
            rich_help_panel=_HOW,
        ),
    ] = None

    def protocol(self) -> Protocol:
        """The standard measurement with these settings."""
        from domino_spec.evaluation import Protocol

        return Protocol(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, seed=self.seed
        )


def evaluate(
    target: TargetArgument,
    *,
    evaluated: EvaluatedOptions,
    source: PromptOptions,
    how: MeasurementOptions,
    out: Annotated[
        Path | None, typer.Option(help="Append a record a drafter and set to this file.")
    ] = None,
    chat: ChatOptions,
    target_options: TargetOptions,
    as_json: JsonOption = False,
) -> None:
    """Measure the acceptance length: committed tokens per cycle, without the prefill's.

    Prompts of 400 tokens or more, answers under 32 tokens and answers that loop are left out.
    """
    with speaking(as_json=as_json) as voice:
        require_places(
            voice,
            target,
            revision=target_options.revision,
            drafts=checkpoints_among(evaluated.draft),
            prompts=source.prompts,
            data=source.data,
        )

        from domino_spec.bench.tasks import check_system
        from domino_spec.drafters import short_name
        from domino_spec.records import append_record, environment

        protocol = how.protocol()
        tasks = _tasks(voice, source, system=chat.system)
        plain, drafters = load_compared(
            voice,
            target,
            target_options,
            evaluated.each(),
            chat,
            LoopOptions(engine=how.engine),
            any_kind=how.decode and evaluated.head,
        )
        if protocol.temperature and not how.decode:
            voice.note("at a temperature a simulation counts the match rule: greedy drafts")
        check_system(chat.system, plain.tokenizer)
        sets = _prompt_sets(plain, source, tasks, protocol)
        documents = []
        interrupted = False
        measured = _measure(voice, plain, drafters, sets, protocol, how, head=evaluated.head)
        table = _table(several=len(drafters) > 1)
        try:
            for draft, measurement in zip(evaluated.draft * len(sets), measured, strict=True):
                names = {"target": short_name(target), "drafter": short_name(draft)}
                documents.append({**names, **measurement.to_dict()})
                if out is not None:
                    append_record(out, {**documents[-1], "environment": environment()})
                voice.status(
                    f"{names['drafter']} on {measurement.prompts.name}: acceptance length "
                    f"{measurement.total.tokens_per_cycle:.2f}"
                )
                _add_row(table, short_name(draft) if len(drafters) > 1 else None, measurement)
        except KeyboardInterrupt:  # what is measured is worth showing; the exit code stays
            if not documents:
                raise
            interrupted = True
        if as_json:
            voice.document({"measurements": documents, "warnings": voice.warnings})
        else:
            voice.out.print(table)
        if interrupted:
            raise KeyboardInterrupt
        if not any(each["used"] for each in documents):
            voice.error(
                "nothing was measured: no prompt counts; expected answers of 32 tokens or more "
                "that do not loop, to prompts of under 400. Give other --prompts, more of them "
                "(--limit) or more --max-new-tokens."
            )
            raise typer.Exit(1)


def _tasks(voice: Voice, source: PromptOptions, *, system: str | None) -> list[Task]:
    """The texts of the prompt files; what is wrong with them is found out first."""
    from domino_spec.bench.tasks import read_tasks

    if not source.prompts and not source.data:
        raise typer.BadParameter("there are no prompts; give --prompts FILE or --data CORPUS.")
    if source.held_out is not None and not source.data:
        raise typer.BadParameter("--held-out goes with --data; files of prompts are not split.")
    if not source.prompts:
        return []
    return read_tasks(source.prompts, limit=source.limit, system=system, notice=voice.warn)


def _prompt_sets(
    decoder: DominoDecoder,
    source: PromptOptions,
    tasks: Sequence[Task],
    protocol: Protocol,
) -> list[PromptSet]:
    from domino_spec.data import load_corpus
    from domino_spec.evaluation import corpus_prompts
    from domino_spec.training.evaluate import split_held_out

    target, tokenizer, chat = decoder.target, decoder.tokenizer, decoder.chat_options
    longest = protocol.longest_for(target)
    sets = [task.encoded(tokenizer, longest=longest, chat_options=chat) for task in tasks]
    if source.data:
        corpus = load_corpus(
            source.data, tokenizer=tokenizer, vocab_size=target.vocab_size, chat_options=chat
        )
        if source.held_out is not None:
            _, corpus = split_held_out(corpus, source.held_out)
        sets.append(corpus_prompts("data", corpus, longest=longest, limit=source.limit))
    return sets


def _measure(
    voice: Voice,
    plain: DominoDecoder,
    drafters: Sequence[DominoDecoder],
    sets: Sequence[PromptSet],
    protocol: Protocol,
    how: MeasurementOptions,
    *,
    head: bool,
) -> Iterator[Measurement]:
    """Every drafter on the first set, then on the next; the target answers each set once."""
    from domino_spec.evaluation import continuations_for, measure_decoded, measure_simulated

    for prompts in sets:
        count = f"{len(prompts.prompts)} prompts of {prompts.name}"
        if how.decode:
            for drafter in drafters:
                with voice.progress(f"decoding {count}") as on_progress:
                    decoded = measure_decoded(
                        drafter,
                        prompts,
                        protocol,
                        head=head,
                        batch_size=how.batch_size,
                        accept=None if how.accept is None else how.accept.value,
                        on_progress=on_progress,
                    )
                yield decoded
            continue
        with voice.progress(f"the target answers {count}") as on_progress:
            continuations = continuations_for(
                plain,
                prompts,
                protocol,
                batch_size=how.batch_size,
                folder=how.continuations,
                on_progress=on_progress,
            )
        for drafter in drafters:
            with voice.working(f"simulating {count}"):
                simulated = measure_simulated(drafter, prompts, protocol, continuations, head=head)
            yield simulated


def _table(*, several: bool) -> Table:
    table = Table(box=None)
    for heading in [*(["drafter"] if several else []), "set"]:
        table.add_column(heading, overflow="fold")
    for heading in ("acceptance length", "first draft"):
        table.add_column(heading, justify="right")
    table.add_column("by position", no_wrap=True)
    for heading in ("used", "loops", "short", "too long"):
        table.add_column(heading, justify="right")
    return table


def _add_row(table: Table, drafter: str | None, measurement: Measurement) -> None:
    total, counts = measurement.total, measurement.counts
    shares = total.acceptance_by_position
    table.add_row(
        *([] if drafter is None else [drafter]),
        measurement.prompts.name,
        f"{total.tokens_per_cycle:.2f}" if total.cycles else "–",
        f"{shares[0]:.1%}" if shares else "–",
        f"|{bar_line(shares)}|",
        *(str(counts[name]) for name in ("used", "loops", "short", "too_long")),
    )
