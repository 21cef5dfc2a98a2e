"""The pages on training: the released drafters, training speed, and ablations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.tables import (
    NONE,
    Columns,
    Record,
    field,
    made,
    made_together,
    page,
    recipe_target,
    remarks,
    table,
)
from benchmarks.time_to_acceptance import time_to_acceptance
from domino_spec.records import read_records

SETS = ("gsm8k", "humaneval", "mt-bench")
PROTOTYPE = {"soft": 233, "hard": 312}
"""Conversations per second of the prototype that the goals were set with, H200."""

_MISSING = """## Not measured yet

Late total variation, the curriculum and the other runs of `benchmarks/plans/recipe.yaml` under the
present recipe; evaluations of the AdamW recipe during a run on the larger target; what a CUDA graph
alone saves of a step. Muon once failed at about step 500 of 623 with an unexplained CUDA launch
failure while two processes shared the card; alone it has not failed in any run since, the main
drafter's 12,500 steps among them, nor in the CPU drafter's 2,957, which shared the card with a run
by Muon. The full sets on the real decoder: above they are simulated, which a test holds equal."""


def training(records: Path) -> str:
    """How good the released drafters are, how they were made, and how fast training is."""
    return page(
        "# Training",
        _acceptance(read_records(records / "acceptance.jsonl")),
        _storage(read_records(records / "storage.jsonl")),
        _candidates(records),
        _long_context(read_records(records / "long-context.jsonl")),
        _release(records),
        time_to_acceptance(records),
        recipe(records),
        other_families(read_records(records / "trained.jsonl")),
        adapted(records / "adapt.jsonl"),
        _steps(read_records(records / "trials.jsonl")),
        _profile(read_records(records / "training-speed.jsonl")),
        _flex(read_records(records / "flex.jsonl")),
        _MISSING,
    )


def _long_context(found: list[dict[str, Any]]) -> str:
    """The same questions after more and more of an unrelated text, by the drafter's window."""

    def window(record: Record) -> str:
        if record["window"] is None:
            own = record.get("sliding_window")
            return f"{own} newest tokens, its own window" if own else "all context"
        size, sinks = record["window"]
        if not size:
            return "all context"
        return f"{size} newest tokens" + (f", {sinks} sinks" if sinks else "")

    columns: Columns = {
        "target": field("target"),
        "drafter": field("drafter"),
        "tokens before": field("context"),
        "drafter reads": window,
        "how": field("way"),
        "drafts": drafts_chosen,
        "acceptance length": _RATE,
        "speedup": lambda r: f"{r['speedup']:.2f}×" if "speedup" in r else NONE,
        "same text": same_text,
        "questions used": field("used"),
    }
    return "\n\n".join(
        [
            "### After long texts",
            "Questions of the three sets after paragraphs of the Python language reference, an "
            "earlier turn of the conversation; greedy, speedup of decoding without the prefill. "
            "*Same text*: answers that equal plain decoding's to the token. "
            "The drafters of 03b2eca and before learnt from conversations of "
            "at most a few hundred tokens, each by itself. On the H200 five runs "
            "before 3a21474 shared the card, so that their speedups are rough. There cpu8 and "
            "main6 are those that learnt from packed sequences of 1024 tokens, half of them "
            "read as one text, without a window; drafter is cpu8's run with conversations apart. "
            "*Simulated*: over the decoded answer and the draft cache that decoding left.",
            _OTHER_PREFILL,
            _DEFAULTS,
            _ON_A_CPU,
            *("\n\n".join([made(run), table(columns, run)]) for run in by_run(found)),
        ]
    )


_OTHER_PREFILL = (
    "Up to 3a21474 plain decoding ran in the slot of the same engine, where prompts took over what "
    "the drafted run had left of them; with drafts they were computed whole. So the two prefilled "
    "in other shapes, after which bfloat16 texts may part at near-ties; they did as often with "
    "each of the five drafters of e8ed220, whatever its acceptance length. Speedups compare "
    "decoding at the same positions of partly different texts. The benchmark prefills alike since: "
    "at 0ddd29f every answer is plain decoding's, in bfloat16."
)

