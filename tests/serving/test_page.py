"""The page in a real browser, with a server that follows a script."""

import json
import re

import pytest

from tests.support.browser import browsing, needs_browser
from tests.support.chat_page import (
    DESK,
    ENDED,
    EVIL,
    FALL,
    HOLDING,
    LAST,
    MET,
    PARAGRAPHS,
    TILES,
    WRITTEN,
    copied,
    counters,
    paragraphs,
    race,
    said,
    send,
    verdict,
    write,
)  # fmt: skip
from tests.support.chat_server import ChatServer, Scene, chatting, token_id

pytestmark = needs_browser
PACE = 0.025
DRAFTED = "guessed by the drafter, accepted by the target"
ROW = Scene([[("a", False, 0.5)], *[[("b", True, 0.9)] * 4 + [(" c", False, 0.5)]] * 6])


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture(scope="module")
def stage():
    scenes = {
        "fall": FALL,
        "hold": HOLDING,
        "hold domino": Scene(ROW.blocks, hold_after=5),
        "hold plain": Scene(FALL.blocks, hold_plain_after=2),
        "paced": Scene(ROW.blocks, pace=PACE),
        "differ": Scene(FALL.blocks, plain=[[("When", False, 0.7)], [("ever", False, 0.2)]]),
        "busy": Scene([], refusal=(429, "The queue is full.", {"Retry-After": "3"})),
        "break": Scene(FALL.blocks, break_after=2),
        "think": Scene([*ROW.blocks[:3], [("Yes.", True, 0.5)]], reasoning=3),
        "drop": Scene(FALL.blocks, hold_after=3, drop_after=3),
    }
    with chatting(ChatServer(scenes)) as server:
        yield server


@pytest.fixture
def server(stage):
    stage.asked.clear()
    stage.left.clear()
    stage.gate.clear()
    stage.key = None
    yield stage
    stage.gate.set()


@pytest.fixture
def tab(browser, server):
    browser.requests.clear()
    browser.complaints.clear()
    browser.open(server.url, width=DESK)
    browser.until(MET)
    return browser


def test_a_block_is_a_row_of_dominoes(tab, server):
    send(tab, "fall")
    assert tab.ask(TILES) == [
        [["first", "p5", "When"]],
        [["draft", "p6", " one"], ["draft", "p6", " falls"], ["own", "p3", ","]],
        [["own", "p2", "↵↵"]],
        [["draft", "p6", "the"], ["draft", "p3", "␣"], ["draft", "p1", "◌"], ["own", "p4", "é"]],
        [["draft", "p2", EVIL], ["draft", "p5", "<|im_end|>"]],
    ]
    forks = "[...document.querySelectorAll('.place')].map((e) => e.innerText.split('\\n'))"
    assert tab.ask(forks)[0] == [" one", "lazy", "slow dog", "+1"]
    assert len(tab.ask(forks)) == 7  # every draft had rivals; the target's own tokens had none
    assert tab.ask("document.querySelector('.legend .branches').checkVisibility()")
    [body] = server.asked
    assert body["messages"] == [{"role": "user", "content": "fall"}]
    assert body["domino"] == {"blocks": True}
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("tiny-target", 0, 512)
    assert "seed" not in body
    assert tab.complaints == []
    assert {url.split("?")[0].startswith(server.url) for url in tab.requests} == {True}


def test_counters_count_what_came(tab, server):
    send(tab, "fall")
    found = counters(tab)
    cycles = FALL.blocks[1:]
    tokens = sum(map(len, cycles))
    drafts = sum(accepted for block in cycles for _, accepted, _ in block)
    assert found["tokens"] == str(tokens + 1)
    assert found["cycles"] == str(len(cycles))
    assert found["acceptance length"] == f"{tokens / len(cycles):.2f}"
    assert found["from drafts"] == f"{100 * drafts / tokens:.0f} %"
    assert found["acceptance rate"] == f"{100 * drafts / (drafts + 7):.0f} %"
    assert float(found["tokens per second"]) > 0


