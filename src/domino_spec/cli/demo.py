"""`domino demo`: plain and Domino decoding of the same prompts, side by side."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from domino_spec.cli.generate import as_prompt
from domino_spec.cli.loading import require_places
from domino_spec.cli.options import JsonOption, LoopOptions, TargetDtype, checked_device
from domino_spec.cli.render import shortened
from domino_spec.cli.voice import Voice, speaking
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

if TYPE_CHECKING:
    from domino_spec.api import DominoDecoder
    from domino_spec.targets import LoadedTarget

_UNTRAINED = "an untrained drafter: the answers are exact, but slower than plain decoding"
_PROMPT_WIDTH = 36
_TEXT_AROUND_A_DIFFERENCE = 8


def demo(
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
        TargetDtype, typer.Option(help="Type of the target's weights; fastest measures a CPU once.")
    ] = TargetDtype.FLOAT32,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; unset: a GPU if any.")] = None,
    seed: Annotated[int, typer.Option(help="Weights of an untrained drafter.")] = 0,
    loop_options: LoopOptions,
    as_json: JsonOption = False,
) -> None:
    """Decode a few prompts plainly and with drafts, and check that the answers are identical."""
    if target is None or Path(target).exists():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing needs fetching
    with speaking(as_json=as_json) as voice:
        if not 1 <= prompts <= len(PROMPTS):
            raise InputError(f"prompts is {prompts}; expected 1 to {len(PROMPTS)}.")
        with_released = target is None and draft is None
        target = str(smollm2()) if target is None else target
        require_places(voice, target, drafts=[draft])
        checked_device(device)
        from domino_spec.targets import load_target

        voice.status(f"loading target {Path(target).name}")
        loaded = load_target(target, dtype=dtype.resolved(), device=device)
        drafter = _UNTRAINED if draft is None else draft
        if with_released and (released := released_drafter(loaded.target.device)):
            draft, drafter = released.source, f"{released.source}: {released.reason}"
        decoder = _decoder(loaded, draft, seed, loop_options)
        voice.note(f"drafting with {drafter}")
        texts = PROMPTS[:prompts]
        comparisons = _compare_all(voice, decoder, texts, max_new_tokens)
        identical = all(comparison.identical for comparison in comparisons)
        if as_json:
            voice.document(
                {
                    "target": Path(target).name,
                    "drafter": "untrained" if draft is None else draft,
                    "device": str(decoder.target.device),
                    "dtype": str(decoder.target.dtype).removeprefix("torch."),
                    "engine": comparisons[0].domino.run.engine,
                    "engine_reason": comparisons[0].domino.run.engine_reason,
                    "identical": identical,
                    "ratio": median_ratio(comparisons),
                    "prompts": [
                        {"prompt": text, **comparison.to_dict()}
                        for text, comparison in zip(texts, comparisons, strict=True)
                    ],
                }
            )
        else:
            _print_table(voice, decoder, texts, comparisons)
        if not identical:
            for text, comparison in zip(texts, comparisons, strict=True):
                if not comparison.identical:
                    voice.error(_difference(decoder, text, comparison))
            raise typer.Exit(1)


def _decoder(
    loaded: LoadedTarget, draft: str | None, seed: int, loop_options: LoopOptions
) -> DominoDecoder:
    from domino_spec.api import DominoDecoder, NoGainNotice, UselessDrafterWarning

    options = loop_options.arguments()
    if draft is not None:
        return DominoDecoder.from_pretrained(loaded, draft, **options)
    for expected in (UselessDrafterWarning, NoGainNotice):
        warnings.simplefilter("ignore", expected)
    drafter = untrained_drafter(loaded.target, seed=seed)
    return DominoDecoder(
        loaded.target, drafter, loaded.tokenizer, revision=loaded.revision, **options
    )


def _compare_all(
    voice: Voice, decoder: DominoDecoder, texts: tuple[str, ...], max_new_tokens: int
) -> list[Comparison]:
    inputs = [as_prompt(text, decoder.tokenizer, raw=False, system=None) for text in texts]
    comparisons = []
    with voice.working("warming up"):
        warm_up(decoder, inputs[0])
    for index, prompt in enumerate(inputs, start=1):
        with voice.working(f"prompt {index} of {len(inputs)}, plainly and with drafts"):
            comparisons.append(compare(decoder, prompt, max_new_tokens=max_new_tokens))
    return comparisons


def _print_table(
    voice: Voice, decoder: DominoDecoder, texts: tuple[str, ...], comparisons: list[Comparison]
) -> None:
    table = Table(box=None)
    table.add_column("prompt", no_wrap=True)
    for heading in ("tokens", "acceptance length", "plain s", "Domino s", "ratio"):
        table.add_column(heading, justify="right")
    table.add_column("identical")
    for text, comparison in zip(texts, comparisons, strict=True):
        same = comparison.identical
        table.add_row(
            shortened(text, _PROMPT_WIDTH),
            str(len(comparison.domino.tokens)),
            f"{comparison.domino.run.tokens_per_cycle:.2f}",
            f"{comparison.plain.run.seconds:.2f}",
            f"{comparison.domino.run.seconds:.2f}",
            f"{comparison.ratio:.2f}×",
            Text("yes" if same else "no", style="green" if same else "red"),
        )
    voice.out.print(table)
    same_count = sum(comparison.identical for comparison in comparisons)
    voice.out.print(
        f"{same_count} of {len(comparisons)} answers identical · {median_ratio(comparisons):.2f}× "
        f"(median) · one run on this machine ({decoder.target.device}, {_loop(comparisons)}), not "
        "a benchmark",
        soft_wrap=True,
    )


def _loop(comparisons: list[Comparison]) -> str:
    ran = comparisons[0].domino.run.engine
    return "the engine" if ran == "fast" else "the reference loop"


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
