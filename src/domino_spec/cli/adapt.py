"""`domino adapt`: a drafter for a fine-tune, from the drafter of its base model."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from domino_spec.cli.command import Voice, command
from domino_spec.cli.data import answers_so_far, prompts_so_far
from domino_spec.cli.loading import device_of, require_places
from domino_spec.cli.train import check_installed, explaining_memory, introduce
from domino_spec.cli.training_view import TrainingView
from domino_spec.errors import TrainingError
from domino_spec.training.config import AdaptSettings, parse_assignments

if TYPE_CHECKING:
    from domino_spec.training.adapt import Adaptation

ADAPT_FILE = "adapt.json"
"""In the folder of a run: what was measured, and where."""
_WORSE = 3  # the exit code; 1 is an error


@command(
    as_json="JSON lines on stdout: settings, reports, the result.",
    quiet="The result alone.",
    json_lines=True,
)
def adapt(
    voice: Voice,
    settings: AdaptSettings,
    *,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting of domino train, such as learning_rate; repeatable.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue what the same command began in --out.")
    ] = False,
) -> None:
    """Adapt a drafter to a fine-tune of its target, if that pays; it needs no data.

    The drafter is measured on held-out prompts, trained for at most --seconds on what the fine-tune
    itself answers, and measured again. Exit code 3: the old drafter is better and is kept.
    """
    check_installed(tensorboard=False)
    require_places(
        voice,
        settings.target,
        settings.revision,
        base=settings.base,
        drafts=[settings.drafter],
        prompts=settings.prompts or (),
        data=settings.data or (),
        out=settings.out,
    )
    changes = parse_assignments(set_ or [])

    from domino_spec.targets import load_target
    from domino_spec.training import World, prepare
    from domino_spec.training import train as run_training
    from domino_spec.training.adapt import (
        ENOUGH,
        Adaptation,
        describe_fitting,
        make_answers,
        measure,
        train_config,
        with_rate,
    )
    from domino_spec.training.run import precision, require_unused

    described = describe_fitting(settings)
    assert described.config is not None, "it has files"
    config = train_config(settings, described.config, changes)
    before = _measured_before(Path(config.out)) if resume else None
    resumed = before is not None
    if not resumed:
        require_unused(Path(config.out))
    world, view = World(device=device_of(config.device)), TrainingView(voice)
    voice.status(f"loading {settings.target}")
    with explaining_memory():
        loaded = load_target(
            settings.target,
            revision=settings.revision,
            base=settings.base,
            dtype=precision(config, world.device),
            device=world.device,
            trust_remote_code=settings.trust_remote_code,
        )
        if settings.data is None:
            with voice.ticker() as say:
                make_answers(
                    settings,
                    loaded,
                    on_prompts=lambda progress: say(prompts_so_far(progress)),
                    on_answers=lambda progress: say(answers_so_far(progress)),
                )
        run = prepare(
            with_rate(config, loaded),
            world=world,
            loaded=loaded,
            observers=[view],
            resume=resumed,
            notice=voice.status,
        )
        introduce(voice, run, alone=True)
        before = measure(run) if before is None else before
        own = described.provenance.tokens_per_cycle
        known: dict[str, Any] = {"before": before, "own_target": own}
        original = "" if own is None else f" ({own:.2f} on its own target)"
        measured = f"acceptance length, held out: {before:.2f}{original}"
        voice.status(measured)
        if not resumed:
            result = Adaptation(drafter=settings.drafter, **known)
            if own is not None and before >= ENOUGH * own and not settings.force:
                advice = f"use {settings.drafter} as it is, or train with --force"
                words = f"{measured}: adapting would gain little; {advice}"
                _conclude(voice, settings, result, words)
                return
            _write(settings, result)  # for who resumes it
        with view.begin(run.config, run.trainer.step):
            outcome, folder = run_training(run, at_least=before)
    if outcome.signal is not None or not outcome.finished:
        again = "the same command with --resume continues"
        voice.err.print(f"stopped at step {outcome.step}; {again}", soft_wrap=True)
        raise typer.Exit(128 + (outcome.signal or 0))
    after, seconds = outcome.last["tokens_per_cycle"], run.trainer.budget.seconds
    drafter = settings.drafter if folder is None else str(folder)
    kept = f"{drafter} is kept, since the new one is worse"
    words = (
        f"acceptance length, held out: {before:.2f} before, {after:.2f} after {outcome.step:,} "
        f"steps in {seconds:.0f} s; {kept if folder is None else f'the drafter is in {folder}'}"
    )
    result = Adaptation(drafter=drafter, after=after, steps=outcome.step, seconds=seconds, **known)
    _conclude(voice, settings, result, words)
    if folder is None:
        raise typer.Exit(_WORSE)


def _measured_before(out: Path) -> float | None:
    """The acceptance length before the training that is to be resumed; None if it never began."""
    from domino_spec.training.state import Checkpoints

    if not Checkpoints(out, keep=1).steps():
        return None
    path = out / ADAPT_FILE
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        before, after = float(known["before"]), known["after"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TrainingError(
            f"{out} holds a run, but {ADAPT_FILE} there does not say what was measured before it; "
            f"resume it with: domino train --out {shlex.quote(str(out))} --resume"
        ) from error
    if after is not None:
        raise TrainingError(
            f"the run in {out} is finished (see {ADAPT_FILE}); adapt into another folder."
        )
    return before


def _write(settings: AdaptSettings, result: Adaptation) -> dict[str, Any]:
    from domino_spec.records import environment

    document = {**result.to_dict(), "environment": environment()}
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    (Path(settings.out) / ADAPT_FILE).write_text(text, encoding="utf-8")
    return document


def _conclude(voice: Voice, settings: AdaptSettings, result: Adaptation, words: str) -> None:
    document = _write(settings, result)
    if voice.as_json:
        voice.document({**document, "warnings": voice.warnings})
        return
    voice.say(words)
    target, draft = shlex.quote(settings.target), shlex.quote(result.drafter)
    # Not `domino chat`, which a base model cannot.
    voice.note(f"try it: domino generate {target} --draft {draft} -p 'Once upon a time'")
