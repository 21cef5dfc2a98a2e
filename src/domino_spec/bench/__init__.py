"""The head-to-head: methods against plain decoding on the same path, raw records and figures."""

from domino_spec.bench.journal import Journal
from domino_spec.bench.methods import open_drafters, recorded
from domino_spec.bench.runner import HeadToHead, Request, Watcher, measure, run_request
from domino_spec.bench.settings import Cell, Settings, plan_cells
from domino_spec.bench.summary import CellSummary, Line, RunSummary, read_runs, summarise
from domino_spec.bench.tables import markdown
from domino_spec.bench.tasks import BUILT_IN, read_tasks
from domino_spec.drafters import PLAIN

__all__ = [
    "BUILT_IN",
    "PLAIN",
    "Cell",
    "CellSummary",
    "HeadToHead",
    "Journal",
    "Line",
    "Request",
    "RunSummary",
    "Settings",
    "Watcher",
    "markdown",
    "measure",
    "open_drafters",
    "plan_cells",
    "read_runs",
    "read_tasks",
    "recorded",
    "run_request",
    "summarise",
]
