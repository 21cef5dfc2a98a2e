"""`domino train`: a drafter for a target, from conversations, in one process."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from domino_spec.cli.command import Voice, command
from domino_spec.cli.loading import device_of, require_places
from domino_spec.cli.training_view import TrainingView, acceptance_length, finite, plan_line
from domino_spec.errors import DominoError, InputError, TrainingError
from domino_spec.training.config import (
    CONFIG_FILE,
    TrainConfig,
    parse_assignments,
    read_settings,
    renamed,
)

if TYPE_CHECKING:
    from domino_spec.training import Observer, Outcome, Run

_LITTLE = 1.1  # acceptance length; 1 is what an untrained drafter gives
_A_MOMENT = 3.0  # torchrun ends all at the first failure: the one that speaks must come first
# A setting leaves no room for what an earlier source said of these.
_REPLACES = {
    "epochs": ("steps",),
    "steps": ("epochs",),
    "captured_layers": ("target_layer_ids",),
}


@command(
    as_json="JSON lines on stdout: settings, reports, the result.",
    quiet="The drafter's folder alone: no progress.",
    json_lines=True,
)
def train(
    voice: Voice,
    settings: Annotated[dict[str, Any], TrainConfig],
    *,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file of settings; flags win over it.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting by its YAML key; wins over all; repeatable.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the run in --out; its settings are known there."),
    ] = False,
    tensorboard: Annotated[
        bool,
        typer.Option("--tensorboard/--no-tensorboard", help="Write TensorBoard's files as well."),
    ] = True,
) -> None:
    """Train a drafter for a frozen target; it stops cleanly and resumes exactly.

    TARGET, --data and --out are enough; docs/training.md explains every setting.
    """
    leads = os.environ.get("RANK", "0") == "0"
    if not leads:
        voice.as_json, voice.quiet = False, True
    with _only_the_first_speaks(leads):
        check_installed(tensorboard=tensorboard and leads)
        values, given_as = gather(settings, config=config, assignments=set_ or [], resume=resume)
        run_config = TrainConfig.from_dict(values, given_as=given_as)
        require_places(
            voice,
            run_config.target,
            run_config.revision,
            drafts=[run_config.init],
            data=run_config.data,
            out=run_config.out,
        )

        from domino_spec.training import open_world, prepare
        from domino_spec.training import train as run_training
        from domino_spec.training.observers import TensorBoard

        with open_world(device_of(run_config.device)) as world:
            voice.status(f"loading {run_config.target} and the data")
            view = TrainingView(voice)
            observers: list[Observer] = [view]
            if tensorboard:
                observers.append(TensorBoard(Path(run_config.out) / "tensorboard"))
            with explaining_memory():
                run = prepare(
                    run_config, world=world, observers=observers, resume=resume, notice=voice.status
                )
                if world.leads:
                    introduce(voice, run, alone=world.alone)
                with view.begin(run.config, run.trainer.step):
                    outcome, folder = run_training(run)
            if world.leads:
                _conclude(voice, run, outcome, folder)
        if outcome.signal and not outcome.finished:
            raise typer.Exit(128 + outcome.signal)


def _flag(name: str) -> str:
    return "TARGET" if name == "target" else f"--{name.replace('_', '-')}"


def gather(
    flags: Mapping[str, Any], *, config: Path | None, assignments: Iterable[str], resume: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """All settings, and how each was given: saved, in a file, by flag, by --set; the later wins."""
    given_as = {name: _flag(name) for name in TrainConfig.model_fields}
    values: dict[str, Any] = {}

    def layer(stated: Mapping[str, Any], called: Callable[[str], str]) -> None:
        nonlocal values
        stated = renamed(stated)
        replaced = {n for name in stated if stated[name] for n in _REPLACES.get(name, ())}
        values = {k: v for k, v in values.items() if k not in replaced} | stated
        given_as.update({name: called(name) for name in stated})

    file = read_settings(config) if config else {}
    assigned = parse_assignments(assignments)
    if resume:
        out = {**file, **flags, **assigned}.get("out")
        layer(_saved(out), lambda name: f"{name} in the saved run")
    layer(file, lambda name: f"{name} in {config}")
    layer(flags, _flag)
    layer(assigned, lambda name: f"--set {name}")
    return values, given_as


def _saved(out: str | None) -> dict[str, Any]:
    from domino_spec.training.state import Checkpoints, as_it_ran

    if not out:
        raise InputError("there is no folder of a run to resume; give --out.")
    saved = Path(out) / CONFIG_FILE
    if not saved.is_file() or not Checkpoints(Path(out), keep=1).steps():
        raise TrainingError(
            f"{out} holds no run to resume (expected {CONFIG_FILE} and a checkpoint there); "
            "name the run's folder with --out, or start it without --resume."
        )
    return as_it_ran(read_settings(saved))


def check_installed(*, tensorboard: bool) -> None:
    """Refuse before anything is loaded what would fail later."""
    advice = "pip install 'domino-spec[train]'"
    if find_spec("yaml") is None:
        raise TrainingError(
            f"PyYAML is not installed, and training reads its settings with it; {advice}."
        )
    if tensorboard and find_spec("tensorboard") is None:
        raise TrainingError(
            f"TensorBoard is not installed; {advice}, or train with --no-tensorboard."
        )


@contextlib.contextmanager
def _only_the_first_speaks(leads: bool) -> Iterator[None]:
    """Under torchrun all processes meet the same errors and warnings; one tells of them."""
    if leads:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except DominoError:
            time.sleep(_A_MOMENT)
            raise typer.Exit(1) from None


@contextlib.contextmanager
def explaining_memory() -> Iterator[None]:
    """Say what to do where the GPU's memory is full."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"the GPU's memory is full ({str(error).split('. ')[0]}). Halve "
            "--batch-size and double --accumulate, which learns the same; or take fewer --anchors, "
            "or a smaller --chunk-bytes."
        ) from error


