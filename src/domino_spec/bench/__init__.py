"""The head-to-head: methods against plain decoding on the same path, raw records and figures."""

from domino_spec.baselines import PLAIN
from domino_spec.bench.journal import Journal
from domino_spec.bench.methods import MAKERS, Method, make_methods, plain
from domino_spec.bench.runner import HeadToHead, Request, Watcher, measure, run_request
from domino_spec.bench.settings import Cell, Settings, plan_cells
from domino_spec.bench.summary import CellSummary, Line, RunSummary, read_runs, summarise
from domino_spec.bench.tables import markdown
from domino_spec.bench.tasks import BUILT_IN, read_tasks

__all__ = [
    "BUILT_IN",
    "MAKERS",
    "PLAIN",
    "Cell",
    "CellSummary",
    "HeadToHead",
    "Journal",
    "Line",
    "Method",
    "Request",
    "RunSummary",
    "Settings",
    "Watcher",
    "make_methods",
    "markdown",
    "measure",
    "plain",
    "plan_cells",
    "read_runs",
    "read_tasks",
    "run_request",
    "summarise",
]
