"""The settings of a training run, each written once.

Names, types, bounds, defaults and descriptions are here; the flags of `domino train`, the keys of
a YAML file and the table in docs/training.md follow from them. The command line imports this
module for its help: it must import neither torch nor transformers.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticKnownError

from domino_spec.errors import ConfigError, InputError
from domino_spec.settings import Settings, default_text, setting

Size = Literal["small", "base", "large"]
Variant = Literal["domino", "dflash", "markov", "medusa", "eagle3"]
BASELINES: tuple[Variant, ...] = ("medusa", "eagle3")
CONFIG_FILE = "config.yaml"
"""In the folder of a run."""
RENAMED = {"rows": "batch_size", "taps": "captured_layers"}
"""Settings by the names that older runs wrote."""


def _number(value: Any) -> Any:
    """YAML reads 1e3 as text, and Python takes true for 1."""
    if isinstance(value, bool):
        raise PydanticKnownError("float_type")
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        raise PydanticKnownError("float_parsing") from None


def _list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Text = Annotated[str, Field(min_length=1)]
Whole = Annotated[int, BeforeValidator(_number)]
Count = Annotated[Whole, Ge(1)]
CountOrZero = Annotated[Whole, Ge(0)]
Number = Annotated[float, BeforeValidator(_number)]
Positive = Annotated[Number, Gt(0)]
Share = Annotated[Number, Ge(0), Le(1)]
Beta = Annotated[Number, Ge(0), Lt(1)]


_target = partial(setting, group="Target")
_drafter = partial(setting, group="Drafter (unset: from the target's shape and --size)")
_data = partial(setting, group="Data")
_loss = partial(setting, group="Loss")
_optimisation = partial(setting, group="Optimisation")
_run = partial(setting, group="Run")


class TrainConfig(BaseModel):
    """One run. `None` means: derived from the target's shape, the size and the data."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    target: Text = setting(..., "the target model: a folder, a GGUF file or a hub id", argument="")
    data: Annotated[tuple[Text, ...], BeforeValidator(_list), Field(min_length=1)] = setting(
        ..., "conversations: files, folders, globs, `hf:name[:split]`"
    )
    out: Text = setting(..., "the run's folder", flags=("-o",))

    revision: str | None = _target(None, "the target's revision on the hub", unset="the newest")
    trust_remote_code: StrictBool = _target(False, "whether the target's own code may run")
    thinking: StrictBool | None = _target(
        None,
        "whether the chat template is told to think; recorded with the drafter",
        unset="the template's own",
    )

    size: Size | None = _drafter(
        None, "how large a drafter: the one dial", unset="`base`; on a CPU `small`"
    )
    variant: Variant = _drafter(
        "domino",
        "the kind of drafter: Domino's causal head, no head, a bigram head, or another method's "
        "drafter to compare with",
        flags=("--kind",),
    )
    layers: Count | None = _drafter(
        None,
        "layers of the backbone, or residual blocks in each of Medusa's heads",
        unset="by size",
    )
    intermediate_size: Count | None = _drafter(None, "width of its MLPs", unset="the target's")
    heads: Count | None = _drafter(None, "attention heads", unset="the target's")
    kv_heads: Count | None = _drafter(None, "key and value heads", unset="the target's")
    head_dim: Count | None = _drafter(None, "size of a head", unset="the target's")
    captured_layers: Count | None = _drafter(
        None,
        "how many target layers' hidden states are captured, evenly spread",
        unset="by size",
        flags=("--taps",),
    )
    target_layer_ids: tuple[CountOrZero, ...] | None = _drafter(
        None, "exactly these layers instead", unset="from `captured_layers`"
    )
    block_size: Count = _drafter(16, "slots of a block")
    sliding_window: CountOrZero | None = _drafter(
        None,
        "tokens of the context that a draft layer reads, the newest; 0: all, however long a text "
        "gets",
        unset="half of `length`; that of `init`",
    )
    shift_label: StrictBool = _drafter(
        True,
        "slot 0, the anchor's, predicts the first draft; without it slot 1 does, and a block "
        "holds one draft less",
    )
    prefix_len: CountOrZero | None = _drafter(
        None, "leading drafts that the head leaves alone", unset="1, Markov 0"
    )
    gru_hidden_dim: Count | None = _drafter(None, "width of Domino's GRU", unset="by size")
    rank: Count | None = _drafter(None, "rank of the head's correction", unset="by size")
    draft_vocab: Count | None = _drafter(
        None,
        "draft only this many tokens, those that answers use most: faster, and never right about "
        "the others",
        unset="all tokens",
    )
    mask_token_id: CountOrZero | None = _drafter(
        None, "the token in empty slots; text must never hold it", unset="found"
    )
    draft_steps: Count | None = _drafter(
        None,
        "Medusa's heads, or the steps that EAGLE-3 is unrolled; block drafters have `block_size`",
        unset="5 heads, 7 steps",
    )
    pack: Literal[8, 6, 4] | None = _drafter(
        None,
        "bits a weight that the drafter will be packed in (`domino export --pack`): the last 30% "
        "of the run learns with weights so rounded",
        unset="not packed",
    )
    init: Text | None = _drafter(
        None,
        "a drafter to start from: the same shape but for `block_size`, no optimiser state",
        unset="random weights",
    )

    messages_field: Text | None = _data(
        None, "the column that holds conversations", unset="the usual names"
    )
    text_field: Text | None = _data(None, "the column that holds texts", unset="the usual names")
    length: Count | None = _data(
        None,
        "tokens of a packed sequence; longer conversations are cut",
        unset="1024, on a CPU 512, or the context",
    )
    concatenate: Share = _data(
        0.5,
        "share of packed sequences whose conversations are read as one text, so that drafts "
        "behind long contexts are learnt; in the others nothing sees another conversation",
    )
    batch_size: Count | None = _data(
        None,
        "packed sequences of a forward, on each GPU",
        unset="16384 / `length`, on a CPU 1024 / `length`",
        flags=("--rows",),
    )
    accumulate: Count = _data(1, "forwards of a step")
    anchors: Count | None = _data(
        None,
        "blocks of a sequence, drawn anew each step; of `medusa` and `eagle3` so many more that a "
        "step has as many labels",
        unset="`length` / 8",
    )
    held_out: CountOrZero = _data(64, "conversations kept for evaluation, at most a tenth")
    limit: Count | None = _data(None, "use only this many conversations", unset="all")

    labels: Literal["soft", "hard"] = _loss(
        "soft", "what a draft is compared with: the target's distribution, or the data's tokens"
    )
    loss_vocab: CountOrZero | None = _loss(
        None,
        "tokens of a step's softmax: its labels, those that answers use most, and others drawn "
        "anew each step; 0: all",
        unset="a quarter of the vocabulary, at least 8192; with `draft_vocab` all",
    )
    gamma: Positive = _loss(5.0, "draft j, counted from 0, weighs exp(−j/γ)")
    sharpness: Positive = _loss(
        1.0,
        "the target's distribution to this power, for soft labels; more looks only at its "
        "favourites",
    )
    base_weight: Share = _loss(
        0.3,
        "share of the base logits' own loss (λ), where the head corrects them; 0 lets them "
        "forget how to rank candidates",
    )
    curriculum_ratio: Share = _loss(
        0.0, "the part of the run over which λ falls from 1 to `base_weight`; 0: it stays there"
    )
    tv_weight: Share = _loss(0.0, "the share that total variation reaches late in the run")
    tv_start: Share = _loss(0.5, "the part of the run before total variation comes in")

    steps: Count | None = _optimisation(None, "optimiser steps", unset="3 epochs")
    epochs: Positive | None = _optimisation(None, "passes over the data instead", unset="3")
    max_seconds: Positive | None = _optimisation(
        None,
        "seconds of training: instead of `steps` or `epochs`, or at most, beside them; learning "
        "rate and λ go by the share that has passed; the compiler, evaluations and checkpoints are "
        "not counted",
        unset="no limit",
    )
    learning_rate: Positive | None = _optimisation(
        None,
        "the learning rate's peak",
        unset="0.003; with AdamW 0.001, less for targets wider than 576",
        flags=("--lr",),
    )
    optimizer: Literal["adamw", "muon"] | None = _optimisation(
        None,
        "Muon is for the inner matrices, with AdamW for the rest; one process only",
        unset="`muon`; in several processes `adamw`",
    )
    betas: tuple[Beta, Beta] = _optimisation((0.9, 0.95), "AdamW's two betas")
    weight_decay: Annotated[Number, Ge(0)] = _optimisation(0.0, "AdamW's and Muon's")
    clip: Positive = _optimisation(1.0, "largest norm of the gradient")
    warmup_ratio: Share = _optimisation(
        0.04, "part of the run in which the learning rate rises; a cosine follows"
    )
    min_lr_ratio: Share = _optimisation(0.0, "where the cosine ends, as a share of the peak")

    device: Text | None = _run(
        None, "where to train: `cpu`, `cuda`, `cuda:1` …", unset="a GPU if any"
    )
    seed: Whole = _run(0, "decides every draw")
    dtype: Literal["auto", "float32", "bfloat16"] = _run(
        "auto",
        "the drafter's type; auto: bfloat16 on a GPU, with float32 masters, float32 elsewhere",
    )
    compile: Literal["auto", "on", "off"] = _run(
        "auto", "compiled layers and loss; auto: on a GPU. The first steps then take longer"
    )
    chunk_bytes: Count | None = _run(
        None,
        "memory that one chunk of logits and their gradients may take",
        unset="2 GiB, on a CPU 256 MiB",
    )
    log_every: Count = _run(20, "steps between reports")
    eval_every: CountOrZero | None = _run(
        None, "steps between evaluations; 0: never", unset="a tenth of the run"
    )
    eval_prompts: CountOrZero = _run(32, "held-out conversations whose prompts are continued")
    eval_tokens: Count = _run(128, "longest answer of an evaluation")
    save_every: CountOrZero | None = _run(
        None, "steps between checkpoints; 0: at the end only", unset="a tenth of the run"
    )
    keep: Count = _run(2, "checkpoints that stay")
    diverge_factor: Annotated[Number, Ge(1)] = _run(
        3.0, "stop when the smoothed loss is this many times its best"
    )

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        """Refuse contradictions; `name` becomes the flag or the key that was given."""
        if self.steps and self.epochs:
            raise ValueError("`steps` and `epochs` contradict each other; give one of them.")
        foreign = [f"`{n}`" for n in _FOREIGN[self.variant] if getattr(self, n) is not None]
        if foreign:
            raise ValueError(
                f"{self.variant} drafters have no {', '.join(foreign)}; leave it out, or choose "
                "another `variant`."
            )
        if self.labels == "hard" and self.sharpness != 1.0:
            raise ValueError(
                f"`sharpness` is {self.sharpness:g}, but hard labels have nothing to sharpen; "
                "leave it out, or choose soft `labels`."
            )
        if self.draft_vocab and self.loss_vocab:
            raise ValueError(
                "`draft_vocab` and `loss_vocab` were both given; the softmax over a reduced "
                "vocabulary is small already. Leave `loss_vocab` out."
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain values for YAML and JSON."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], *, given_as: Mapping[str, str] | None = None
    ) -> TrainConfig:
        """Build from plain values; errors call a setting as `given_as` says, else by its name."""
        try:
            return cls.model_validate(renamed(values))
        except ValidationError as error:
            raise ConfigError(_explained(error, given_as or {})) from None

    def replace(self, **changes: Any) -> TrainConfig:
        """The same run with other settings."""
        return self.from_dict({**dict(self), **changes})


