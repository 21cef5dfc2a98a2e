"""Head-to-heads and load tests as one self-contained HTML page, and their charts as pictures."""

from domino_spec.report.charts import Chart, charts
from domino_spec.report.loads import load_charts, load_findings
from domino_spec.report.page import caveats, findings, page, read_files, write_report

__all__ = ["Chart", "caveats", "charts", "findings", "load_charts", "load_findings", "page",
           "read_files", "write_report"]  # fmt: skip
