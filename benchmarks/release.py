"""Puts a trained drafter on the shelf: packed, with its configuration, log, curves and card.

    python -m benchmarks.release RUN NAME --bits 'embed_proj.2*=4' --bits '*=6' --made MADE.json

RUN is the folder of `domino train`; MADE.json says where it ran, as records do (`environment`), how
many `conversations` there were, and the commands (`data`) by which some of them were made. A
`--sliding-window` is what the draft layers read of their context where the run has set none.
The run goes on record. Nothing is trained here, and nothing measured: the release states the run's
last evaluation.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml

from domino_spec.checkpoints import Provenance, load_drafter, save_packed
from domino_spec.demo import smollm2
from domino_spec.drafter import DominoHeadConfig
from domino_spec.drafters.facts import target_facts
from domino_spec.records import append_record
from domino_spec.targets import load_target
from domino_spec.training.config import CONFIG_FILE
from domino_spec.training.observers import LOG_FILE, draw_curves, read_log
from domino_spec.training.start import with_windows
from domino_spec.training.state import DRAFTER_FOLDER

SHELF = Path(__file__).parent.parent / "src" / "domino_spec" / "released"
TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
CARD = """# {name}

A Domino drafter for SmolLM2-135M-Instruct, Apache-2.0 (the target's own licence).

- {parameters:.1f}M parameters, {layers} layers, captured layers {captured}, blocks of {block}
  (shifted labels), {head}; {vocabulary}; reads {window} of its context
- stored as {bits}: {size:.1f} MB; `domino export released:{name} OUT` writes the public bfloat16
  layout
- trained on {conversations:,} conversations that the target answered itself (no benchmark's test
  set among them), {steps:,} steps in {seconds:.0f} s of one H200

| file | what |
|---|---|
| `config.yaml` | every setting of the run |
| `log.jsonl`, `curves.png` | how it went |

The command: `{command}`
{data}Figures: `docs/results.md`.
"""


def run_record(
    name: str, settings: dict[str, Any], log: list[dict[str, Any]], parameters: int
) -> dict[str, Any]:
    """What a run's log says of it, with its evaluations by seconds of training."""
    trained = [entry for entry in log if "loss" in entry]
    seconds, curve = 0.0, []
    for entry in log:
        seconds = entry.get("training_seconds", seconds)
        if "tokens_per_cycle" in entry:
            kept = ("step", "tokens_per_cycle", "tokens_per_cycle_head_off")
            curve.append({"seconds": seconds, **{key: entry[key] for key in kept}})
    return {
        "name": name,
        "settings": {n: value for n, value in settings.items() if value is not None},
        "parameters": parameters,
        "steps": trained[-1]["step"],
        "training_seconds": trained[-1]["training_seconds"],
        "run_length": trained[-1]["run_length"],
        "peak_memory_bytes": max(entry["peak_memory_bytes"] for entry in trained),
        "curve": curve,
    }


def main() -> None:
    """Pack and describe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--bits", action="append", default=[], help="PATTERN=BITS; first match")
    parser.add_argument("--made", type=Path, required=True, help="command, commit, hardware, ...")
    parser.add_argument(
        "--sliding-window", type=int, help="tokens; chosen by benchmarks.long_context"
    )
    parser.add_argument("--records", type=Path, default=Path("records/release.jsonl"))
    arguments = parser.parse_args()
    bits = {p: int(b) for p, _, b in (entry.rpartition("=") for entry in arguments.bits)} or 8
    made = json.loads(arguments.made.read_text(encoding="utf-8"))
    conversations, commands = made.pop("conversations"), made.get("data", [])
    drafter = load_drafter(arguments.run / DRAFTER_FOLDER, dtype=torch.bfloat16).drafter
    if arguments.sliding_window:
        drafter = with_windows(drafter, arguments.sliding_window)
    loaded = load_target(smollm2(), device="cpu")
    facts = target_facts(loaded.target, loaded.tokenizer)
    settings = yaml.safe_load((arguments.run / CONFIG_FILE).read_text(encoding="utf-8"))
    log = read_log(arguments.run / LOG_FILE)
    provenance = Provenance(
        target_id=TARGET,
        tokenizer_sha256=facts.tokenizer_sha256,
        chat_template_sha256=facts.chat_template_sha256,
        training_length=settings["length"],
        tokens_per_cycle=next(
            (each["tokens_per_cycle"] for each in reversed(log) if "tokens_per_cycle" in each), None
        ),
        license="Apache-2.0",
    )
    folder = SHELF / arguments.name
    if folder.exists():
        shutil.rmtree(folder)  # what it held of the release before
    save_packed(drafter, folder, bits=bits, provenance=provenance)
    shutil.copyfile(arguments.run / LOG_FILE, folder / LOG_FILE)
    settings |= {
        "target": "SmolLM2-135M-Instruct.Q4_1.gguf",
        "data": [Path(path).name for path in settings["data"]], "out": arguments.name,
    }  # fmt: skip
    text = yaml.safe_dump(settings, sort_keys=False)
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    draw_curves(folder / LOG_FILE, folder / "curves.png")
    config = drafter.config
    head = config.head
    assert isinstance(head, DominoHeadConfig)
    reduced = config.draft_vocab_size
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    parameters = sum(p.numel() for p in drafter.parameters())
    run = run_record(arguments.name, settings, log, parameters)
    append_record(arguments.records, {**run, "environment": made})
    card = CARD.format(
        name=arguments.name,
        parameters=parameters / 1e6,
        layers=config.num_layers,
        captured=list(config.target_layer_ids),
        block=config.block_size,
        head=f"GRU of {head.gru_hidden_dim}, correction of rank {head.emb_dim}",
        vocabulary=f"drafts {reduced} of the target's tokens" if reduced else "whole vocabulary",
        window=f"the newest {config.sliding_window} tokens" if config.sliding_window else "all",
        bits=", ".join(arguments.bits) or "8-bit integers with scales",
        size=size / 1e6,
        steps=run["steps"],
        seconds=run["training_seconds"],
        command=made["command"],
        conversations=conversations,
        data="".join(f"Data: `{each}`\n" for each in commands),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    print(f"{folder.name}: {size / 1e6:.2f} MB of weights")


if __name__ == "__main__":
    main()
