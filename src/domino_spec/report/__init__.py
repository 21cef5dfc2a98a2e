"""A head-to-head as one self-contained HTML page, and its charts as pictures."""

from domino_spec.report.charts import Chart, charts
from domino_spec.report.page import caveats, findings, page, write_report

__all__ = ["Chart", "caveats", "charts", "findings", "page", "write_report"]
