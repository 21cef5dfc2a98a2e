"""How the page looks and is reached: small screens, the dark, the keyboard, keys, servers gone."""

import re

import pytest

from tests.support.browser import browsing, needs_browser
from tests.support.chat_page import (
    DESK,
    ENDED,
    FALL,
    HOLDING,
    LAST,
    MET,
    PHONE,
    race,
    said,
    send,
    verdict,
    write,
)  # fmt: skip
from tests.support.chat_server import FACTS, ChatServer, Scene, chatting

pytestmark = needs_browser

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
LONG = Scene(
    [
        [("Begin", False, 0.5)],
        [("x" * 90, True, 0.9), *((f" {i}", True, 0.9) for i in range(20)), ("y" * 60, False, 0.5)],
        *([[(f" word{i}", False, 0.4)] for i in range(40)]),
    ]
)
MARKED = f"""# A
> b [c](https://d.e)

`{"f" * 99}`
```
{"g " * 99}
```
|h|i|{"j" * 60}|
|-|-|-|
|k|l|m|"""
MARKS = Scene([[(MARKED, False, 0.5)]])
# Contrast as WCAG counts it, between text and the first painted ground behind it.
CONTRAST = """
(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
  const rgb = (paint) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = paint; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c[3] === 255) return c;
    }
  };
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const found = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (own && e.checkVisibility() && !e.closest('.unseen, noscript'))
      found.push([ratio(light(rgb(getComputedStyle(e).color)), light(ground(e))),
                  e.outerHTML.slice(0, 90)]);
  }
  return found;
})()
"""
KINDS = """['draft', 'own', 'first'].map((kind) => {
  const style = getComputedStyle(document.querySelector('.dominoes .' + kind));
  return [style.backgroundColor, style.borderTopStyle];
})"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def stage():
    busy = Scene([], refusal=(429, "The queue is full.", {"Retry-After": "3"}))
    with chatting(
        ChatServer({"fall": FALL, "hold": HOLDING, "long": LONG, "busy": busy, "marks": MARKS})
    ) as server:
        yield server


@pytest.fixture
def server(stage):
    stage.asked.clear()
    stage.facts = dict(FACTS)
    stage.key = None
    stage.gate.set()
    return stage


def visit(tab, server, **screen):
    tab.complaints.clear()
    tab.open(server.url, **{"width": DESK, **screen})
    tab.until(MET)


@pytest.mark.parametrize("width", [PHONE, 700, DESK])
def test_it_fits_the_screen(tab, server, width):
    visit(tab, server, width=width)
    assert tab.ask("innerWidth") == width
    assert tab.ask(OVERFLOW) == 0
    tab.ask("document.getElementById('settings').open = true")
    send(tab, "long")
    assert tab.ask(OVERFLOW) == 0
    race(tab, "long")
    verdict(tab)
    send(tab, "busy")
    assert tab.ask(OVERFLOW) == 0
    tab.ask("document.querySelector('input[value=text]').click()")
    send(tab, "marks")
    assert tab.ask(OVERFLOW) == 0
    right = """Math.max(...[...document.querySelectorAll('.lane, .said, .tile, #composer, button')]
      .filter((e) => e.checkVisibility()).map((e) => e.getBoundingClientRect().right))"""
    assert tab.ask(right) <= width


IN_VIEW = """(selector) => {
  const box = document.querySelector(selector).getBoundingClientRect();
  const bottom = document.getElementById('composer').getBoundingClientRect().top;
  const over = document.elementFromPoint(box.left + 20, box.top + box.height / 2);
  return box.top >= -1 && box.bottom <= bottom && over.closest(selector) !== null;
}"""


def test_a_phone_keeps_the_side_with_drafts_in_view(tab, server):
    """While both run, one above the other, and when the result is there."""
    visit(tab, server, width=PHONE, height=760)
    assert tab.ask("scrollY") == 0
    assert tab.ask(f"({IN_VIEW})('#race-example')")
    assert tab.ask(OVERFLOW) == 0
    tab.ask("scrollTo(0, 9999)")
    tab.ask("new Promise(requestAnimationFrame)")
    send(tab, "long")  # the welcome that goes moves the page up: that was no reader
    tab.until("scrollY > 200 && document.documentElement.scrollHeight - scrollY - innerHeight < 9")
    server.gate.clear()
    race(tab, "hold")
    tab.until(f"document.querySelectorAll('{LAST} .domino .tile').length === 4")
    both = [f"{LAST} .headline", f"{LAST} .domino .head", f"{LAST} .plain .head"]
    tab.until(f"{both!r}.every({IN_VIEW})")
    server.gate.set()
    assert verdict(tab)[0] == "Too short to tell"
    tab.until(f"{both[:2]!r}.every({IN_VIEW})")
    tab.ask(
        f"document.querySelector('{LAST} .plain .counters').scrollIntoView({{block: 'center'}})"
    )
    tab.until(f"({IN_VIEW})('{LAST} .headline')")  # it sticks
    assert tab.ask(OVERFLOW) == 0


@pytest.mark.parametrize("dark", [False, True])
def test_everything_can_be_read(tab, server, dark):
    visit(tab, server, dark=dark)
    ground = tab.ask("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in ground[4:-1].split(",")) / 3 < 60) == dark
    welcome = tab.ask(CONTRAST)
    race(tab, "fall")
    verdict(tab)
    send(tab, "busy")
    send(tab, "marks")
    tab.ask("document.querySelector('.dominoes .tile').focus()")
    tab.ask("document.getElementById('key').show()")
    tab.ask("document.getElementById('numbers').open = true")
    dominoes = tab.ask(CONTRAST)
    tab.ask("document.querySelector('input[value=text]').click()")
    found = [*welcome, *dominoes, *tab.ask(CONTRAST)]
    assert {"<a", "<code", "<th", "<s"} <= {re.match(r"<\w+", what)[0] for _, what in found}
    for contrast, what in found:
        assert contrast >= 4.5, what
    tab.ask("document.querySelector('input[value=dominoes]').click()")
    kinds = tab.ask(KINDS)
    assert len({ground for ground, _ in kinds}) == 3
    assert [edge for _, edge in kinds] == ["solid", "solid", "dashed"]


def test_dominoes_fall_unless_told_not_to(tab, server):
    server.gate.clear()
    name = "getComputedStyle(document.querySelector('.fresh .tile')).animationName"
    for still in (False, True):
        visit(tab, server, still=still)
        write(tab, "hold")
        tab.press("Enter")
        tab.until("document.querySelector('.fresh') !== null")
        assert tab.ask(name) == ("none" if still else "fall")
        tab.press("Escape")
        tab.until(ENDED)
        tab.until("document.querySelector('.fresh') === null")


def test_the_keyboard_goes_everywhere(tab, server):
    visit(tab, server)
    assert tab.ask("document.activeElement.id") == "prompt"  # autofocus
    tab.type("fa")
    tab.press("Enter", shift=True)
    assert tab.ask("document.getElementById('prompt').value") == "fa\n"
    tab.ask("document.getElementById('prompt').value = ''")
    send(tab, "fall")
    tab.ask("document.querySelector('.skip').focus()")
    stops = []
    for _ in range(16):
        tab.press("Tab")
        stops.append(tab.ask("((e) => e.id || e.value || e.textContent)(document.activeElement)"))
        shape = tab.ask("getComputedStyle(document.activeElement).outlineStyle + "
                        "document.activeElement.matches(':focus-visible')")  # fmt: skip
        assert stops[-1] == "dominoes" or shape == "solidtrue", stops[-1]  # its label has the ring
    assert stops == [
        "dominoes", "clear", "Settings", "system", "temperature", "top_p", "max_tokens", "seed",
        "defaults", "About the numbers", "When", "Copy", "Retry", "prompt", "send", "race",
    ]  # fmt: skip


def test_everything_has_a_name(tab, server):
    visit(tab, server)
    race(tab, "fall")
    verdict(tab)
    tree = tab.call("Accessibility.getFullAXTree")["nodes"]
    kinds = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in tree if "role" in n]
    for role, name in kinds:
        if role in ("button", "textbox", "spinbutton", "radio", "progressbar", "form", "region"):
            assert name, role
    roles = [role for role, _ in kinds]
    assert {"banner", "main", "complementary", "form", "status"} <= set(roles)
    assert ("region", "With drafts") in kinds
    assert ("region", "Without drafts") in kinds
    spoken = (
        "[...document.querySelectorAll('.domino .tile')].map((e) => e.ariaLabel).filter(Boolean)"
    )
    assert tab.ask(spoken) == ["line break, line break", "space", "part of a character"]
    assert roles.count("progressbar") == 2


def test_a_field_that_cannot_be_read_is_shown(tab, server):
    visit(tab, server, width=PHONE)
    tab.ask("document.getElementById('temperature').value = '3'")
    write(tab, "fall")
    tab.press("Enter")
    tab.until("!document.getElementById('notice').hidden")
    assert said(tab, "#notice p").startswith("Temperature: ")
    assert tab.ask("document.activeElement.id") == "temperature"
    assert server.asked == []
    assert tab.ask("document.getElementById('prompt').value") == "fall"


def test_a_key_is_asked_for_and_kept_nowhere(tab, server):
    server.key = "open sesame"
    tab.open(server.url, width=PHONE)
    unknown = "It does not know the key it was given."
    for guess, why in (("wrong", ""), ("open sesame", unknown)):
        tab.until("document.getElementById('key').open")
        assert said(tab, "#key-why") == why
        tab.until("document.activeElement.id === 'key-value'")
        tab.type(guess)
        tab.press("Enter")
    tab.until(MET)
    send(tab, "fall")
    assert tab.ask("document.querySelectorAll('.dominoes .tile').length") == 11
    server.key = "another"  # changed while the page was open
    write(tab, "fall")
    tab.press("Enter")
    tab.until("document.getElementById('key').open")
    assert said(tab, f"{LAST} .error") == "This server wants an API key it knows."
    tab.until("document.activeElement.id === 'key-value'")
    tab.type("another")
    tab.press("Enter")
    tab.until(f"document.querySelectorAll('{LAST} .tile').length === 11")
    everywhere = "[localStorage, sessionStorage].map((kept) => JSON.stringify(kept)).join('')"
    kept = tab.ask(f"{everywhere} + document.cookie + document.documentElement.outerHTML")
    assert "fall" in kept
    assert "another" not in kept
    assert "sesame" not in kept


def test_no_race_without_a_drafter(tab, server):
    server.facts |= {"draft": None, "speculates": False}
    visit(tab, server)
    assert tab.ask("document.getElementById('race').disabled")
    reason = "No race: this server has no drafter, so all decoding is plain."
    assert said(tab, "#why-no-race") == reason
    assert "It has no drafter, so it writes one token at a time." in said(tab, "#facts")
    assert not tab.ask("document.getElementById('first-race').checkVisibility()")
    assert tab.ask("document.getElementById('why-no-race').checkVisibility()")
    assert not tab.ask("document.getElementById('send').disabled")


def test_a_server_that_has_gone_is_said(tab, tmp_path):
    with chatting(ChatServer({"fall": FALL})) as server:
        visit(tab, server)
        send(tab, "fall")
    write(tab, "again")
    tab.press("Enter")
    tab.until(f"document.querySelector('{LAST} .error') !== null && {ENDED}")
    assert said(tab, f"{LAST} .error") == "The server cannot be reached. Is it still running?"
    assert tab.ask("document.querySelectorAll('.turn').length") == 2
    assert said(tab, f"{LAST} .said p") == "again"