def test_counters_are_live_and_the_server_knows_who_left(tab, server):
    write(tab, "hold")
    tab.press("Enter")
    tab.until(f"document.querySelectorAll('{LAST} .tile').length === 4")
    tab.until(f"document.querySelector('{LAST} .counters dd').textContent === '3.00'")
    found = counters(tab)
    assert (found["tokens"], found["cycles"], found["acceptance rate"]) == ("4", "1", "–")
    assert tab.ask("document.getElementById('send').disabled")
    tab.press("Escape")
    tab.until(ENDED)
    for _ in range(1000):  # it takes a moment to get there
        if server.left:
            break
        tab.ask("new Promise((resolve) => setTimeout(resolve, 5))")
    assert server.left == ["hold"]
    assert said(tab, f"{LAST} .note") == "Stopped."
    assert paragraphs(tab) == ["When one falls,"]
    assert tab.ask("document.activeElement.id") == "prompt"


def test_the_stop_button_stops(tab, server):
    write(tab, "hold")
    tab.click("#send")
    tab.until(f"document.querySelectorAll('{LAST} .tile').length === 4")
    assert tab.ask("document.activeElement.id") == "stop"
    tab.click("#stop")
    tab.until(ENDED)
    assert said(tab, "#status") == "Stopped. Answer: 4 tokens in 1 cycle."
    server.gate.set()
    tab.click(f"{LAST} .retry")
    tab.until(f"document.querySelectorAll('{LAST} .tile').length === 11 && {ENDED}")
    assert paragraphs(tab) == PARAGRAPHS
    assert [body["messages"] for body in server.asked] == [
        [{"role": "user", "content": "hold"}]
    ] * 2


def test_model_text_stays_text_in_both_views(tab, server):
    send(tab, "fall")
    seen = "(s) => document.querySelector(s).checkVisibility()"
    assert tab.ask(f"['.dominoes', '.text', '.legend'].map({seen})") == [True, False, True]
    tab.ask("document.querySelector('input[value=text]').focus()")
    tab.press(" ")
    assert tab.ask(f"['.dominoes', '.text', '.legend'].map({seen})") == [False, True, False]
    texts = f"[...document.querySelectorAll('{LAST} .text > p')].map((e) => e.textContent)"
    assert tab.ask(texts) == PARAGRAPHS
    assert tab.ask("document.querySelectorAll('#turns img, #turns script').length") == 0
    assert "tiny-target" in tab.ask("document.title")
    assert tab.complaints == []


def test_the_conversation_goes_on(tab, server):
    tab.ask("document.getElementById('system').value = 'Be brief.'")
    tab.ask("document.getElementById('seed').value = '11'")
    for prompt in ("fall", "busy", "differ"):
        send(tab, prompt)
    assert server.asked[-1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "fall"},
        {"role": "assistant", "content": WRITTEN},
        {"role": "user", "content": "differ"},
    ]
    assert server.asked[-1]["seed"] == 11
    tab.click("#clear")
    assert tab.ask("document.querySelectorAll('.turn').length") == 0
    tab.click("#notice button")
    assert tab.ask("document.querySelectorAll('.turn').length") == 3


@pytest.mark.parametrize("how", ["mouse", "finger", "keyboard"])
def test_a_tile_tells_what_it_is(tab, server, how):
    send(tab, "fall")
    tile = ".block:nth-child(2) > :nth-child(2) .tile"
    if how == "mouse":
        tab.point(tile)
    elif how == "finger":
        tab.tap(tile)
    else:
        tab.ask("document.querySelector('.tile[tabindex=\"0\"]').focus()")
        for key in ("End", "Home", "ArrowRight", "ArrowDown", "ArrowUp", "ArrowRight"):
            tab.press(key)
    tab.until("!document.getElementById('tip').hidden")
    assert said(tab, "#tip code") == '" falls"'
    assert said(tab, "#tip p") == DRAFTED
    lines = "[...document.querySelectorAll('#tip dl > div')].map((e) => e.innerText.split('\\n'))"
    assert tab.ask(lines) == [
        ["Position", "2"],
        ["Token", str(token_id(" falls"))],
        ["Probability", "90.0 %"],
        ["Cycle", "1"],
    ]
    lost = "[...document.querySelectorAll('#tip li')].map((e) => e.textContent)"
    assert tab.ask(lost) == ['" lazy"', '" slow dog"', '" cat"']
    assert tab.ask(f"document.querySelector('{tile}').getAttribute('aria-describedby')") == "tip"
    box = "(({left, top, right, bottom}) => left >= 0 && top >= 0 && right <= innerWidth && "
    box += "bottom <= innerHeight)(document.getElementById('tip').getBoundingClientRect())"
    assert tab.ask(box)
    tab.press("Escape")
    assert tab.ask("document.getElementById('tip').hidden")


