"""What files alone tell: fit, tokenizer, chat template, mask token, context, memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from domino_spec.checkpoints import Check, Provenance, TargetFacts, check_fit
from domino_spec.doctor.settings import Plans
from domino_spec.drafter import DrafterConfig, Eagle3Config, ModuleConfig
from domino_spec.drafters.registry import DrafterDescription
from domino_spec.engine.recurrent import read_delta_shape
from domino_spec.quantization.reference import FORMATS
from domino_spec.quantization.scaled import GROUPS
from domino_spec.records import hardware
from domino_spec.settings import Quantize
from domino_spec.targets.quantized import ROUNDED
from domino_spec.targets.spare_tokens import spare_tokens, special_tokens
from domino_spec.targets.support import linear_layers
from domino_spec.targets.weight_only import read_scheme

State = Literal["ok", "unknown", "warning", "problem"]
_SEVERITY: tuple[State, ...] = ("ok", "unknown", "warning", "problem")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing: what was found, what was expected, what to do."""

    name: str
    state: State
    found: Any
    expected: Any = None
    advice: str = ""


def judged(
    name: str, good: bool, found: Any, expected: Any, advice: str, *, bad: State = "problem"
) -> Finding:
    """A finding with advice if it is not good."""
    if good:
        return Finding(name=name, state="ok", found=found, expected=expected)
    return Finding(name=name, state=bad, found=found, expected=expected, advice=advice)


def worst(findings: Iterable[Finding]) -> State:
    """The most serious state among them."""
    return max((finding.state for finding in findings), key=_SEVERITY.index, default="ok")


_FATAL = ("hidden size", "vocabulary", "target layers", "captured hidden states", "mask token")
_MARKER = re.compile(r"<\|[^|<>{}\s]+\|>")


def is_hopeless(findings: Iterable[Finding]) -> bool:
    """Whether the pair cannot even be loaded, so that there is nothing to measure."""
    return any(
        f.state == "problem" and (f.name in _FATAL or f.name.startswith("memory")) for f in findings
    )


def examine_files(
    *,
    config: Any,
    tokenizer: Any | None,
    facts: TargetFacts,
    described: DrafterDescription,
    dtype: torch.dtype,
    device: torch.device,
    plans: Plans,
    quantize: Quantize | None = None,
) -> list[Finding]:
    """What configuration files and headers tell, in the order in which a person would look."""
    drafter, provenance = described.config, described.provenance
    checks = [] if drafter is None else check_fit(drafter, provenance, facts)
    return [
        Finding(name="machine", state="ok", found=f"{hardware()}, torch {torch.__version__}"),
        _types(described, dtype, device, quantize),
        read_memory(
            config,
            described,
            plans,
            dtype=dtype,
            device=device,
            stored=stored_bytes(config, quantize, facts.name, dtype=dtype, device=device),
        ),
        *(_from_check(check) for check in checks if check.name != "training length"),  # see context
        *read_tokenizer(tokenizer, facts),
        *(read_mask(drafter, tokenizer) if isinstance(drafter, DrafterConfig) else []),
        read_context(drafter, provenance, facts, plans),
    ]


def _types(
    described: DrafterDescription,
    dtype: torch.dtype,
    device: torch.device,
    quantize: Quantize | None,
) -> Finding:
    state: State = "ok"
    advice = ""
    if dtype == torch.float16 and "BF16" in described.dtypes:
        state = "warning"
        advice = "bfloat16 weights can overflow in float16: use --dtype bfloat16 or float32."
    elif dtype in (torch.float16, torch.bfloat16) and device.type == "cpu":
        advice = "On most CPUs half types are slower than float32."
    stored = f"drafter stored as {', '.join(described.dtypes)}"
    return Finding(
        name="type", state=state, found=stored if described.dtypes else "nothing is stored",
        expected=f"{str(dtype).removeprefix('torch.')} on {device}"
        + (f", the target's matrices in few bits ({quantize})" if quantize else ""),
        advice=advice,
    )  # fmt: skip


def _from_check(check: Check) -> Finding:
    """A comparison of checkpoint and target, as `domino info` makes it."""
    state: State = "ok" if check.verdict == "ok" else "unknown"
    advice = check.advice
    if check.verdict == "mismatch":
        state = "problem" if check.name in (*_FATAL, "tokenizer") else "warning"
        if check.name == "tokenizer":
            advice += " Use the tokenizer of the drafter's training, or train one for this one."
    return Finding(
        name=check.name, state=state, found=check.found, expected=check.expected, advice=advice
    )


