"""Records made up for the page: two drafters, three tasks, two temperatures, three batch sizes.

And a load: two sides at three concurrencies.
"""

from __future__ import annotations

import json
import random

from domino_spec.bench.settings import Cell
from tests.bench.helpers import made_up
from tests.load.made_up import two_sides

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


def load(*, names=("drafts", "plain"), evil: bool = False, **others) -> list[dict]:
    """Each side takes longer the more requests there are; the second takes twice as long."""
    if evil:
        names = (EVIL, "plain")
    found: list[dict] = []
    for concurrency in (1, 8, 32):
        seconds = [(spread * concurrency, 2 * spread * concurrency) for spread in (0.9, 1, 1.1)] * 2
        made = two_sides(seconds, names=names, **{"concurrency": concurrency, **others})
        found += made[1:] if found else made
    if evil:
        found[0]["sides"][0] |= {"model": EVIL, "url": EVIL, "body": {EVIL: EVIL}}
        found[0]["environment"] = dict.fromkeys(found[0]["environment"], EVIL) | {"versions": {}}
    return found


def write(path, made=None, **options):
    made = records(**options) if made is None else made
    path.write_text("".join(json.dumps(r) + "\n" for r in made), encoding="utf-8")
    return path
