"""`domino train`: a drafter for a target, from conversations, in one process."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from domino_spec.cli.training_view import LineView, LiveView
from domino_spec.cli.voice import Voice, speaking

if TYPE_CHECKING:
    from domino_spec.training import Run

_DRAFTER = "Drafter"
_DATA = "Data"
_LOSS = "Loss"
_OPTIMISER = "Optimisation"
_RUN = "Run"


@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """What is trained; everything unset follows from the target and the size."""

    size: Annotated[
        str | None, typer.Option(help="small, base or large.", rich_help_panel=_DRAFTER)
    ] = None
    variant: Annotated[
        str | None,
        typer.Option(help="domino, dflash (no head) or markov.", rich_help_panel=_DRAFTER),
    ] = None
    layers: Annotated[int | None, typer.Option(rich_help_panel=_DRAFTER)] = None
    taps: Annotated[
        int | None, typer.Option(help="Target layers that are read.", rich_help_panel=_DRAFTER)
    ] = None
    block_size: Annotated[
        int | None, typer.Option(help="Slots a block.", rich_help_panel=_DRAFTER)
    ] = None
    rank: Annotated[
        int | None, typer.Option(help="Of the head's correction.", rich_help_panel=_DRAFTER)
    ] = None
    gru_hidden_dim: Annotated[int | None, typer.Option(rich_help_panel=_DRAFTER)] = None
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            help="Draft only the tokens that answers use most, this many.",
            rich_help_panel=_DRAFTER,
        ),
    ] = None
    mask_token_id: Annotated[
        int | None, typer.Option(help="A token that text never holds.", rich_help_panel=_DRAFTER)
    ] = None
    init: Annotated[
        str | None,
        typer.Option(help="A drafter to start from (a warm start).", rich_help_panel=_DRAFTER),
    ] = None


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
    """How it is trained."""

    length: Annotated[
        int | None, typer.Option(help="Tokens in a packed row.", rich_help_panel=_DATA)
    ] = None
    rows: Annotated[int | None, typer.Option(help="Rows a forward.", rich_help_panel=_DATA)] = None
    anchors: Annotated[int | None, typer.Option(help="Blocks a row.", rich_help_panel=_DATA)] = None
    held_out: Annotated[
        int | None, typer.Option(help="Conversations kept for evaluation.", rich_help_panel=_DATA)
    ] = None
    limit: Annotated[
        int | None, typer.Option(help="Conversations used.", rich_help_panel=_DATA)
    ] = None
    labels: Annotated[str | None, typer.Option(help="soft or hard.", rich_help_panel=_LOSS)] = None
    curriculum: Annotated[
        bool | None, typer.Option("--curriculum/--no-curriculum", rich_help_panel=_LOSS)
    ] = None
    gamma: Annotated[
        float | None, typer.Option(help="Decay of later drafts' weights.", rich_help_panel=_LOSS)
    ] = None
    tv_weight: Annotated[
        float | None, typer.Option(help="Late share of total variation.", rich_help_panel=_LOSS)
    ] = None
    steps: Annotated[int | None, typer.Option(rich_help_panel=_OPTIMISER)] = None
    epochs: Annotated[float | None, typer.Option(rich_help_panel=_OPTIMISER)] = None
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", "--lr", rich_help_panel=_OPTIMISER)
    ] = None
    accumulate: Annotated[
        int | None, typer.Option(help="Forwards a step.", rich_help_panel=_OPTIMISER)
    ] = None
    optimizer: Annotated[
        str | None, typer.Option(help="adamw or muon.", rich_help_panel=_OPTIMISER)
    ] = None
    device: Annotated[str | None, typer.Option(rich_help_panel=_RUN)] = None
    dtype: Annotated[
        str | None, typer.Option(help="auto, float32 or bfloat16.", rich_help_panel=_RUN)
    ] = None
    log_every: Annotated[int | None, typer.Option(rich_help_panel=_RUN)] = None
    eval_every: Annotated[
        int | None, typer.Option(help="Steps; 0 = never.", rich_help_panel=_RUN)
    ] = None
    save_every: Annotated[
        int | None, typer.Option(help="Steps; 0 = only at the end.", rich_help_panel=_RUN)
    ] = None
    seed: Annotated[int | None, typer.Option(rich_help_panel=_RUN)] = None


def train(
    target: Annotated[
        str | None, typer.Argument(help="A folder, a GGUF file or a hub id; or set it in the file.")
    ] = None,
    *,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Conversations, shards, folders or hf:DATASET; repeatable."),
    ] = None,
    out: Annotated[str | None, typer.Option(help="The run's folder.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file of settings; flags win over it.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE of any setting; repeatable."),
    ] = None,
    shape: ShapeOptions,
    learning: LearningOptions,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where the run in --out was left.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard/--no-tensorboard", help="Write TensorBoard's files.")
    ] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Reports as JSON lines.")] = False,
) -> None:
    """Train a drafter on a frozen target; stops cleanly, resumes exactly."""
    with speaking(as_json=as_json, quiet=quiet) as voice:
        settings = _settings(target, data, out, config, set_ or [], shape, learning)
        if resume and not settings.get("target"):
            settings = {**_saved_settings(settings), **settings}
        _run(voice, settings, resume=resume, tensorboard=tensorboard)


def _settings(
    target: str | None,
    data: list[str] | None,
    out: str | None,
    config: Path | None,
    assignments: list[str],
    *groups: ShapeOptions | LearningOptions,
) -> dict[str, Any]:
    """The file's settings, then the flags', then --set's."""
    from domino_spec.errors import InputError
    from domino_spec.training.config import parse_assignments, read_settings

    given: dict[str, Any] = {"target": target, "data": data or None, "out": out}
    for group in groups:
        given |= dataclasses.asdict(group)
    flags = {name: value for name, value in given.items() if value is not None}
    values = {**(read_settings(config) if config else {}), **flags}
    values |= parse_assignments(assignments)
    if "out" not in values:
        raise InputError("no folder for the run; give --out.")
    return values


