"""The headers of a checkpoint's files against what its config promises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from domino_spec.checkpoints.layouts import SPECULATORS
from domino_spec.checkpoints.locate import INDEX_FILE, CheckpointFiles
from domino_spec.checkpoints.names import OFFSETS, TARGET_COPIES, is_head, public_names, to_public
from domino_spec.drafter import Drafter, DrafterConfig
from domino_spec.errors import CheckpointError

FLOAT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_INTEGER_BYTES = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}
_FC = "fc.weight"
_HEAD_OUTPUT = "embed_proj.2.weight"
_LISTED = 5


@dataclass(frozen=True, kw_only=True)
class TensorHeader:
    """One stored tensor, without its data."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def parameters(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)

    @property
    def byte_count(self) -> int:
        """Bytes of data in the file."""
        if self.dtype in FLOAT_DTYPES:
            return self.parameters * FLOAT_DTYPES[self.dtype].itemsize
        return self.parameters * _INTEGER_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """Which stored tensor is which of the drafter's; complete and of the right shapes."""

    weights: Mapping[str, TensorHeader]
    """By public name."""
    offsets: TensorHeader | None
    ignored: tuple[str, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The one type of a loaded drafter: that of `fc.weight`."""
        return FLOAT_DTYPES[self.weights[_FC].dtype]


@contextmanager
def open_tensors(path: Path, *, device: str = "cpu") -> Iterator[Any]:
    """A safetensors file; whatever is wrong with it is named after it."""
    try:
        with safe_open(path, framework="pt", device=device) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors ({error}); it is damaged or incomplete. "
            "Download it again."
        ) from error


def read_headers(files: CheckpointFiles) -> dict[str, TensorHeader]:
    """Names, shapes and types of all tensors; no data is read."""
    headers: dict[str, TensorHeader] = {}
    for path in files.weights:
        with open_tensors(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if name in headers:
                    raise CheckpointError(
                        f"tensor {name!r} is in {headers[name].file.name} and in {path.name}; "
                        "expected it once. Remove the file that does not belong here."
                    )
                part = file.get_slice(name)
                headers[name] = TensorHeader(
                    name=name, file=path, shape=tuple(part.get_shape()), dtype=part.get_dtype()
                )
    for name, expected in files.index.items():
        if name not in headers or headers[name].file.name != expected:
            raise CheckpointError(
                f"{INDEX_FILE} places tensor {name!r} in {expected}, which does not hold it; index "
                "and files belong to different checkpoints. Download them again."
            )
    return headers


def empty_drafter(config: DrafterConfig) -> Drafter:
    """The drafter's modules without memory behind them."""
    with torch.device("meta"):
        return Drafter(config)


def plan_tensors(
    headers: Mapping[str, TensorHeader], config: DrafterConfig, *, layout: str
) -> TensorPlan:
    """Match stored tensors with the drafter's; missing, extra and mis-shaped ones are named."""
    found: dict[str, TensorHeader] = {}
    for stored, public in public_names(headers).items():
        if public in found:
            raise CheckpointError(
                f"tensors {found[public].name!r} and {stored!r} are both {public!r}; expected one "
                "of them. Remove the other."
            )
        found[public] = headers[stored]
    ignored = {public for public in found if layout == SPECULATORS and public in TARGET_COPIES}
    weights = {public: h for public, h in found.items() if public not in ignored | {OFFSETS}}
    expected = {
        to_public(name): tuple(parameter.shape)
        for name, parameter in empty_drafter(config).named_parameters()
    }
    _require_names(weights, expected)
    _require_shapes(weights, expected, config)
    _require_floats(weights)
    offsets = found.get(OFFSETS)
    _require_offsets(offsets, config)
    return TensorPlan(
        weights=weights,
        offsets=offsets,
        ignored=tuple(sorted(found[public].name for public in ignored)),
    )


def _require_names(
    weights: Mapping[str, TensorHeader], expected: Mapping[str, tuple[int, ...]]
) -> None:
    missing = [f"{name!r} {list(expected[name])}" for name in expected if name not in weights]
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {_listed(missing)}; expected {len(expected)} tensors, found "
            f"{len(weights)}. It is incomplete, or config.json belongs to another one."
        )
    extra = [name for name in weights if name not in expected]
    if extra:
        hint = "config.json belongs to another checkpoint, or the drafter is of an unknown kind"
        if any(map(is_head, extra)):
            hint = "config.json declares no Domino head (projector_type), yet its tensors are here"
        described = [f"{weights[name].name!r} {list(weights[name].shape)}" for name in extra]
        raise CheckpointError(
            f"the checkpoint holds {_listed(described)}, which the drafter has no use for; {hint}."
        )


def _require_shapes(
    weights: Mapping[str, TensorHeader],
    expected: Mapping[str, tuple[int, ...]],
    config: DrafterConfig,
) -> None:
    output = weights.get(_HEAD_OUTPUT)
    if output is not None and output.shape[:1] != (config.output_vocab_size,):
        raise CheckpointError(
            f"vocabulary mismatch: tensor {output.name!r} is {list(output.shape)}, so the head was "
            f"made for {output.shape[0] if output.shape else 0} tokens, but config.json says "
            f"{config.output_vocab_size}. Correct vocab_size, or state draft_vocab_size and store "
            f"its map {OFFSETS!r} for a reduced vocabulary."
        )
    wrong = [
        f"{weights[name].name!r} is {list(weights[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if weights[name].shape != shape
    ]
    if wrong:
        raise CheckpointError(
            f"mis-shaped: {_listed(wrong)}. config.json and the weights do not belong together."
        )


def _require_floats(weights: Mapping[str, TensorHeader]) -> None:
    wrong = [f"{h.name!r} is {h.dtype}" for h in weights.values() if h.dtype not in FLOAT_DTYPES]
    if wrong:
        raise CheckpointError(
            f"{_listed(wrong)}; expected one of {', '.join(FLOAT_DTYPES)}. Quantised drafters "
            "cannot be loaded: convert them back first."
        )


def _require_offsets(offsets: TensorHeader | None, config: DrafterConfig) -> None:
    if offsets is None:
        if config.draft_vocab_size is not None:
            raise CheckpointError(
                f"config.json says draft_vocab_size = {config.draft_vocab_size} of "
                f"{config.vocab_size} tokens, but the checkpoint lacks tensor {OFFSETS!r} "
                f"[{config.draft_vocab_size}], which maps them to the target's ids."
            )
        return
    expected = (config.output_vocab_size,)
    if offsets.shape != expected or offsets.dtype not in _INTEGER_BYTES:
        raise CheckpointError(
            f"tensor {offsets.name!r} is {list(offsets.shape)} of {offsets.dtype}, expected "
            f"{list(expected)} whole numbers: one for each draft token."
        )


def _listed(items: Sequence[str]) -> str:
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return f"{len(items)} tensor{'s' * (len(items) > 1)}: {'; '.join(items[:_LISTED])}{more}"
