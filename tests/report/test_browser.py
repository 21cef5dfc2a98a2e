"""The page as a real browser shows it: on a phone, on a desk, in the light and in the dark."""

import pytest

from domino_spec.bench.summary import summarise
from domino_spec.load.summary import summarise as summarise_loads
from domino_spec.report import charts, load_charts, write_report
from tests.report.runs import load, records, write
from tests.support.browser import browsing, needs_browser

pytestmark = needs_browser

PHONE, DESK = 360, 1100
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# Contrast as WCAG counts it, between what is painted and the first painted ground behind it.
CONTRAST = """
(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
  };
  const found = [];
  const probe = document.querySelector('th');
  const rule = probe && getComputedStyle(probe).borderBottomColor;  // grid lines are pale
  const add = (kind, e, paint) => {
    const [a, b] = [light(rgb(paint)), light(ground(e.parentElement || e))].sort((x, y) => y - x);
    found.push([kind, (a + 0.05) / (b + 0.05), e.outerHTML.slice(0, 80)]);
  };
  const words = 'h1,h2,h3,p,li,td,th,dt,dd,figcaption,summary,strong,caption';
  for (const e of document.querySelectorAll(words))
    if (e.checkVisibility()) add('text', e, getComputedStyle(e).color);
  const drawn = (kind, which, paint) =>
    document.querySelectorAll(which).forEach((e) => add(kind, e, getComputedStyle(e)[paint]));
  drawn('text', 'svg text', 'fill');
  for (const e of document.querySelectorAll('svg path, svg use'))
    for (const paint of [getComputedStyle(e).fill, getComputedStyle(e).stroke])
      if (!e.closest('defs') && paint !== 'none' && paint !== rule) add('shape', e, paint);
  return found;
})()
"""
SIZES = """
[...document.querySelectorAll('svg')].map((svg) => {
  const box = svg.getBoundingClientRect(), card = svg.closest('figure').getBoundingClientRect();
  return [svg.dataset.chart, box.width, box.height, svg.checkVisibility(),
          box.left >= card.left && box.right <= card.right];
})
"""
# Text that leaves its chart, or runs into the text beside it.
TEXTS = """
[...document.querySelectorAll('svg')].flatMap((svg) => {
  const box = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')].map((e) => [e, e.getBoundingClientRect()]);
  const out = texts.filter(([, b]) => b.left < box.left - 1 || b.right > box.right + 1);
  const over = texts.filter(([e, b], i) => texts.slice(i + 1).some(([f, c]) =>
    Math.min(b.right, c.right) - Math.max(b.left, c.left) > 1 &&
    Math.min(b.bottom, c.bottom) - Math.max(b.top, c.top) > 4));
  return [...out, ...over].map(([e]) => svg.dataset.chart + ': ' + e.textContent);
})
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    files = [write(folder / "r.jsonl", evil=True), write(folder / "l.jsonl", load(evil=True))]
    return write_report(files, folder / "report.html")[0]


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_it_fits_the_screen(tab, report, width):
    tab.open(report, width=width)
    assert tab.ask("innerWidth") == width
    assert tab.ask(OVERFLOW) == 0
    sizes = tab.ask(SIZES)
    drawn = [*charts(summarise(records())[0]), *load_charts(summarise_loads(load())[0])]
    assert [name for name, *_ in sizes] == [chart.slug for chart in drawn]
    for name, chart_width, height, visible, inside in sizes:
        assert visible, name
        assert inside, name
        assert chart_width > 250, name
        assert height > 80, name
    assert tab.ask(TEXTS) == []
    small = tab.ask(
        "Math.min(...[...document.querySelectorAll('svg text')].map((e) => parseFloat("
        "getComputedStyle(e).fontSize) * e.ownerSVGElement.getBoundingClientRect().width / 360))"
    )
    assert small >= 9.5


@pytest.mark.parametrize("dark", [False, True])
def test_everything_can_be_read(tab, report, dark):
    tab.open(report, width=DESK, dark=dark)
    ground = tab.ask("getComputedStyle(document.body).backgroundColor")
    level = sum(int(part) for part in ground[4:-1].split(",")) / 3
    assert (level < 60) == dark
    found = tab.ask(CONTRAST)
    assert len(found) > 300
    for kind, contrast, what in found:
        assert contrast >= (4.5 if kind == "text" else 3.0), what


def test_it_asks_for_nothing_and_complains_of_nothing(tab, report):
    tab.requests.clear()
    tab.complaints.clear()
    tab.open(report, width=DESK)
    tab.ask("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    assert tab.ask(OVERFLOW) == 0  # tables scroll by themselves
    tab.open(report, width=PHONE)
    tab.ask("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    assert tab.ask(OVERFLOW) == 0
    assert {url.split(":")[0] for url in tab.requests} <= {"file", "data"}
    assert [url for url in tab.requests if url.startswith("file")] == [report.as_uri()] * 2
    assert tab.complaints == []


def test_the_browser_would_have_told(tab, tmp_path):
    """The checks above can fail: a page with every fault is caught."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<style>body{background:#fff}p{color:#eee}</style><p>pale</p>"
        "<div style='width:900px'>wide</div><img src='file:///nowhere.png'>"
        "<script>console.error('oh')</script>"
    )
    tab.requests.clear()
    tab.complaints.clear()
    tab.open(bad, width=PHONE)
    assert tab.ask(OVERFLOW) > 0
    assert min(contrast for _, contrast, _ in tab.ask(CONTRAST)) < 2
    assert any("nowhere" in url for url in tab.requests)
    assert any("oh" in complaint for complaint in tab.complaints)
