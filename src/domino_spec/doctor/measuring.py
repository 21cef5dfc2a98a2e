"""What only drafting tells: alignment, mask token, prompt format, the right target."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from domino_spec.api import DominoDecoder
from domino_spec.api.prompts import encode_prompt
from domino_spec.audit import PROMPTS
from domino_spec.decoding import AcceptanceStats
from domino_spec.decoding.stats import MIN_TOKENS_PER_CYCLE
from domino_spec.doctor.reading import Finding, judged, mask_candidates
from domino_spec.doctor.settings import Plans
from domino_spec.drafter import DominoHeadConfig, DrafterConfig, DraftModel
from domino_spec.drafters import Drafter
from domino_spec.engine.kernels.rollout import CANDIDATES
from domino_spec.evaluation import Continuations, continue_prompts, simulate
from domino_spec.evaluation.runs import greedy_counts
from domino_spec.quantization.modules import weights_in_words

_MOST_MASKS = 16
_DISAPPOINTING = 0.7
"""Of what training measured: other prompts differ, but not by so much."""
_KEPT_BY_CANDIDATES = 0.95
"""Of the acceptance length over the whole vocabulary; a rollout over all of it costs more."""
Say = Callable[[str], None]


def examine_loaded(
    decoder: DominoDecoder, plans: Plans, *, template_fits: bool, say: Say = lambda _: None
) -> list[Finding]:
    """Draft for a few answers of the target, as configured and otherwise."""
    drafts = decoder.drafter
    assert drafts is not None
    reason = decoder.unsupported_reason()
    runs = "runs this pair" if reason is None else f"the reference loop only: {reason}"
    found: list[Finding | None] = [Finding(name="engine", state="ok", found=runs)]
    weights = weights_in_words(decoder.target.model)
    if weights is not None:
        found.append(Finding(name="quantised weights", state="ok", found=weights))
    texts = PROMPTS[: plans.prompts]
    say(f"the target answers {len(texts)} prompts of {plans.tokens} tokens")
    known = _answers(decoder, texts, "as it is", plans)
    own = measure(decoder, known)
    if isinstance(drafts.config, DrafterConfig):
        found.append(_alignment(decoder, drafts.config, known, own))
        found.append(_mask(decoder, drafts.config, known, say))
        found.append(_candidates(decoder, drafts.config, known))
    unsure = not template_fits or own.tokens_per_cycle < MIN_TOKENS_PER_CYCLE
    if drafts.config is not None and unsure:
        say("trying other forms of the prompts")
        found.append(_format(decoder, texts, own, plans))
    told = [finding for finding in found if finding is not None]
    explained = any(finding.state == "problem" for finding in told)
    return [*told, _acceptance(drafts, own, explained=explained)]


def _alignment(
    decoder: DominoDecoder, config: DrafterConfig, known: Continuations, own: AcceptanceStats
) -> Finding:
    other = "no-shift" if config.shift_label else "shift"
    trial = measure(decoder, known, shift_label=not config.shift_label)
    found = f"{config.alignment}: acceptance length {own.tokens_per_cycle:.2f}"
    against = f"{other}: {trial.tokens_per_cycle:.2f}"
    if clearly_better(trial, own):
        right = str(not config.shift_label).lower()
        advice = f"The drafter was trained with {other}: correct shift_label in its config.json to "
        return judged("alignment", False, found, against, f"{advice}{right}.")
    better = own.tokens_per_cycle > trial.tokens_per_cycle
    sure = better and own.tokens_per_cycle >= MIN_TOKENS_PER_CYCLE
    advice = "Too few drafts are right to tell."
    return judged("alignment", sure, found, against, advice, bad="unknown")


def _mask(
    decoder: DominoDecoder, config: DrafterConfig, known: Continuations, say: Say
) -> Finding | None:
    candidates = mask_candidates(config, decoder.tokenizer, most=_MOST_MASKS)
    if not candidates:
        return None
    say(f"trying {len(candidates)} other mask tokens")
    # The best of many is lucky on what it was chosen by: it is compared on the other prompts.
    first, *others = range(len(known.prompts))
    chosen_by, rest = known.select([first]), known.select(others or [first])
    tried = {token: measure(decoder, chosen_by, mask_token_id=token) for token in candidates}
    best = max(tried, key=lambda token: tried[token].tokens_per_cycle)
    trial = measure(decoder, rest, mask_token_id=best)
    own = measure(decoder, rest)
    return judged(
        "mask token, measured",
        not clearly_better(trial, own),
        f"{config.mask_token_id}: acceptance length {own.tokens_per_cycle:.2f}",
        f"best of {len(candidates)} others, {best}: {trial.tokens_per_cycle:.2f}",
        f"The drafter was trained with another mask token: set mask_token_id to {best} in its "
        "config.json.",
    )


def _candidates(
    decoder: DominoDecoder, config: DrafterConfig, known: Continuations
) -> Finding | None:
    """Whether the head chooses as well among the candidates that a GPU gives it by default."""
    drafts, every = decoder.drafter, config.output_vocab_size
    assert drafts is not None
    if drafts.candidates or not isinstance(config.head, DominoHeadConfig) or every <= CANDIDATES:
        return None
    few, whole = (
        measure(decoder, known, candidates=count).tokens_per_cycle for count in (CANDIDATES, every)
    )
    return judged(
        "candidates",
        few >= _KEPT_BY_CANDIDATES * whole,
        f"best {CANDIDATES} by base logits: acceptance length {few:.2f}",
        f"all {every}: {whole:.2f}",
        f"On a GPU its head looks at {CANDIDATES} candidates by default, and its base logits rank "
        f"them badly: pass --candidates {every} there, or train it with a base_weight above 0.",
        bad="warning",
    )


def _format(
    decoder: DominoDecoder, texts: Sequence[str], own: AcceptanceStats, plans: Plans
) -> Finding | None:
    template = getattr(decoder.tokenizer, "chat_template", None)
    if not template:
        return None
    forms = ["plain text"]
    if "enable_thinking" in str(template):
        forms += ["thinking", "no thinking"]
    trials = {form: measure(decoder, _answers(decoder, texts, form, plans)) for form in forms}
    best = max(trials, key=lambda form: trials[form].tokens_per_cycle)
    return judged(
        "prompt format",
        not clearly_better(trials[best], own),
        f"this template: acceptance length {own.tokens_per_cycle:.2f}",
        f"{best}: {trials[best].tokens_per_cycle:.2f}",
        f"The drafter was trained on other prompts, more like {best}: use the template and mode of "
        "its training, or train it on this template.",
    )


def _acceptance(drafts: Drafter, own: AcceptanceStats, *, explained: bool) -> Finding:
    reached, useless = own.tokens_per_cycle, own.tokens_per_cycle < MIN_TOKENS_PER_CYCLE
    found = f"{reached:.2f} over {own.cycles} cycles"
    if drafts.config is None:  # prompt lookup: nothing was learnt, so nothing can be set up wrong
        advice = "Lookup pays where answers repeat their prompts; these hardly do."
        expected = "nothing is trained"
        return judged("acceptance length", not useless, found, expected, advice, bad="warning")
    trained = drafts.provenance.tokens_per_cycle
    short = trained is not None and reached < 1 + _DISAPPOINTING * (trained - 1)
    is_block = isinstance(drafts.config, DrafterConfig)
    tried = "alignment, mask token and prompt format" if is_block else "prompt format"
    advice = ""
    if (useless or short) and explained:
        advice = "Mend what is named above first."
    elif useless:
        advice = (
            f"Hardly any draft is right, whatever the {tried}: the drafter was trained for another "
            "target or another version of it, or not at all. Use the target it names, or train one "
            "for this target."
        )
    elif short:
        advice = (
            "Fewer than training measured: check the target's weights, and that these prompts are "
            "of the kind it was trained for."
        )
    return Finding(
        name="acceptance length",
        state="problem" if useless else "warning" if short else "ok",
        found=found,
        expected="unknown from training" if trained is None else f"{trained:.2f} in training",
        advice=advice,
    )


_CLEAR = 3.0
"""Standard deviations between two averages that chance does not make."""


def clearly_better(one: AcceptanceStats, other: AcceptanceStats) -> bool:
    """Whether more drafts a cycle were accepted, beyond chance."""
    (mean, error), (other_mean, other_error) = _accepted(one), _accepted(other)
    return mean - other_mean > _CLEAR * math.sqrt(error + other_error)


def _accepted(stats: AcceptanceStats) -> tuple[float, float]:
    """Mean of the accepted drafts a cycle, and the square of its standard error."""
    if not stats.cycles:
        return 0.0, 0.0
    mean = sum(stats.accepted) / stats.cycles
    square = sum((2 * place + 1) * count for place, count in enumerate(stats.accepted))
    return mean, max(square / stats.cycles - mean**2, 0.0) / stats.cycles


def _answers(
    decoder: DominoDecoder, texts: Sequence[str], form: str, plans: Plans
) -> Continuations:
    """The target's own answers to prompts in a form, which trials draft for."""
    options: dict[str, Any] = dict(decoder.chat_options)
    if form in ("thinking", "no thinking"):
        options["enable_thinking"] = form == "thinking"
    templated = bool(getattr(decoder.tokenizer, "chat_template", None)) and form != "plain text"
    prompts = [[{"role": "user", "content": text}] if templated else text for text in texts]
    return continue_prompts(
        decoder.target,
        [encode_prompt(prompt, decoder.tokenizer, options) for prompt in prompts],
        eos=decoder.eos_token_ids,
        max_new_tokens=plans.tokens,
        batch_size=len(prompts),
    )


