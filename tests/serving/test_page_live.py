"""The page and the real server: a tiny target that knows its way, and a drafter that does too."""

import pytest
import torch

from domino_spec.api import DominoDecoder
from domino_spec.serving.app import make_app
from domino_spec.serving.config import ServerConfig
from domino_spec.serving.engine_setup import local_service
from domino_spec.serving.metrics import Metrics
from tests.support.browser import browsing, needs_browser
from tests.support.chat_page import LAST, TILES, copied, counters, race, said, send, verdict
from tests.support.chat_server import listening
from tests.support.pair import bigram_target, knowing_drafter
from tests.support.tokens import SPECIALS, small_tokenizer

pytestmark = needs_browser

SIZE = 96
ASKED = "the quick fox"
MOST = 40


def circle():
    """Every token leads to the next ordinary one, round and round."""
    table = torch.arange(1, SIZE + 1)
    table[: len(SPECIALS)] = len(SPECIALS)
    table[SIZE - 2 :] = len(SPECIALS)
    return table


def pair(*, drafter=True):
    drafts = knowing_drafter(shift=True, prefix=1, table=circle()) if drafter else None
    return DominoDecoder(bigram_target(circle()), drafts, small_tokenizer())


@pytest.fixture(scope="module")
def server():
    settings = ServerConfig(model="circle", context=256, slots=2, api_keys=("a key",))
    metrics = Metrics()
    service = local_service(pair(), settings, metrics=metrics)
    with listening(make_app(service, metrics=metrics)) as url:
        yield url


@pytest.fixture(scope="module")
def tab(tmp_path_factory, server):
    with browsing(tmp_path_factory.mktemp("profile")) as page:
        page.open(server, width=1100)
        page.until("document.getElementById('key').open")
        page.until("document.activeElement.id === 'key-value'")
        page.type("a key")
        page.press("Enter")
        page.until("document.title.includes('circle')")
        page.ask(f"document.getElementById('max_tokens').value = '{MOST}'")
        page.complaints.clear()
        yield page


@pytest.fixture(scope="module")
def alone():
    messages = [{"role": "user", "content": ASKED}]
    return pair(drafter=False).generate(messages, max_new_tokens=MOST)


def test_what_is_shown_is_what_the_target_writes(tab, alone):
    send(tab, ASKED)
    assert said(tab, f"{LAST} .error") is None
    assert copied(tab) == alone.text
    blocks = tab.ask(TILES)
    assert [kind for kind, *_ in blocks[0]] == ["first"]
    for block in blocks[1:-1]:  # the drafter is always right
        kinds = [kind for kind, *_ in block]
        assert kinds == ["draft"] * (len(kinds) - 1) + ["own"]
        assert len(kinds) > 2
    found = counters(tab)
    assert found["tokens"] == str(len(alone.tokens)) == str(MOST)
    assert found["cycles"] == str(len(blocks) - 1)
    assert found["acceptance length"] == f"{(MOST - 1) / (len(blocks) - 1):.2f}"
    assert found["acceptance rate"].endswith(" %")
    tab.ask("document.querySelector('.dominoes .tile').focus()")
    assert str(alone.tokens[0]) in said(tab, "#tip dl")
    assert "%" in said(tab, "#tip dl")
    assert tab.complaints == []


def test_a_race_on_the_real_server(tab, alone):
    tab.click("#clear")
    race(tab, ASKED)
    words = verdict(tab)
    assert words[3] == f"The texts are identical ({MOST} tokens)."
    assert copied(tab) == alone.text
    assert counters(tab, ".plain")["acceptance length"] == "1.00"
    assert float(counters(tab)["acceptance length"]) > 2