def read_tokenizer(tokenizer: Any | None, facts: TargetFacts) -> Iterator[Finding]:
    """Whether tokenizer, template and model belong to each other."""
    if tokenizer is None:
        yield Finding(
            name="tokenizer files", state="warning", found="none", expected="next to the weights",
            advice="Text cannot be read; save the model's tokenizer next to its weights.",
        )  # fmt: skip
        return
    highest = max(tokenizer.get_vocab().values(), default=-1)
    yield judged(
        "tokenizer ids", highest < facts.vocab_size, f"up to {highest}",
        f"below {facts.vocab_size}",
        "The tokenizer is of another version than the weights: get both anew.",
    )  # fmt: skip
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        yield Finding(
            name="chat markers", state="ok", found="no chat template: text is continued as it is"
        )
        return
    markers = sorted(set(_MARKER.findall(template if isinstance(template, str) else str(template))))
    split = [m for m in markers if len(tokenizer.encode(m, add_special_tokens=False)) != 1]
    found = f"{', '.join(split)} in pieces" if split else f"{len(markers)}, a token each"
    advice = "The tokenizer is older than its chat template: get both of one version."
    yield judged("chat markers", not split, found, "a token each", advice)


def read_mask(config: DrafterConfig, tokenizer: Any | None) -> Iterator[Finding]:
    """Whether the mask token is one that never stands in a text."""
    mask = config.mask_token_id
    if tokenizer is None:
        return
    text = {index: token for token, index in tokenizer.get_vocab().items()}.get(mask)
    yield judged(
        "mask token text",
        mask in {*spare_tokens(tokenizer, config.vocab_size), *special_tokens(tokenizer)},
        f"{mask} ({'not in the tokenizer' if text is None else repr(text)})",
        "a special or unused id",
        "It may not be the token of the drafter's training: compare with its training code.",
        bad="warning",
    )


def mask_candidates(config: DrafterConfig, tokenizer: Any | None, *, most: int) -> list[int]:
    """Ids that a drafter might have been trained with instead, likeliest first."""
    if tokenizer is None:
        return []
    own = getattr(tokenizer, "mask_token_id", None)
    spare = spare_tokens(tokenizer, config.vocab_size)[:2]
    found = dict.fromkeys([*([] if own is None else [own]), *spare, *special_tokens(tokenizer)])
    usable = [i for i in found if 0 <= i < config.vocab_size and i != config.mask_token_id]
    return usable[:most]


def read_context(
    config: DrafterConfig | ModuleConfig | None,
    provenance: Provenance,
    facts: TargetFacts,
    plans: Plans,
) -> Finding:
    """The length that is planned against target, drafter and training."""
    wanted, trained, context = plans.context, provenance.training_length, facts.context_length
    limits = {
        "the target's context": context,
        "the drafter's positions": getattr(config, "max_position_embeddings", None),
    }
    known = {name: limit for name, limit in limits.items() if limit is not None}
    told = ", ".join(f"{name} {limit}" for name, limit in known.items())
    if config is not None:
        told += f", trained on {'unknown' if trained is None else trained}"
    found = "as long as the target takes" if wanted is None else wanted
    over = [name for name, limit in known.items() if wanted is not None and wanted > limit]
    state: State = "ok"
    advice = "" if trained is None else f"Past {trained} tokens expect fewer accepted drafts."
    if trained is not None and context is not None and trained > context:
        state, advice = "warning", "It saw longer sequences than this target takes: another target?"
    elif over:
        state = "problem"
        advice = f"Plan for at most {min(known.values())} tokens: {' and '.join(over)} end there."
    elif trained is None and config is not None:
        state, advice = "unknown", "The checkpoint does not say how long its training texts were."
    elif trained is not None and wanted is not None and wanted > trained:
        state, advice = "warning", f"{advice} Train on longer texts, or decode plainly after that."
    elif wanted is not None:
        advice = ""
    return Finding(name="context", state=state, found=found, expected=told, advice=advice)


_UNPLANNED = 4096
_TIGHT = 0.9


