"""Prometheus metrics of the engine and of HTTP."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from domino_spec.decoding import Sequence, SequenceOutput

_METHODS = frozenset({"GET", "POST"})
_FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_INTER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_CYCLE = (*range(1, 9), 10, 12, 16, 24, 32)
_REASONS = ("eos", "stop", "length", "cancelled", "failed")


class _Buckets:
    """A histogram that is cheap to add to: prometheus_client's takes a lock and walks buckets."""

    def __init__(self, name: str, text: str, bounds: Iterable[float]) -> None:
        self._name, self._text, self._bounds = name, text, tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Metric:
        below, buckets = 0, []
        for bound, count in zip((*map(float, self._bounds), "+Inf"), self._counts, strict=True):
            below += count
            buckets.append((str(bound), below))
        return HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class Metrics:
    """All numbers of one server, in a registry of their own.

    Numbers of sequences are written by the engine's thread alone and are plain sums, because they
    are on the way of every token; they become Prometheus' families when they are read.
    """

    media_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._waiting = self._running = self._slots = 0
        self._cache_usage = 0.0
        self._accepted_tokens = self._own_tokens = 0
        self._cycles: Tally[int] = Tally()
        """Cycles by how many drafts they verified."""
        self._accepted: Tally[int] = Tally()
        """Cycles by how many drafts they accepted."""
        self._finished = Tally(dict.fromkeys(_REASONS, 0))
        self._tokens_per_cycle, self._first, self._inter, self._whole = self._histograms = (
            _Buckets("domino_tokens_per_cycle", "Tokens committed in a cycle; 1 without drafts",
                     _CYCLE),
            _Buckets("domino_time_to_first_token_seconds",
                     "From a request's entering the queue to its first token", _FIRST_TOKEN),
            _Buckets("domino_inter_token_seconds",
                     "Time per token: a cycle's, shared among its tokens", _INTER_TOKEN),
            _Buckets("domino_answer_seconds", "From a request's entering the queue to its end",
                     _WHOLE),
        )  # fmt: skip
        self._registry.register(self)
        self._responses = Counter(
            "domino_http_responses",
            "HTTP responses; 499 are clients that disconnected",
            ["method", "path", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "domino_http_request_seconds",
            "From a request to the end of its response",
            ["path"],
            buckets=_WHOLE,
            registry=self._registry,
        )

    def set_queue(self, *, waiting: int, running: int, slots: int, cache_usage: float) -> None:
        """How full the engine is."""
        self._waiting, self._running, self._slots = waiting, running, slots
        self._cache_usage = cache_usage

    def observe_output(self, output: SequenceOutput, *, now: float) -> None:
        """The tokens of one step and sequence; cycle 0 is the prefill's."""
        sequence, count = output.sequence, len(output.tokens)
        self._accepted_tokens += output.accepted
        self._own_tokens += count - output.accepted
        if output.cycle == 0:
            self._first.add(now - sequence.arrived)
            return
        self._cycles[output.drafts] += 1
        self._accepted[output.accepted] += 1
        self._tokens_per_cycle.add(count)
        if count:
            self._inter.add((now - sequence.last_output) / count, count)

    def observe_finished(self, sequence: Sequence, reason: str) -> None:
        """A sequence ended: `eos`, `stop`, `length`, `cancelled` or `failed`."""
        self._finished[reason] += 1
        self._whole.add(time.perf_counter() - sequence.arrived)

    def observe_response(self, *, method: str, path: str, status: int, seconds: float) -> None:
        """An HTTP response; paths and methods that are not served are one."""
        path = path or "other"
        method = method if method in _METHODS else "other"
        self._responses.labels(method, path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """The engine's numbers, for the registry."""
        gauges = {
            "domino_answers_waiting": ("Sequences that wait for a slot", self._waiting),
            "domino_answers_running": ("Sequences in slots", self._running),
            "domino_slots": ("Sequences that can run at a time", self._slots),
            "domino_cache_usage": ("Share of the caches that sequences hold", self._cache_usage),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value)
        tokens = {"accepted": self._accepted_tokens, "own": self._own_tokens}
        yield _counter(
            "domino_tokens", "Committed tokens: accepted drafts, the target's own", "kind", tokens
        )
        cycles, accepted = dict(self._cycles), dict(self._accepted)
        total = sum(cycles.values())
        yield CounterMetricFamily("domino_cycles", "Cycles of sequences, prefills not", total)
        depth = range(max(cycles, default=0))
        found = {str(p): sum(n for d, n in cycles.items() if d > p) for p in depth}
        yield _counter("domino_drafts_offered", "Drafts verified", "position", found)
        found = {str(p): sum(n for a, n in accepted.items() if a > p) for p in depth}
        yield _counter("domino_drafts_accepted", "Drafts accepted", "position", found)
        yield from (histogram.collect() for histogram in self._histograms)
        yield _counter("domino_answers_ended", "Sequences that ended", "reason", self._finished)

    def render(self) -> bytes:
        """All numbers, as Prometheus reads them."""
        return generate_latest(self._registry)


def _counter(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
