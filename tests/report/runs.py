"""Records made up for the page: two drafters, three tasks, two temperatures, three batch sizes."""

from __future__ import annotations

import json
import random

from domino_spec.bench.settings import Cell
from tests.bench.helpers import made_up

TASKS = ("maths", "code", "chat")
GOOD, BAD = "good", "a-drafter-with-a-name-too-long-for-any-phone"
EVIL = "<img src=x onerror=alert(1)> & 'co'"


def records(*, evil: bool = False) -> list[dict]:
    rng = random.Random(0)
    cells = [Cell(t, heat, b) for t in TASKS for heat in (0.0, 0.7) for b in (1, 4, 16)]
    bad = EVIL if evil else BAD
    seconds = {"plain": [2.0] * 8, GOOD: [1.0] * 8, bad: [2.0] * 8}
    made = made_up(seconds, cells=cells, cycles={GOOD: 25, bad: 60}, loops=2)
    shares = {"maths": 0.9, "code": 0.7, "chat": 1.2}
    for record in made:
        if record["record"] != "unit":
            continue
        batch = record["cell"]["batch_size"]
        for name, found in record["methods"].items():
            slower = 1.0 if name == "plain" else shares[record["cell"]["task"]] * batch**0.35
            spread = rng.uniform(0.9, 1.1)
            for column in ("seconds", "prefill", "draft", "verify"):
                found[column] = [value * slower * spread / batch for value in found[column]]
    return made


def write(path, **options):
    path.write_text("".join(json.dumps(r) + "\n" for r in records(**options)), encoding="utf-8")
    return path