def test_kinds_have_words(tab, server):
    send(tab, "fall")
    first = "first token, from reading the prompt; nothing was guessed"
    for tile, kind, sure in (
        (".tile.first", first, "71.0 %"),
        (".tile.own", "the target’s own token", "50.0 %"),
        (".block:nth-child(4) .tile", DRAFTED, "over 99.9 %"),
        (".block:nth-child(4) > :nth-child(3) .tile", DRAFTED, "under 0.1 %"),
    ):
        tab.ask(f"document.querySelector('.dominoes {tile}').focus()")
        assert said(tab, "#tip p") == kind
        assert sure in said(tab, "#tip dl")


def test_an_empty_page_asks_and_races_by_one_click(tab, server):
    introduction = said(tab, "#facts")
    assert introduction.startswith("tiny-target answers. tiny-drafter guesses its next words")
    assert introduction.endswith("Running on a CPU.")
    prompts = tab.ask("[...document.querySelectorAll('.examples button')].map((e) => e.innerText)")
    assert len(prompts) >= 3
    write(tab, "half a thou")
    server.scenes[prompts[0]] = FALL
    tab.click(".examples button")
    tab.until(ENDED)
    assert said(tab, f"{LAST} .said p") == prompts[0]
    assert tab.ask("document.getElementById('prompt').value") == "half a thou"
    assert not tab.ask("document.getElementById('welcome').checkVisibility()")
    tab.click("#clear")
    tab.ask("document.getElementById('max_tokens').value = '512'")
    raced = " ".join(said(tab, "#race-prompt").split())
    server.scenes[raced] = FALL
    tab.click("#race-example")
    assert verdict(tab)[0] == "Too short to tell"
    _, first, second = server.asked
    for body, speculate in ((first, True), (second, False)):
        assert body["messages"][-1]["content"] == raced
        assert body["domino"]["speculate"] == speculate
        assert body["max_tokens"] == 200


COLUMNS = "[...document.querySelectorAll('.lane')].map((e) => e.querySelectorAll('.tile').length)"
BARS = "[...document.querySelectorAll('progress')].map((e) => e.value + '/' + e.max)"
CLOCKS = "[...document.querySelectorAll('.clock')].map((e) => e.textContent)"


def test_a_race_runs_one_after_the_other_and_ends_in_words(tab, server):
    race(tab, "hold")
    tab.until(f"String({COLUMNS}) === '4,0'")
    tab.until(f"String({BARS}) === '4/512,0/512'")
    assert len(server.asked) == 1
    assert tab.ask(CLOCKS)[1] == "0.00 s"
    server.gate.set()
    words = verdict(tab)
    took = r"With drafts 11 tokens took [\d.]+ s, without drafts 11 tokens took [\d.]+ s\. "
    assert words[0] == "Too short to tell"
    assert re.fullmatch(took + "Under 30 tokens chance decides: ask for a longer answer.", words[1])
    assert re.fullmatch(r"After .* was [\d.]+ against [\d.]+ tokens per second\.", words[2])
    assert words[3] == "The texts are identical (11 tokens)."
    first, second = server.asked
    assert [b["domino"] for b in (first, second)] == [
        {"blocks": True, "speculate": True, "reuse": False},
        {"blocks": True, "speculate": False, "reuse": False},
    ]  # fmt: skip
    assert {key: first[key] for key in first if key != "domino"} == {
        key: second[key] for key in second if key != "domino"
    }
    assert words[4].startswith(f"Both had the seed {first['seed']} and computed ")
    assert tab.ask(BARS) == ["11/11", "11/11"]
    assert counters(tab, ".plain")["acceptance length"] == "1.00"
    assert set(tab.ask(TILES)[1][0]) == {"draft", "p6", " one"}
    assert tab.complaints == []


