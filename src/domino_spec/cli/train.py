"""`domino train`: a drafter for a target, from conversations, in one process."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from domino_spec.cli.options import checked_device
from domino_spec.cli.places import checkpoints_among, require_places
from domino_spec.cli.training_options import LearningOptions, ShapeOptions
from domino_spec.cli.training_settings import check_installed, gather
from domino_spec.cli.training_view import LineView, LiveView, finite, tokens_a_cycle
from domino_spec.cli.voice import Voice, speaking
from domino_spec.errors import DominoError, TrainingError

if TYPE_CHECKING:
    from domino_spec.training import Observer, Outcome, Run
    from domino_spec.training.observers import TensorBoard

_LITTLE = 1.1  # tokens a cycle; 1 is what an untrained drafter gives
_A_MOMENT = 3.0  # torchrun ends all at the first failure: the one that speaks must come first


def train(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="The target model: a folder, a GGUF file or a hub id.",
            show_default=False,
        ),
    ] = None,
    *,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Conversations: files, folders, globs or hf:name[:split]; repeatable."),
    ] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="The run's folder.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file of settings; flags win over it.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Any setting, also one without a flag; wins over all; repeatable.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run in --out; its settings are known there."),
    ] = False,
    tensorboard: Annotated[
        bool,
        typer.Option("--tensorboard/--no-tensorboard", help="Write TensorBoard's files as well."),
    ] = True,
    shape: ShapeOptions,
    learning: LearningOptions,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON lines on stdout: settings, reports, the result.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="The drafter's folder alone: no progress.")
    ] = False,
) -> None:
    """Train a drafter for a frozen target; it stops cleanly and resumes exactly.

    TARGET, --data and --out are enough; docs/training.md explains every setting.
    """
    leads = os.environ.get("RANK", "0") == "0"
    with (
        speaking(as_json=as_json and leads, quiet=quiet or not leads, json_lines=True) as voice,
        _only_the_first_speaks(leads),
    ):
        check_installed(tensorboard=tensorboard and leads)
        settings = gather(
            {"target": target, "data": data or None, "out": out},
            (shape, learning),
            config=config,
            assignments=set_ or [],
            resume=resume,
        )
        _run(voice, settings, resume=resume, tensorboard=tensorboard)


def _run(voice: Voice, settings: dict[str, Any], *, resume: bool, tensorboard: bool) -> None:
    from domino_spec.training import TrainConfig

    config = TrainConfig.from_dict(settings)
    require_places(
        voice,
        config.target,
        revision=config.revision,
        drafts=checkpoints_among([config.init]),
        data=config.data,
    )
    import torch

    from domino_spec.targets import default_device
    from domino_spec.training import open_world, train
    from domino_spec.training.prepare import prepare

    named = checked_device(config.device)
    with open_world(torch.device(named) if named else default_device()) as world:
        voice.status(f"loading {config.target} and the data")
        view = LiveView(voice) if voice.shows_bars else LineView(voice)
        observers: list[Observer] = [view]
        if tensorboard:
            observers.append(_LateTensorBoard(Path(config.out) / "tensorboard"))
        with _explaining_memory():
            run = prepare(
                config, world=world, observers=observers, resume=resume, notice=voice.status
            )
            if world.leads:
                _introduce(voice, run, alone=world.alone)
            view.begin(run.config, run.trainer.step)
            with view:
                outcome, folder = train(run)
        if world.leads:
            _conclude(voice, run, outcome, folder)
    if outcome.signal and not outcome.finished:
        raise typer.Exit(128 + outcome.signal)


class _LateTensorBoard:
    """TensorBoard's files, from the first report on: a run that never began leaves none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._board: TensorBoard | None = None

    def report(self, step: int, values: dict[str, Any]) -> None:
        from domino_spec.training.observers import TensorBoard

        self._board = self._board or TensorBoard(self._folder)
        self._board.report(step, values)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


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
def _explaining_memory() -> Iterator[None]:
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"the GPU's memory is full ({str(error).split('. ')[0]}). Halve rows and double "
            "accumulate, which learns the same; or take fewer anchors, or a smaller chunk_bytes."
        ) from error


def _introduce(voice: Voice, run: Run, *, alone: bool) -> None:
    from domino_spec.data.report import bad_lines
    from domino_spec.training.prepare import CONFIG_FILE

    config, report = run.config, run.corpus.report
    parameters = sum(p.numel() for p in run.drafter.parameters())
    bad = bad_lines(report.bad)
    voice.status(f"{config.variant} drafter: {parameters / 1e6:,.1f}M parameters, {_shape(run)}")
    for line in report.lines():
        if line not in bad:
            voice.status(line)
    for line in bad:
        voice.warn(line)
    length = f"{config.steps:,} steps" if config.steps else f"{config.max_seconds:g} s of steps"
    voice.status(
        f"{length} of {config.rows} rows × {config.length} tokens, {config.anchors} "
        f"blocks a row, {config.labels} labels, learning rate {config.learning_rate:.3g}"
    )
    if run.evaluate is None and config.eval_every != 0:
        why = "nothing could be held out" if alone else "several processes share the drafter"
        voice.status(f"tokens a cycle are not measured: {why}; use domino eval afterwards")
    voice.status(f"all settings: {Path(config.out) / CONFIG_FILE}")
    if voice.as_json:
        voice.document(
            {
                "config": config.to_dict(),
                "parameters": parameters,
                "data": report.to_dict(),
                "first_step": run.trainer.step,
            }
        )


def _shape(run: Run) -> str:
    config = run.config
    if config.variant == "medusa":
        return f"{config.draft_steps} heads of {config.layers} blocks"
    taps = f"taps {', '.join(map(str, run.drafter.config.target_layer_ids))}"
    if config.variant == "eagle3":
        return f"{taps}, unrolled for {config.draft_steps} steps"
    return f"{config.layers} layers, {taps}, blocks of {config.block_size}"


def _conclude(voice: Voice, run: Run, outcome: Outcome, folder: Path | None) -> None:
    from domino_spec.training.config import BASELINES
    from domino_spec.training.observers import CURVES_FILE, LOG_FILE, draw_curves

    out = Path(run.config.out)
    with contextlib.suppress(DominoError):
        draw_curves(out / LOG_FILE, out / CURVES_FILE)
    again = None if outcome.finished else f"domino train --out {shlex.quote(str(out))} --resume"
    rate = outcome.last.get("tokens_per_cycle")
    if folder is not None and rate is not None and rate < _LITTLE:
        voice.warn(
            f"only {rate:.2f} tokens a cycle held out: the drafter has learnt next to nothing. "
            "Train longer or on more data; docs/training.md says what else goes wrong."
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
        _say(voice, f"stopped at step {outcome.step}{of}; go on with: {again}")
    else:
        told = "" if rate is None else f"; tokens a cycle, held out: {tokens_a_cycle(outcome.last)}"
        _say(voice, f"the drafter is in {folder}{told}")
        target, draft = shlex.quote(run.config.target), shlex.quote(str(folder))
        if run.config.variant in BASELINES:
            more = f"domino bench {target} --draft {draft}"
        else:
            more = f"domino chat {target} --draft {draft}"
        voice.note(f"try it: {more}")


def _say(voice: Voice, line: str) -> None:
    voice.out.print(line, soft_wrap=True)
