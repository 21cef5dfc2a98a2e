"""A drafter for a fine-tune: its base model's drafter, measured on it and trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domino_spec.api import DominoDecoder
from domino_spec.data.answer import AnswerProgress, LocalAnswerer, answer_prompts
from domino_spec.data.folder import target_identity
from domino_spec.data.prompts import read_prompts
from domino_spec.data.settings import AnswerSettings, SynthSettings
from domino_spec.data.synth import SynthProgress, synthesise
from domino_spec.drafter import (
    DominoHeadConfig,
    DrafterConfig,
    Eagle3Config,
    MedusaConfig,
    ModuleConfig,
)
from domino_spec.drafters.registry import DrafterDescription, describe_fitting_drafter, is_named
from domino_spec.errors import DataError, InputError, TrainingError
from domino_spec.evaluation import fingerprint
from domino_spec.targets import LoadedTarget
from domino_spec.training.config import AdaptSettings, TrainConfig
from domino_spec.training.run import Run
from domino_spec.training.start import derive

ENOUGH = 0.95
"""A drafter that keeps this share of its acceptance length is used as it is."""
TEMPERATURES = (0.0, 0.7, 1.0)
"""Of the answers that are learnt from."""
_WARMUP = 0.02
_RATE_SHARE = 1 / 3  # of a fresh drafter's: much is known already
_EPOCHS = 8.0  # of few answers more would teach it those answers
_PROMPTS, _PROMPTS_ON_A_CPU = 8192, 2000


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """What came of it; acceptance lengths on the same held-out prompts."""

    drafter: str
    """The one to use."""
    before: float
    after: float | None = None
    """None where nothing was trained."""
    own_target: float | None = None
    """The acceptance length on the drafter's own target, as its files tell."""
    steps: int = 0
    seconds: float = 0.0
    """Of training."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        return dataclasses.asdict(self)


def describe_fitting(settings: AdaptSettings) -> DrafterDescription:
    """The drafter, refused by its files alone where it does not fit the fine-tune."""
    if is_named(settings.drafter):
        raise InputError(f"{settings.drafter!r} has no weights to adapt; give a trained drafter.")
    return describe_fitting_drafter(
        settings.drafter,
        settings.target,
        revision=settings.revision,
        base=settings.base,
        trust_remote_code=settings.trust_remote_code,
    )


def train_config(
    settings: AdaptSettings, drafter: DrafterConfig | ModuleConfig, changes: Mapping[str, Any]
) -> TrainConfig:
    """A short run that starts from the drafter; `changes` are settings of training."""
    fixed = {
        **_shape(drafter),
        "init": settings.drafter,
        "data": settings.data or (str(Path(settings.out) / "answers"),),
        **settings.model_dump(
            include={"target", "out", "revision", "trust_remote_code", "thinking", "device"}
        ),
    }
    taken = sorted(fixed.keys() & changes.keys())
    if taken:
        raise InputError(
            f"{', '.join(taken)} cannot be set here: the drafter's own shape is kept, and the rest "
            "has options of its own."
        )
    at_the_end = {"eval_every": 10**9, "save_every": 0}  # evaluations would outlast the training
    length = {"max_seconds": settings.seconds, **at_the_end}
    if not changes.keys() & {"steps", "epochs"}:
        length["epochs"] = _EPOCHS
    return TrainConfig.from_dict({**fixed, **length, "warmup_ratio": _WARMUP, **changes})


def _shape(drafter: DrafterConfig | ModuleConfig) -> dict[str, Any]:
    """A drafter's configuration in the names of training's settings."""
    shape: dict[str, Any] = {"draft_vocab": drafter.draft_vocab_size}
    if isinstance(drafter, MedusaConfig):
        return shape | {
            "variant": drafter.kind, "layers": drafter.num_layers, "draft_steps": drafter.num_heads,
        }  # fmt: skip
    assert isinstance(drafter, (DrafterConfig, Eagle3Config))
    shape |= {
        "intermediate_size": drafter.intermediate_size,
        "heads": drafter.num_heads,
        "kv_heads": drafter.num_kv_heads,
        "head_dim": drafter.head_dim,
        "target_layer_ids": drafter.target_layer_ids,
    }
    if isinstance(drafter, Eagle3Config):
        return shape | {"variant": drafter.kind, "draft_steps": drafter.unrolled}
    head = drafter.head
    shape |= {
        "variant": "dflash" if head is None else head.kind,
        "layers": drafter.num_layers,
        "block_size": drafter.block_size,
        "shift_label": drafter.shift_label,
        "mask_token_id": drafter.mask_token_id,
    }
    if head is not None:
        shape |= {"rank": head.emb_dim, "prefix_len": head.pure_draft_prefix_len}
    if isinstance(head, DominoHeadConfig):
        shape["gru_hidden_dim"] = head.gru_hidden_dim
    return shape


def make_answers(
    settings: AdaptSettings,
    loaded: LoadedTarget,
    *,
    on_prompts: Callable[[SynthProgress], None] = lambda _: None,
    on_answers: Callable[[AnswerProgress], None] = lambda _: None,
) -> None:
    """Let the fine-tune answer prompts, its own if there are none; what is there is kept."""
    out = Path(settings.out)
    chat = {} if settings.thinking is None else {"enable_thinking": settings.thinking}
    decoder = DominoDecoder.from_pretrained(loaded, None, chat_options=chat)
    facts = decoder.facts()
    identity = target_identity(fingerprint(decoder.target), facts)
    sources = settings.prompts
    on_cpu = decoder.target.device.type == "cpu"
    limit = settings.limit or (_PROMPTS_ON_A_CPU if on_cpu else _PROMPTS)
    if sources is None:
        sources = (str(out / "prompts"),)
        synthesise(
            decoder,
            out / "prompts",
            SynthSettings.model_validate({}),
            count=limit,
            identity=identity,
            on_progress=on_prompts,
        )
    room = settings.max_new_tokens
    if facts.context_length is not None:
        room = min(room, max(1, facts.context_length // 2))
    done = answer_prompts(
        read_prompts(sources, limit=limit),
        LocalAnswerer(decoder),
        out / "answers",
        AnswerSettings.model_validate({"max_new_tokens": room, "temperatures": TEMPERATURES}),
        vocab_size=facts.vocab_size,
        identity={**identity, "answered_by": "the target"},
        on_progress=on_answers,
    )
    if not done.answered:
        raise DataError(f"no prompt was answered ({done.dropped_reasons()}); give other prompts.")


def with_rate(config: TrainConfig, loaded: LoadedTarget) -> TrainConfig:
    """A learning rate that keeps what the drafter knows, unless one was given."""
    rate = derive(config, loaded.target).learning_rate
    assert rate is not None
    return config if config.learning_rate else config.replace(learning_rate=rate * _RATE_SHARE)


def measure(run: Run) -> float:
    """The acceptance length of a run's drafter as it is, on the run's held-out prompts."""
    if run.evaluate is None:
        raise TrainingError(
            f"nothing can be measured: {len(run.corpus)} conversations, of which a tenth is held "
            f"out, and eval_every is {run.config.eval_every}. Expected ten or more conversations: "
            "give more data or prompts."
        )
    with run.acceleration.active() if run.acceleration else nullcontext():
        return float(run.evaluate()["tokens_per_cycle"])
