"""Figures from records whose answers are known."""

import pytest

from domino_spec.errors import InputError
from domino_spec.load.summary import Quantiles, inter_token, latency, summarise, tpot, ttft
from domino_spec.load.tables import caveats, tables
from tests.load.made_up import facts, request_record, round_record, two_sides


def test_no_quantile_without_a_sample_beyond_it():
    found = Quantiles.of([float(i) for i in range(1, 101)])
    assert (found.samples, found.mean, found.p50, found.largest) == (100, 50.5, 50.5, 100.0)
    assert found.p95 == pytest.approx(95.05)
    assert found.p99 == pytest.approx(99.01)
    few = Quantiles.of([1.0] * 99)
    assert (few.p95, few.p99) == (1.0, None)
    fewer = Quantiles.of([1.0, 2.0] * 5)
    assert (fewer.p50, fewer.p95, fewer.p99) == (1.5, None, None)
    assert Quantiles.of([]) is None


def test_a_chunks_gap_is_shared_by_its_tokens():
    record = request_record(chunks=[1.0, 1.6, 2.0], chunk_tokens=[1, 3, 2], tokens=6)
    assert inter_token(record) == pytest.approx([0.2, 0.2, 0.2, 0.2, 0.2])
    assert tpot(record) == pytest.approx([0.2])
    silent = request_record(chunks=[1.0, 1.6, 2.0], tokens=6)
    assert inter_token(silent) == []
    assert tpot(silent) == pytest.approx([1.0 / 5])
    assert tpot(request_record(chunks=[1.0], tokens=6)) == []


def test_times_count_from_when_a_request_was_due():
    """A client that sends late would otherwise hide how long its requests waited."""
    record = request_record(scheduled=0.2, sent=0.9, chunks=[1.0, 1.5], ended=1.6)
    assert ttft(record) == pytest.approx([0.8])
    assert latency(record) == pytest.approx([1.4])
    assert ttft(request_record()) == []


def test_full_tokens_are_those_that_arrived_in_the_window():
    requests = [
        request_record(index=0, sent=0.0, ended=4.0, chunks=[1.0, 2.0, 3.0, 4.0], tokens=8),
        request_record(index=1, sent=1.0, ended=6.0, chunks=[2.0, 6.0], chunk_tokens=[1, 9],
                       tokens=10),
    ]  # fmt: skip
    (run,) = summarise([facts(), *requests, round_record(requests, seconds=6.0)])
    (side,) = run.cells[0].sides
    # Both are under way from 1 to 4 seconds: chunks at 2, 3 and 4 of the first, at 2 of the second.
    assert side.full_tokens_per_second == pytest.approx((3 * 2 + 1) / 3)
    assert side.tokens_per_second == pytest.approx(18 / 6)


def test_errors_are_counted_by_class_and_apart_from_what_was_measured():
    requests = [
        request_record(index=0, ended=2.0, chunks=[1.0, 2.0], tokens=4, accepted=3),
        request_record(index=1, ended=0.5, error="busy", status=429, retry_after="3"),
        request_record(index=2, ended=0.5, error="busy", status=429, retry_after="3"),
        request_record(index=3, ended=4.0, error="broken stream", chunks=[1.0, 3.0], tokens=None),
        request_record(index=4, ended=9.0, error="interrupted"),
    ]
    (run,) = summarise([facts(), *requests, round_record(requests, complete=False)])
    (side,) = run.cells[0].sides
    assert side.errors == {"broken stream": 1, "busy": 2}
    assert (side.requests, side.completed, side.interrupted, side.tokens) == (5, 1, 1, 4)
    assert side.times["latency"].samples == 1
    assert side.tokens_per_second == pytest.approx(4 / 4.0)  # not until the interruption
    assert side.full_tokens_per_second is None
    shown = tables(run)[0].lines[0]
    assert (*shown[2:4], shown[7]) == ("1 of 4", "2 busy, 1 broken stream", "75%")
    assert any("1 requests were in flight" in caveat for caveat in caveats(run))


