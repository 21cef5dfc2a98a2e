"""Token shards: conversations as flat arrays in one npz file."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from domino_spec.errors import DataError

TokenArray = npt.NDArray[np.integer]
_NEEDED = ("tokens", "length", "prompt_len")


@dataclass(frozen=True)
class Shard:
    """What a shard holds: each conversation's prompt comes first, the answer ends it."""

    tokens: TokenArray  # [total], conversations back to back
    lengths: npt.NDArray[np.int64]  # [conversations]
    prompt_lengths: npt.NDArray[np.int64]  # [conversations]
    sources: list[str]
    temperatures: npt.NDArray[np.float32] | None
    tokenizer_sha256: str | None
    """Which tokenizer made the ids; None where it was not recorded."""


def read_shard(path: str | Path) -> Shard:
    """Read a shard, each array once, checking that its parts belong together."""
    arrays = _arrays(path)
    missing = [name for name in _NEEDED if name not in arrays]
    if missing:
        raise DataError(
            f"{path} has no {' and no '.join(missing)}; expected a token shard with the arrays "
            f"{', '.join(_NEEDED)} (found {', '.join(arrays) or 'none'})."
        )
    for name in _NEEDED:
        if arrays[name].ndim != 1 or not np.issubdtype(arrays[name].dtype, np.integer):
            raise DataError(
                f"{path}: {name} is {arrays[name].dtype} of {arrays[name].ndim} dimensions; "
                "expected whole numbers of 1 dimension."
            )
    tokens = arrays["tokens"]
    # Lengths are stored in 16 bits: their sums are not.
    lengths = arrays["length"].astype(np.int64)
    prompt_lengths = arrays["prompt_len"].astype(np.int64)
    sources = arrays.get("source")
    temperatures = arrays.get("temperature")
    for name, array in (("prompt_len", prompt_lengths), ("source", sources)):
        if array is not None and array.shape != lengths.shape:
            raise DataError(
                f"{path}: {name} has {array.size} entries but length has {len(lengths)}; expected "
                "one each a conversation."
            )
    if int(lengths.sum()) != len(tokens) or (lengths < 0).any():
        raise DataError(
            f"{path}: the lengths add up to {int(lengths.sum()):,} tokens but there are "
            f"{len(tokens):,}; the file is damaged or of another layout."
        )
    recorded = arrays.get("tokenizer_sha256")
    return Shard(
        tokens=tokens,
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        sources=[Path(path).stem] * len(lengths) if sources is None else sources.tolist(),
        temperatures=None if temperatures is None else temperatures.astype(np.float32),
        tokenizer_sha256=None if recorded is None else str(recorded),
    )


def write_shard(
    path: str | Path,
    *,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    vocab_size: int,
    sources: Sequence[str] | None = None,
    temperatures: Sequence[float] | None = None,
    tokenizer_sha256: str | None = None,
) -> Path:
    """Write prompts and answers as one shard, whole or not at all."""
    path = Path(path)
    conversations = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    tokens = np.array([token for tokens in conversations for token in tokens], dtype=np.int64)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise DataError(
            f"a conversation holds the token id {int(tokens.max())}; expected ids below the "
            f"vocabulary of {vocab_size}."
        )
    lengths = [len(tokens) for tokens in conversations]
    prompt_lengths = [len(prompt) for prompt in prompts]
    longest = np.uint16 if max(lengths, default=0) < 2**16 else np.uint32
    arrays: dict[str, Any] = {
        "tokens": tokens.astype(np.uint16 if vocab_size <= 2**16 else np.uint32),
        "length": np.array(lengths, dtype=longest),
        "prompt_len": np.array(prompt_lengths, dtype=longest),
    }
    if sources is not None:
        arrays["source"] = np.array(list(sources), dtype=np.str_)
    if temperatures is not None:
        arrays["temperature"] = np.array(list(temperatures), dtype=np.float16)
    if tokenizer_sha256 is not None:
        arrays["tokenizer_sha256"] = np.array(tokenizer_sha256)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, **arrays)
    partial.replace(path)
    return path


def _arrays(path: str | Path) -> dict[str, npt.NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path} could not be read as an npz file ({error}); copy or make it again."
        ) from error