def _saved_settings(settings: dict[str, Any]) -> dict[str, Any]:
    from domino_spec.training.config import read_settings
    from domino_spec.training.prepare import CONFIG_FILE

    return read_settings(Path(settings["out"]) / CONFIG_FILE)


def _run(voice: Voice, settings: dict[str, Any], *, resume: bool, tensorboard: bool) -> None:
    import torch

    from domino_spec.targets import default_device
    from domino_spec.training import Observer, TrainConfig, open_world, prepare, train
    from domino_spec.training.observers import TensorBoard

    config = TrainConfig.from_dict(settings)
    device = torch.device(config.device) if config.device else default_device()
    with open_world(device) as world:
        speaks = world.leads
        if speaks:
            voice.status(f"loading {config.target} and the data")
        view: LineView | LiveView = (
            LiveView(voice) if voice.shows_bars and speaks else LineView(voice, silent=not speaks)
        )
        observers: list[Observer] = [view]
        if tensorboard and speaks:
            observers.append(TensorBoard(Path(config.out) / "tensorboard"))
        run = prepare(
            config,
            world=world,
            observers=observers,
            resume=resume,
            notice=voice.status if speaks else (lambda _line: None),
        )
        if speaks:
            _introduce(voice, run)
        view.begin(run.config, run.trainer.step)
        with view:
            outcome, folder = train(run)
        if speaks:
            _conclude(voice, run, outcome, folder)
    if outcome.signal:
        raise typer.Exit(128 + outcome.signal)


def _introduce(voice: Voice, run: Run) -> None:
    config, drafter = run.config, run.drafter
    size = sum(p.numel() for p in drafter.parameters())
    voice.status(
        f"{config.variant} drafter of {size / 1e6:.1f}M parameters, {config.layers} layers, taps "
        f"{list(drafter.config.target_layer_ids)}, blocks of {config.block_size}"
    )
    for line in run.corpus.report.lines():
        voice.status(line)
    voice.status(
        f"{config.steps} steps of {config.rows} rows x {config.length} tokens, {config.anchors} "
        f"blocks a row, {config.labels} labels, learning rate {config.learning_rate:g}"
    )


def _conclude(voice: Voice, run: Run, outcome: Any, folder: Path | None) -> None:
    from domino_spec.errors import DominoError
    from domino_spec.training.observers import CURVES_FILE, LOG_FILE, draw_curves

    out = Path(run.config.out)
    with contextlib.suppress(DominoError):
        draw_curves(out / LOG_FILE, out / CURVES_FILE)
    if folder is None:
        resume = f"domino train --out {out} --resume"
        voice.status(f"stopped at step {outcome.step}; go on with: {resume}")
        return
    summary = {"drafter": str(folder), "step": outcome.step, **_last(outcome)}
    if voice.as_json:
        voice.document(summary)
    else:
        rate = summary.get("tokens_per_cycle")
        told = f", {rate:.2f} tokens a cycle held out" if rate else ""
        voice.out.print(f"{folder}{told}", soft_wrap=True)


def _last(outcome: Any) -> dict[str, Any]:
    names = ("loss", "tokens_per_cycle", "tokens_per_cycle_head_off", "conversations_per_second")
    return {name: outcome.last[name] for name in names if name in outcome.last}