def introduce(voice: Voice, run: Run, *, alone: bool) -> None:
    """Say what is about to be run_config, on what."""
    config, report = run.config, run.corpus.report
    parameters = sum(p.numel() for p in run.drafter.parameters())
    voice.status(f"{config.variant} drafter: {parameters / 1e6:,.1f}M parameters, {_shape(run)}")
    for line in report.lines():
        voice.status(line)
    for line in report.bad.lines():
        voice.warn(line)
    steps = f"{config.steps:,} steps" if config.steps else None
    seconds = f"{config.max_seconds:g} s of steps" if config.max_seconds else None
    length = f"{steps}, at most {seconds}," if steps and seconds else steps or seconds
    voice.status(
        f"{length} of {config.batch_size} sequences × {config.length} tokens, {config.anchors} "
        f"blocks a sequence, {config.labels} labels, learning rate {config.learning_rate:.3g}"
    )
    # How many steps fit into seconds is known, and told, once some were made.
    known = config.steps if config.max_seconds is None else None
    plan = run.trainer.forecast.plan(known) if known else None
    if plan:
        voice.status(plan_line(plan))
    if run.evaluate is None and config.eval_every != 0:
        why = "nothing could be held out" if alone else "several processes share the drafter"
        voice.status(f"the acceptance length is not measured: {why}; use domino eval afterwards")
    if run.acceleration is not None:
        voice.status("the first step waits for the compiler: a minute or two, the first time")
    voice.status(f"all settings: {Path(config.out) / CONFIG_FILE}")
    if voice.as_json:
        voice.document(
            {
                "config": config.to_dict(),
                "parameters": parameters,
                "data": asdict(report),
                "first_step": run.trainer.step,
                "plan": plan,
            }
        )


def _shape(run: Run) -> str:
    config = run.config
    if config.variant == "medusa":
        return f"{config.draft_steps} heads of {config.layers} blocks"
    ids = ", ".join(map(str, run.drafter.config.target_layer_ids))
    captured = f"hidden states of target layers {ids}"
    if config.variant == "eagle3":
        return f"{captured}, unrolled for {config.draft_steps} steps"
    window = f", windows of {config.sliding_window} tokens" if config.sliding_window else ""
    return f"{config.layers} layers, {captured}, blocks of {config.block_size}{window}"


def _conclude(voice: Voice, run: Run, outcome: Outcome, folder: Path | None) -> None:
    from domino_spec.training.observers import CURVES_FILE, LOG_FILE, draw_curves

    out = Path(run.config.out)
    with contextlib.suppress(DominoError):
        draw_curves(out / LOG_FILE, out / CURVES_FILE)
    again = None if outcome.finished else f"domino train --out {shlex.quote(str(out))} --resume"
    rate = outcome.last.get("tokens_per_cycle")
    if folder is not None and rate is not None and rate < _LITTLE:
        voice.warn(
            f"the acceptance length, held out, is only {rate:.2f}: the drafter has learnt next to "
            "nothing. Train longer or on more data; docs/training.md says what else goes wrong."
        )
    if voice.as_json:
        names = ("loss", "tokens_per_cycle", "tokens_per_cycle_head_off")
        voice.document(
            {
                "finished": outcome.finished,
                "step": outcome.step,
                "drafter": None if folder is None else str(folder),
                **{name: finite(outcome.last.get(name)) for name in names},
                "signal": outcome.signal,
                "resume": again,
                "warnings": voice.warnings,
            }
        )
    elif folder is None:
        of = f" of {run.config.steps}" if run.config.steps else ""
        voice.say(f"stopped at step {outcome.step}{of}; resume with: {again}")
    else:
        measured = "" if rate is None else acceptance_length(outcome.last)
        told = f"; acceptance length, held out: {measured}" if measured else ""
        voice.say(f"the drafter is in {folder}{told}")
        target, draft = shlex.quote(run.config.target), shlex.quote(str(folder))
        # Not `domino chat`, which a base model cannot.
        voice.note(f"try it: domino generate {target} --draft {draft} -p 'Once upon a time'")