def test_a_race_is_replayed_side_by_side_at_its_true_times(tab, server):
    race(tab, "paced")
    tab.until("document.getElementById('status').textContent.startsWith('Replaying')")
    tab.until(f"(([domino, plain]) => domino > plain && plain > 0)({COLUMNS})")
    words = verdict(tab)
    times = [float(clock.removesuffix(" s")) for clock in tab.ask(CLOCKS)]
    assert 5 * PACE < times[0] < times[1]
    assert times[1] > 31 * PACE
    assert words[1].startswith(
        f"With drafts 31 tokens took {times[0]:.2f} s, without drafts 31 tokens took {times[1]:.2f}"
    )
    assert words[0].endswith("× as fast with drafts")
    assert float(words[0].split("×")[0]) == pytest.approx(times[1] / times[0], rel=0.05)


def test_a_stop_skips_the_rest_of_a_replay(tab, server):
    race(tab, "paced")
    tab.until("document.getElementById('status').textContent.startsWith('Replaying')")
    tab.press("Escape")
    assert verdict(tab)[3] == "The texts are identical (31 tokens)."
    assert tab.ask(COLUMNS) == [31, 31]
    assert float(tab.ask(CLOCKS)[1].removesuffix(" s")) > 31 * PACE


def test_drafts_may_lose_and_texts_may_part(tab, server):
    race(tab, "hold domino")
    tab.until(f"document.querySelectorAll('{LAST} .domino .tile').length === 21")
    tab.ask("new Promise((resolve) => setTimeout(resolve, 300))")  # it trails by far
    server.gate.set()
    assert re.fullmatch(r"Slower with drafts \(0\.\d\d×\)", verdict(tab)[0])
    race(tab, "differ")
    assert verdict(tab)[3] == ('The texts part at token 1: with drafts " one", without "ever".')


@pytest.mark.parametrize("second", [False, True])
def test_a_stopped_race_has_no_result(tab, server, second):
    race(tab, "hold plain" if second else "hold")
    tab.until(f"String({COLUMNS}) === '{'11,2' if second else '4,0'}'")
    tab.press("Escape")
    assert verdict(tab) == ["No result", "The race was stopped."]
    assert len(server.asked) == 1 + second


def test_a_race_that_fails_has_no_result_and_may_be_run_again(tab, server):
    race(tab, "busy")
    assert verdict(tab) == ["No result", "The run with drafts failed."]
    assert said(tab, f"{LAST} .plain .note") == "Not run."
    assert len(server.asked) == 1
    tab.click(f"{LAST} .retry")
    assert verdict(tab) == ["No result", "The run with drafts failed."]


@pytest.mark.parametrize(
    ("prompt", "words", "kept"),
    [
        ("busy", "The queue is full. Try again in 3 seconds.", []),
        ("break", "Decoding failed: out of dominoes.", ["When one falls,"]),
        ("drop", "The connection ended before the answer did. What came so far is above.",
         ["When one falls,"]),
    ],
)  # fmt: skip
def test_errors_are_said_and_nothing_is_lost(tab, server, prompt, words, kept):
    write(tab, prompt)
    tab.press("Enter")
    if prompt == "drop":
        tab.until("document.querySelectorAll('.dominoes .tile').length === 5")
    server.gate.set()
    tab.until(ENDED)
    assert said(tab, f"{LAST} .error") == words
    assert paragraphs(tab) == kept
    assert said(tab, f"{LAST} .said p") == prompt
    assert tab.ask(f"document.querySelector('{LAST} .retry').checkVisibility()")
    assert not tab.ask("document.getElementById('send').disabled")


