"""`domino report`."""

import json

from tests.report.runs import write


def test_a_page_from_records(domino, tmp_path):
    source, out = write(tmp_path / "r.jsonl"), tmp_path / "page.html"
    result = domino("report", source, "-o", out)
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [str(out)]
    assert "Head-to-head on made up" in out.read_text(encoding="utf-8")
    found = json.loads(domino("report", source, "-o", out, "--json").stdout)
    assert found["written"] == [str(out)]


def test_what_is_wrong_is_one_line(domino, tmp_path):
    (tmp_path / "r.jsonl").write_text("{}\n")
    result = domino("report", tmp_path / "r.jsonl", "-o", tmp_path / "page.html")
    assert result.exit_code == 1
    assert "no records of domino bench" in result.stderr
    source = write(tmp_path / "good.jsonl")
    blocked = domino("report", source, "-o", tmp_path / "good.jsonl" / "page.html")
    assert blocked.exit_code == 1
    assert "cannot be written" in blocked.stderr
