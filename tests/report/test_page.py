"""The page says what the records say; nothing in a record can break out of it."""

import re
import sys
from html.parser import HTMLParser

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas
from matplotlib.figure import Figure

from domino_spec.bench.settings import Cell
from domino_spec.bench.summary import summarise
from domino_spec.errors import InputError
from domino_spec.load.summary import summarise as summarise_loads
from domino_spec.records import append_record
from domino_spec.report import (
    caveats,
    charts,
    findings,
    load_charts,
    load_findings,
    page,
    read_files,
    write_report,
)  # fmt: skip
from tests.bench.helpers import made_up
from tests.report.runs import EVIL, GOOD, TASKS, load, records, write

VOID = {"meta", "link"}


class Tags(HTMLParser):
    """Every tag with its attributes; complains about tags that do not close."""

    def __init__(self):
        super().__init__()
        self.found, self.open = [], []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def tags_of(text):
    parser = Tags()
    parser.feed(text)
    assert parser.open == []
    return parser.found


@pytest.fixture(scope="module")
def runs():
    return summarise(records())


@pytest.fixture(scope="module")
def text(runs):
    return page(runs)


def test_every_chart_is_there_with_its_words_and_its_table(text):
    kinds = ("speedup", "acceptance-length", "acceptance-rate", "cycle", "throughput")
    slugs = [f"{kind}-{tag}" for tag in ("t0", "t0-7") for kind in kinds]
    tags = tags_of(text)
    drawn = [attributes for tag, attributes in tags if tag == "svg"]
    assert [chart["data-chart"] for chart in drawn] == slugs
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for chart in drawn:
        assert chart["role"] == "img"
        assert set(chart["aria-labelledby"].split()) <= set(ids)
    assert sum(tag == "table" for tag, _ in tags) == len(drawn) + 3


def test_numbers_on_the_page_are_those_of_the_summary(runs, text):
    for cell in runs[0].cells:
        for line in cell.lines:
            assert f"{line.speed_up.value:.2f}×" in text
            assert f"<td>{line.tokens_per_second:.1f}</td>" in text
    for words in ("a made-up machine", "domino bench TARGET", "2.13.0", "kkkkkkkkkkkk"):
        assert words in text


def test_nothing_is_fetched_and_nothing_runs(text):
    assert "<script" not in text
    assert not re.search(r"(?:src|href)=[\"'](?!data:|#)", text)  # or a part of the same chart
    assert not re.search(r"url\((?!#)", text)
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_a_name_cannot_break_out():
    text = page(summarise(records(evil=True)))
    assert "<img" not in text
    assert "&lt;img src=x onerror=alert(1)&gt; &amp; &#39;co&#39;" in text
    assert "onerror" not in {name for _, attributes in tags_of(text) for name in attributes}
    drawn = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(drawn) == 10
    assert all("&lt;img src=x onerror=alert(1" in chart for chart in drawn)


def test_nothing_else_in_a_record_can_break_out():
    made = records()
    facts = made[0]["facts"]
    facts["target"] = dict.fromkeys(facts["target"], EVIL)
    facts["settings"] |= dict.fromkeys(("shortest_answer", "max_new_tokens", "accept"), EVIL)
    for method in facts["methods"]:
        method |= {"kind": EVIL, "fingerprint": EVIL, "settings": {EVIL: EVIL}}
    for record in made:
        versions = dict.fromkeys(record["environment"]["versions"], EVIL)
        record["environment"] = dict.fromkeys(record["environment"], EVIL) | {"versions": versions}
    text = page(summarise(made))
    assert "<img" not in text
    assert text.count("&lt;img src=x") > 20


def test_verdicts_follow_the_intervals(runs):
    said = {(f.method, "T 0;" in f.rest): f for f in findings(runs[0])}
    good = said[GOOD, True]
    assert good.kind == "unclear"  # faster at one batch size, slower at another
    assert re.match(
        r"faster at batch size 1: 2\.\d\d× .*; slower at batch size 16: 0\.\d\d×", good.verdict
    )
    kinds = {}
    for name, spent in (("fast", 1.0), ("slow", 4.0), ("even", 2.0)):
        spread = [spent * f for f in (0.9, 1.1, 1.0, 0.95, 1.05, 1.0)]
        (run,) = summarise(made_up({"plain": [2.0] * 6, name: spread}))
        (finding,) = findings(run)
        kinds[name] = (finding.kind, finding.verdict.split(" at")[0])
    assert kinds == {
        "fast": ("faster", "faster"),
        "slow": ("slower", "slower"),
        "even": ("unclear", "no clear difference"),
    }
    (run,) = summarise(made_up({"plain": [2.0] * 3, "few": [1.0] * 3}))
    assert findings(run)[0].kind == "unclear"
    assert "An interval takes 5 units" in findings(run)[0].rest


def test_caveats():
    assert caveats(summarise(made_up({"plain": [2.0] * 6, "fast": [1.0] * 6}))[0]) == []
    made = made_up({"plain": [2.0] * 6, "fast": [1.0] * 6}, loops=9)
    made[2]["methods"]["fast"]["rows"][0]["differs_at"] = 7
    made[3]["methods"]["fast"]["repeats_agree"] = False
    for record in made:
        record["environment"]["commit"] += "+changes"
    made[-1]["environment"]["date"] = "2026-07-08"
    found = " ".join(caveats(summarise(made)[0]))
    for words in ("1 of 6 answers of fast differ", "Repeats of fast did not", "9 of 15 plain",
                  "uncommitted changes", "2 sessions"):  # fmt: skip
        assert words in found


