"""From names on a command line to a run: loads what is to be compared, and compares it."""

from __future__ import annotations

import copy
import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from domino_spec.api.prompts import check_system, end_tokens
from domino_spec.bench.journal import CELL, STAGES, UNIT, Journal
from domino_spec.bench.llama_cpp import LlamaCpp, OpenedModel, find_against
from domino_spec.bench.paths import EnginePath, Prompt, ReferencePath, Timed
from domino_spec.bench.settings import BenchSettings, Cell, digest
from domino_spec.bench.summary import RunSummary, read_runs
from domino_spec.bench.tasks import Task, prompts_digest, read_tasks
from domino_spec.decoding import Drafter, SamplingParams
from domino_spec.decoding import Sequence as Decoded
from domino_spec.drafters import PLAIN, PlainDecoding, open_drafter, short_name
from domino_spec.drafters.registry import (
    describe_fitting_drafter,
    is_block_drafter,
    is_named,
)
from domino_spec.errors import InputError, TargetError
from domino_spec.evaluation import PromptSet, fingerprint
from domino_spec.evaluation.continuations import weight_values
from domino_spec.evaluation.runs import unsupported_by_engine
from domino_spec.targets import LoadedTarget, Target, load_target

Say = Callable[[str], None]
"""Hears that something begins that takes a while."""
Progress = Callable[[Cell, int, int], None]
"""Hears how many units of a cell are on file, of how many."""


def run_bench(
    settings: BenchSettings,
    *,
    say: Say = lambda _: None,
    progress: Progress = lambda *_: None,
    system: str | None = None,
    chat_options: Mapping[str, Any] | None = None,
    load: Mapping[str, Any] | None = None,
) -> tuple[RunSummary, Path]:
    """Measure what is not on file yet; the whole run's figures and its file.

    `load` are further arguments of `load_target`.
    """
    chat_options = dict(chat_options or {})
    # What can be wrong on the command line is found out before anything large is loaded.
    tasks = read_tasks(settings.prompts, limit=settings.limit, system=system, notice=say)
    place = {k: v for k, v in (load or {}).items() if k in ("revision", "trust_remote_code")}
    for draft in settings.draft:
        if not is_named(draft):
            describe_fitting_drafter(
                draft, settings.target, **place, shift_label=settings.shift_label
            )
    against = find_against(settings, load or {})
    say(f"loading target {settings.target}")
    loaded = load_target(settings.target, **(load or {}))
    if loaded.tokenizer is None:
        raise TargetError(
            f"{settings.target} came without a tokenizer, so prompts cannot be read; expected "
            "tokenizer files next to its weights. Save the model's tokenizer there."
        )
    check_system(system, loaded.tokenizer)
    methods = open_drafters(
        settings.draft,
        loaded,
        depth=settings.depth,
        tree=settings.tree,
        candidates=settings.candidates,
        draft_window=settings.draft_window,
        draft_sinks=settings.draft_sinks,
        shift_label=settings.shift_label,
        chat_options=chat_options,
    )
    settings = settings.replace(engine=choose_loop(settings, loaded.target, methods, say))
    prompts = _encoded(tasks, loaded, settings, chat_options)
    facts = {
        "settings": settings.recorded(),
        "target": {
            "name": short_name(settings.target),
            "fingerprint": fingerprint(loaded.target),
            "dtype": loaded.target.dtype_name,
            "device": loaded.target.device.type,
            "attention": loaded.target.model.config._attn_implementation,
        },
        "methods": [recorded(method) for method in methods]
        + [other.recorded(torch.get_num_threads()) for other in against],
        "system": system,
        "chat_options": chat_options,
    }
    stem = re.sub(r"[^A-Za-z0-9.]+", "-", Path(short_name(settings.target)).stem).strip("-").lower()
    journal = Journal(
        settings.out or Path(), facts, stem=None if settings.out else stem or "target"
    )
    run = HeadToHead(
        settings=settings,
        path=_open_path(settings, loaded, methods, prompts),
        methods=methods,
        prompts=prompts,
        cells=settings.cells([task.name for task in tasks]),
        against=against,
    )
    model = OpenedModel(
        path=Path(settings.target),
        device=loaded.target.device,
        threads=torch.get_num_threads(),
        capacity=_capacity(settings, prompts),
    )
    with ExitStack() as opened:
        for other in against:
            say(f"opening the same file with {other.by} {other.version}")
            opened.enter_context(other.opened(model))
            _compare_tokenizers(other, prompts, loaded.tokenizer, say)
        measure(run, journal, say=say, progress=progress)
    (summary,) = read_runs([journal.path])
    return summary, journal.path