_ON_A_CPU = (
    "At 495a002 one CPU thread decodes the 4-bit target with the released CPU drafter, with its "
    "window and without: then it accepts nothing behind 1,000 tokens and more, decoding is plain "
    "but for looks at drafts, and within 2% of plain decoding's speed. On a CPU a verified token "
    "reads all keys, so that longer texts leave less to gain: at e36ba1f, where two tokens of a "
    "block read them together and not up to eight, 4,000 tokens left 1.13 times and not 1.36 (15 "
    "questions and 12; that run was stopped)."
)

_DEFAULTS = (
    "The drafter of Qwen2.5-Coder-1.5B at 0ddd29f was trained by `domino train`'s defaults for "
    "400 s ([how](#drafters-by-the-commands-alone)), half of the packed sequences of 1024 tokens "
    "read as one text; its layers' window of 512 tokens is the default too. *Adaptive* drafts are "
    "trees where "
    "these pay, so that their acceptance length is above that of whole chains. The run ended "
    "there: whole chains behind 16,000 and 31,000 tokens and a window of all context "
    "(`--window 0`) are missing."
)


def drafts_chosen(record: Record) -> str:
    """Which drafts of a record's cycles were verified."""
    return "adaptive" if record.get("adaptive") else "all"


def same_text(record: Record) -> str:
    """Of the answers that count, how many are plain decoding's."""
    return f"{record['same_text']} of {record['used']}" if "same_text" in record else NONE