def test_a_run_without_a_prompt_that_counts_is_still_a_page():
    (run,) = summarise(made_up({"plain": [], "fast": []}, loops=4))
    assert charts(run) == []
    text = page([run])
    assert "No prompt counts in: maths, T 0, 1 row." in text
    tags_of(text)


def test_plain_decoding_alone_has_no_speed_up_to_show():
    (run,) = summarise(made_up({"plain": [2.0] * 6}, cells=[Cell(t, 0.0, 1) for t in TASKS]))
    assert [chart.slug for chart in charts(run)] == ["cycle-t0"]


def test_pictures_of_the_same_charts(tmp_path):
    """One of each kind, with a name that matplotlib would take for mathematics."""
    names = ("plain", "costs $1 or $2_x$")
    cells = [Cell("maths", 0.0, size) for size in (1, 4)]
    made = made_up({n: [2.0] * 5 for n in names}, cells=cells, cycles={names[1]: 40})
    for record in made:
        append_record(tmp_path / "r.jsonl", record)
    out, *pictures = write_report(
        [tmp_path / "r.jsonl"], tmp_path / "p" / "r.html", pictures=tmp_path / "png"
    )
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [p.stem for p in pictures] == [c.slug for c in charts(summarise(made)[0])]
    assert len(pictures) == 5
    for picture in pictures:
        data = picture.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) > 5000


def test_bars_are_as_long_as_their_values(runs):
    axes = FigureCanvas(Figure()).figure.add_subplot()
    chart = charts(runs[0])[0]
    chart.paint(axes)
    widths = [bar.get_width() for bar in axes.patches]
    values = [float(text.split("×")[0]) for _, _, text in chart.table[1]]
    assert len(set(values)) > 1
    assert widths == pytest.approx([v * widths[0] / values[0] for v in values], rel=0.01)


def test_without_matplotlib_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"charts need matplotlib; pip install 'domino-spec"):
        write_report([write(tmp_path / "r.jsonl")], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_what_is_no_record_is_refused(tmp_path):
    append_record(tmp_path / "other.jsonl", {"set": "gsm8k"})
    with pytest.raises(InputError, match="no records of domino bench"):
        write_report([tmp_path / "other.jsonl"], tmp_path / "r.html")
    with pytest.raises(InputError, match="cannot be read"):
        write_report([tmp_path / "none.jsonl"], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_a_load_is_drawn_over_concurrency_with_all_sides_in_one_chart():
    (run,) = summarise_loads(load())
    throughput, first, token = load_charts(run)
    assert [c.slug.removesuffix("-concurrency") for c in (throughput, first, token)] == [
        "load-throughput", "load-ttft", "load-tpot",
    ]  # fmt: skip
    # 22 tokens a round of 1 second on average, then in 8 and in 32 times as long.
    assert throughput.table == (
        ("side", "1", "8", "32"),
        [("drafts", "22", "2.75", "0.6875"), ("plain", "11", "1.375", "0.3438")],
    )
    heads, lines = first.table
    assert heads == ("side", "1", "8", "32")
    assert lines == [
        ("drafts, p50", "500", "4,000", "16,000"),
        ("plain, p50", "1,000", "8,000", "32,000"),
    ]  # twelve requests have no p95
    assert token.table[1][0] == ("drafts, p50", "50", "400", "1,600")
    (finding,) = load_findings(run)
    assert (finding.method, finding.kind) == ("drafts", "faster")
    assert finding.verdict.startswith("faster at concurrency 1: 2.00×; faster at concurrency 8: ")
    assert "over plain's" in finding.rest


def test_gaps_between_tokens_are_drawn_where_every_server_counts_them():
    (run,) = summarise_loads(load(chunk_tokens=[1, 10], concurrency=None, rate=0.5))
    assert [chart.slug for chart in load_charts(run)] == [
        "load-throughput-request-rate", "load-ttft-request-rate", "load-itl-request-rate",
    ]  # fmt: skip
    alone = [r for r in load() if r.get("side", "drafts") == "drafts"]
    alone[0]["sides"].pop()
    (run,) = summarise_loads(alone)
    assert load_findings(run) == []
    assert [len(chart.table[1]) for chart in load_charts(run)] == [1, 1, 1]


def test_loads_and_head_to_heads_are_one_page(tmp_path):
    files = [write(tmp_path / "load.jsonl", load(evil=True)), write(tmp_path / "bench.jsonl")]
    runs, loads = read_files(files)
    assert (len(runs), len(loads)) == (1, 1)
    text = page([], loads)
    assert f"<title>Load on {EVIL.split()[0].replace('<', '&lt;')}" in text
    assert "<img" not in text
    assert text.count("&lt;img src=x") > 20
    tags = tags_of(text)
    assert sum(tag == "svg" for tag, _ in tags) == 3
    assert sum(tag == "table" for tag, _ in tags) == 6
    for words in ("TTFT", "3 prompts, chat endpoint", "plain (95% bootstrap over rounds"):
        assert words in text
    both = tags_of(page(runs, loads))
    ids = [attributes["id"] for _, attributes in both if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert sum(tag == "svg" for tag, _ in both) == 13
    with pytest.raises(InputError, match="same run was given twice"):
        read_files([files[0], files[0]])
