"""What the files of a checkpoint hold: names, shapes and types, without reading any data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from domino_spec.checkpoints.locate import INDEX_FILE, CheckpointFiles
from domino_spec.errors import CheckpointError

FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""PyTorch's names of the types that weights are stored in."""
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
INTEGER_BYTES = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}
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
        return self.parameters * {**_FLOAT_BYTES, **INTEGER_BYTES}[self.dtype]


@contextmanager
def open_tensors(
    path: Path, *, framework: Literal["pt", "np"] = "pt", device: str = "cpu"
) -> Iterator[Any]:
    """A safetensors file; errors name it. With "np" its header is read without PyTorch."""
    try:
        with safe_open(path, framework=framework, device=device) as file:
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
        with open_tensors(path, framework="np") as file:
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


def listed(items: Sequence[str]) -> str:
    """How many, and the first few of them."""
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return f"{len(items)} tensor{'s' * (len(items) > 1)}: {'; '.join(items[:_LISTED])}{more}"