def test_reasoning_is_shown_above_the_answer(tab, server):
    shown = f"document.querySelector('{LAST} .reasoning:not([hidden]) + .text')"
    send(tab, "think")
    for fresh in (True, False):
        assert tab.ask(f"{shown}.previousSibling.textContent") == "abbbb cbbbb c"
        assert paragraphs(tab) == ["Yes."]
        if fresh:
            tab.open(server.url, width=DESK, fresh=False)
            tab.until(MET)
    send(tab, "fall")
    assert server.asked[-1]["messages"][1] == {"role": "assistant", "content": "Yes."}
    assert tab.ask(f"{shown} === null")


# A reload

SHOWN = "document.getElementById('turns').innerText"


def test_a_reload_keeps_the_conversation_and_the_settings(tab, server):
    """And Clear forgets it; Undo brings it back."""
    for prompt in ("fall", "busy"):
        send(tab, prompt)
    race(tab, "differ")
    verdict(tab)
    tab.ask("""for (const [id, value] of [['system', 'Be brief.'], ['seed', '7']]) {
      const field = document.getElementById(id);
      field.value = value;
      field.dispatchEvent(new Event('change'));
    }""")
    tab.complaints.clear()  # the browser's own of an answer 429
    shown, tiles = tab.ask(SHOWN), tab.ask(TILES)
    assert "Try again in 3 seconds." in shown
    write(tab, "hold")
    tab.press("Enter")
    tab.until(f"document.querySelectorAll('{LAST} .tile').length === 4")
    tab.open(server.url, width=DESK, fresh=False)  # while it is written
    tab.until(MET)
    assert said(tab, f"{LAST} .note") == "Stopped."
    assert len(tab.ask(TILES)[1]) == 3
    tab.ask(f"document.querySelector('{LAST}').remove()")
    assert tab.ask(SHOWN) == shown
    assert tab.ask(TILES) == tiles
    assert tab.ask("document.getElementById('system').value") == "Be brief."
    tab.ask("document.querySelector('.dominoes .tile.draft').focus()")
    assert "slow dog" in said(tab, "#tip")
    server.gate.set()
    send(tab, "fall")
    said_so_far = [message["content"] for message in server.asked[-1]["messages"]]
    assert said_so_far[:3] == ["Be brief.", "fall", WRITTEN]
    assert server.asked[-1]["seed"] == 7
    tab.click("#clear")
    assert tab.ask("Object.keys(localStorage).filter((name) => name.includes('turns'))") == []
    tab.click("#notice button")
    tab.click("#defaults")
    tab.open(server.url, width=DESK, fresh=False)
    tab.until(MET)
    assert tab.ask("document.querySelectorAll('.turn').length") == 5
    assert tab.ask("document.getElementById('system').value") == ""
    assert tab.complaints == []


def test_what_cannot_be_read_or_kept_is_ignored(tab, server):
    send(tab, "fall")
    (good,) = json.loads(tab.ask("localStorage.getItem('domino:/:turns')"))
    no_token = [1, "a", None, 1, [["x", "a", 1, 0.5]]]
    answer = {"state": "done", "total": 1, "error": None, "record": [no_token]}
    some = json.dumps([1, {}, {"said": 1}, good, {**good, "answers": [answer]}])
    for kept, turns in (("{", 0), ("7", 0), (some, 1)):
        tab.ask(f"for (const name of ['turns', 'settings']) "
                f"localStorage.setItem(`domino:/:${{name}}`, {json.dumps(kept)})")  # fmt: skip
        tab.open(server.url, width=DESK, fresh=False)
        tab.until(MET)
        assert tab.ask("document.querySelectorAll('.turn').length") == turns
    assert tab.ask(TILES)[0] == [["first", "p5", "When"]]
    # A browser that has no room for all keeps the later ones; one that keeps nothing works too.
    tab.ask(f"const most = {len(json.dumps([good]))}")
    tab.ask("""(() => {
      const set = Storage.prototype.setItem;
      Storage.prototype.setItem = function (name, value) {
        if (value.length > most) throw new DOMException('full', 'QuotaExceededError');
        set.call(this, name, value);
      };
    })()""")
    send(tab, "differ")
    kept = "JSON.parse(localStorage.getItem('domino:/:turns')).map((turn) => turn.said)"
    assert tab.ask(kept) == ["differ"]
    tab.ask("Storage.prototype.setItem = () => { throw new DOMException('off', 'SecurityError'); }")
    send(tab, "fall")
    assert tab.ask("document.querySelectorAll('.turn').length") == 3
    assert tab.complaints == []


