"""All findings, in the order in which a person would look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from domino_spec.api import DominoDecoder
from domino_spec.checkpoints import TargetFacts
from domino_spec.doctor.measuring import measured_findings
from domino_spec.doctor.reading import (
    Finding,
    Plans,
    State,
    read_context,
    read_fit,
    read_mask,
    read_memory,
    read_tokenizer,
    worst,
)
from domino_spec.drafter import DrafterConfig
from domino_spec.drafters import Drafter
from domino_spec.drafters.registry import DrafterDescription
from domino_spec.evaluation.runs import unsupported_by_engine
from domino_spec.records import hardware


@dataclass(frozen=True, kw_only=True)
class Examination:
    """A target, a drafter and a machine."""

    findings: tuple[Finding, ...]

    @property
    def state(self) -> State:
        """The most serious one's."""
        return worst(self.findings)

    @property
    def hopeless(self) -> bool:
        """Whether the pair cannot even be loaded, so that there is nothing to measure."""
        stops = (
            "hidden size",
            "vocabulary",
            "target layers",
            "captured hidden states",
            "mask token",
        )
        return any(
            f.state == "problem" and (f.name in stops or f.name.startswith("memory"))
            for f in self.findings
        )

    def get(self, name: str) -> Finding | None:
        """The finding of this name."""
        return next((finding for finding in self.findings if finding.name == name), None)


def examine_files(
    *,
    config: Any,
    tokenizer: Any | None,
    facts: TargetFacts,
    described: DrafterDescription,
    dtype: torch.dtype,
    device: torch.device,
    plans: Plans,
) -> Examination:
    """What configuration files and headers tell; no weights are read."""
    drafter, provenance = described.config, described.provenance
    findings = [
        Finding(name="machine", state="ok", found=f"{hardware()}, torch {torch.__version__}"),
        _types(described, dtype, device),
        read_memory(config, described, plans, dtype=dtype, device=device),
        *([] if drafter is None else read_fit(drafter, provenance, facts)),
        *read_tokenizer(tokenizer, facts),
        *(read_mask(drafter, tokenizer) if isinstance(drafter, DrafterConfig) else []),
        *read_context(drafter, provenance, facts, plans),
    ]
    return Examination(findings=tuple(findings))


def examine_loaded(
    decoder: DominoDecoder,
    drafts: Drafter,
    texts: Sequence[str],
    *,
    tokens: int,
    template_fits: bool,
    say: Callable[[str], None] = lambda _: None,
) -> Examination:
    """What a few answers of the target tell; the decoder needs no drafter of its own."""
    reason = unsupported_by_engine(decoder.target, drafts)
    engine = Finding(
        name="engine",
        state="ok",
        found="runs this pair" if reason is None else f"the reference loop only: {reason}",
    )
    measured = measured_findings(
        decoder, drafts, texts, tokens=tokens, template_fits=template_fits, say=say
    )
    return Examination(findings=(engine, *measured))


def _types(described: DrafterDescription, dtype: torch.dtype, device: torch.device) -> Finding:
    stored = f"drafter stored as {', '.join(described.dtypes)}"
    name = str(dtype).removeprefix("torch.")
    state: State = "ok"
    advice = ""
    if dtype == torch.float16 and "BF16" in described.dtypes:
        state = "warning"
        advice = "bfloat16 weights can overflow in float16: use --dtype bfloat16 or float32."
    elif dtype in (torch.float16, torch.bfloat16) and device.type == "cpu":
        advice = "On most CPUs half types are slower than float32."
    return Finding(
        name="type", state=state, found=stored if described.dtypes else "nothing is stored",
        expected=f"{name} on {device}", advice=advice,
    )  # fmt: skip