def open_drafters(
    sources: Sequence[str],
    loaded: LoadedTarget,
    *,
    depth: int | None = None,
    tree: int = 0,
    candidates: int | None = None,
    draft_window: int | None = None,
    draft_sinks: int | None = None,
    shift_label: bool | None = None,
    chat_options: Mapping[str, Any] | None = None,
) -> list[Drafter]:
    """Plain decoding and the drafter of each source, in order, each with a name of its own.

    Those that can draft trees come a second time, with trees of so many drafts.
    """
    found: list[Drafter] = [PlainDecoding()]
    names = names_of(sources)
    blocks = [is_block_drafter(source) for source in sources]
    for name, source, is_block in zip(names, sources, blocks, strict=True):
        # These are block drafters'; where there are some, theirs alone.
        own: dict[str, Any] = {
            "candidates": candidates,
            "draft_window": draft_window,
            "draft_sinks": draft_sinks,
            "shift_label": shift_label,
        }
        told = is_block or not any(blocks)
        drafter = open_drafter(
            source,
            loaded,
            depth=depth,
            **(own if told else {}),
            chat_options=chat_options or {},
        )
        drafter = copy.copy(drafter)
        drafter.name = name
        found.append(drafter)
        if tree and drafter.can_branch:
            branching = drafter.with_tree(tree)
            branching.name = f"{name}, tree of {tree}"
            found.append(branching)
    return found


def recorded(drafter: Drafter) -> dict[str, Any]:
    """A drafter as plain values; the fingerprint changes whenever its drafts could."""
    facts: list[Any] = [drafter.kind, drafter.config and drafter.config.to_dict()]
    if drafter.model is not None:
        facts.append(weight_values(drafter.model))
    settings: dict[str, Any] = {"depth": drafter.depth, "candidates": drafter.candidates}
    settings |= {"tree": drafter.nodes} if drafter.nodes else {}
    if drafter.window is not None:
        settings["window"] = list(drafter.window)
    return {
        "name": drafter.name,
        "kind": drafter.kind,
        "fingerprint": digest(facts) if drafter.drafts else PLAIN,
        "settings": settings if drafter.drafts else {},
        "nbytes": drafter.weight_bytes,
    }


def names_of(sources: Sequence[str]) -> list[str]:
    """Short names without the machine's own paths; as long as it takes to tell them apart."""
    repeated = {source for source in sources if list(sources).count(source) > 1}
    if repeated:
        raise InputError(f"the drafter {sorted(repeated)[0]} is given twice; give it once.")
    for parts in range(1, 5):
        names = [_short(source, parts) for source in sources]
        if len({PLAIN, *names}) == len(names) + 1:
            return names
    return [f"{_short(source, 1)} ({i})" for i, source in enumerate(sources, start=1)]


def _short(source: str, parts: int) -> str:
    if not Path(source).exists():
        return source.removeprefix("released:")
    return "/".join(Path(source).resolve().parts[-parts:])


def choose_loop(
    settings: BenchSettings, target: Target, methods: list[Drafter], say: Say
) -> Literal["fast", "reference"]:
    """The engine where it runs all, else the reference loop, unless set."""
    if settings.engine == "reference":
        return "reference"
    reasons = (unsupported_by_engine(target, method) for method in methods)
    reason = next(filter(None, reasons), None)
    if reason is None:
        say("all on the engine")
        return "fast"
    if settings.engine == "fast":
        raise InputError(f"{reason}. Take --engine reference, or auto.")
    say(f"all in the reference loop: {reason}")
    return "reference"


def _encoded(
    tasks: list[Task],
    loaded: LoadedTarget,
    settings: BenchSettings,
    chat_options: Mapping[str, Any],
) -> dict[str, PromptSet]:
    longest = settings.protocol().longest_for(loaded.target)
    if longest < 1:
        raise InputError(
            f"max_new_tokens is {settings.max_new_tokens}, which leaves no room for a prompt in "
            f"the target's context of {loaded.target.context_length}; ask for fewer."
        )
    return {
        task.name: task.encoded(loaded.tokenizer, longest=longest, chat_options=chat_options)
        for task in tasks
    }


