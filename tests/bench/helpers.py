"""A run on the tiny pair whose drafter knows the target, and records made up for known answers."""

from __future__ import annotations

import json
from functools import cache

from domino_spec.bench.journal import Journal
from domino_spec.bench.paths import EnginePath, ReferencePath
from domino_spec.bench.runner import HeadToHead, recorded
from domino_spec.bench.settings import LLAMA_CPP, BenchSettings, Cell
from domino_spec.drafters import BlockDrafter, Drafter, PlainDecoding
from domino_spec.evaluation import PromptSet
from domino_spec.targets import Target
from tests.engine.runs import own
from tests.support.drafters import ScriptedDrafter
from tests.support.pair import SIZE, bigram_target, knowing_drafter

NEW = 12
DEPTH = 7
_KINDS = {"plain": "plain", LLAMA_CPP: LLAMA_CPP}
ONE_CELL = (Cell("maths", 0.0, 1),)


@cache
def _target() -> Target:
    return bigram_target()


def prompt_set(name="count", numbers=(0, 1, 2, 3, 4), too_long=0) -> PromptSet:
    prompts = tuple((1 + n, 5 + n, 9 + n)[: 1 + n % 3] for n in numbers)
    return PromptSet(name, prompts, tuple(numbers), too_long)


def knowing(*, name="knowing") -> Drafter:
    return BlockDrafter(knowing_drafter(shift=True, prefix=0), name=name)


def hopeless() -> Drafter:
    """A kind of one's own, known to the reference loop alone: it looks at the sequences."""
    drafter = ScriptedDrafter([[0]] * 99, depth=2, vocab=SIZE)
    drafter.name = "hopeless"
    return drafter


def make_run(
    engine="reference", *, methods=None, sets=None, temperatures=(0.0,), batches=(1,), against=(),
    **settings,
) -> HeadToHead:  # fmt: skip
    target = own(_target())
    methods = [PlainDecoding(), *(methods or [knowing()])]
    sets = sets or [prompt_set()]
    quick = {"max_new_tokens": NEW, "shortest_answer": 4, "repeats": 2}
    how = BenchSettings(
        target="bigram", engine=engine, temperature=temperatures, batch_size=batches,
        **{**quick, **settings},
    )  # fmt: skip
    if engine == "reference":
        runs_on = ReferencePath(target, eos=())
    else:
        longest = max(len(prompt) for found in sets for prompt in found.prompts)
        capacity = longest + how.max_new_tokens
        runs_on = EnginePath(target, methods, eos=(), slots=max(batches), capacity=capacity)
    return HeadToHead(
        settings=how,
        path=runs_on,
        methods=methods,
        prompts={found.name: found for found in sets},
        cells=how.cells([found.name for found in sets]),
        against=against,
    )


def facts(run: HeadToHead, **changes) -> dict:
    return {
        "settings": run.settings.recorded(),
        "target": {"name": "bigram", "dtype": "float32", "device": "cpu", "fingerprint": "b"},
        "methods": [recorded(method) for method in run.methods],
        **changes,
    }


def journal_of(run: HeadToHead, path, **changes) -> Journal:
    return Journal(path, facts(run, **changes))


def made_up(
    seconds: dict[str, list[float]],
    *,
    cells=ONE_CELL,
    tokens=100,
    cycles=None,
    loops=0,
    engine="reference",
) -> list[dict]:
    """Records of a run in which each method takes so many seconds for each unit of each cell."""
    environment = {
        "date": "2026-07-07", "commit": "0" * 12, "command": "domino bench TARGET",
        "hardware": "a made-up machine", "python": "3.11", "versions": {
            "torch": "2.13.0", "transformers": "5.22.2", "domino-spec": "0.1.0"},
    }  # fmt: skip
    common = {"key": "k" * 64, "environment": environment}
    methods = [
        {"name": name, "kind": _KINDS.get(name, "domino"), "fingerprint": name,
         "settings": {"by": "a", "version": "b", "threads": 1} if name == LLAMA_CPP else {},
         "nbytes": 0}
        for name in seconds
    ]  # fmt: skip
    settings = {**BenchSettings(target="made up").recorded(), "engine": engine}
    target = {"name": "made up", "dtype": "float32", "device": "cpu", "fingerprint": "f"}
    head = {"settings": settings, "target": target, "methods": methods}
    records = [{"record": "run", "facts": head, **common}]
    for cell in cells:
        count = len(seconds["plain"])
        records.append({
            "record": "cell", "cell": vars(cell), "prompts_digest": "p", "outcomes": {},
            "units": [[n] for n in range(count)], "used": count, "loops": loops, "short": 0,
            "too_long": 0, "left_over": 0, **common,
        })  # fmt: skip
        for unit in range(count):
            found = {
                name: _method(spent[unit], tokens, (cycles or {}).get(name, tokens))
                for name, spent in seconds.items()
            }
            records.append({
                "record": "unit", "cell": vars(cell), "unit": unit, "prompts": [unit],
                "prompt_tokens": [10], "order": [list(seconds)], "methods": found, **common,
            })  # fmt: skip
    return json.loads(json.dumps(records))


def _method(seconds: float, tokens: int, cycles: int) -> dict:
    drafts = 0 if cycles == tokens else 3
    return {
        "seconds": [seconds], "prefill": [0.0], "draft": [0.25 * seconds if drafts else 0.0],
        "verify": [0.5 * seconds], "cycles": cycles, "peak_memory": 2**30, "repeats_agree": True,
        "rows": [{
            "tokens": tokens, "sha256": "s", "finish": "length", "cycles": cycles,
            "committed": tokens, "offered": [cycles] * drafts,
            "accepted": [cycles * (3 - i) // 4 for i in range(drafts)], "differs_at": None,
            "compared": True,
        }],
    }  # fmt: skip
