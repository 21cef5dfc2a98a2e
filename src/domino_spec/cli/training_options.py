"""The flags of `domino train`: the settings that are changed most, by topic."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

_DRAFTER = "Drafter (unset: from the target's shape and --size)"
_DATA = "Data"
_LOSS = "Loss"
_OPTIMISER = "Optimisation"
_RUN = "Run"


class Size(StrEnum):
    """The one dial."""

    SMALL = "small"
    BASE = "base"
    LARGE = "large"


class Variant(StrEnum):
    """Kinds of drafters."""

    DOMINO = "domino"
    DFLASH = "dflash"
    MARKOV = "markov"
    MEDUSA = "medusa"
    EAGLE3 = "eagle3"


class Labels(StrEnum):
    """What a draft is compared with."""

    SOFT = "soft"
    HARD = "hard"


class OptimizerName(StrEnum):
    """Optimisers."""

    ADAMW = "adamw"
    MUON = "muon"


class Precision(StrEnum):
    """Types that training runs in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """What is trained; everything unset follows from the target and the size."""

    size: Annotated[
        Size | None,
        typer.Option(help="How large a drafter; unset: base.", rich_help_panel=_DRAFTER),
    ] = None
    variant: Annotated[
        Variant | None,
        typer.Option(
            "--variant",
            "--kind",
            help="Domino's causal head, no head, a bigram head, or another method's drafter to "
            "compare with; unset: domino.",
            rich_help_panel=_DRAFTER,
        ),
    ] = None
    layers: Annotated[
        int | None, typer.Option(help="Layers of the backbone.", rich_help_panel=_DRAFTER)
    ] = None
    taps: Annotated[
        int | None,
        typer.Option(help="Target layers that are read, evenly spread.", rich_help_panel=_DRAFTER),
    ] = None
    block_size: Annotated[
        int | None, typer.Option(help="Slots a block; unset: 16.", rich_help_panel=_DRAFTER)
    ] = None
    rank: Annotated[
        int | None, typer.Option(help="Rank of the head's correction.", rich_help_panel=_DRAFTER)
    ] = None
    gru_hidden_dim: Annotated[
        int | None, typer.Option(help="Width of Domino's GRU.", rich_help_panel=_DRAFTER)
    ] = None
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            help="Draft only this many tokens, those that answers use most; unset: all.",
            rich_help_panel=_DRAFTER,
        ),
    ] = None
    mask_token_id: Annotated[
        int | None,
        typer.Option(help="A token that text never holds.", rich_help_panel=_DRAFTER),
    ] = None
    draft_steps: Annotated[
        int | None,
        typer.Option(
            help="Medusa's heads (unset: 5), or the steps that EAGLE-3 is unrolled (unset: 7).",
            rich_help_panel=_DRAFTER,
        ),
    ] = None
    init: Annotated[
        str | None,
        typer.Option(
            help="A drafter to start from; unset: random weights.", rich_help_panel=_DRAFTER
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
    """How it is trained."""

    length: Annotated[
        int | None,
        typer.Option(
            help="Tokens in a packed row; unset: 1024, less if the target's context is shorter.",
            rich_help_panel=_DATA,
        ),
    ] = None
    rows: Annotated[
        int | None,
        typer.Option(
            help="Rows a forward, on each GPU; unset: 16384 / length.", rich_help_panel=_DATA
        ),
    ] = None
    anchors: Annotated[
        int | None, typer.Option(help="Blocks a row; unset: length / 8.", rich_help_panel=_DATA)
    ] = None
    held_out: Annotated[
        int | None,
        typer.Option(
            help="Conversations kept for evaluation, a tenth at most; unset: 64.",
            rich_help_panel=_DATA,
        ),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option(help="Use only this many conversations.", rich_help_panel=_DATA),
    ] = None
    labels: Annotated[
        Labels | None,
        typer.Option(
            help="The target's distribution, or the data's tokens; unset: soft.",
            rich_help_panel=_LOSS,
        ),
    ] = None
    curriculum: Annotated[
        bool | None,
        typer.Option(
            "--curriculum/--no-curriculum",
            help="Train the backbone first, the head more and more; unset: yes.",
            rich_help_panel=_LOSS,
        ),
    ] = None
    gamma: Annotated[
        float | None,
        typer.Option(
            help="Draft j weighs exp(-j / gamma), from 0; unset: 7.", rich_help_panel=_LOSS
        ),
    ] = None
    tv_weight: Annotated[
        float | None,
        typer.Option(
            help="The share that total variation reaches late in the run; unset: 0.",
            rich_help_panel=_LOSS,
        ),
    ] = None
    steps: Annotated[
        int | None, typer.Option(help="Optimiser steps.", rich_help_panel=_OPTIMISER)
    ] = None
    epochs: Annotated[
        float | None,
        typer.Option(help="Passes over the data instead; unset: 3.", rich_help_panel=_OPTIMISER),
    ] = None
    max_seconds: Annotated[
        float | None,
        typer.Option(
            help="Seconds of training instead, evaluations and checkpoints not counted.",
            rich_help_panel=_OPTIMISER,
        ),
    ] = None
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning-rate",
            "--lr",
            help="Unset: 0.001, less for wide targets.",
            rich_help_panel=_OPTIMISER,
        ),
    ] = None
    accumulate: Annotated[
        int | None, typer.Option(help="Forwards a step; unset: 1.", rich_help_panel=_OPTIMISER)
    ] = None
    optimizer: Annotated[
        OptimizerName | None, typer.Option(help="Unset: adamw.", rich_help_panel=_OPTIMISER)
    ] = None
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda, cuda:1, ...; unset: a GPU if any.", rich_help_panel=_RUN),
    ] = None
    dtype: Annotated[
        Precision | None,
        typer.Option(
            help="Unset: bfloat16 on a GPU (with float32 masters), else float32.",
            rich_help_panel=_RUN,
        ),
    ] = None
    log_every: Annotated[
        int | None, typer.Option(help="Steps between reports; unset: 20.", rich_help_panel=_RUN)
    ] = None
    eval_every: Annotated[
        int | None,
        typer.Option(
            help="Steps between evaluations, 0 = never; unset: a tenth of the run.",
            rich_help_panel=_RUN,
        ),
    ] = None
    save_every: Annotated[
        int | None,
        typer.Option(
            help="Steps between checkpoints, 0 = only at the end; unset: a tenth of the run.",
            rich_help_panel=_RUN,
        ),
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Decides every draw; unset: 0.", rich_help_panel=_RUN)
    ] = None