def needs(
    config: Any,
    described: DrafterDescription,
    plans: Plans,
    *,
    dtype: torch.dtype,
    context: int,
    stored: int | None = None,
) -> dict[str, int] | None:
    """Bytes that decoding takes at a context, by part; None if the target's size is unknown.

    `stored` are a target's whose weights are not all of `dtype`.
    """
    weights = _parameters(config)
    if weights is None:
        return None
    text, size = config.get_text_config(), dtype.itemsize
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    tokens = plans.rows * context
    linear = len(linear_layers(text))
    attending = int(text.num_hidden_layers) - linear
    states = 0
    if linear and hasattr(text, "linear_num_value_heads"):
        states = linear * read_delta_shape(text).slot_bytes(described.drafts + 1, dtype)
    target_cache = 2 * attending * kv_heads * head_dim * tokens
    drafter, cached = described.config, 0  # numbers a token in the drafter's own keys
    if isinstance(drafter, DrafterConfig):
        cached = drafter.num_layers * drafter.num_kv_heads * drafter.head_dim
    elif isinstance(drafter, Eagle3Config):
        cached = drafter.num_kv_heads * drafter.head_dim
    draft_cache = 2 * 2 * cached * tokens  # the draft context grows in doublings
    # Medusa captures what the lm_head reads.
    captured = 0 if drafter is None else len(drafter.target_layer_ids) or 1
    block = plans.rows * (described.drafts + 1)
    logits = 2 * block * int(text.vocab_size)  # the drafter's and the target's, both of a block
    wide = int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    prefill = tokens * (2 * wide + (4 + captured) * int(text.hidden_size))
    return {
        "target": weights * size if stored is None else stored,
        "drafter": described.parameters * size,
        "caches": (target_cache + draft_cache) * size + plans.rows * states,
        "activations": logits * (size + 4) + prefill * size,
    }


def read_memory(
    config: Any,
    described: DrafterDescription,
    plans: Plans,
    *,
    dtype: torch.dtype,
    device: torch.device,
    stored: int | None = None,
) -> Finding:
    """Whether it fits, and what to do if not."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or _UNPLANNED
    context = min(limit, _UNPLANNED) if plans.context is None else plans.context
    what = f"memory for {plans.rows} × {context} tokens, {str(dtype).removeprefix('torch.')}"
    need = needs(config, described, plans, dtype=dtype, context=context, stored=stored)
    there = available(device)
    if need is None or there is None:
        why = "the target's size cannot be counted" if need is None else f"{device} does not tell"
        return Finding(name=what, state="unknown", found=None, expected=there, advice=why)
    total = sum(need.values())
    tight = _TIGHT * there < total <= there
    advice = "It is tight: close other programs, or plan for fewer tokens." if tight else ""
    if total > there:
        last = "--device-map auto, " if device.type == "cuda" else ""
        advice = (
            "Use a smaller type (--dtype bfloat16), fewer sequences (--rows), a shorter --context, "
            f"{last}--quantize int8 or a smaller target."
        )
    parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in need.items())
    return Finding(
        name=what,
        state="problem" if total > there else "warning" if tight else "ok",
        found=f"about {gigabytes(total)} ({parts})",
        expected=f"{gigabytes(there)} free on {device}",
        advice=advice,
    )


def stored_bytes(
    config: Any,
    quantize: Quantize | None,
    source: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> int | None:
    """What a quantised target's weights take; None where they are of one type."""
    if quantize == "keep":
        return Path(source).stat().st_size
    scheme = read_scheme(config, source, device)
    kind = quantize if scheme is None else scheme.kind
    model = None if kind is None else _empty(config)
    if model is None:
        return None
    numbers = _count(model.parameters())
    if device.type != "cuda":
        form = FORMATS[ROUNDED["int4" if kind == "int4" else "int8"]]
        return numbers * form.bytes // form.size
    layers = _count(m.weight for m in model.get_decoder().modules() if type(m) is nn.Linear)
    # Scales count for little but in int4, whose groups have four bytes each.
    bits = 4 + 32 / GROUPS[0] if kind == "int4" else 8
    return int(layers * bits / 8) + (numbers - layers) * dtype.itemsize


def available(device: torch.device) -> int | None:
    """Free bytes on a device; None where unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def gigabytes(size: int) -> str:
    """As people read it."""
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"


def _parameters(config: Any) -> int | None:
    """Numbers in a model of this configuration, tied ones once."""
    model = _empty(config)
    return None if model is None else _count(model.parameters())


def _count(tensors: Iterable[Any]) -> int:
    return sum(int(tensor.numel()) for tensor in tensors)


def _empty(config: Any) -> Any | None:
    """A model of this configuration, nothing allocated; None where it cannot be made."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
    except (ValueError, TypeError, ImportError, AttributeError, RuntimeError, KeyError):
        return None
    return model
