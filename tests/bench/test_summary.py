"""From made-up records to figures that are known."""

import pytest

from domino_spec.bench.settings import Cell
from domino_spec.bench.summary import summarise
from domino_spec.bench.tables import HEADS, markdown
from tests.bench.helpers import made_up

SECONDS = {"plain": [2.0] * 6, "fast": [1.0] * 6, "slow": [4.0, 2.2, 2.1, 2.4, 2.3, 3.0]}


def test_figures_of_a_cell():
    (run,) = summarise(made_up(SECONDS, cycles={"fast": 25}, loops=3))
    (cell,) = run.cells
    fast, slow = cell.line("fast"), cell.line("slow")
    assert fast.speed_up.value == fast.speed_up.low == fast.speed_up.high == 2.0
    assert slow.speed_up.value == pytest.approx(12 / 16)
    assert slow.speed_up.verdict == -1
    assert fast.tokens_per_cycle.value == 4.0
    assert fast.tokens_per_second == pytest.approx(100.0)
    assert fast.counts.acceptance_by_position == pytest.approx([18 / 25, 12 / 25, 6 / 25])
    assert fast.cycle.total == pytest.approx(40.0)  # 1 s over 25 cycles, in ms
    assert (fast.cycle.draft, fast.cycle.verify) == pytest.approx((10.0, 20.0))
    assert cell.loops == 3
    assert run.overall == ()


def test_our_methods_are_also_compared_with_another_implementation():
    records = made_up({"plain": [2.0] * 6, "fast": [1.0] * 6, "llama.cpp": [1.6] * 6})
    for record in records:
        if record["record"] == "unit":
            record["methods"]["llama.cpp"]["prefill"] = [0.6]
    (run,) = summarise(records)
    (cell,) = run.cells
    speedup, decoding = cell.line("fast").over["llama.cpp"]
    assert speedup.value == speedup.low == pytest.approx(1.6)
    assert decoding.value == pytest.approx(1.0)
    assert cell.line("plain").over["llama.cpp"][0].value == pytest.approx(0.8)
    assert cell.line("llama.cpp").over == {}
    assert cell.line("llama.cpp").speed_up.value == pytest.approx(1.25)
    fast = "| maths | 0 | 1 | fast | llama.cpp | 1.60× | 1.00× |"
    assert fast in markdown([run])


def test_repeats_count_by_their_median():
    records = made_up({"plain": [2.0] * 6, "fast": [1.0] * 6})
    for record in records:
        if record["record"] == "unit":
            for found in record["methods"].values():
                for name in ("seconds", "prefill", "draft", "verify"):
                    found[name] = [found[name][0], 100.0 * found[name][0], found[name][0]]
    assert summarise(records)[0].cells[0].line("fast").speed_up.value == 2.0


def test_answers_of_other_lengths_compare_by_speed_not_by_time():
    records = made_up({"plain": [2.0] * 6, "fast": [1.0] * 6})
    for record in records:
        if record["record"] == "unit":
            record["methods"]["fast"]["rows"][0]["tokens"] = 50  # half the text in half the time
    assert summarise(records)[0].cells[0].line("fast").speed_up.value == pytest.approx(1.0)


def test_tasks_together_are_a_geometric_mean():
    cells = (Cell("maths", 0.0, 1), Cell("chat", 0.0, 1))
    records = made_up({"plain": [2.0] * 6, "fast": [1.0] * 6}, cells=cells)
    for record in records:
        if record.get("cell") == vars(cells[1]) and record["record"] == "unit":
            record["methods"]["fast"]["seconds"] = [0.25]
    (run,) = summarise(records)
    (together,) = run.overall
    assert together.line("fast").speed_up.value == pytest.approx(4.0)  # of 2 and 8
    assert together.units == 12
    assert [summary.cell.task for summary in run.at(0.0, 1)] == ["maths", "chat", "all tasks"]


def test_the_tables_say_what_the_records_say():
    text = markdown(summarise(made_up(SECONDS, cycles={"fast": 25}, loops=3)))
    assert "| " + " | ".join(HEADS) + " |" in text
    assert "| maths | 0 | 1 | fast | 2.00× | 2.00× | 4.00 | 100.0 | 6 of 6 |" in text
    assert "| maths | 0 | 1 | plain | 1.00× | 1.00× | 1.00 | 50.0 | – |" in text
    assert "| maths | 0 | 1 | 6 | 3 | 0 | 0 | 0 |" in text
    slow = next(line for line in text.splitlines() if "| 1 | slow" in line)
    assert "0.75× (0." in slow  # with its interval
    for words in (
        "made up, float32 on cpu",
        "the reference loop",
        "a made-up machine",
        "median of",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("fast", "all methods on the engine (plain: the same engine without a drafter"),
        ("lean", "all methods on the reference loop over the engine's forward (plain: the same"),
        ("reference", "all methods on the reference loop through Transformers (plain: the same"),
    ],
)
def test_the_tables_say_what_ran(engine, words):
    assert words in markdown(summarise(made_up(SECONDS, engine=engine)))
