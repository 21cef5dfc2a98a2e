"""Everything a training run is told, from a YAML file or from flags; unknown names are errors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from domino_spec.errors import ConfigError

Size = Literal["small", "base", "large"]
Variant = Literal["domino", "dflash", "markov", "medusa", "eagle3"]
BASELINES: tuple[Variant, ...] = ("medusa", "eagle3")
Precision = Literal["auto", "float32", "bfloat16"]
Switch = Literal["auto", "on", "off"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One run. `None` means: derived from the target's own shape and the size."""

    target: str
    data: tuple[str, ...]
    out: str
    revision: str | None = None
    """The target's revision on the hub."""
    trust_remote_code: bool = False
    """Whether the target's own code may run."""
    thinking: bool | None = None
    """Whether the chat template is told to think; unset: its own default."""

    # The drafter.
    size: Size = "base"
    variant: Variant = "domino"
    layers: int | None = None
    """Of the backbone, or residual blocks in each of Medusa's heads."""
    intermediate_size: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    taps: int | None = None
    """How many target layers are tapped, evenly spread."""
    target_layer_ids: tuple[int, ...] | None = None
    """Exactly these layers instead."""
    block_size: int = 16
    shift_label: bool = True
    prefix_len: int | None = None
    """Leading drafts that the head leaves alone (1 with a Domino head, 0 with a Markov head)."""
    gru_hidden_dim: int | None = None
    rank: int | None = None
    draft_vocab: int | None = None
    """A reduced vocabulary: the tokens the data's answers use most."""
    mask_token_id: int | None = None
    draft_steps: int | None = None
    """Medusa's heads, or the steps that EAGLE-3 is unrolled; block drafters have blocks."""
    init: str | None = None
    """A drafter to start from instead of random weights (a warm start: no optimiser state)."""

    # Data and blocks.
    messages_field: str | None = None
    """The column of conversations that are not called as usual."""
    text_field: str | None = None
    """The same for texts."""
    length: int | None = None
    """Tokens in a packed row."""
    rows: int | None = None
    """Rows in a forward, on each GPU."""
    accumulate: int = 1
    """Forwards in a step."""
    anchors: int | None = None
    """Blocks in a row."""
    gamma: float = 7.0
    held_out: int = 64
    limit: int | None = None
    """Use only this many conversations."""
    seed: int = 0

    # Loss.
    labels: Literal["soft", "hard"] = "soft"
    sharpness: float = 1.0
    """The target's distribution raised to this power (soft labels)."""
    curriculum: bool = True
    curriculum_ratio: float = 1.0
    tv_weight: float = 0.0
    tv_start: float = 0.5

    # Optimisation.
    steps: int | None = None
    epochs: float | None = None
    max_seconds: float | None = None
    """Seconds of training instead, evaluations and checkpoints not counted."""
    learning_rate: float | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    warmup_ratio: float = 0.04
    min_lr_ratio: float = 0.0

    # Running.
    device: str | None = None
    dtype: Precision = "auto"
    compile: Switch = "auto"
    chunk_bytes: int = 2 * 1024**3
    """Memory that one chunk of logits and their gradients may take."""
    log_every: int = 20
    eval_every: int | None = None
    """Steps between acceptance lengths; a tenth of the run by default, 0 = never.

    A run over seconds does not know its steps: by default it evaluates and saves at its end.
    """
    eval_prompts: int = 32
    eval_tokens: int = 128
    save_every: int | None = None
    """Steps between checkpoints; a tenth of the run by default, 0 = only at the end."""
    keep: int = 2
    """Checkpoints kept."""
    diverge_factor: float = 3.0
    """Stop when the smoothed loss is this many times its best."""

    def __post_init__(self) -> None:
        data = (self.data,) if isinstance(self.data, str) else tuple(self.data)
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "betas", tuple(self.betas))
        if self.target_layer_ids is not None:
            object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; expected one of {', '.join(allowed)}."
                )
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} is {value}; expected more than 0.")
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                upper = "or more" if most == math.inf else f"to {most:g}"
                raise ConfigError(f"{name} is {value}; expected {least:g} {upper}.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas are {list(self.betas)}; expected two from 0 to below 1.")
        if not self.data:
            raise ConfigError("no training data: name files, folders or hf:DATASET.")
        budgets = [n for n in ("steps", "epochs", "max_seconds") if getattr(self, n) is not None]
        if len(budgets) > 1:
            raise ConfigError(
                f"both {' and '.join(budgets)} are given; they contradict each other."
            )
        if self.variant == "dflash" and (self.rank or self.gru_hidden_dim or self.prefix_len):
            raise ConfigError("a DFlash drafter has no head; leave rank, gru and prefix out.")
        foreign = [name for name in _foreign(self.variant) if getattr(self, name) is not None]
        if foreign:
            raise ConfigError(
                f"a {self.variant} drafter has no {', '.join(foreign)}; leave it out."
            )
        if self.labels == "hard" and self.sharpness != 1.0:
            raise ConfigError("sharpness is for soft labels; hard ones have nothing to sharpen.")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for YAML and JSON."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Build from plain values; unknown or missing names are errors."""
        names = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(names))
        if unknown:
            raise ConfigError(
                f"training knows no setting {', '.join(map(repr, unknown))}; known settings are "
                f"{', '.join(sorted(names))}."
            )
        missing = [name for name in ("target", "data", "out") if not values.get(name)]
        if missing:
            raise ConfigError(
                f"training needs {', '.join(missing)}; give it in the file or as a flag."
            )
        return cls(**{name: _typed(names[name], value) for name, value in values.items()})


