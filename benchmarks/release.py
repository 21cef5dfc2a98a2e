"""Puts a trained drafter on the shelf: packed, with its configuration, log, curves and card.

    python -m benchmarks.release RUN NAME --bits 'embed_proj.2*=4' --bits '*=6'

RUN holds a drafter (config.json and tensors), config.yaml and log.jsonl. Nothing is trained here,
and nothing measured: `benchmarks.acceptance --data ... --state` makes the release state its
acceptance length.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
import yaml

from domino_spec.checkpoints import Provenance, load_drafter, save_packed
from domino_spec.demo import smollm2
from domino_spec.drafter import DominoHeadConfig
from domino_spec.drafters.facts import target_facts
from domino_spec.targets import load_target
from domino_spec.training.observers import draw_curves

SHELF = Path(__file__).parent.parent / "src" / "domino_spec" / "released"
TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
CARD = """# {name}

A Domino drafter for SmolLM2-135M-Instruct, Apache-2.0 (the target's own licence).

- {parameters:.1f}M parameters, {layers} layers, captured layers {captured}, blocks of {block}
  (shifted labels), {head}; {vocabulary}
- stored as {bits}: {size:.1f} MB; `domino export released:{name} OUT` writes the public bfloat16
  layout
- trained on 76,461 conversations that the target answered itself (no benchmark's test set among
  them), {steps} steps on one H200

| file | what |
|---|---|
| `config.yaml` | every setting of the run |
| `log.jsonl`, `curves.png` | how it went |

The command: `{command}`
{extra}
Figures: `docs/results.md`.
"""


def main() -> None:
    """Pack and describe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--bits", action="append", default=[], help="PATTERN=BITS; first match")
    parser.add_argument("--command", required=True, help="what trained it")
    parser.add_argument("--extra", default="", help="what else was done to it")
    arguments = parser.parse_args()
    bits = {p: int(b) for p, _, b in (entry.rpartition("=") for entry in arguments.bits)} or 8
    drafter = load_drafter(arguments.run, dtype=torch.bfloat16).drafter
    loaded = load_target(smollm2(), device="cpu")
    facts = target_facts(loaded.target, loaded.tokenizer)
    settings = yaml.safe_load((arguments.run / "config.yaml").read_text(encoding="utf-8"))
    provenance = Provenance(
        target_id=TARGET,
        tokenizer_sha256=facts.tokenizer_sha256,
        chat_template_sha256=facts.chat_template_sha256,
        training_length=settings["length"],
        license="Apache-2.0",
    )
    folder = SHELF / arguments.name
    save_packed(drafter, folder, bits=bits, provenance=provenance)
    shutil.copyfile(arguments.run / "log.jsonl", folder / "log.jsonl")
    settings |= {
        "target": "SmolLM2-135M-Instruct.Q4_1.gguf", "data": ["train"], "out": arguments.name,
    }  # fmt: skip
    text = yaml.safe_dump(settings, sort_keys=False)
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    draw_curves(folder / "log.jsonl", folder / "curves.png")
    config = drafter.config
    head = config.head
    assert isinstance(head, DominoHeadConfig)
    reduced = config.draft_vocab_size
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    card = CARD.format(
        name=arguments.name,
        parameters=sum(p.numel() for p in drafter.parameters()) / 1e6,
        layers=config.num_layers,
        captured=list(config.target_layer_ids),
        block=config.block_size,
        head=f"GRU of {head.gru_hidden_dim}, correction of rank {head.emb_dim}",
        vocabulary=f"drafts {reduced} of the target's tokens" if reduced else "whole vocabulary",
        bits=", ".join(arguments.bits) or "8-bit integers with scales",
        size=size / 1e6,
        steps=settings["steps"],
        command=arguments.command,
        extra=f"\n{arguments.extra}\n" if arguments.extra else "",
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    print(f"{folder.name}: {size / 1e6:.2f} MB of weights")


if __name__ == "__main__":
    main()