def test_goodput_counts_answers_that_keep_every_goal():
    requests = [
        request_record(index=0, ended=2.0, chunks=[0.4, 2.0], tokens=5),
        request_record(index=1, ended=2.0, chunks=[0.6, 2.0], tokens=5),  # first token too late
        request_record(index=2, ended=4.0, chunks=[0.4, 4.0], tokens=5),  # the rest too slow
        request_record(index=3, ended=0.1, error="busy"),
    ]
    goals = {"first_token_goal": 0.5, "token_goal": 0.5}
    (run,) = summarise([facts(**goals), *requests, round_record(requests)])
    (side,) = run.cells[0].sides
    assert side.goodput == pytest.approx(1 / 4)
    assert side.requests_per_second == pytest.approx(3 / 4)
    assert tables(run)[0].heads[-1] == "goodput, req/s"
    assert tables(run)[0].lines[0][-1] == "0.25"
    (without,) = summarise([facts(), *requests, round_record(requests)])
    assert without.cells[0].sides[0].goodput is None
    assert "goodput, req/s" not in tables(without)[0].heads


def test_ratios_have_intervals_over_rounds():
    seconds = [1.0, 1.2, 0.8, 1.0, 1.1, 0.9]
    (run,) = summarise(two_sides([(s, 2 * s) for s in seconds]))
    found = run.cells[0].comparison
    for ratio in (found.tokens_per_second, found.requests_per_second):
        assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    assert found.latency.value == pytest.approx(0.5)
    assert found.first_token.value == pytest.approx(0.5)
    (noisy,) = summarise(two_sides([(1.0, 1.0), (1.0, 3.0)] * 3))
    ratio = noisy.cells[0].comparison.tokens_per_second
    assert ratio.value == pytest.approx(2.0)
    assert 1.0 <= ratio.low < 2.0 < ratio.high <= 3.0
    assert tables(noisy)[2].lines[0][1].startswith("2.00× (")


def test_only_rounds_that_both_sides_finished_are_compared():
    records = two_sides([(1.0, 2.0)] * 6)
    ended = next(r for r in records if r["kind"] == "round" and r["round"] == 5)
    ended["complete"] = False
    (run,) = summarise(records)
    assert run.cells[0].comparison.rounds == 5


def test_a_round_without_answers_takes_the_interval_away_not_the_ratio():
    records = two_sides([(1.0, 2.0)] * 6)
    for record in records:
        if record["kind"] == "request" and record["side"] == "two" and record["round"] == 0:
            record["error"] = "HTTP 500"
    (run,) = summarise(records)
    found = run.cells[0].comparison.tokens_per_second
    assert found.value == pytest.approx(2.0 * 6 / 5)
    assert found.low is None
    for record in records:
        if record["kind"] == "request" and record["side"] == "two":
            record["error"] = "HTTP 500"
    (run,) = summarise(records)
    assert run.cells[0].comparison.tokens_per_second is None
    assert tables(run)[2].lines[0][1:] == ["–"] * 6


def test_caveats_about_a_busy_client_and_guessed_tokens():
    requests = [request_record(ended=2.0, chunks=[1.0, 2.0], tokens=None)]
    (run,) = summarise([facts(), *requests, round_record(requests, client_busy=0.93)])
    said = " ".join(caveats(run))
    assert "used 93% of a core" in said
    assert "a chunk counts as one" in said
    assert "have no ITL" in said
    requests = [request_record(ended=2.0, chunks=[1.0, 2.0], chunk_tokens=[1, 1], tokens=2)]
    (run,) = summarise([facts(), *requests, round_record(requests)])
    assert caveats(run) == []
    assert [line[2] for line in tables(run)[1].lines] == [
        "TTFT", "TPOT", "ITL", "inter-chunk", "E2E latency",
    ]  # fmt: skip


def test_warm_up_is_on_record_but_in_no_figure():
    requests = [request_record(ended=2.0, chunks=[1.0, 2.0], tokens=2)]
    warm = [{**r, "warm_up": True, "round": -1} for r in requests]
    (run,) = summarise([facts(), *warm, *requests, round_record(requests)])
    assert run.cells[0].sides[0].requests == 1


def test_a_line_without_its_run_is_refused():
    with pytest.raises(InputError, match="comes before its run"):
        summarise([request_record()])
