"""A head-to-head as one HTML page that needs nothing else, and its charts as pictures."""

from domino_spec.report.figures import Bars, Figure, Lines, Stacks, figures
from domino_spec.report.page import page
from domino_spec.report.write import write_report

__all__ = ["Bars", "Figure", "Lines", "Stacks", "figures", "page", "write_report"]
