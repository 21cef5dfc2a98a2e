"""Tokens a cycle of drafters under the standard measurement, one record a set and temperature.

The first turn of each prompt, chat template applied, under 400 tokens; 256 new tokens; answers of
at least 32 tokens that do not loop; all committed tokens over all cycles, without the prefill's.

    python -m benchmarks.acceptance --draft FOLDER --sets gsm8k.jsonl --temperature 0 0.7
    python -m benchmarks.acceptance --draft released:NAME --data SHARDS --simulate
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from domino_spec.api import DominoDecoder
from domino_spec.bench.tasks import read_tasks
from domino_spec.data import load_corpus
from domino_spec.demo import smollm2
from domino_spec.evaluation import (
    Measurement,
    PromptSet,
    Protocol,
    continuations_for,
    corpus_prompts,
    measure_decoded,
    measure_simulated,
)
from domino_spec.records import append_record, environment
from domino_spec.targets import load_target
from domino_spec.training.evaluate import split_held_out

HELD_OUT = "held-out"
NAMES = {"smollm2": "SmolLM2-135M-Instruct"}
HEADS = ("drafter", "set", "T", "way", "head", "tokens a cycle", "first", "used", "left out", "s")


def measure(
    decoders: Sequence[DominoDecoder],
    sets: Sequence[PromptSet],
    protocol: Protocol,
    options: argparse.Namespace,
) -> Iterator[tuple[int, Measurement]]:
    """All drafters on all sets at one temperature, each with its place among the drafters."""
    heads = (True, False) if options.head_off else (True,)
    for prompts in sets:
        continuations = None
        if options.simulate:
            continuations = continuations_for(
                decoders[0],
                prompts,
                protocol,
                batch_size=options.batch_size,
                folder=options.continuations,
            )
        for place, decoder in enumerate(decoders):
            for head in heads:
                if continuations is not None:
                    yield (
                        place,
                        measure_simulated(
                            decoder,
                            prompts,
                            protocol,
                            continuations,
                            head=head,
                            sequences_per_forward=options.batch_size,
                            max_slots=options.max_slots,
                        ),
                    )
                else:
                    size = options.batch_size
                    yield (
                        place,
                        measure_decoded(
                            decoder,
                            prompts,
                            protocol,
                            head=head,
                            batch_size=size,
                            accept="rejection",
                        ),
                    )


def row_of(drafter: str, measurement: Measurement) -> list[str]:
    """One line of the table."""
    total, counts = measurement.total, measurement.counts
    left_out = " ".join(f"{name} {counts[name]}" for name in ("loops", "short", "too_long"))
    return [
        drafter,
        measurement.prompts.name,
        f"{measurement.protocol.temperature:g}",
        f"{measurement.way} {measurement.accept or ''}".strip(),
        "on" if measurement.head else "off",
        f"{total.tokens_per_cycle:.3f}",
        f"{total.acceptance_by_position[0]:.3f}" if total.offered else "-",
        str(counts["used"]),
        left_out,
        f"{measurement.seconds:.1f}",
    ]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, append the records, print the table last."""
    options = _options(arguments)
    named = options.target in NAMES
    loaded = load_target(
        smollm2() if named else options.target,
        dtype=getattr(torch, options.dtype),
        device=options.device,
    )
    target_name = f"{NAMES.get(options.target, Path(options.target).name)}, {options.dtype}"
    decoders = [
        DominoDecoder.from_pretrained(
            loaded, draft, depth=options.depth, candidates=options.candidates
        )
        for draft in options.draft
    ]
    protocol = Protocol(seed=options.seed, max_new_tokens=options.max_new_tokens)
    longest = protocol.longest_for(loaded.target)
    sets = [
        task.encoded(loaded.tokenizer, longest=longest)
        for task in (read_tasks(options.sets, limit=options.limit) if options.sets else ())
    ]
    if options.data:
        corpus = load_corpus(
            options.data, tokenizer=loaded.tokenizer, vocab_size=loaded.target.vocab_size
        )
        _, corpus = split_held_out(corpus, options.held_out)
        sets.append(corpus_prompts(HELD_OUT, corpus, longest=longest, limit=options.limit))
    circumstances = environment()
    rows: list[Sequence[str]] = [HEADS]
    for temperature in options.temperature:
        own = replace(protocol, temperature=temperature)
        for place, measurement in measure(decoders, sets, own, options):
            drafter = Path(options.draft[place]).name.removeprefix("released:")
            record: dict[str, Any] = {
                "target": target_name,
                "drafter": drafter,
                "rows": options.batch_size,
                **measurement.to_dict(),
                "environment": circumstances,
            }
            append_record(options.out, record)
            rows.append(row_of(drafter, measurement))
            print(*rows[-1], flush=True)
    print(f"\n{table(rows)}")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="smollm2", help="smollm2, a folder or a GGUF file")
    parser.add_argument("--draft", nargs="+", required=True)
    parser.add_argument("--sets", nargs="*", default=[], help="JSON lines of turns")
    parser.add_argument("--data", nargs="*", default=[], help="what the drafters were trained on")
    parser.add_argument("--held-out", type=int, default=64, help="of which this was held out")
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0])
    parser.add_argument("--simulate", action="store_true", help="at T > 0 that is the match rule")
    parser.add_argument("--head-off", action="store_true", help="also with base logits alone")
    parser.add_argument("--depth", type=int)
    parser.add_argument("--candidates", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="prompts a set")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-slots", type=int, default=16384)
    parser.add_argument("--continuations", help="a folder that keeps the target's answers")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device")
    parser.add_argument("--out", default="records/acceptance.jsonl")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
