"""What is said of a run beforehand and while it trains, and that it follows from the records."""

import json
import math
from dataclasses import replace

import pytest
from benchmarks import forecast, make_results

from domino_spec.training import train
from domino_spec.training.forecast import (
    FIT,
    FIT_FILE,
    REFERENCE,
    Forecast,
    expected_at_end,
    expected_from_records,
)
from tests.training.helpers import Reports, ready

RECORDS = make_results.RECORDS


def grown(share, *, end=1.5, growth=0.3):
    """Drafts accepted per cycle, by the law."""
    return end * (1 + growth * math.log(share))


def test_constants_and_table_follow_from_the_records():
    for path, text in make_results.forecast_files().items():
        assert path.read_text(encoding="utf-8") == text, f"`make results` writes {path.name} anew"
    assert forecast.errors_table(RECORDS) in make_results.GUIDE.read_text(encoding="utf-8")
    assert json.loads(FIT_FILE.read_text())["growth"] == FIT.growth


def test_a_table_is_replaced_where_it_stands():
    table = forecast.errors_table(RECORDS)
    old = "\n".join([*table.splitlines()[:2], "| 1% | 1 | 1% | 1% |"])
    assert forecast.with_table(f"before\n\n{old}\n\nafter\n", RECORDS) == (
        f"before\n\n{table}\n\nafter\n"
    )


def test_the_end_of_a_curve_that_grows_with_the_logarithm():
    fit = replace(FIT, growth=0.3, errors=[(0.2, 0.1), (0.5, 0.05)])
    assert expected_at_end(1 + grown(0.19), 0.19, fit) is None, "too early"
    for share, error in ((0.2, 0.1), (0.45, 0.1), (0.5, 0.05), (0.99, 0.05)):
        low, high = expected_at_end(1 + grown(share), share, fit)
        assert (low, high) == pytest.approx((2.5 * (1 - error), 2.5 * (1 + error)), abs=1e-3)
    assert expected_at_end(2.5, 1.0, fit) is None, "nothing to foretell"
    assert expected_at_end(1.01, 0.2, replace(fit, growth=0.9)) is None
    assert expected_at_end(1.0, 0.0, replace(fit, errors=[(0.0, 0.1)])) is None
    assert expected_at_end(1.0, 0.3, fit)[0] == 1.0, "never less than a token a cycle"


def test_a_fit_finds_the_growth_it_was_made_with():
    reports = [{"step": s, "tokens_per_cycle": 1 + grown(s / 100)} for s in range(10, 101, 10)]
    curve = forecast.curve([{"step": 6, "seconds_left": 9.0}, *reports])
    assert curve.growth() == pytest.approx(0.3)
    assert curve.errors(0.3) == pytest.approx([0] * len(forecast.MARKS), abs=1e-3)
    assert min(curve.errors(0.4)) > 0.05
    assert forecast.curve(reports[-1:]) is None, "an end alone is no curve"
    assert forecast.curve([*reports[:-1], {"step": 100}]) is None, "without its end neither"


def test_the_records_bear_the_estimates_out():
    """From where they are told, half of them are within a tenth."""
    told = [share for share, _ in FIT.errors]
    assert told, "some part of a run can be foretold"
    for mark, errors in zip(forecast.MARKS, forecast.judged(RECORDS), strict=True):
        assert mark not in told or sorted(map(abs, errors))[len(errors) // 2] < 0.1


def test_runs_on_record_reached_what_is_expected_of_runs_as_long():
    for run in forecast.recipe_runs(RECORDS):
        low, high = expected_from_records(forecast.tokens(run))
        assert low - 0.01 <= run["acceptance_length"]["held-out"]["on"] <= high + 0.01
    fewest, most = FIT.tokens
    assert expected_from_records(fewest / 2.1) is expected_from_records(most * 2.1) is None
    short, long = expected_from_records(fewest), expected_from_records(most * 2)
    assert all(a < b for a, b in zip(short, long, strict=True)), "more tokens, more drafts"
    fit = replace(FIT, exponent=0.5, drafts=(1.0, 1.5), tokens=(REFERENCE, REFERENCE))
    assert expected_from_records(REFERENCE * 1.44, fit) == [2.2, 2.8]


def test_tokens_of_a_record_follow_from_its_settings():
    run = {"steps": 10, "base": {"length": 512}, "settings": {}}
    assert forecast.tokens(run) == 10 * 32 * 512
    assert forecast.tokens({**run, "settings": {"rows": 2, "accumulate": 3}}) == 10 * 2 * 512 * 3


FORECAST = Forecast(
    tokens_per_step=16384, steps_per_epoch=200.0, recorded_shape=True, from_scratch=True
)


def test_a_plan():
    plan = FORECAST.plan(500)
    assert (plan["steps"], plan["tokens"], plan["epochs"]) == (500, 8_192_000, 2.5)
    assert plan["expected_tokens_per_cycle"] == expected_from_records(8_192_000)
    assert plan["expected_from"].startswith(f"{FIT.runs} runs on record, ")
    for other in ({"recorded_shape": False}, {"from_scratch": False}):
        assert replace(FORECAST, **other).plan(500)["expected_tokens_per_cycle"] is None
    short = FORECAST.plan(5)
    assert short["expected_tokens_per_cycle"] is short["expected_from"] is None
    assert FORECAST.at_end(2.0, 0.6) == {"expected_tokens_per_cycle": expected_at_end(2.0, 0.6)}
    assert replace(FORECAST, from_scratch=False).at_end(2.0, 0.6) == {}


def test_a_run_says_what_to_expect_of_it(tmp_path, corpus, loaded):
    measured = Reports()
    run = ready(tmp_path / "a", corpus, loaded, measured, steps=10, eval_every=1, save_every=0)
    run.trainer._evaluate = lambda: {"tokens_per_cycle": 1.5}
    assert run.trainer.forecast.tokens_per_step == 2 * 64
    train(run)
    told = {step: v.get("expected_tokens_per_cycle") for step, v in measured.evaluated}
    assert told == {s: expected_at_end(1.5, s / 10) for s in range(1, 11)}
    assert all("expected_tokens_per_cycle" not in values for _, values in measured.trained)
