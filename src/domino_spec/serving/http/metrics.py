"""The worker's and the guard's events as Prometheus' numbers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from domino_spec.decoding import SequenceOutput

_METHODS = frozenset({"GET", "POST"})
_WAIT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_A_CYCLE = (*range(1, 9), 10, 12, 16, 24, 32)


class PrometheusMeter:
    """A `Meter` for the worker and a counter for the guard, in a registry of its own."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._waiting = Gauge(
            "domino_answers_waiting", "Answers that wait for a slot", registry=registry
        )
        self._running = Gauge("domino_answers_running", "Answers in slots", registry=registry)
        self._slots = Gauge("domino_slots", "Answers that can run at once", registry=registry)
        self._tokens = Counter(
            "domino_tokens",
            "Committed tokens: accepted drafts, and the target's own",
            ["kind"],
            registry=registry,
        )
        self._cycles = Counter(
            "domino_cycles", "Blocks committed behind a prompt's first token", registry=registry
        )
        self._a_cycle = Histogram(
            "domino_tokens_per_cycle",
            "Tokens committed in a cycle; plain decoding commits one",
            buckets=_A_CYCLE,
            registry=registry,
        )
        self._offered = Counter(
            "domino_drafts_offered", "Drafts verified", ["position"], registry=registry
        )
        self._accepted = Counter(
            "domino_drafts_accepted", "Drafts accepted", ["position"], registry=registry
        )
        self._first = Histogram(
            "domino_time_to_first_token_seconds",
            "From an answer's being asked for to its first token",
            buckets=_WAIT,
            registry=registry,
        )
        self._between = Histogram(
            "domino_inter_token_seconds",
            "Time a token: a block's, shared among its tokens",
            buckets=_BETWEEN,
            registry=registry,
        )
        self._whole = Histogram(
            "domino_answer_seconds",
            "From an answer's being asked for to its end",
            buckets=_WHOLE,
            registry=registry,
        )
        self._ended = Counter(
            "domino_answers_ended", "Answers that are over", ["reason"], registry=registry
        )
        self._responses = Counter(
            "domino_http_responses",
            "HTTP responses; 499 are clients that hung up",
            ["method", "path", "status"],
            registry=registry,
        )
        self._took = Histogram(
            "domino_http_request_seconds",
            "From a request to the end of its response",
            ["path"],
            buckets=_WHOLE,
            registry=registry,
        )
        for kind in ("accepted", "own"):  # a rate needs a zero to begin with
            self._tokens.labels(kind)
        for reason in ("eos", "stop", "length", "cancelled", "failed"):
            self._ended.labels(reason)

    def queue(self, *, waiting: int, running: int, slots: int) -> None:
        """How full it is."""
        self._waiting.set(waiting)
        self._running.set(running)
        self._slots.set(slots)

    def first_token(self, seconds: float) -> None:
        """The prompt's, for which no draft competed."""
        self._first.observe(seconds)
        self._tokens.labels("own").inc()

    def block(self, output: SequenceOutput, *, seconds: float) -> None:
        """A cycle of one answer."""
        count = len(output.tokens)
        self._cycles.inc()
        self._a_cycle.observe(count)
        self._tokens.labels("accepted").inc(output.accepted)
        self._tokens.labels("own").inc(count - output.accepted)
        for position in range(output.drafts):
            self._offered.labels(str(position)).inc()
            self._accepted.labels(str(position)).inc(position < output.accepted)
        for _ in output.tokens:
            self._between.observe(seconds / count)

    def ended(self, reason: str, *, seconds: float) -> None:
        """An answer is over."""
        self._ended.labels(reason).inc()
        self._whole.observe(seconds)

    def response(self, *, method: str, path: str, status: int, seconds: float) -> None:
        """A response is out; paths and methods nobody serves are one."""
        path = path or "other"
        method = method if method in _METHODS else "other"
        self._responses.labels(method, path, str(status)).inc()
        self._took.labels(path).observe(seconds)

    def page(self) -> bytes:
        """All numbers, as Prometheus reads them."""
        return generate_latest(self._registry)
