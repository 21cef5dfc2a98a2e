"""The page in a real browser, with a server that follows a script."""

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


@pytest.mark.parametrize(
    ("tile", "kind", "sure"),
    [
        (".tile.first", "first token, from reading the prompt; nothing was guessed", "71.0 %"),
        (".tile.own", "the target’s own token", "50.0 %"),
        (".block:nth-child(4) .tile", DRAFTED, "over 99.9 %"),
        (".block:nth-child(4) > :nth-child(3) .tile", DRAFTED, "under 0.1 %"),
    ],
)
def test_kinds_have_words(tab, server, tile, kind, sure):
    send(tab, "fall")
    tab.ask(f"document.querySelector('.dominoes {tile}').focus()")
    assert said(tab, "#tip p") == kind
    assert sure in said(tab, "#tip dl")


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
