"""Perplexity of a GGUF file's own blocks on a CPU, beside the same values multiplied in float32.

    python -m benchmarks.perplexity FILE.gguf --texts humaneval.jsonl --out records/perplexity.jsonl

The blocks' values are the same on both sides; what differs is that products round what they read to
8 bits. Texts are the first turns of the prompts, joined and cut into pieces of a length.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from domino_spec.quantization.modules import quantized_weights, weights_in_words
from domino_spec.records import append_record, environment
from domino_spec.targets import Target, load_target


def main() -> None:
    """Both sides in one process, one after the other over the same tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--texts", nargs="+", type=Path, required=True)
    parser.add_argument("--pieces", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    loaded = load_target(args.target, quantize="keep", device="cpu")
    target = loaded.target
    rows = [json.loads(line) for path in args.texts for line in path.read_text().splitlines()]
    text = "\n\n".join(row["turns"][0] for row in rows)
    tokens = torch.tensor(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])
    pieces = tokens[: args.pieces * args.length].view(-1, args.length)
    kept = losses(target, pieces)
    for module in target.model.modules():
        if hasattr(module, "rounds"):
            module.rounds = False  # the same values, multiplied in float32
    exact = losses(target, pieces)
    found: dict[str, Any] = {
        "target": Path(args.target).name,
        "kinds": weights_in_words(target.model),
        "weights": len(quantized_weights(target.model)),
        "texts": [path.name for path in args.texts],
        "tokens": pieces.numel(),
        "perplexity": {"blocks": math.exp(kept), "float32": math.exp(exact)},
    }
    print(json.dumps(found))
    append_record(args.out, {**found, "environment": environment()})


@torch.no_grad()
def losses(target: Target, pieces: torch.Tensor) -> float:
    """Mean negative log-likelihood of every token but each piece's first."""
    total = 0.0
    for piece in pieces:
        logits = target.forward(piece.unsqueeze(0), target.new_cache(1), rollback=False).logits[0]
        total += F.cross_entropy(logits[:-1].float(), piece[1:], reduction="sum").item()
    return total / (len(pieces) * (pieces.shape[1] - 1))


if __name__ == "__main__":
    main()