def measure(
    decoder: DominoDecoder,
    continuations: Continuations,
    *,
    candidates: int | None = None,
    **changes: Any,
) -> AcceptanceStats:
    """Counts with the drafter as it is, or with fields of its configuration changed.

    Or with other candidates. Chains of block drafters are simulated, which counts the same; others
    decode.
    """
    drafts = decoder.drafter
    assert drafts is not None
    chain = candidates or changes
    if not isinstance(drafts.model, DraftModel) or (drafts.nodes and not chain):
        assert not chain, "only block drafters can be read differently"
        drafting = DominoDecoder(decoder.target, drafts, decoder.tokenizer, depth=drafts.depth)
        return greedy_counts(
            drafting,
            continuations.prompts,
            max_new_tokens=continuations.max_new_tokens,
            batch_size=len(continuations.prompts),
        )
    drafter = changed(drafts.model, **changes) if changes else drafts.model
    depth = min(drafts.depth, drafter.config.max_depth)
    simulated = simulate(
        drafter, decoder.target, continuations, depth=depth,
        candidates=candidates or drafts.candidates, window=drafts.window,
    )  # fmt: skip
    return simulated.total


def changed(drafter: DraftModel, **changes: Any) -> DraftModel:
    """The same weights under a configuration that reads them differently."""
    other = copy.copy(drafter)
    other._modules = dict(drafter._modules)
    other.config = dataclasses.replace(drafter.config, **changes)
    return other
