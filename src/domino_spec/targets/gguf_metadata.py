"""What a GGUF file holds, without its arrays: the gguf package takes long to read those."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from domino_spec.errors import TargetError

# The types of values, by their number in the file.
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32


def gguf_metadata(path: Path) -> dict[str, Any]:
    """Numbers, flags and texts by their keys; an array's value is its length."""
    with path.open("rb") as file:
        return _metadata(file)[0]


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in its file."""

    kind: str
    """A name of `gguf.GGMLQuantizationType`."""
    shape: tuple[int, ...]
    """Rows first, as PyTorch has it."""
    start: int
    row_bytes: int

    @property
    def rows(self) -> int:
        """Rows of blocks, all leading dimensions together."""
        return math.prod(self.shape[:-1])


def gguf_tensors(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """The metadata, and where each tensor lies; a tensor that cannot be read is refused by name."""
    with path.open("rb") as file:
        metadata, count = _metadata(file)
        stated = {}
        for _ in range(count):
            name, (dimensions,) = _string(file), _read(file, "<I")
            shape = _read(file, f"<{dimensions}Q")
            kind, offset = _read(file, "<IQ")
            stated[name] = (kind, shape[::-1], offset)
        alignment = int(metadata.get("general.alignment", _ALIGNMENT))
        data = -(-file.tell() // alignment) * alignment
    size = path.stat().st_size
    return metadata, {
        name: _stored_tensor(path, name, kind, shape, start=data + offset, file_bytes=size)
        for name, (kind, shape, offset) in stated.items()
    }


def _stored_tensor(
    path: Path, name: str, kind: int, shape: tuple[int, ...], *, start: int, file_bytes: int
) -> StoredTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        known = GGMLQuantizationType(kind)
    except ValueError as error:
        raise TargetError(
            f"{path} has {name} in type {kind}, which the installed gguf package does not know; "
            f"expected one of its {len(GGMLQuantizationType)} types. Update the package (pip "
            "install -U gguf), or use another quantisation of the model."
        ) from error
    numbers, size = GGML_QUANT_SIZES[known]
    tensor = StoredTensor(known.name, shape, start, shape[-1] // numbers * size)
    end = start + tensor.rows * tensor.row_bytes
    if end > file_bytes:
        raise TargetError(
            f"{path} has {file_bytes:,} bytes and {name} lies at bytes {start:,} to {end:,}; "
            "expected the whole file. It was cut off: download it again."
        )
    return tensor


def read_rows(path: Path, tensor: StoredTensor) -> Any:
    """The file's bytes of a tensor, [rows, bytes of a row]."""
    import numpy as np

    count = tensor.rows * tensor.row_bytes
    stored = np.fromfile(path, dtype=np.uint8, count=count, offset=tensor.start)
    return stored.reshape(tensor.rows, tensor.row_bytes)


def unpacked(stored: Any, kind: str) -> Any:
    """Bytes of rows in float32, as Transformers unpacks them."""
    import gguf
    import numpy as np

    return np.array(gguf.dequantize(stored, gguf.GGMLQuantizationType[kind]), dtype=np.float32)


def _metadata(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """It, and how many tensors are described after it."""
    magic, _version, tensors, count = _read(file, "<4sIQQ")
    if magic != b"GGUF":
        raise TargetError(
            f"{file.name} begins with {magic!r}; expected a GGUF file. Check the path, or "
            "download it again."
        )
    pairs = ((_string(file), _read(file, "<I")[0]) for _ in range(count))
    metadata = {key: _value(file, kind) for key, kind in pairs}
    if (parts := metadata.get("split.count", 0)) > 1:
        raise TargetError(
            f"{file.name} is file {metadata.get('split.no', 0) + 1} of {parts} of a split GGUF; "
            "expected the whole model in one file. Merge them with llama.cpp: llama-gguf-split "
            "--merge FIRST.gguf WHOLE.gguf, FIRST being the one that ends in "
            f"-00001-of-{parts:05d}.gguf."
        )
    return metadata, tensors


def gguf_shape(path: Path) -> dict[str, int]:
    """Hidden size, vocabulary and decoder layers of the model in the file."""
    metadata = gguf_metadata(path)
    kind = metadata.get("general.architecture")
    shape: dict[str, Any] = {
        "hidden_size": metadata.get(f"{kind}.embedding_length"),
        "vocab_size": metadata.get(f"{kind}.vocab_size", metadata.get("tokenizer.ggml.tokens")),
        "num_layers": metadata.get(f"{kind}.block_count"),
    }
    missing = [name for name, value in shape.items() if value is None]
    if missing:
        raise TargetError(
            f"{path} ({kind}) does not state its {', '.join(missing)}; expected a GGUF file of a "
            "language model."
        )
    # Layers that predict further tokens are counted with the decoder's.
    shape["num_layers"] -= metadata.get(f"{kind}.nextn_predict_layers", 0)
    return shape


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _read(file, _SCALARS[kind])[0]
    inner, length = _read(file, "<IQ")
    if inner in _SCALARS:
        file.seek(length * struct.calcsize(_SCALARS[inner]), 1)
    else:
        for _ in range(length):
            _value(file, inner)
    return length


def _string(file: BinaryIO) -> str:
    (length,) = _read(file, "<Q")
    return file.read(length).decode("utf-8", errors="replace")


def _read(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    data = file.read(struct.calcsize(layout))
    if len(data) < struct.calcsize(layout):
        raise TargetError(f"{file.name} ends inside its metadata; download it again.")
    return struct.unpack(layout, data)