class AdaptSettings(Settings):
    """A drafter for a fine-tune, from a drafter for its base model."""

    drafter: Text = setting(
        ..., "the drafter: a folder, a safetensors file, a hub id or released:NAME", argument=""
    )
    target: Text = setting(
        ..., "the fine-tune: a folder, a PEFT adapter's folder, a GGUF file or a hub id"
    )
    out: Text = setting(..., "the run's folder", flags=("-o",))
    base: Text | None = setting(
        None, "the base model of an adapter", unset="what its adapter_config.json names"
    )
    data: tuple[Text, ...] | None = setting(
        None,
        "conversations that the fine-tune wrote: files, folders, globs, `hf:name[:split]`",
        unset="it answers `prompts`",
        group="Data",
    )
    prompts: tuple[Text, ...] | None = setting(
        None,
        "prompts for the fine-tune to answer: JSONL or text files, folders, globs",
        unset="it makes them up",
        group="Data",
    )
    limit: Count | None = setting(
        None, "prompts to answer or to make up", unset="8,192, on a CPU 2,000", group="Data"
    )
    max_new_tokens: Count = setting(512, "longer answers are cut", group="Data", flags=("-n",))
    seconds: Positive = setting(
        60.0, "seconds of training, at most: 8 passes over the answers end it too", group="Training"
    )
    force: bool = setting(False, "train even where little is to be gained", group="Training")
    revision: Text | None = _target(None, "the target's revision on the hub", unset="the newest")
    trust_remote_code: bool = _target(False, "whether the target's own code may run")
    thinking: bool | None = _target(
        None, "whether the chat template is told to think", unset="the template's own"
    )
    device: Text | None = _target(
        None, "where to run: `cpu`, `cuda`, `cuda:1` …", unset="a GPU if any"
    )

    @model_validator(mode="after")
    def _consistent(self) -> AdaptSettings:
        if self.data and self.prompts:
            raise InputError(
                "data and prompts were both given; conversations are trained on as they are. "
                "Give one of them."
            )
        return self


