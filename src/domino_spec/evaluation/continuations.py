"""A target's own answers to a set of prompts: made once, kept, and drafted against many times."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from domino_spec.api import DominoDecoder
from domino_spec.decoding import SamplingParams
from domino_spec.errors import InputError
from domino_spec.evaluation.runs import Progress, decode_prompts
from domino_spec.quantization.modules import quantized_weights
from domino_spec.settings import AcceptRule
from domino_spec.targets import Target

_VALUES_A_WEIGHT = 16
_NOT_THE_MODEL = ("transformers_version", "dtype", "torch_dtype", "name_or_path")


@dataclass(frozen=True, kw_only=True)
class Continuations:
    """Prompts and what the target answered to each, the prefill's token first."""

    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...]
    """Up to `max_new_tokens`, or to the end-of-sequence token, which is part of it."""
    max_new_tokens: int
    key: str = ""
    """A hash of the target's weights, the settings and the prompts; empty if unknown."""

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.answers):
            raise InputError(
                f"there are {len(self.prompts)} prompts but {len(self.answers)} answers; expected "
                "one answer a prompt."
            )
        for index, (prompt, answer) in enumerate(zip(self.prompts, self.answers, strict=True)):
            if not prompt or not 1 <= len(answer) <= self.max_new_tokens:
                raise InputError(
                    f"continuation {index} has {len(prompt)} prompt tokens and {len(answer)} "
                    f"answer tokens; expected at least one of each and at most "
                    f"{self.max_new_tokens} in the answer."
                )

    def select(self, indices: Sequence[int]) -> Continuations:
        """Only these, in this order; the key stays that of the whole."""
        return replace(
            self,
            prompts=tuple(self.prompts[index] for index in indices),
            answers=tuple(self.answers[index] for index in indices),
        )

    def save(self, path: str | Path) -> None:
        """Write a small npz file."""
        pairs = zip(self.prompts, self.answers, strict=True)
        tokens = [token for prompt, answer in pairs for token in (*prompt, *answer)]
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            Path(path),
            tokens=np.array(tokens, dtype=np.int32),
            prompt_len=np.array([len(prompt) for prompt in self.prompts], dtype=np.int32),
            answer_len=np.array([len(answer) for answer in self.answers], dtype=np.int32),
            max_new_tokens=np.array(self.max_new_tokens),
            key=np.array(self.key),
        )

    @classmethod
    def load(cls, path: str | Path) -> Continuations:
        """Read what `save` wrote."""
        try:
            with np.load(Path(path), allow_pickle=False) as file:
                lengths = np.stack((file["prompt_len"], file["answer_len"]), axis=1).ravel()
                parts = np.split(file["tokens"], np.cumsum(lengths)[:-1])
                key, max_new_tokens = str(file["key"]), int(file["max_new_tokens"])
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise InputError(
                f"{path} does not hold continuations ({error}); expected a file that "
                "Continuations.save wrote."
            ) from error
        texts = tuple(tuple(part.tolist()) for part in parts)  # prompt and answer in turns
        return cls(prompts=texts[::2], answers=texts[1::2], max_new_tokens=max_new_tokens, key=key)


def continue_prompts(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    eos: Collection[int],
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    accept: AcceptRule = "coupled",
    batch_size: int = 16,
    folder: str | Path | None = None,
    name: str = "continuations",
    on_progress: Progress | None = None,
) -> Continuations:
    """Let the target answer without drafts; with a folder, only if it has not done so before.

    At a temperature the answers are drawn, prompt i from seed + i, as decoding with the rule
    `accept` draws them: coupled ones on the engine. Files are called by name and key, so one
    never stands for another target, other prompts or other settings.
    """
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
    }
    if temperature:
        settings["accept"] = accept
    params = SamplingParams(**settings)
    key = _sha256([fingerprint(target), settings, sorted(eos), [list(p) for p in prompts]])
    path = None if folder is None else Path(folder) / f"{name}-{key[:12]}.npz"
    if path is not None and path.is_file():
        kept = Continuations.load(path)
        if kept.key == key:
            return kept
    answers = decode_prompts(
        DominoDecoder(target, None),
        prompts,
        params,
        eos=eos,
        batch_size=batch_size,
        on_progress=on_progress,
    )
    made = Continuations(
        prompts=tuple(tuple(prompt) for prompt in prompts),
        answers=tuple(tuple(answer.output) for answer in answers),
        max_new_tokens=max_new_tokens,
        key=key,
    )
    if path is not None:
        made.save(path)
    return made


def fingerprint(target: Target) -> str:
    """A hash of a target's configuration, type and some values of every weight.

    Name and device do not count: a copy elsewhere is the same target.
    """
    config = {
        name: value
        for name, value in target.config.to_dict().items()
        if not name.startswith("_") and name not in _NOT_THE_MODEL
    }
    return _sha256([config, str(target.dtype), weight_values(target.model)])


def weight_values(model: nn.Module) -> list[list[object]]:
    """Name, shape and some values of every weight: enough to tell two models apart."""
    weights: list[list[object]] = []
    for name, weight in model.named_parameters():
        values: list[float] = []
        if not weight.is_meta:  # off-loaded: its name and shape must do
            flat = weight.detach().flatten()
            step = max(1, len(flat) // _VALUES_A_WEIGHT)
            values = flat[::step].to("cpu", torch.float32).tolist()
        weights.append([name, list(weight.shape), values])
    for name, quantized in quantized_weights(model).items():
        stored = quantized.stored_bytes()
        step = max(1, len(stored) // _VALUES_A_WEIGHT)
        weights.append([name, quantized.kind, stored[::step].tolist()])
    return weights


def _sha256(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
