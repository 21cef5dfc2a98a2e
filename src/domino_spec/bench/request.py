"""From names on a command line to a run: loads what is to be compared, and compares it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from domino_spec.api.prompts import end_tokens
from domino_spec.baselines import short_name
from domino_spec.bench.journal import Journal
from domino_spec.bench.methods import DraftSettings, Method, make_methods
from domino_spec.bench.paths import DecodingPath, EnginePath, ReferencePath
from domino_spec.bench.runner import HeadToHead, Watcher, measure
from domino_spec.bench.settings import LoopChoice, LoopName, Settings, plan_cells
from domino_spec.bench.summary import RunSummary, read_runs
from domino_spec.bench.tasks import Task, check_system, read_tasks
from domino_spec.decoding.params import AcceptRule
from domino_spec.errors import InputError, TargetError
from domino_spec.evaluation import PromptSet, fingerprint
from domino_spec.evaluation.loops import unsupported_by_engine
from domino_spec.targets import LoadedTarget, Target, load_target


@dataclass(frozen=True, kw_only=True)
class Request:
    """What somebody wants compared."""

    target: str
    draft: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    """Names of built-in sets, files, or hf:NAME; none takes the built-in ones."""
    limit: int | None = None
    temperatures: tuple[float, ...] = (0.0,)
    batch_sizes: tuple[int, ...] = (1,)
    engine: LoopChoice = "auto"
    max_new_tokens: int = 256
    shortest_answer: int = 32
    repeats: int = 3
    warm_up: int = 1
    seed: int = 0
    accept: AcceptRule = "coupled"
    adaptive: bool = False
    depth: int | None = None
    candidates: int | None = None
    shift_label: bool | None = None
    system: str | None = None
    chat_options: Mapping[str, Any] = field(default_factory=dict)
    load: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `load_target`."""
    out: Path | None = None
    """Unset: a file in this folder, named after the target and the run's key."""


def run_request(request: Request, watcher: Watcher | None = None) -> tuple[RunSummary, Path]:
    """Measure what is not on file yet; the whole run's figures and its file."""
    watcher = watcher or Watcher()
    # What can be wrong on the command line is found out before anything large is loaded.
    tasks = read_tasks(
        request.prompts, limit=request.limit, system=request.system, notice=watcher.say
    )
    cells = plan_cells([t.name for t in tasks], request.temperatures, request.batch_sizes)
    likely: LoopName = "fast" if request.adaptive else "reference"
    _settings(request, likely if request.engine == "auto" else request.engine)
    watcher.say(f"loading target {request.target}")
    loaded = load_target(request.target, **request.load)
    if loaded.tokenizer is None:
        raise TargetError(
            f"{request.target} came without a tokenizer, so prompts cannot be read; expected "
            "tokenizer files beside its weights. Save the model's tokenizer there."
        )
    check_system(request.system, loaded.tokenizer)
    drafts = DraftSettings(
        depth=request.depth,
        candidates=request.candidates,
        shift_label=request.shift_label,
        chat_options=request.chat_options,
    )
    methods = make_methods(request.draft, loaded, drafts)
    settings = _settings(request, choose_loop(request, loaded.target, methods, watcher))
    prompts = _encoded(tasks, loaded, settings, request)
    facts = {
        "settings": settings.to_dict(),
        "target": {
            "name": short_name(request.target),
            "fingerprint": fingerprint(loaded.target),
            "dtype": str(loaded.target.dtype).removeprefix("torch."),
            "device": loaded.target.device.type,
            "attention": loaded.target.model.config._attn_implementation,
        },
        "methods": [method.to_dict() for method in methods],
        "system": request.system,
        "chat_options": dict(request.chat_options),
    }
    journal = (
        Journal(request.out, facts)
        if request.out is not None
        else Journal.named_after(_file_stem(short_name(request.target)), facts)
    )
    run = HeadToHead(
        settings=settings,
        path=_open_path(settings, loaded, methods, prompts, max(request.batch_sizes)),
        methods=methods,
        prompts=prompts,
        cells=cells,
    )
    measure(run, journal, watcher)
    (summary,) = read_runs([journal.path])
    return summary, journal.path


def choose_loop(
    request: Request, target: Target, methods: list[Method], watcher: Watcher
) -> LoopName:
    """The engine where it runs all, else the reference loop, unless told."""
    if request.engine == "reference":
        return "reference"
    reasons = (
        unsupported_by_engine(target, name=m.name, kind=m.kind, source=m.source) for m in methods
    )
    reason = next(filter(None, reasons), None)
    if reason is None and request.accept != "coupled":
        reason = f"the engine does not know the {request.accept} rule"
    if reason is None:
        watcher.say("all on the engine")
        return "fast"
    if request.engine == "fast":
        raise InputError(f"{reason}. Take --engine reference, or auto.")
    watcher.say(f"all in the reference loop: {reason}")
    return "reference"


def _settings(request: Request, engine: LoopName) -> Settings:
    return Settings(
        engine=engine,
        max_new_tokens=request.max_new_tokens,
        shortest_answer=request.shortest_answer,
        repeats=request.repeats,
        warm_up=request.warm_up,
        seed=request.seed,
        accept=request.accept,
        adaptive=request.adaptive,
    )


def _encoded(
    tasks: list[Task], loaded: LoadedTarget, settings: Settings, request: Request
) -> dict[str, PromptSet]:
    longest = settings.protocol().longest_for(loaded.target)
    if longest < 1:
        raise InputError(
            f"max_new_tokens is {settings.max_new_tokens}, which leaves no room for a prompt in "
            f"the target's context of {loaded.target.context_length}; ask for fewer."
        )
    return {
        task.name: task.encoded(
            loaded.tokenizer, longest=longest, chat_options=request.chat_options
        )
        for task in tasks
    }


def _open_path(
    settings: Settings,
    loaded: LoadedTarget,
    methods: list[Method],
    prompts: Mapping[str, PromptSet],
    slots: int,
) -> DecodingPath:
    eos = end_tokens(loaded.target, loaded.tokenizer)
    if settings.engine == "reference":
        if slots > 1 and loaded.target.batch_refusal:
            raise TargetError(loaded.target.batch_refusal)
        return ReferencePath(loaded.target, methods, eos=eos)
    longest = max((len(p) for found in prompts.values() for p in found.prompts), default=1)
    capacity = longest + settings.max_new_tokens
    return EnginePath(
        loaded.target,
        methods,
        eos=eos,
        slots=slots,
        capacity=capacity,
        adaptive=settings.adaptive,
    )


def _file_stem(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", Path(name).stem).strip("-").lower() or "target"