# Markdown

FORMATTED = """async (text, open = false) => {
  const { Formatted } = await import('/page/format.js');
  const made = new Formatted();
  made.show(text, open);
  return made.element;
}"""
COPY = '<button type="button" class="copy">Copy</button></figcaption><pre tabindex="0"><code>'
MARKDOWN = [
    ("# Title #\n\na **b *c* d** `e*f` ~~g~~\nh",
     "<h3>Title</h3><p>a <strong>b <em>c</em> d</strong> <code>e*f</code> <del>g</del>\nh</p>"),
    ("***a** b* **a*b** snake_case 2 * 3 \\*x\\* \\(y\\)",
     "<p><em><strong>a</strong> b</em> <strong>a*b</strong> snake_case 2 * 3 *x* \\(y\\)</p>"),
    ("- a\n- b\n  - c\n\n3. d\n   e\n\n   f\n4. [x] g",
     "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>"
     '<ol start="3"><li>d\ne<p>f</p></li><li class="task">☑ g</li></ol>'),
    ("> a\n> - b\n\n---\nc\nd<br>e",
     "<blockquote><p>a</p><ul><li>b</li></ul></blockquote><hr><p>c\nd<br>e</p>"),
    ("a\n1. ```py x\n   def f():\n   \treturn '</code>'\n   ```\n~~~\n```\n",
     f'<p>a</p><ol><li><figure class="code"><figcaption><span>py</span>{COPY}def f():\n'
     "\treturn '&lt;/code&gt;'</code></pre></figure></li></ol>"
     f'<figure class="code"><figcaption><span>code</span>{COPY}```</code></pre></figure>'),
    ("a | `b`\n--|:-:\n1 | x\\|y | z\n2",
     '<div class="table" role="region" aria-label="Table" tabindex="0"><table>'
     '<thead><tr><th>a</th><th class="center"><code>b</code></th></tr></thead>'
     '<tbody><tr><td>1</td><td class="center">x|y</td></tr></tbody></table></div><p>2</p>'),
]  # fmt: skip
LINKS = {
    "[a](https://b.c/d_(e) 'f')": ("https://b.c/d_(e)", "a"),
    "![p](http://b.c/p.png)": ("http://b.c/p.png", "p"),
    "[m](mailto:a@b.c)": ("mailto:a@b.c", "m"),
    "(see https://b.c/d_e).": ("https://b.c/d_e", "https://b.c/d_e"),
    "<https://b.c>": ("https://b.c/", "https://b.c"),
    "[a](javascript:alert(1))": None,
    "[a](JaVa\tScript:alert(1))": None,
    "[a](data:text/html,x)": None,
    "[a](/v1/models)": None,
    "<javascript:alert(1)>": None,
    "[a](https://)": None,
    EVIL: None,
}


def test_markdown_becomes_nodes(tab):
    for source, html in MARKDOWN:
        assert tab.ask(f"({FORMATTED})({source!r}).then((e) => e.innerHTML)") == html, source
    for source, expected in LINKS.items():
        [found, text] = tab.ask(
            f"""({FORMATTED})({source!r}).then((e) => [[...e.querySelectorAll('p *')].map(
              (a) => [a.localName, a.getAttribute('href'), a.textContent, a.rel, a.target]),
              e.textContent])"""
        )
        if expected is None:
            assert (found, text) == ([], source), source
        else:
            assert found == [["a", *expected, "noopener noreferrer nofollow", "_blank"]], source