_CHOICES = {
    "size": get_args(Size),
    "variant": get_args(Variant),
    "labels": ("soft", "hard"),
    "optimizer": ("adamw", "muon"),
    "dtype": get_args(Precision),
    "compile": get_args(Switch),
}
_POSITIVE = (
    "accumulate", "anchors", "block_size", "chunk_bytes", "clip", "draft_steps", "draft_vocab",
    "epochs", "gamma", "keep", "layers", "learning_rate", "length", "log_every", "max_seconds",
    "rows", "sharpness", "steps",
)  # fmt: skip
_HEAD_SETTINGS = ("rank", "gru_hidden_dim", "prefix_len", "mask_token_id")
_ATTENTION_SETTINGS = (
    "intermediate_size", "heads", "kv_heads", "head_dim", "taps", "target_layer_ids",
)  # fmt: skip


def _foreign(variant: Variant) -> tuple[str, ...]:
    """Settings that mean nothing for a kind of drafter."""
    if variant == "medusa":
        return (*_HEAD_SETTINGS, *_ATTENTION_SETTINGS)
    return (*_HEAD_SETTINGS, "layers") if variant == "eagle3" else ("draft_steps",)


_RANGES: Mapping[str, tuple[float, float]] = {
    "curriculum_ratio": (0.0, 1.0),
    "diverge_factor": (1.0, math.inf),
    "eval_every": (0, math.inf),
    "eval_prompts": (0, math.inf),
    "eval_tokens": (1, math.inf),
    "held_out": (0, math.inf),
    "min_lr_ratio": (0.0, 1.0),
    "save_every": (0, math.inf),
    "tv_start": (0.0, 1.0),
    "tv_weight": (0.0, 1.0),
    "warmup_ratio": (0.0, 1.0),
    "weight_decay": (0.0, math.inf),
}


def _typed(field: dataclasses.Field[Any], value: Any) -> Any:
    """YAML reads 1e-3 as text and users write 3 for 3.0: accept what is meant, refuse the rest."""
    wanted = str(field.type)
    if value is None:
        if "None" not in wanted:
            raise ConfigError(f"{field.name} is empty; expected {wanted}.")
        return None
    try:
        if wanted.startswith("float"):
            return _number(value)
        if wanted.startswith("int"):
            return _whole_number(value)
        if wanted.startswith("bool") and not isinstance(value, bool):
            raise ValueError
        if wanted.startswith("tuple[float"):
            return tuple(_number(v) for v in _several(value))
        if wanted.startswith("tuple[int"):
            return tuple(_whole_number(v) for v in _several(value))
        if wanted.startswith("tuple[str"):
            sources = (value,) if isinstance(value, str) else tuple(_several(value))
            if not all(isinstance(source, str) for source in sources):
                raise ValueError
            return sources
        if wanted.startswith("str") and not isinstance(value, str):
            raise ValueError
    except (TypeError, ValueError):
        raise ConfigError(f"{field.name} is {value!r}; expected {wanted}.") from None
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(float(value)):
        raise ValueError
    return float(value)


def _whole_number(value: Any) -> int:
    if _number(value) != int(float(value)):
        raise ValueError
    return int(float(value)) if isinstance(value, str) else int(value)


def _several(value: Any) -> Iterable[Any]:
    if not isinstance(value, (list, tuple)):
        raise TypeError
    return value


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