def _open_path(
    settings: BenchSettings,
    loaded: LoadedTarget,
    methods: list[Drafter],
    prompts: Mapping[str, PromptSet],
) -> ReferencePath:
    slots = max(settings.batch_size)
    eos = end_tokens(loaded.target, loaded.tokenizer)
    if settings.engine == "reference":
        if slots > 1 and loaded.target.batch_refusal:
            raise TargetError(loaded.target.batch_refusal)
        return ReferencePath(loaded.target, eos=eos)
    return EnginePath(
        loaded.target,
        methods,
        eos=eos,
        slots=slots,
        capacity=_capacity(settings, prompts),
        adaptive=settings.adaptive,
    )


def _capacity(settings: BenchSettings, prompts: Mapping[str, PromptSet]) -> int:
    """Tokens of the longest prompt with the longest answer."""
    longest = max((len(p) for found in prompts.values() for p in found.prompts), default=1)
    return longest + settings.max_new_tokens


def _compare_tokenizers(
    other: LlamaCpp, prompts: Mapping[str, PromptSet], tokenizer: Any, say: Say
) -> None:
    """Say whether the other implementation would read the prompts' texts as the same tokens."""
    every = [prompt for found in prompts.values() for prompt in found.prompts]
    same = sum(other.tokenize(tokenizer.decode(prompt)) == list(prompt) for prompt in every)
    if same == len(every):
        say(f"{other.name} tokenises all {same} prompts as we do")
    else:
        say(
            f"{other.name} would tokenise {len(every) - same} of {len(every)} prompts otherwise "
            "than we do; it gets our token ids, so all answer the same prompts"
        )


_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class HeadToHead:
    """Everything a run needs, loaded."""

    settings: BenchSettings
    path: ReferencePath
    methods: Sequence[Drafter]
    """Plain decoding first."""
    prompts: Mapping[str, PromptSet]
    """By the name of the task."""
    cells: Sequence[Cell]
    against: Sequence[LlamaCpp] = ()
    """Other implementations, ready to answer."""


def measure(
    run: HeadToHead,
    journal: Journal,
    *,
    say: Say = lambda _: None,
    progress: Progress = lambda *_: None,
) -> None:
    """Measure whatever is not on file yet."""
    journal.open()
    for cell in run.cells:
        prompts = run.prompts[cell.task]
        found = journal.cell(cell, prompts_digest(prompts))
        if found is None:
            say(f"{cell}: plain answers, to see which prompts count")
            found = journal.add(CELL, cell=vars(cell), **_which_count(run, cell, prompts))
        tokens = dict(zip(prompts.numbers, prompts.prompts, strict=True))
        units = [[Prompt(n, tokens[n]) for n in numbers] for numbers in found["units"]]
        done = journal.units(cell)
        if len(done) < len(units):
            say(f"{cell}: {len(units) - len(done)} to measure")
            _warm_up(run, cell, units, found["new_tokens"])
        for unit, batch in enumerate(units):
            if unit not in done:
                measured = _measure_unit(run, cell, unit, batch, found["new_tokens"])
                journal.add(UNIT, cell=vars(cell), unit=unit, **measured)
                done.add(unit)
            progress(cell, len(done), len(units))
        if units and not any(r["batch_size"] == cell.batch_size for r in journal.of(STAGES)):
            _add_stages(run, cell, units, journal)


def _which_count(run: HeadToHead, cell: Cell, prompts: PromptSet) -> dict[str, Any]:
    """Plain decoding answers all once, untimed: loops and short answers flatter or say nothing."""
    protocol, params = run.settings.protocol(), run.settings.params(cell.temperature)
    pairs = zip(prompts.numbers, prompts.prompts, strict=True)
    every = [Prompt(number, tokens) for number, tokens in pairs]
    outcomes: dict[int, str] = {}
    lengths: dict[str, int] = {}
    for batch in _chunks(every, cell.batch_size):
        answered = run.path.run(run.methods[0], batch, params)
        outcomes |= {each.index: protocol.outcome(each.output) for each in answered.sequences}
        lengths |= {str(each.index): len(each.output) for each in answered.sequences}
    used = [number for number in prompts.numbers if outcomes[number] == "used"]
    chunks = _chunks(used, cell.batch_size)
    # A batch that is not full would be timed as another batch size.
    full = [chunk for chunk in chunks if len(chunk) == cell.batch_size]
    count = Counter(outcomes.values())
    return {
        "prompts_digest": prompts_digest(prompts),
        "outcomes": {str(number): outcome for number, outcome in outcomes.items()},
        "new_tokens": lengths,
        "units": full,
        "used": sum(map(len, full)),
        "loops": count["loop"],
        "short": count["short"],
        "too_long": prompts.too_long,
        "left_over": len(used) - sum(map(len, full)),
    }