_NO_BLOCKS = ("rank", "gru_hidden_dim", "prefix_len", "mask_token_id", "sliding_window")
_FOREIGN: Mapping[Variant, tuple[str, ...]] = {
    "domino": ("draft_steps",),
    "markov": ("draft_steps",),
    "dflash": ("draft_steps", "rank", "gru_hidden_dim", "prefix_len"),
    "eagle3": (*_NO_BLOCKS, "layers"),
    "medusa": (
        *_NO_BLOCKS, "intermediate_size", "heads", "kv_heads", "head_dim", "captured_layers",
        "target_layer_ids",
    ),
}  # fmt: skip
"""Settings that mean nothing for a kind of drafter."""


def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under today's names: λ once ended at 0, after a curriculum or without one."""
    found = {RENAMED.get(str(name), str(name)): value for name, value in values.items()}
    if "curriculum" in found:
        ratio = found.pop("curriculum") and found.get("curriculum_ratio", 1.0)
        found |= {"curriculum_ratio": float(ratio), "base_weight": 0.0}
    return found


def settings_table() -> str:
    """The table of docs/training.md."""
    lines = ["| setting | default | what |", "|---|---|---|"]
    for name, field in TrainConfig.model_fields.items():
        choices = _choices(field.annotation)
        named = f"; {', '.join(f'`{choice}`' for choice in choices)}" if choices else ""
        lines.append(f"| `{name}` | {default_text(field)} | {field.description}{named} |")
    return "\n".join(lines)


