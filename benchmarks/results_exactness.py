"""The page on exactness: audits and token-by-token comparisons on a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.tables import Columns, Record, field, made, made_together, page, table
from domino_spec.records import read_records

_LOOPS = {"fast": "engine", "reference": "reference loop"}


def exactness(records: Path) -> str:
    """What `domino audit` found, then greedy decoding against Transformers' own `generate`."""
    audits = read_records(records / "audit.jsonl")
    cpu, gpu = read_records(records / "exactness.jsonl"), gpu_records(records)
    hybrids = read_records(records / "exactness-hybrids.jsonl")
    blocks = read_records(records / "perplexity.jsonl")
    return page(
        "# Exactness",
        "## Audits",
        "`domino audit`: greedy tokens against the model's own plain "
        "decoding, one by one; samples against its own probabilities. An answer may end before it "
        "has all the tokens asked for. A near-tie is proved, never assumed "
        "([how](../audit.md)).",
        made(audits),
        table(_GREEDY, [record for record in audits if record["greedy"]]),
        table(_SAMPLED, [record for record in audits if record["sampling"]]),
        "## Greedy decoding on a CPU",
        f"{cpu[0]['target']}: tokens compared one by one with Transformers' own `generate`, one "
        "sequence and one token per forward. The scripted drafters (oracle, good, adversarial) "
        "know the answer and spoil it as named; the random ones are untrained drafters over real "
        "hidden states. A drafter that is always right commits 16 tokens per cycle, fewer in the "
        "last, cut block.",
        made_together(cpu),
        table(_CASE | _LENGTH, cpu),
        "## Hybrid targets on a CPU",
        "Tiny models with random weights whose recurrent states fade over tens of tokens: two "
        "linear-attention layers around one of full attention. Prompts of 3 to 79 tokens, the same "
        "comparison; differing prompts are of all seeds, distinct tokens those of a mean answer. "
        "On the engine prompts are computed in chunks of 40 tokens, and its batch size is the "
        "slots that they take in turns.",
        made(hybrids),
        table(
            {"target": field("target"), "loop": hybrid_loop, "seeds": field("seeds")}
            | _CASE
            | _LENGTH
            | {"distinct tokens": field("distinct_tokens", ".0f")},
            [record for record in hybrids if "restored" not in record],
        ),
        "Audits of the same, all prompts in one batch; without the restored states each text has "
        "a bug, where its audit ends.",
        table(_RESTORED, [record for record in hybrids if "restored" in record]),
        "## What 8 bits cost a quantised target",
        "A GGUF file's own blocks on a CPU: products round what they read to 8 bits in blocks of "
        "32 numbers, as llama.cpp's do. Beside them the same values multiplied in float32; "
        "perplexity of the texts named, cut into pieces. K-quants have the file's very values.",
        made(blocks),
        table(_PERPLEXITY, blocks),
        "## Greedy decoding on a GPU",
        "SmolLM2-135M-Instruct, the same comparison. In bfloat16 a matrix product rounds "
        "differently for one token and for sixteen, alone and in a batch, so two tokens whose "
        "logits nearly tie can change places; from there on the texts differ. Plain decoding "
        "differs from itself in the same way when sequences share a batch (drafter: none). A "
        "difference counts as a proven tie only if, at the first differing position, the two "
        "tokens' logits are closer than twice the largest difference measured there between "
        "single steps and the block and batch shapes that decoding uses. After a flip the "
        "scripted drafters follow another text, which is why their acceptance lengths fall.",
        made_together(gpu),
        table(
            {"dtype": gpu_dtype, **_CASE, "of these proven ties": field("proven_ties"), **_LENGTH},
            gpu,
        ),
    )


def gpu_records(records: Path) -> list[dict[str, Any]]:
    """Both types' comparisons on a GPU."""
    files = (records / f"gpu_exactness_{dtype}.jsonl" for dtype in ("float32", "bfloat16"))
    return [record for path in files for record in read_records(path)]


def gpu_dtype(record: Record) -> str:
    """The type that a comparison on a GPU ran in."""
    return str(record["target"].split(", ")[1])


def audited(record: Record) -> str:
    """Which loop was audited, where and in which type."""
    return f"{_LOOPS[record['engine']]}, {record['device']}, {record['dtype']}"


def hybrid_loop(record: Record) -> str:
    """Which loop decoded hybrid targets; the first records are all of the reference loop."""
    return _LOOPS[record.get("loop", "reference")]


def _prompts(record: Record) -> str:
    name = Path(record["prompts"]).stem
    return f"{record['greedy']['prompts']} ({name}) × {record['new_tokens']}"


def audit_target(record: Record) -> str:
    """The target that was audited."""
    return str(record["target"]).removesuffix(".gguf")


def _detectable(record: Record) -> str:
    found = record["sampling"]["detectable"]
    return "too few samples" if found is None else f"{found:.2f}"


_GREEDY: Columns = {
    "target": audit_target,
    "drafter": field("drafter"),
    "loop": audited,
    "prompts": _prompts,
    "tokens compared": field("greedy.tokens"),
    "tokens that differ": lambda r: str(len(r["greedy"]["differences"])),
    "near-ties": field("greedy.ties"),
    "unclear": field("greedy.unclear"),
    "bugs": field("greedy.bugs"),
    "acceptance length": field("greedy.tokens_per_cycle", ".2f"),
    "verdict": field("answer"),
}
_SAMPLED: Columns = {
    "target": audit_target,
    "drafter": field("drafter"),
    "loop": audited,
    "samples per prompt": field("sampling.samples"),
    "positions": lambda r: str(len(r["sampling"]["places"])),
    "temperature": field("sampling.temperature"),
    "wrong positions": field("sampling.wrong"),
    "total variation found nine times in ten": _detectable,
    "verdict": field("answer"),
}
_CASE: Columns = {
    "drafter": field("drafter"),
    "batch size": field("rows"),
    "prompts × tokens": lambda r: f"{r['prompts']} × {r['new_tokens']}",
    "prompts that differ": field("differing_prompts"),
}
_LENGTH: Columns = {"acceptance length": field("tokens_per_cycle", ".2f")}
_PERPLEXITY: Columns = {
    "target": field("target"),
    "kinds": field("kinds"),
    "tokens": field("tokens"),
    "texts": lambda r: ", ".join(r["texts"]),
    "perplexity, blocks": field("perplexity.blocks", ".4f"),
    "perplexity, float32": field("perplexity.float32", ".4f"),
}
_RESTORED: Columns = {
    "target": field("target"),
    "states restored": lambda r: "yes" if r["restored"] else "no",
    "texts": lambda r: str(r["seeds"] * r["prompts"]),
    "tokens compared": field("tokens"),
    "near-ties": field("ties"),
    "unclear": field("unclear"),
    "bugs": field("bugs"),
}