def _warm_up(
    run: HeadToHead, cell: Cell, units: Sequence[Sequence[Prompt]], new_tokens: Mapping[str, int]
) -> None:
    params = run.settings.params(cell.temperature)
    for method in run.methods:
        run.path.prepare(method, cell.batch_size, params)
    for turn in range(run.settings.warm_up):
        for answer in _answering(run, units[turn % len(units)], params, new_tokens).values():
            answer()


def _answering(
    run: HeadToHead,
    batch: Sequence[Prompt],
    params: SamplingParams,
    new_tokens: Mapping[str, int],
) -> dict[str, Callable[[], Timed]]:
    """What answers a batch once, by the name of the method."""
    found: dict[str, Callable[[], Timed]] = {
        method.name: partial(run.path.run, method, batch, params) for method in run.methods
    }
    for other in run.against:
        (prompt,) = batch  # they answer one at a time, as many tokens as plain decoding gave
        found[other.name] = partial(other.run, prompt, params, new_tokens[str(prompt.number)])
    return found


def turns(
    methods: Sequence[str], *, seed: int, cell: Cell, unit: int, repeats: int
) -> list[list[str]]:
    """Who runs when: drawn anew for each unit, and each repeat starts with the next one."""
    drawn = list(methods)
    random.Random(digest([seed, vars(cell), unit])).shuffle(drawn)
    shifts = [turn % len(drawn) for turn in range(repeats)]
    return [drawn[shift:] + drawn[:shift] for shift in shifts]


def _measure_unit(
    run: HeadToHead,
    cell: Cell,
    unit: int,
    batch: Sequence[Prompt],
    new_tokens: Mapping[str, int],
) -> dict[str, Any]:
    settings = run.settings
    answering = _answering(run, batch, settings.params(cell.temperature), new_tokens)
    names = list(answering)
    order = turns(names, seed=settings.seed, cell=cell, unit=unit, repeats=settings.repeats)
    timed: dict[str, list[Timed]] = {name: [] for name in names}
    for turn in order:
        for name in turn:
            timed[name].append(answering[name]())
    plain = timed[PLAIN][0].sequences if settings.same_text(cell.temperature) else None
    return {
        "prompts": [prompt.number for prompt in batch],
        "prompt_tokens": [len(prompt.tokens) for prompt in batch],
        "order": order,
        "methods": {name: _written(repeats, plain) for name, repeats in timed.items()},
    }


def _written(repeats: Sequence[Timed], plain: Sequence[Decoded] | None) -> dict[str, Any]:
    """One method's repeats; counts are those of the first, and whether the others agree."""
    first = repeats[0]
    answers = [[own.output for own in each.sequences] for each in repeats]
    peaks = [each.peak_memory for each in repeats if each.peak_memory is not None]

    def column(value: Callable[[Timed], float | None]) -> list[float] | None:
        values = [value(each) for each in repeats]
        return None if any(v is None for v in values) else [float(f"{v:.6g}") for v in values]

    return {
        "seconds": column(lambda each: each.seconds),
        "prefill": column(lambda each: each.prefill),
        "draft": column(lambda each: each.draft),
        "verify": column(lambda each: each.verify),
        "cycles": first.cycles,
        "peak_memory": max(peaks, default=None),
        "repeats_agree": all(answer == answers[0] for answer in answers),
        "rows": [
            {
                "tokens": len(sequence.output),
                "sha256": hashlib.sha256(repr(sequence.output).encode()).hexdigest()[:12],
                "finish": sequence.finish_reason,
                "cycles": sequence.stats.cycles,
                "committed": sequence.stats.committed,
                "offered": list(sequence.stats.offered),
                "accepted": list(sequence.stats.accepted),
                "differs_at": None
                if plain is None
                else first_difference(plain[index].output, sequence.output),
                "compared": plain is not None,
            }
            for index, sequence in enumerate(first.sequences)
        ],
    }


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two answers part, counted from 0; None if they are the same."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def _add_stages(
    run: HeadToHead, cell: Cell, units: Sequence[Sequence[Prompt]], journal: Journal
) -> None:
    """The parts of a cycle in the middle of an answer of middling length."""
    lengths = sorted(len(prompt.tokens) for unit in units for prompt in unit)
    context = lengths[len(lengths) // 2] + run.settings.max_new_tokens // 2
    found = {m.name: run.path.stages(m, cell.batch_size, context) for m in run.methods}
    if any(stages is not None for stages in found.values()):
        journal.add(STAGES, batch_size=cell.batch_size, context=context, methods=found)


def _chunks(items: Sequence[_T], size: int) -> list[list[_T]]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)]