def _choices(annotation: Any) -> tuple[str, ...]:
    """The values of a Literal, or of one that may be unset."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next((_choices(part) for part in get_args(annotation) if _choices(part)), ())


def _explained(error: ValidationError, given_as: Mapping[str, str]) -> str:
    """What was found, what was expected and what to do, for each setting that is wrong."""
    sentences: dict[str, str] = {}
    missing: list[str] = []
    for detail in error.errors():
        name = str(detail["loc"][0]) if detail["loc"] else ""
        if detail["type"] == "missing" and len(detail["loc"]) == 1:
            missing.append(given_as.get(name, name))
        else:
            sentences.setdefault(name, _sentence(detail, name, given_as))
    if missing:
        listed = " and ".join([", ".join(missing[:-1]), missing[-1]] if missing[1:] else missing)
        needed = f"training needs {listed}; give {'it' if len(missing) == 1 else 'them'}"
        sentences["missing"] = f"{needed} as an argument or in a file of settings."
    return " ".join(sentences.values())


def _sentence(detail: ErrorDetails, name: str, given_as: Mapping[str, str]) -> str:
    called = given_as.get(name, name)
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, TrainConfig.model_fields, n=1)
        advice = f"did you mean {near[0]}?" if near else "docs/training.md lists the settings."
        return f"there is no setting {called}; {advice}"
    if not detail["loc"]:  # a contradiction, which names its settings
        text = str(detail["ctx"]["error"])
        return re.sub(r"`(\w+)`", lambda match: given_as.get(match[1], match[1]), text)
    if detail["type"] == "missing":
        expected = "it should hold two values"
    else:
        called += "".join(f"[{index}]" for index in detail["loc"][1:])
        expected = re.sub(r"^\w+ should", "it should", detail["msg"])
        expected = expected.replace("valid tuple", "list").replace(" after validation", "")
    default = str(default_text(TrainConfig.model_fields[name])).replace("`", "")
    advice = "" if default == "needed" else f" Leave it out for the default ({default})."
    return f"{called} is {detail['input']!r}; {expected}.{advice}"


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings of a YAML file, as they stand there."""
    import yaml

    path = Path(path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}; expected settings by name.")
    return values


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Settings given as name=value, the value read as YAML reads it."""
    import yaml

    values = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"{assignment!r} is no setting; expected name=value.")
        try:
            values[name.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{assignment!r} cannot be read: {error}") from error
    return values


def save_config(config: TrainConfig, path: Path) -> None:
    """Write every setting, the derived ones included."""
    import yaml

    path.write_text(yaml.safe_dump(config.to_dict(), sort_keys=False), encoding="utf-8")
