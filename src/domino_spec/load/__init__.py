"""Load on a server: requests from another process, and what they met."""

from domino_spec.load.request import Against, LoadRequest, measure, run_load
from domino_spec.load.runner import Runner, Watcher
from domino_spec.load.settings import Cell, Goals, Settings, Side
from domino_spec.load.summary import (
    CellSummary,
    RunSummary,
    SideSummary,
    read_runs,
    summarise,
)
from domino_spec.load.tables import markdown

__all__ = [
    "Against",
    "Cell",
    "CellSummary",
    "Goals",
    "LoadRequest",
    "RunSummary",
    "Runner",
    "Settings",
    "Side",
    "SideSummary",
    "Watcher",
    "markdown",
    "measure",
    "read_runs",
    "run_load",
    "summarise",
]
