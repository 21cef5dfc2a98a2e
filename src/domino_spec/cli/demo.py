"""`domino demo`: plain and Domino decoding of the same prompts, side by side."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from domino_spec.cli.command import Voice, command
from domino_spec.cli.generate import as_prompt
from domino_spec.cli.loading import LoopOptions, require_places, resolved_dtype, with_own_blocks
from domino_spec.cli.render import shortened, table
from domino_spec.demo import (
    FEWEST_ROUNDS,
    MOST_PROMPTS,
    PROMPTS,
    Comparison,
    Speedup,
    compare,
    overall,
    prompts_in_time,
    released_drafter,
    seconds_of,
    smollm2,
    untrained_drafter,
    warm_up,
)
from domino_spec.errors import InputError
from domino_spec.settings import Dtype, Quantize, TargetOptions

if TYPE_CHECKING:
    from domino_spec.api import DominoDecoder

_HEADS = ("prompt", "tokens", "acceptance length", "plain s", "Domino s", "speedup", "identical")
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
    prompts: Annotated[
        int | None,
        typer.Option(
            help=f"How many of the built-in prompts; unset: {MOST_PROMPTS}, or as many as a slow "
            "machine compares in about a minute."
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n")] = 48,
    rounds: Annotated[
        int,
        typer.Option(help="How often each prompt is answered plainly and with drafts, in turns."),
    ] = FEWEST_ROUNDS,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Type of the target's weights, fastest measures a CPU once; unset: float32."
        ),
    ] = None,
    quantize: Annotated[
        Quantize | None,
        typer.Option(
            help="Weights in blocks of few bits, on a CPU; unset: a GGUF file's own, unless there "
            "is a type."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; unset: a GPU if any.")] = None,
    seed: Annotated[int, typer.Option(help="Weights of an untrained drafter.")] = 0,
    loop_options: LoopOptions,
) -> None:
    """Decode a few prompts plainly and with drafts, and check that the answers are identical."""
    start = time.perf_counter()
    if target is None or Path(target).exists():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing needs fetching
    if prompts is not None and not 1 <= prompts <= len(PROMPTS):
        raise InputError(f"prompts is {prompts}; expected 1 to {len(PROMPTS)}.")
    if rounds < FEWEST_ROUNDS:
        raise InputError(
            f"rounds is {rounds}; expected {FEWEST_ROUNDS} or more: fewer do not tell how noisy "
            "the machine is."
        )
    ours = target is None
    with_released = ours and draft is None
    target = str(smollm2()) if target is None else target
    require_places(voice, target, drafts=[draft])
    options = TargetOptions(dtype=dtype, quantize=quantize, device=device)
    quantize = with_own_blocks(voice, target, options).quantize
    from domino_spec.api import DominoDecoder, NoGainNotice, UselessDrafterWarning
    from domino_spec.targets import load_target

    voice.status(f"loading target {Path(target).name}")
    loaded = load_target(
        target, dtype=resolved_dtype(dtype or "float32"), device=device, quantize=quantize
    )
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
    inputs = [as_prompt(text, decoder.tokenizer, raw=False, system=None) for text in PROMPTS]
    first = decoder.generate([inputs[0]], speculate=False, max_new_tokens=max_new_tokens)[0]
    waited = time.perf_counter() - start
    voice.note(f"the first answer after {waited:.0f} s: {first.text or first.tokens}")
    if prompts is None:
        prompts = prompts_in_time(first.run.seconds, rounds=rounds)
    texts, inputs = PROMPTS[:prompts], inputs[:prompts]
    with voice.working("warming up"):
        warm_up(decoder, inputs[0])
    with voice.progress() as update:
        comparisons = compare(
            decoder, inputs, max_new_tokens=max_new_tokens, rounds=rounds,
            on_progress=lambda done, total: update("plainly and with drafts", done, total),
        )  # fmt: skip
    identical = sum(comparison.identical for comparison in comparisons)
    pairs, speedup = list(zip(texts, comparisons, strict=True)), overall(comparisons)
    measured = _measured(decoder, comparisons, speedup, max_new_tokens)
    if voice.as_json:
        run = comparisons[0].domino[0].run
        voice.document(
            {
                "target": Path(target).name,
                "drafter": "untrained" if draft is None else draft,
                "device": str(decoder.target.device),
                "dtype": decoder.target.dtype_name,
                "engine": run.engine,
                "engine_reason": run.engine_reason,
                "first_answer_seconds": waited,
                "identical": identical == len(pairs),
                **speedup.to_dict(),
                "measured": measured,
                "prompts": [{"prompt": text, **each.to_dict()} for text, each in pairs],
            }
        )
    else:
        rows = [
            (
                shortened(text, _PROMPT_WIDTH),
                len(each.domino[0].tokens),
                f"{each.domino[0].run.tokens_per_cycle:.2f}",
                f"{median(seconds_of(each.plain)):.2f}",
                f"{median(seconds_of(each.domino)):.2f}",
                str(each.speedup),
                "yes" if each.identical else "no",
            )
            for text, each in pairs
        ]
        voice.out.print(table(_HEADS, rows, words=("prompt", "identical")))
        voice.say(f"{identical} of {len(pairs)} answers identical · speedup {speedup}")
        voice.say(measured)
    for text, each in pairs:
        if not each.identical:
            voice.error(_difference(decoder, text, each))
    if identical < len(pairs):
        raise typer.Exit(1)


def _measured(
    decoder: DominoDecoder,
    comparisons: list[Comparison],
    speedup: Speedup,
    max_new_tokens: int,
) -> str:
    """What the figures are of."""
    import torch

    target, rounds = decoder.target, len(speedup.ratios)
    fast = comparisons[0].domino[0].run.engine == "fast"
    place = str(target.device)
    if target.device.type == "cpu":
        threads = torch.get_num_threads()
        place += f" with {threads} thread" + ("" if threads == 1 else "s")
    ratios = f"{min(speedup.ratios):.2f} to {max(speedup.ratios):.2f}"
    return (
        f"measured here, not a benchmark: {len(comparisons)} prompt"
        f"{'' if len(comparisons) == 1 else 's'}, up to {max_new_tokens} new "
        f"tokens each, greedy, from the prompt to the last token, {rounds} times plainly and "
        f"{rounds} times with drafts in turns; medians (the rounds' speedups: {ratios}); "
        f"{target.dtype_name} on {place}, {'the engine' if fast else 'the reference loop'}"
    )


def _difference(decoder: DominoDecoder, text: str, comparison: Comparison) -> str:
    index = comparison.first_difference
    assert index is not None
    shown, rounds = {}, (comparison.plain, comparison.domino)
    turn = next(
        turn
        for turn, (plain, domino) in enumerate(zip(*rounds, strict=True))
        if plain.tokens[: index + 1] != domino.tokens[: index + 1]
    )
    for name, answer in zip(("plain", "Domino"), (each[turn] for each in rounds), strict=True):
        nearby = answer.tokens[max(index - _TEXT_AROUND_A_DIFFERENCE, 0) : index + 1]
        token = answer.tokens[index] if index < len(answer.tokens) else "the end"
        decoded = "" if decoder.tokenizer is None else repr(decoder.tokenizer.decode(nearby))
        shown[name] = f"{name} has {token} {decoded}".rstrip()
    return (
        f"{shortened(text, _PROMPT_WIDTH)}: token {index} differs; {shown['plain']}, "
        f"{shown['Domino']}. In half precision near-tied tokens can flip: --dtype float32 tells."
    )
