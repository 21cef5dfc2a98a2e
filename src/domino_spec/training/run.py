"""Puts a run together from its configuration: target, data, drafter, optimiser, trainer."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from domino_spec.checkpoints import Provenance
from domino_spec.data import Corpus, PackedBatches, load_corpus
from domino_spec.drafter import DrafterConfig, DraftModule, ModuleConfig
from domino_spec.drafters.facts import target_facts
from domino_spec.drafters.registry import describe_fitting_drafter
from domino_spec.engine.model_runner import GraphRecorder
from domino_spec.errors import ConfigError, TrainingError
from domino_spec.evaluation import fingerprint
from domino_spec.settings import require_folder
from domino_spec.targets import LoadedTarget, Target, load_target
from domino_spec.training.acceleration import Acceleration, compiled_gradients
from domino_spec.training.blocks import Plan, plan_blocks
from domino_spec.training.config import BASELINES, CONFIG_FILE, TrainConfig, save_config
from domino_spec.training.evaluate import held_out_evaluation, split_held_out
from domino_spec.training.forecast import Forecast
from domino_spec.training.learning import Learning
from domino_spec.training.loss import chunk_gradients
from domino_spec.training.objective import Objective, make_objective
from domino_spec.training.observers import LOG_FILE, JsonlLog
from domino_spec.training.optimiser import Masters, Optimiser
from domino_spec.training.schedule import Budget, Schedule
from domino_spec.training.start import derive, start_drafter
from domino_spec.training.state import DRAFTER_FOLDER, Checkpoints, Keeper, check_same_run
from domino_spec.training.trainer import Intervals, Observer, Outcome, Trainer, Watch
from domino_spec.training.vocabulary import TokenDraw
from domino_spec.training.world import World, shard

_DEFAULT_EPOCHS = 3.0
_BYTES_A_LOGIT = 16  # logits, correction, teacher and two gradients in half precision, and slack
_PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Run:
    """A trainer with what surrounds it."""

    config: TrainConfig
    trainer: Trainer
    corpus: Corpus
    drafter: DraftModule
    acceleration: Acceleration | None
    evaluate: Callable[[], dict[str, Any]] | None
    finish: Callable[[], Path | None]


def prepare(
    config: TrainConfig,
    *,
    world: World,
    loaded: LoadedTarget | None = None,
    corpus: Corpus | None = None,
    observers: Sequence[Observer] = (),
    resume: bool = False,
    notice: Callable[[str], None] = lambda _line: None,
) -> Run:
    """Load, derive what was left open, and be ready to train."""
    out = Path(config.out)
    require_folder(out)
    checkpoints = Checkpoints(out, keep=config.keep)
    if not resume:
        require_unused(out)
    dtype = precision(config, world.device)
    if loaded is None and config.init is not None:
        describe_fitting_drafter(
            config.init,
            config.target,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
        )
    loaded = loaded or load_target(
        config.target,
        revision=config.revision,
        dtype=dtype,
        device=world.device,
        trust_remote_code=config.trust_remote_code,
    )
    target, tokenizer = loaded.target, loaded.tokenizer
    target.model.requires_grad_(False)
    target_weights = fingerprint(target)  # while they are whole
    config = derive(config, target, alone=world.alone, on_cpu=world.device.type == "cpu")
    corpus = corpus or _corpus(config, loaded)
    training, held_out = split_held_out(corpus, config.held_out)
    state = checkpoints.latest() if resume else None
    drafter, config, scales = start_drafter(
        config, target, tokenizer, training, scales=state.scales if state else None
    )
    batches = _batches(config, training, tokenizer, world)
    config = _with_steps(config, batches)
    keeper = Keeper(
        out=out,
        checkpoints=checkpoints,
        dtype=dtype,
        settings={
            **config.to_dict(),
            "drafter": drafter.config.to_dict(),
            "target_weights": target_weights,
        },
        provenance=_provenance(config, loaded),
        scales=scales,
    )
    if state is not None:  # before anything of the run is written over
        check_same_run(state.settings, keeper.settings)
        batches.load_state_dict(state.data)
    quick = config.compile == "on" or (config.compile == "auto" and world.device.type == "cuda")
    objective, masters, optimiser = _learner(
        config, drafter, target, scales=scales, world=world, dtype=dtype, quick=quick
    )
    acceleration = Acceleration(drafter, target) if quick else None
    own: list[Observer] = []
    if world.leads:
        out.mkdir(parents=True, exist_ok=True)
        save_config(config, out / CONFIG_FILE)
        own = [JsonlLog(out / LOG_FILE, fresh=not resume), *observers]
    evaluate = held_out_evaluation(
        config, drafter, target, tokenizer, held_out, acceleration=acceleration, world=world
    )
    budget = Budget(steps=config.steps, seconds=config.max_seconds, world=world)
    trainer = Trainer(
        objective=objective,
        masters=masters,
        learn=Learning(
            target,
            objective,
            masters,
            device=world.device,
            recorder=_recorder(config, target, world) if quick else None,
        ),
        optimiser=optimiser,
        batches=batches,
        plan=_planner(config, objective, training, target.vocab_size),
        schedule=_schedule(config, budget),
        budget=budget,
        forecast=_forecast(config, batches),
        world=world,
        accumulate=config.accumulate,
        clip=config.clip,
        seed=config.seed,
        intervals=Intervals(
            log=config.log_every,
            evaluate=config.eval_every,
            save=sys.maxsize if config.save_every == 0 else config.save_every,
        ),
        watch=Watch(config.diverge_factor),
        observers=own,
        evaluate=evaluate,
        save=keeper.save,
    )
    if state is not None:
        keeper.restore(state, trainer)
        known = f" of {config.steps}" if config.steps else f", {budget.seconds:.0f} s of training"
        notice(f"resumed at step {state.step}{known}")
    return Run(
        config=config,
        trainer=trainer,
        corpus=corpus,
        drafter=drafter,
        acceleration=acceleration,
        evaluate=evaluate,
        finish=partial(keeper.finish, trainer),
    )


def train(run: Run, *, at_least: float = 0.0) -> tuple[Outcome, Path | None]:
    """Run to the end; a finished run writes its drafter, if it has this acceptance length."""
    with run.acceleration.active() if run.acceleration else nullcontext():
        outcome = run.trainer.run()
    kept = outcome.finished and outcome.last.get("tokens_per_cycle", 0.0) >= at_least
    return outcome, run.finish() if kept else None


_Value = TypeVar("_Value", int, float)


def _known(value: _Value | None) -> _Value:
    """A setting that `derive` has filled in."""
    assert value is not None
    return value


def precision(config: TrainConfig, device: torch.device) -> torch.dtype:
    """The type that drafter and target are loaded in."""
    if config.dtype != "auto":
        return _PRECISIONS[config.dtype]
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def require_unused(out: Path) -> None:
    """Refuse the folder of another run."""
    checkpoints = Checkpoints(out, keep=1)
    if checkpoints.steps():
        raise TrainingError(
            f"{checkpoints.folder} already holds a run at step {checkpoints.steps()[-1]}; resume "
            "it, or train into another folder."
        )
    if (out / DRAFTER_FOLDER / "config.json").is_file():
        raise TrainingError(
            f"{out / DRAFTER_FOLDER} holds the drafter of a finished run; train into another "
            "folder, or move it away."
        )


def _corpus(config: TrainConfig, loaded: LoadedTarget) -> Corpus:
    return load_corpus(
        config.data,
        tokenizer=loaded.tokenizer,
        vocab_size=loaded.target.vocab_size,
        max_length=config.length,
        limit=config.limit,
        messages_field=config.messages_field,
        text_field=config.text_field,
        chat_options=_chat_options(config),
    )


def _batches(config: TrainConfig, training: Corpus, tokenizer: Any, world: World) -> PackedBatches:
    pad = getattr(tokenizer, "pad_token_id", None)
    return PackedBatches(
        training,
        rows=_known(config.batch_size),
        length=_known(config.length),
        seed=config.seed,
        pad_token=pad if isinstance(pad, int) else 0,
        concatenate=config.concatenate,
        rank=world.rank,
        world=world.size,
    )


def _learner(
    config: TrainConfig,
    drafter: DraftModule,
    target: Target,
    *,
    scales: dict[str, torch.Tensor],
    world: World,
    dtype: torch.dtype,
    quick: bool,
) -> tuple[Objective[Any], Masters, Optimiser]:
    """The drafter where it is trained, in this type, perhaps spread over processes."""
    drafter.to(world.device, dtype if world.alone else torch.float32).train()
    objective = make_objective(
        drafter,
        labels=config.labels,
        sharpness=config.sharpness,
        chunk=_chunk(config, drafter.config),
        gradients=compiled_gradients() if quick else chunk_gradients,
    )
    if not world.alone:
        if config.optimizer == "muon":
            raise ConfigError("muon needs whole matrices; train on several GPUs with adamw.")
        if target.packing_refusal:  # read document by document: processes would lose step
            raise TrainingError(f"{target.packing_refusal} Train on it in one process.")
        shard(objective, target, world, dtype=dtype)
        if config.pack is not None:
            raise ConfigError("pack rounds whole matrices; pack after training on several GPUs.")
    masters = Masters(drafter.named_parameters(), scales=scales, bits=config.pack)
    optimiser = Optimiser(
        masters.names,
        masters.parameters,
        name=config.optimizer or "adamw",
        betas=config.betas,
        weight_decay=config.weight_decay,
    )
    return objective, masters, optimiser


def _recorder(config: TrainConfig, target: Target, world: World) -> GraphRecorder | None:
    """Of CUDA graphs, where one process makes a step of one batch on one GPU."""
    one_gpu = world.alone and {p.device.type for p in target.model.parameters()} == {"cuda"}
    one_gpu = one_gpu and len({p.device for p in target.model.parameters()}) == 1
    whole = config.accumulate == 1 and not target.packing_refusal
    return GraphRecorder() if one_gpu and whole else None


def _chunk(config: TrainConfig, drafter: DrafterConfig | ModuleConfig) -> int:
    """Labels a chunk: their logits fit the allowance, and the last, part-filled one is small."""
    tokens = config.loss_vocab or drafter.output_vocab_size
    fitting = _known(config.chunk_bytes) // (_BYTES_A_LOGIT * tokens)
    most = _known(config.batch_size) * _known(config.anchors) * drafter.trained_depth
    return max(128, min(fitting, max(2048, most // 16), most) // 128 * 128)


def _planner(
    config: TrainConfig, objective: Objective[Any], training: Corpus, vocab_size: int
) -> Plan:
    draw = None
    if config.loss_vocab:
        counts = torch.from_numpy(training.token_counts(vocab_size))
        draw = TokenDraw(counts, config.loss_vocab)
    return partial(
        plan_blocks,
        anchors=_known(config.anchors),
        depth=objective.depth,
        gamma=config.gamma,
        chunk=objective.chunk,
        known=objective.known,
        history=objective.history,
        draw=draw,
    )


def _with_steps(config: TrainConfig, batches: PackedBatches) -> TrainConfig:
    if config.steps is not None or (config.max_seconds is not None and config.epochs is None):
        return config
    epochs = _DEFAULT_EPOCHS if config.epochs is None else config.epochs
    steps = max(1, math.ceil(epochs * batches.batches_per_epoch / config.accumulate))
    return config.replace(steps=steps, epochs=None)


def _forecast(config: TrainConfig, batches: PackedBatches) -> Forecast:
    blocks = config.variant not in BASELINES
    return Forecast(
        tokens_per_step=config.accumulate * batches.rows * batches.world * batches.length,
        steps_per_epoch=batches.batches_per_epoch / config.accumulate,
        recorded_shape=blocks and config.size == "base",
        from_scratch=blocks and config.init is None,
    )


def _schedule(config: TrainConfig, budget: Budget) -> Schedule:
    own = {field.name for field in dataclasses.fields(Schedule)}
    return Schedule(total_steps=budget.places, **config.model_dump(include=own))


def _provenance(config: TrainConfig, loaded: LoadedTarget) -> Provenance:
    facts = target_facts(
        loaded.target, loaded.tokenizer, loaded.revision, chat_options=_chat_options(config)
    )
    return Provenance(
        target_id=Path(config.target).name if Path(config.target).exists() else config.target,
        target_revision=facts.revision,
        tokenizer_sha256=facts.tokenizer_sha256,
        chat_template_sha256=facts.chat_template_sha256,
        thinking=facts.thinking,
        training_length=config.length,
    )


def _chat_options(config: TrainConfig) -> dict[str, Any]:
    return {} if config.thinking is None else {"enable_thinking": config.thinking}