WRITING = """Here is **a plan** with `code` and [a link](https://b.c/d):

1. First *item*
   - nested
2. Second

```python
x = 2 + 2
```

| name | value |
|------|------:|
| `a`  | 1     |
---
10. ~~fin~~"""


def test_an_answer_that_is_written_shows_no_half_marks(tab):
    """And what was shown stays the same node, so that it can be selected while more comes."""
    found = tab.ask(
        f"""(async () => {{
          const {{ Formatted }} = await import('/page/format.js');
          const [text, made, whole, seen] = [{WRITING!r}, new Formatted(), new Formatted(), []];
          let first = null;
          for (let end = 1; end < text.length; end += 1) {{
            made.rest = 0;
            made.show(text.slice(0, end), true);
            first ??= made.element.firstChild;
            const kinds = [...made.element.children].map((e) => e.localName);
            seen.push([kinds, made.element.textContent]);
          }}
          made.show(text, false);
          whole.show(text, false);
          return [seen, made.element.firstChild === first,
                  made.element.innerHTML === whole.element.innerHTML];
        }})()"""
    )
    seen, same_node, same_end = found
    assert same_node
    assert same_end
    kinds = ["p", "ol", "figure", "div", "hr", "ol"]
    for shown, text in seen:
        assert shown == kinds[: len(shown)]  # nothing becomes something else
        assert not re.search(r"```|\*\*|\|-|\| |~~|\]\(|\d\.", text), text


SIZE = 50_000
HOSTILE = {
    "emphasis": "*a **b " * (SIZE // 7),
    "openers": "*a " * (SIZE // 3),
    "nested emphasis": "*a " * (SIZE // 6) + "a* " * (SIZE // 6),
    "stars": "*" * SIZE,
    "backticks": " ".join("`" * n for n in range(1, 300)),
    "brackets": "[" * SIZE,
    "links": "[a](" * (SIZE // 4),
    "nested links": "[" * (SIZE // 5) + "](x)" * (SIZE // 5),
    "titles": '[a](b "' * (SIZE // 7),
    "quotes": ">" * SIZE,
    "lists": "- " * (SIZE // 2),
    "deep list": "\n".join(" " * 2 * n + "- x" for n in range(200)),
    "fences": "```\n" * 2001,
    "wide table": "|a" * 9999 + "\n" + "|-" * 9999 + "\n" + "|b" * 9999,
    "rows": "|a|b|\n|-|-|\n" + "|\n" * 3000,
    "blank lines": "- a\n" + "\n" * SIZE + "  b",
    "a line": "x" * 10 * SIZE,
    "spaces": " " * SIZE + "#" + " " * SIZE + "#",
    "addresses": ("http://a.b/" + "." * 999) * (SIZE // 1000),
    "angles": "<https://a" * (SIZE // 10),
    "backslashes": "\\" * SIZE,
}


def test_hostile_markdown_is_inert_and_takes_linear_time(tab):
    measure = """async (text, open) => {
      const { Formatted } = await import('/page/format.js');
      const made = new Formatted();
      const begun = performance.now();
      made.show(text, open);
      const spent = performance.now() - begun;
      let [deep, level] = [0, [made.element]];
      for (; level.length; deep += 1) level = level.flatMap((e) => [...e.children]);
      return [spent, deep];
    }"""
    for name, text in HOSTILE.items():
        for still_written in ("false", "true"):
            spent, deep = tab.ask(f"({measure})({json.dumps(text)}, {still_written})")
            assert spent < 1500, name  # squares of these lengths would take minutes
            assert deep < 40, name
    assert tab.complaints == []


def test_code_has_a_copy_button_in_the_text_view(tab, server):
    tab.ask("document.querySelector('input[value=text]').click()")
    server.scenes["code"] = Scene(
        [[("```py\n", False, 0.5)], [("1 < 2\n", True, 0.9), ("```", False, 0.5)]]
    )
    send(tab, "code")
    assert copied(tab, f"{LAST} .copy") == "1 < 2"
    tab.until(f"document.querySelector('{LAST} .copy').textContent === 'Copied'")
    assert said(tab, "#status") == "Copied."
