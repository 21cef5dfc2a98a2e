"""`domino eval`: the acceptance length a drafter gives, under the standard measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from domino_spec.cli.command import Voice, command
from domino_spec.cli.loading import (
    ACCEPT_UNSET,
    ChatOptions,
    EngineName,
    LoopOptions,
    TargetArgument,
    load_target,
    make_decoder,
    require_places,
)
from domino_spec.cli.render import bar_line, table
from domino_spec.errors import InputError
from domino_spec.settings import (
    AcceptRule,
    Candidates,
    Depth,
    DraftOptions,
    DraftSinks,
    DraftWindow,
    Settings,
    ShiftLabel,
    TargetOptions,
    setting,
)

if TYPE_CHECKING:
    from domino_spec.api import DominoDecoder
    from domino_spec.bench.tasks import Task
    from domino_spec.evaluation import Measurement, PromptSet, Protocol

_drafter = partial(setting, group="Drafter")
_prompts = partial(setting, group="Prompts")
_how = partial(setting, group="Measurement")
_LEFT_OUT = ("used", "loops", "short", "too_long")


class EvalSettings(Settings):
    """Which drafters are measured, on what and how."""

    draft: tuple[str, ...] = _drafter(
        ...,
        "a drafter of any kind: a folder, a safetensors file, a hub id, released:NAME, "
        "lookup[:DEPTH] or plain; repeatable",
    )
    shift_label: ShiftLabel = None
    depth: Depth = None
    candidates: Candidates = None
    draft_window: DraftWindow = None
    draft_sinks: DraftSinks = None
    head: bool = _drafter(True, "whether the head corrects the base logits")
    prompts: tuple[str, ...] = _prompts(
        (),
        '`maths`, code, chat (built in), JSON lines of {"turns": [...]}, of which the first is '
        "asked, or hf:NAME[:SPLIT]; repeatable",
    )
    data: tuple[str, ...] = _prompts(
        (), "the prompts of a corpus' conversations: files, folders, globs; repeatable"
    )
    held_out: int | None = _prompts(
        None, "of --data only what training holds out: this many, at most a tenth"
    )
    limit: int | None = _prompts(None, "prompts a set, from the first")
    decode: bool = _how(
        False, "decode for real; unset: simulate it, with the same result when greedy"
    )
    temperature: float = _how(0.0, "0 is greedy", flags=("-t",))
    seed: int = _how(0, "prompt i draws from it + i")
    max_new_tokens: int = _how(256, "the longest answer", flags=("-n",))
    engine: EngineName = _how(
        "auto",
        "`fast` is the engine, reference the loop through Transformers; auto: the engine where it "
        "can run the pair",
    )
    accept: AcceptRule | None = _how(
        None, "how --decode accepts sampled drafts", unset=ACCEPT_UNSET
    )
    batch_size: int = _how(16, "prompts decoded together in the reference loop")
    continuations: Path | None = _how(
        None, "a folder that keeps the target's answers for the next simulation"
    )


@command()
def evaluate(
    voice: Voice,
    target: TargetArgument,
    *,
    settings: EvalSettings,
    out: Annotated[
        Path | None, typer.Option(help="Append a record a drafter and set to this file.")
    ] = None,
    chat: ChatOptions,
    target_options: TargetOptions,
) -> None:
    """Measure the acceptance length: committed tokens per cycle, without the prefill's.

    Prompts of 400 tokens or more, answers under 32 tokens and answers that loop are left out.
    """
    require_places(
        voice,
        target,
        target_options.revision,
        drafts=settings.draft,
        prompts=settings.prompts,
        data=settings.data,
    )

    from domino_spec.api.prompts import check_system
    from domino_spec.drafters import short_name
    from domino_spec.evaluation import Protocol
    from domino_spec.records import append_record, environment

    protocol = Protocol(
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        seed=settings.seed,
    )
    tasks = _tasks(voice, settings, system=chat.system)
    plain, drafters = _load(voice, target, target_options, settings, chat)
    if protocol.temperature and not settings.decode:
        voice.note("at a temperature a simulation counts the match rule: greedy drafts")
    check_system(chat.system, plain.tokenizer)
    sets = _prompt_sets(plain, settings, tasks, protocol)
    documents, rows = [], []
    interrupted = False
    try:
        measured = _measure(voice, plain, drafters, sets, protocol, settings)
        for draft, measurement in zip(settings.draft * len(sets), measured, strict=True):
            names = {"target": short_name(target), "drafter": short_name(draft)}
            documents.append({**names, **measurement.to_dict()})
            if out is not None:
                append_record(out, {**documents[-1], "environment": environment()})
            total, where = measurement.total, measurement.prompts.name
            voice.status(
                f"{names['drafter']} on {where}: acceptance length {total.tokens_per_cycle:.2f}"
            )
            shares = total.acceptance_by_position
            rows.append(
                (
                    names["drafter"],
                    where,
                    f"{total.tokens_per_cycle:.2f}" if total.cycles else "–",
                    f"{shares[0]:.1%}" if shares else "–",
                    f"|{bar_line(shares)}|",
                    *(measurement.counts[name] for name in _LEFT_OUT),
                )
            )
    except KeyboardInterrupt:  # what is measured is worth showing; the exit code stays
        if not documents:
            raise
        interrupted = True
    if voice.as_json:
        voice.document({"measurements": documents, "warnings": voice.warnings})
    else:
        counted = (name.replace("_", " ") for name in _LEFT_OUT)
        heads = ("drafter", "set", "acceptance length", "first draft", "by position", *counted)
        start = 0 if len(drafters) > 1 else 1  # one drafter needs no name
        words = ("drafter", "set", "by position")
        voice.out.print(table(heads[start:], [row[start:] for row in rows], words=words))
    if interrupted:
        raise KeyboardInterrupt
    if not any(each["used"] for each in documents):
        voice.error(
            "nothing was measured: no prompt counts; expected answers of 32 tokens or more "
            "that do not loop, to prompts of under 400. Give other --prompts, more of them "
            "(--limit), more --max-new-tokens or, where answers loop, a temperature (-t 0.7)."
        )
        raise typer.Exit(1)


def _load(
    voice: Voice, target: str, options: TargetOptions, settings: EvalSettings, chat: ChatOptions
) -> tuple[DominoDecoder, list[DominoDecoder]]:
    """The target alone, and a decoder with each drafter."""
    from domino_spec.drafters.registry import is_block_drafter

    names = ("shift_label", "depth", "candidates", "draft_window", "draft_sinks")
    more = {name: getattr(settings, name) for name in names}
    drafts = [DraftOptions(draft=draft, **more) for draft in settings.draft]
    simulated = not (settings.decode and settings.head)
    for draft in settings.draft:
        if simulated and not is_block_drafter(draft):
            raise InputError(
                f"{draft} is no block drafter and cannot be simulated with these settings; decode "
                "for real with --decode, and leave --no-head out."
            )
    loaded, loop = load_target(voice, target, options, drafts), LoopOptions(engine=settings.engine)
    plain, *drafters = (make_decoder(loaded, d, chat, loop) for d in (DraftOptions(), *drafts))
    return plain, drafters


def _tasks(voice: Voice, source: EvalSettings, *, system: str | None) -> list[Task]:
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
    source: EvalSettings,
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
    how: EvalSettings,
) -> Iterator[Measurement]:
    """Every drafter on the first set, then on the next; the target answers each set once."""
    from domino_spec.evaluation import continuations_for, measure_decoded, measure_simulated

    for prompts in sets:
        count = f"{len(prompts.prompts)} prompts of {prompts.name}"
        with voice.progress() as update:
            if how.decode:
                for drafter in drafters:
                    yield measure_decoded(
                        drafter,
                        prompts,
                        protocol,
                        head=how.head,
                        batch_size=how.batch_size,
                        accept=how.accept,
                        on_progress=partial(update, f"decoding {count}"),
                    )
                continue
            continuations = continuations_for(
                plain,
                prompts,
                protocol,
                batch_size=how.batch_size,
                folder=how.continuations,
                on_progress=partial(update, f"the target answers {count}"),
            )
        for drafter in drafters:
            with voice.working(f"simulating {count}"):
                yield measure_simulated(drafter, prompts, protocol, continuations, head=how.head)
