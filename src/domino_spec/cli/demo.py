"""`domino demo`: plain and Domino decoding of the same prompts, side by side."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from domino_spec.cli.command import Voice, command
from domino_spec.cli.generate import as_prompt
from domino_spec.cli.loading import LoopOptions, device_of, require_places, resolved_dtype
from domino_spec.cli.render import shortened, table
from domino_spec.demo import (
    PROMPTS,
    Comparison,
    compare,
    median_ratio,
    released_drafter,
    smollm2,
    untrained_drafter,
    warm_up,
)
from domino_spec.errors import InputError
from domino_spec.settings import Dtype

if TYPE_CHECKING:
    from domino_spec.api import DominoDecoder

_HEADS = ("prompt", "tokens", "acceptance length", "plain s", "Domino s", "ratio", "identical")
_PROMPT_WIDTH = 36
_TEXT_AROUND_A_DIFFERENCE = 8


@command()
def demo(
    voice: Voice,
    *,
    target: Annotated[
        str | None, typer.Option(help="Another target; unset: SmolLM2-135M-Instruct.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="Another drafter; unset: the released one, else an untrained one."),
    ] = None,
    prompts: Annotated[int, typer.Option(help="How many of the built-in prompts.")] = 4,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n")] = 48,
    dtype: Annotated[
        Dtype, typer.Option(help="Type of the target's weights; fastest measures a CPU once.")
    ] = "float32",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; unset: a GPU if any.")] = None,
    seed: Annotated[int, typer.Option(help="Weights of an untrained drafter.")] = 0,
    loop_options: LoopOptions,
) -> None:
    """Decode a few prompts plainly and with drafts, and check that the answers are identical."""
    if target is None or Path(target).exists():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing needs fetching
    if not 1 <= prompts <= len(PROMPTS):
        raise InputError(f"prompts is {prompts}; expected 1 to {len(PROMPTS)}.")
    with_released = target is None and draft is None
    target = str(smollm2()) if target is None else target
    require_places(voice, target, drafts=[draft])
    device_of(device)
    from domino_spec.api import DominoDecoder, NoGainNotice, UselessDrafterWarning
    from domino_spec.targets import load_target

    voice.status(f"loading target {Path(target).name}")
    loaded = load_target(target, dtype=resolved_dtype(dtype), device=device)
    drafter: Any = draft
    if with_released and (released := released_drafter(loaded.target.device)):
        drafter = draft = released.source
        voice.note(f"drafting with {draft}: {released.reason}")
    elif draft is None:
        drafter = untrained_drafter(loaded.target, seed=seed)
        for expected in (UselessDrafterWarning, NoGainNotice):
            warnings.simplefilter("ignore", expected)
        voice.note(
            "drafting with an untrained drafter: the answers are exact, but slower than plain "
            "decoding"
        )
    else:
        voice.note(f"drafting with {draft}")
    pack = None if loop_options.pack else False
    decoder = DominoDecoder.from_pretrained(loaded, drafter, engine=loop_options.engine, pack=pack)
    texts, comparisons = PROMPTS[:prompts], []
    inputs = [as_prompt(text, decoder.tokenizer, raw=False, system=None) for text in texts]
    with voice.working("warming up"):
        warm_up(decoder, inputs[0])
    for index, prompt in enumerate(inputs, start=1):
        with voice.working(f"prompt {index} of {len(inputs)}, plainly and with drafts"):
            comparisons.append(compare(decoder, prompt, max_new_tokens=max_new_tokens))
    identical = sum(comparison.identical for comparison in comparisons)
    pairs, run = list(zip(texts, comparisons, strict=True)), comparisons[0].domino.run
    if voice.as_json:
        voice.document(
            {
                "target": Path(target).name,
                "drafter": "untrained" if draft is None else draft,
                "device": str(decoder.target.device),
                "dtype": decoder.target.dtype_name,
                "engine": run.engine,
                "engine_reason": run.engine_reason,
                "identical": identical == len(pairs),
                "ratio": median_ratio(comparisons),
                "prompts": [{"prompt": text, **each.to_dict()} for text, each in pairs],
            }
        )
    else:
        rows = [
            (
                shortened(text, _PROMPT_WIDTH),
                len(each.domino.tokens),
                f"{each.domino.run.tokens_per_cycle:.2f}",
                f"{each.plain.run.seconds:.2f}",
                f"{each.domino.run.seconds:.2f}",
                f"{each.ratio:.2f}×",
                "yes" if each.identical else "no",
            )
            for text, each in pairs
        ]
        voice.out.print(table(_HEADS, rows, words=("prompt", "identical")))
        loop = "the engine" if run.engine == "fast" else "the reference loop"
        voice.say(
            f"{identical} of {len(pairs)} answers identical · {median_ratio(comparisons):.2f}× "
            f"(median) · one run on this machine ({decoder.target.device}, {loop}), not a benchmark"
        )
    for text, each in pairs:
        if not each.identical:
            voice.error(_difference(decoder, text, each))
    if identical < len(pairs):
        raise typer.Exit(1)


def _difference(decoder: DominoDecoder, text: str, comparison: Comparison) -> str:
    index = comparison.first_difference
    assert index is not None
    shown = {}
    for name, answer in (("plain", comparison.plain), ("Domino", comparison.domino)):
        nearby = answer.tokens[max(index - _TEXT_AROUND_A_DIFFERENCE, 0) : index + 1]
        token = answer.tokens[index] if index < len(answer.tokens) else "the end"
        decoded = "" if decoder.tokenizer is None else repr(decoder.tokenizer.decode(nearby))
        shown[name] = f"{name} has {token} {decoded}".rstrip()
    return (
        f"{shortened(text, _PROMPT_WIDTH)}: token {index} differs; {shown['plain']}, "
        f"{shown['Domino']}. In half precision near-tied tokens can flip: --dtype float32 tells."
    )