def by_run(records: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Records that were made together, together."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        runs.setdefault(str(record["environment"]), []).append(record)
    return list(runs.values())


_RATE = field("tokens_per_cycle", ".2f")


_ACCEPTANCE_REMARKS = {
    "e8ed220": "Of commit e8ed220 main6 is the present drafter and cpu8 the CPU drafter until "
    "851e768, before their window of 768 tokens was set, which such short conversations do not "
    "fill; cpu-a/drafter is cpu8's run with conversations apart (concatenate: 0); the other two "
    "were the released ones then.",
    "151b5f2f3e96": "Both drafters of commits 151b5f2f3e96 and 1ccc1d69aa2b, and the main one of "
    "de50c7613bf3, are those of 2026-11-15; the main one of 03565b9108b3 and 4ee82c9dc938 is that "
    "of the morning of 2026-11-18, that of 93dfc37 the next, trained on more answers.",
    "ca636f0d8341": "Commit ca636f0d8341 was rebased before it was merged, as 9342adcb398e; what "
    "lies between the two is of the server alone.",
    "1ccc1d69aa2b": "Commit 1ccc1d69aa2b was rebased before it was merged, as 9a259acf5588; what "
    "lies between the two is of training alone.",
}


def _acceptance(records: list[dict[str, Any]]) -> str:
    columns: Columns = {
        "drafter": field("drafter"),
        "set": field("set"),
        "T": field("protocol.temperature", "g"),
        "how": field("way"),
        "drafts": field("depth"),
        "head": lambda r: "on" if r["head"] else "off",
        "acceptance length": _RATE,
        "prompts used": lambda r: (
            f"{r['used']} ({r['loops']} loops, {r['short']} short, {r['too_long']} long)"
        ),
    }
    parts: list[str] = []
    for run in by_run(records):
        parts += [f"{run[0]['target']}. {made_together(run)}", table(columns, run)]
    return page(
        "## Acceptance length of the released drafters",
        "First turn of each prompt under 400 tokens, 256 new tokens, answers of at least 32 "
        "tokens, looping answers left out (fewer than half distinct 4-grams). The acceptance "
        "length is all committed tokens over all cycles, bonus tokens included, the prefill's "
        "token not; block size - 1 drafts. *Simulated* counts what greedy decoding would do from "
        "the target's own answers; *decoded* is the decoder itself. *held-out* are conversations "
        "that training did not see: the drafters' files state that figure, and `domino adapt` and "
        "`domino doctor` compare with it.",
        *remarks((record["environment"] for record in records), _ACCEPTANCE_REMARKS),
        *parts,
    )


def _looked_up(rates: dict[tuple[str, str], str], prompts: str, drafter: str) -> str:
    return rates[drafter, prompts]


def _storage(records: list[dict[str, Any]]) -> str:
    parts: list[str] = []
    for hardware in dict.fromkeys(r["environment"]["hardware"] for r in records):
        run = [r for r in records if r["environment"]["hardware"] == hardware]
        rates = {(r["drafter"], r["set"]): _RATE(r) for r in run}
        columns: Columns = {"main drafter stored as": str}
        for one in {r["set"]: r for r in run}.values():
            name = f"{one['set']}, {one['used']} prompts"
            columns[name] = partial(_looked_up, rates, one["set"])
        parts += [made(run), table(columns, list(dict.fromkeys(r["drafter"] for r in run)))]
    return page(
        "### What packing costs",
        "The same measurement, simulated. The main drafter of the morning of 2026-11-18 lost "
        "nothing to 6 bits on the first 16 prompts of a set; the present one, trained for longer, "
        "loses 5% on gsm8k and 1 to 2% elsewhere. In 8 bits it would be larger than the 24 MB it "
        "may take in this repository.",
        *parts,
    )


def _candidates(records: Path) -> str:
    before = read_records(records / "candidates.jsonl")
    found = {(r["drafter"], r["candidates"], r["head"]): _RATE(r) for r in before}
    columns: dict[str, Any] = {
        "main drafter before": str,
        "whole vocabulary": lambda drafter: found[drafter, None, True],
        "best 32 of the base logits": lambda drafter: found[drafter, 32, True],
        "head off": lambda drafter: found[drafter, None, False],
    }
    stages = {r["stage"]: r for r in read_records(records / "adapt.jsonl")}
    today = stages["base, drafter before"]
    by_set = today["acceptance_length"]

    def reached(way: str) -> Callable[[str], str]:
        return lambda name: f"{by_set[name][way]:.2f}"

    return page(
        "### With few candidates",
        "A rollout over the best candidates of the base logits is cheaper. Today's recipe keeps λ "
        "at 0.3, and the base logits keep their ranking: the main drafter, in bfloat16 before it "
        "was packed, on the first 64 prompts of each set (those used), simulated:",
        made_together([today]),
        table(
            {
                "set": lambda name: f"{name} ({today['answers'][name]['used']})",
                "whole vocabulary": reached("on"),
                "best 32 of the base logits": reached("candidates"),
                "head off": reached("off"),
            },
            SETS,
        ),
        f"In the main drafter before, on the first 16 prompts of gsm8k ({before[0]['used']} used), "
        "λ was 0 for most of the warm start, which forgot how to rank them; an average of the "
        "weights, 60% of the warm start and 40% of what it started from, was released then.",
        *map(made_together, by_run(before)),
        table(columns, dict.fromkeys(r["drafter"] for r in before)),
    )


def _release(records: Path) -> str:
    (refit,) = read_records(records / "refit.jsonl")
    runs = read_records(records / "release.jsonl")
    parts: list[str] = []
    for stage in by_run(runs):
        parts += [made_together(stage), table(_RELEASE, stage)]
    return page(
        "## The release runs",
        "Both released drafters are warm starts from those before them, the last two tables: on "
        "more answers, half of the packed sequences read as one text, the main one's last 30% with "
        "weights rounded to 6 bits. Those before were of one run each, from random weights by the "
        "recipe of 2026-11-17, each step a CUDA graph (the CPU drafter's 170 s were shared with "
        "another run, and its commit's code had the line that chose graphs mended, 6001d10). The "
        "first had two runs each, the first two tables: from random weights, then a warm start "
        "from the result, without its optimiser state. Seconds of the first two tables include "
        "compilation, and in their warm starts both drafters shared the card for the shorter run's "
        "time. *Right in a row* counts among the tokens that can be drafted, which flatters the "
        "CPU drafter's 8192. Held out: 24 prompts × 96 tokens in the first runs, 32 × 128 later; "
        "the CPU drafter's last two runs were not evaluated.",
        *parts,
        "Of the first main drafter: its first run's head output matrix was lost in transfer and "
        "fitted again on a CPU by `benchmarks.refit_output`, everything else frozen: that gave an "
        "acceptance length of "
        f"{refit['tokens_per_cycle']:.2f} on the run's own {refit['prompts']} held-out prompts, "
        "and is what the warm start began from. In its warm start λ was 0 for the last 70% of the "
        "run: the base logits alone (head off) fell while the whole drafter rose.",
    )


def _last(record: Record, name: str) -> str:
    return f"{record['curve'][-1][name]:.2f}" if record["curve"] else NONE


_RELEASE: Columns = {
    "run": field("name"),
    "start": lambda r: "warm" if "init" in r["settings"] else "random weights",
    "parameters": field("parameters", ".1f", "M", scale=1e-6),
    "steps": field("steps"),
    "seconds": field("training_seconds", ".0f"),
    "peak memory of the process": field("peak_memory_bytes", ".1f", " GiB", scale=2**-30),
    "right in a row, teacher forced": field("run_length", ".2f"),
    "acceptance length, held out": lambda r: _last(r, "tokens_per_cycle"),
    "head off": lambda r: _last(r, "tokens_per_cycle_head_off"),
}


def _steps(records: list[dict[str, Any]]) -> str:
    def gain(record: Record) -> str:
        return f"{record['conversations_per_second'] / PROTOTYPE[record['labels']]:.1f}×"

    columns: Columns = {
        "run": field("label"),
        "time per step": field("seconds_a_step", ".1f", " ms", scale=1e3),
        "conversations/s": field("conversations_per_second"),
        "over the prototype": gain,
    }
    return page(
        "## Training speed",
        "Steps 21 to 30 of a run that has the card to itself, 16 rows of 1,024 tokens with 160 "
        f"blocks each. The prototype reached {PROTOTYPE['soft']} conversations/s with soft labels "
        f"and {PROTOTYPE['hard']} with hard ones on the same card and about the same blocks per "
        "conversation (handed down, not a record here).",
        made_together(records),
        table(columns, records),
    )


def _profile(records: list[dict[str, Any]]) -> str:
    columns: Columns = {
        "target": field("target"),
        "labels": field("labels"),
        "rows × tokens": lambda r: f"{r['rows']} × {r['length']}",
        "blocks per row": field("anchors"),
        "tokens/s": field("tokens_per_second", ",.0f"),
        "peak memory": field("peak_memory_gib", ".1f", " GiB"),
        "share of peak FLOP/s": field("share_of_peak", ".0%"),
        "device time": lambda r: ", ".join(f"{k} {v:.0%}" for k, v in r["stage_share"].items()),
    }
    parts: list[str] = []
    for record in records:
        parts += [made_together([record]), table(columns, [record])]
    return page(
        "## Where a training step's time goes",
        "The speed includes the profiler's own time. The backward pass is the backbone's and the "
        "head's: the loss computes its gradients itself. The share of peak counts the matrix "
        "products a step needs against the card's dense bfloat16 peak. The first record is from "
        "before the loss was rewritten to pass over the logits twice instead of four times. At "
        "Qwen3-4B's shape the vocabulary is 151,936 and the drafter has 588M parameters.",
        *parts,
    )


def _flex(records: list[dict[str, Any]]) -> str:
    columns: Columns = {
        "layers": field("layers"),
        "dtype": field("dtype"),
        "dense, output": field("dense_output_error", ".1e"),
        "flex, output": field("flex_output_error", ".1e"),
        "dense, gradients": field("dense_gradient_error", ".1e"),
        "flex, gradients": field("flex_gradient_error", ".1e"),
    }
    return page(
        "## FlexAttention against the dense mask",
        "Packed rows in SmolLM2's shape; relative errors against the dense mask in float32 "
        "(outputs: the whole tensor; gradients: the worst parameter).",
        made_together(records),
        table(columns, records),
    )


# The recipe -------------------------------------------------------------------------------------


_WORDS = {
    "dense": None, "normscale": None, "gain": None, "vector": None,
    "floor": "λ {}", "pace": "D-PACE weights, α {}", "zero": "zero output matrices in each layer",
    "unscaled": "weights not scaled by their inputs' sizes",
}  # fmt: skip
"""What experimental settings of the first search meant; None: in all of its runs."""


_FOUND = {
    "smollm2": (
        "All runs with Muon, γ = 5, first logits a tenth of the target's, norms at ten times the "
        "learning rate; the first 32 prompts of each set. The ablations' Domino, trained for 55 s "
        "by the recipe before, reached 1.71 on held-out conversations (other 128) and "
        "1.98 / 1.77 / 1.59 on the sets. What won is the default now: rate 0.003, λ 0.3, scaled "
        "weights. D-PACE learns as much in a step and its steps take a tenth longer: not kept. The "
        "runs' code was the commit's with these changes; since then the first logits are smaller "
        "still where the mask's own would exceed 1, and scales have a floor. The runs with a "
        "softmax over a part of the vocabulary are of the landed recipe, on the first 48 prompts "
        "of each set. All of these runs were bound by the host, not by the GPU: half the sequences "
        "bring few more steps, and learn less. In the runs since 03565b9 a step is one CUDA graph, "
        "and the softmax has the default 12,288 tokens: 706 steps in the seconds of 484. Against "
        "it, in equal seconds, LK loss, hard labels and layers that start from the target's own "
        "all lose (`benchmarks/tried.py`)."
    ),
    "qwen2.5-coder-1.5b-instruct": (
        "A target that no part of the recipe was chosen on, with all defaults, trained on 36,270 "
        "of its own answers of at most 256 tokens: `domino data synth` made 8,000 prompts in 46 s "
        "and `domino data answer` answered these and 28,468 prompts of other data in 144 s, "
        "loading included, at temperatures of 0, 0.7 and 1. The first 48 prompts of each set. "
        "Before this recipe 390 s on a shared card gave Domino 1.51 and DFlash 1.69 on another "
        "mixture of the sets (handed down, not a record here). Steps of half the size learn more "
        "in 45 s; whether they do in longer runs is not known yet. The queue of plans that the "
        "command names fed `benchmarks.sweep` with `benchmarks/plans/head_to_head.yaml` and two "
        "runs of `recipe.yaml`. The drafters of 4545a6a (`contest.yaml` is `head_to_head.yaml` "
        "with what the short runs chose) were trained on 36,300 answers made anew in the same "
        "way. The short runs (`benchmarks/plans/rates.yaml`, on the first 6,400 answers) shared "
        "the card, so that their milliseconds do not compare. "
        "With Muon EAGLE-3 has 2.15 after 48 steps where AdamW has 1.13, so Muon is the default "
        "for every kind now. Markov's softmax was over all tokens, as Domino's and DFlash's were. "
        "EAGLE-3, one layer unrolled seven times, makes more than twice as many steps as Domino "
        "in 400 s, and has the longest acceptance length on held-out text, humaneval and "
        "mt-bench; which is faster is another matter ([head-to-head](head-to-head.md))."
    ),
}
"""What each target's runs were, and what follows from them."""


def recipe(records: Path) -> str:
    """The search for the recipe: equal seconds, by target."""
    runs = [r for r in read_records(records / "recipe.jsonl") if "acceptance_length" in r]
    targets = dict.fromkeys(map(recipe_target, runs))
    return page(
        "## The recipe",
        "The card to itself; seconds of training alone; acceptance lengths simulated on 64 "
        "held-out conversations and the first prompts of each set.",
        *(_recipe_of(name, [r for r in runs if recipe_target(r) == name]) for name in targets),
    )


def _recipe_of(target: str, runs: list[Record]) -> str:
    def what(record: Record) -> str:
        own = {**record["base"], **record["settings"]}
        if "x" not in own:
            return str(record["name"])
        found = [own.get("variant", "domino"), f"rate {own.get('learning_rate', 1e-3):g}"]
        words = {name: _WORDS[name] for name in own["x"]}
        found += [word.format(own["x"][name]) for name, word in words.items() if word]
        return ", ".join(found)

    def reached(prompts: str, way: str) -> Callable[[Record], str]:
        def cell(record: Record) -> str:
            value = record["acceptance_length"].get(prompts, {}).get(way)
            return "" if value is None else f"{value:.2f}"

        return cell

    columns: Columns = {
        "run": what,
        "seconds": lambda record: format(record["seconds"] or NONE),
        "steps": field("steps"),
        "ms per step": field("seconds_per_step", ".1f", scale=1e3),
        "held out": reached("held-out", "on"),
        "best 32 candidates": reached("held-out", "candidates"),
        "head off": reached("held-out", "off"),
        **{name: reached(name, "on") for name in SETS},
    }
    return page(
        f"### {target}",
        _FOUND.get(target, ""),
        made(runs),
        table(columns, runs),
    )


def other_families(runs: list[Record]) -> str:
    """Drafters for models that nothing was tuned on, by the commands alone."""

    def stage(index: int) -> Callable[[Record], str]:
        return lambda run: f"{run['stages'][index]['seconds']} s"

    def reached(temperature: str) -> Callable[[Record], str]:
        def cell(run: Record) -> str:
            found = run.get("held_out", {}).get(temperature)
            return f"{found['tokens_per_cycle']:.2f} ({found['used']})" if found else NONE

        return cell

    columns: Columns = {
        "target": field("target"),
        "prompts": stage(0),
        "answers": stage(1),
        "kept": lambda run: f"{run['stages'][1]['kept']:,}",
        "training, all of it": stage(2),
        "steps": field("steps", ","),
        "parameters": field("parameters", ".1f", "M", scale=1e-6),
        "held out, at the end of training": lambda run: (
            f"{run['curve'][-1]['tokens_per_cycle']:.2f}"
        ),
        "held out, T = 0": reached("0.0"),
        "T = 0.7": reached("0.7"),
    }
    return page(
        "## Drafters by the commands alone",
        "By `domino data synth`, `domino data answer` and `domino train`, with the options below "
        "and defaults for the rest; seconds of whole commands, with loading, compiling and "
        "evaluating. Gemma's is from nothing but the target; `prompts.jsonl` are 29,000 prompts of "
        "other data, and the answers to them and to the target's own were stopped after 133 s. "
        "In brackets, how many held-out conversations count: loops do not. A base model as small "
        "as Gemma 3 270M loops in most of its greedy answers, and what it writes before that is "
        "easily foretold, so its figure at T = 0 flatters; that at T = 0.7 is what to expect "
        "([speedups](head-to-head.md)).",
        "\n".join(f"- `{each['command']}`" for run in runs for each in run["stages"]),
        made(runs),
        table(columns, runs),
    )


def adapted(file: Path) -> str:
    """A fine-tune of the released drafters' target, and what adapting brings; empty: no record."""
    if not file.exists():
        return ""
    stages = {record["stage"]: record for record in read_records(file)}
    made_by, same = stages["fine-tune"], stages["texts"]
    adapt, train = stages["domino adapt"], stages["domino train"]
    runs: dict[str, tuple[str, Record | None]] = {
        "base, drafter before": ("released, on its own target", None),
        "fine-tune, drafter before": ("released, on the fine-tune", None),
        "fine-tune, drafter adapted": ("`domino adapt`", adapt),
        "fine-tune, drafter trained": ("`domino train` from random weights", train),
    }

    def trained(name: str, form: str) -> Callable[[str], str]:
        def cell(stage: str) -> str:
            run = runs[stage][1]
            return NONE if run is None else format(run[name], form)

        return cell

    def reached(name: str) -> Callable[[str], str]:
        def cell(stage: str) -> str:
            used = stages[stage]["answers"][name].get("used", 0)
            length = stages[stage]["acceptance_length"][name]["on"]
            return f"{length:.2f} ({used})" if used else NONE

        return cell

    names = stages["base, drafter before"]["acceptance_length"]
    columns: Columns = {
        "drafter": lambda stage: runs[stage][0],
        "training seconds": trained("seconds", ".0f"),
        "steps": trained("steps", ","),
        "epochs": trained("epochs", ","),
        **{_ASKED.get(name, name): reached(name) for name in names},
    }
    learnt, how = made_by["conversations"]["trained"], made_by["settings"]
    first, last = made_by["loss"]
    merged = same["as_adapter"]["merged"]
    return page(
        "## A drafter for a fine-tune",
        f"{made_by['target']}, fine-tuned by PEFT {made_by['peft']} in {made_by['seconds']:.0f} s "
        f"(LoRA of rank {how['rank']}, {how['steps']} steps of {how['batch']} of {learnt:,} "
        f"conversations, loss {first:.2f} to {last:.2f}: {', '.join(made_by['data'])}). The "
        f"adapter and the merged model write the same greedy text for {merged} of {same['texts']} "
        f"prompts on the engine, base model and fine-tune for {same['as_adapter']['base']}. "
        "`domino adapt` had the fine-tune make up prompts and answer them, and measured "
        f"{adapt['before']:.2f} before and {adapt['after']:.2f} after; all of it took "
        f"{adapt['wall_seconds']:.0f} s, loading and compiling included. Acceptance lengths below "
        "are simulated with each target's own greedy answers; in brackets, how many of them count: "
        "loops and answers under 32 tokens do not.",
        _best(train),
        *remarks((record["environment"] for record in stages.values()), _ADAPT_REMARKS),
        made(stages.values()),
        table(columns, runs),
    )


def _best(train: Record) -> str:
    """Where a run was at its best before its end."""
    best = max(train["curve"], key=lambda point: point["tokens_per_cycle"])
    if best["step"] == train["steps"]:
        return ""
    return (
        f"On its own held-out prompts the drafter from random weights was at its best, "
        f"{best['tokens_per_cycle']:.2f}, at step {best['step']:,}; it ended at "
        f"{train['after']:.2f}."
    )


_ADAPT_REMARKS = {
    "03565b9": "Both had 2,000 answers, which is few: adapting gains on the fine-tune's prompts "
    "and forgets others, and the drafter from random weights overfits. Since then `domino adapt` "
    "has 8,192 answers made on a GPU and ends after 8 epochs, and `domino train` warns of more "
    "than 16; what that brings is not measured yet."
}
_ASKED = {"held-out": "made-up prompts, held out", "fine-tune": "fine-tune's data, held out"}


# Ablations --------------------------------------------------------------------------------------


def ablations(records: Path) -> str:
    """One change at a time: equal seconds, then equal steps."""
    runs = {r["label"]: r for r in read_records(records / "ablations.jsonl")}
    domino = runs["domino"]
    seconds = domino["budget"]["seconds"]
    stepped = [domino, *(r for r in runs.values() if "steps_of" in r["budget"])]
    head = held_out(domino) / held_out(domino, "off") - 1
    return page(
        "# Ablations",
        f"The same pool of data; {seconds} seconds of the card each, one thing changed at a time; "
        "acceptance lengths simulated on 128 held-out conversations and the first 32 prompts of "
        "each set (loops and short answers left out). Step times were measured alone, then two "
        "runs at a time shared the card, each with the steps its seconds buy alone. *Head off* is "
        "the same drafter with its base logits only. These are short runs: a tenth of the release.",
        made_together(runs.values()),
        f"Equal seconds ({seconds}):",
        table(ablation_columns(domino), equal_seconds(runs.values())),
        "Equal steps:",
        table(ablation_columns(domino), stepped),
        "What the paper finds and what these runs find:",
        f"- the head: +20% there; here Domino is {change(domino, runs['dflash'])} over DFlash at "
        f"equal seconds, {change(domino, runs['dflash, steps of domino'])} at equal steps, and "
        f"{head:+.1%} over itself with the head off;\n"
        "- the Markov head, which sees one token back: Domino is "
        f"{change(domino, runs['markov'])} at equal seconds, "
        f"{change(domino, runs['markov, steps of domino'])} at equal steps;\n"
        f"- the curriculum: +6% there; here {change(domino, runs['no curriculum'])}: in so short a "
        "run the corrected logits get half the gradient they would have had.",
    )


def equal_seconds(records: Any) -> list[dict[str, Any]]:
    """The runs that had the same seconds."""
    return [record for record in records if "seconds" in record["budget"]]


def held_out(record: Record, head: str = "on") -> float:
    """Acceptance length on held-out conversations."""
    return float(record["tokens_per_cycle"]["held-out"][head])


def change(record: Record, other: Record) -> str:
    """How much longer the acceptance length is than another run's."""
    return f"{held_out(record) / held_out(other) - 1:+.1%}"


def ablation_columns(domino: Record) -> Columns:
    """A run's columns, held against Domino's."""

    def alone(record: Record) -> str:
        seconds = record["seconds_a_step_alone"]
        return f"{seconds * 1e3:.1f}" if seconds else ""

    def head_off(record: Record) -> str:
        scored = "off" in record["tokens_per_cycle"]["held-out"]
        return f"{held_out(record, 'off'):.2f}" if scored else ""

    return {
        "run": field("name"),
        "steps": field("steps"),
        "ms per step, alone": alone,
        "parameters": field("parameters", ".1f", "M", scale=1e-6),
        "held out": field("tokens_per_cycle.held-out.on", ".2f"),
        "head off": head_off,
        "against Domino": lambda r: "" if r is domino else change(r, domino),
        **{name: field(f"tokens_per_cycle.{name}.on", ".2f") for name in SETS},
    }
