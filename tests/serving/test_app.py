"""Models, health, metrics, and the files of the page."""

import re
from importlib.resources import files

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from domino_spec.decoding import SamplingParams, Sequence, SequenceOutput
from domino_spec.serving.app import page_routes
from tests.serving.fake import MODEL


def test_models(client):
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert model["id"] == MODEL
    assert model["created"] == client.service.created
    assert client.get(f"/v1/models/{MODEL}").json() == model


@pytest.mark.parametrize(("state", "status"), [("ready", 200), ("stopping", 503), ("failed", 503)])
def test_health(client, state, status):
    client.service.state = state
    response = client.get("/health")
    assert (response.status_code, response.json()) == (status, {"status": state})


def test_facts(client):
    assert client.get("/v1/domino").json() == client.service.info()


def numbers(client) -> dict[str, float]:
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = [line for line in response.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_what_the_engine_tells_is_counted(client):
    metrics = client.metrics
    sequence = Sequence([1], SamplingParams())
    sequence.arrived = sequence.last_output = 10.0
    metrics.set_queue(waiting=3, running=2, slots=4, cache_usage=0.25)
    metrics.observe_output(SequenceOutput(sequence, (1,), 0, 0, None), now=10.25)
    first = SequenceOutput(sequence, (1, 2, 3), 2, 1, None, drafts=4)
    metrics.observe_output(first, now=10.03)
    metrics.observe_output(SequenceOutput(sequence, (1,), 0, 2, None, drafts=1), now=10.03)
    metrics.observe_finished(sequence, "length")
    found = numbers(client)
    assert found["domino_answers_waiting"] == 3
    assert found["domino_answers_running"] == 2
    assert found["domino_slots"] == 4
    assert found["domino_cache_usage"] == 0.25
    assert found['domino_tokens_total{kind="accepted"}'] == 2
    assert found['domino_tokens_total{kind="own"}'] == 3
    assert found["domino_cycles_total"] == 2
    assert found["domino_tokens_per_cycle_sum"] / found["domino_tokens_per_cycle_count"] == 2
    offered = [found[f'domino_drafts_offered_total{{position="{p}"}}'] for p in range(4)]
    accepted = [found[f'domino_drafts_accepted_total{{position="{p}"}}'] for p in range(4)]
    assert offered == [2, 1, 1, 1]
    assert accepted == [1, 1, 0, 0]
    assert found["domino_time_to_first_token_seconds_sum"] == 0.25
    assert found['domino_time_to_first_token_seconds_bucket{le="0.25"}'] == 1
    assert found['domino_time_to_first_token_seconds_bucket{le="0.1"}'] == 0
    assert found["domino_inter_token_seconds_count"] == 4
    assert found["domino_inter_token_seconds_sum"] == pytest.approx(0.06)
    assert found["domino_answer_seconds_count"] == 1
    assert found['domino_answers_ended_total{reason="length"}'] == 1
    assert found['domino_answers_ended_total{reason="failed"}'] == 0


def test_responses_are_counted_by_path_and_status(client):
    client.chat()
    client.chat(n=0)
    client.get("/surprise/1")
    client.get("/surprise/2")
    client.send("BREW", "/surprise/3")
    found = numbers(client)

    def count(method: str, path: str, status: int) -> float:
        labels = f'{{method="{method}",path="{path}",status="{status}"}}'
        return found["domino_http_responses_total" + labels]

    assert count("POST", "/v1/chat/completions", 200) == 1
    assert count("POST", "/v1/chat/completions", 400) == 1
    assert count("GET", "other", 404) == 2
    assert count("other", "other", 404) == 1


# The page -----------------------------------------------------------------------------------------


FOLDER = files("domino_spec.serving").joinpath("page")
NAMES = sorted(entry.name for entry in FOLDER.iterdir())
SCRIPTS = [name for name in NAMES if name.endswith(".js")]
POLICY = {
    "default-src": "'none'", "script-src": "'self'", "style-src": "'self'",
    "connect-src": "'self'", "img-src": "'self' data:", "base-uri": "'none'",
    "form-action": "'none'", "frame-ancestors": "'none'",
}  # fmt: skip


def text(name):
    return FOLDER.joinpath(name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site():
    app = FastAPI()
    app.include_router(page_routes())
    return TestClient(app)


def test_the_index_is_at_the_root(site):
    answer = site.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text == text("index.html")
    assert site.head("/").headers["etag"] == answer.headers["etag"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("page.css", "text/css; charset=utf-8"),
        ("page.js", "text/javascript; charset=utf-8"),
        ("icon.svg", "image/svg+xml"),
    ],
)
def test_files_come_with_their_types(site, name, kind):
    answer = site.get(f"/page/{name}")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == kind
    assert answer.content == FOLDER.joinpath(name).read_bytes()


@pytest.mark.parametrize("place", ["/", *(f"/page/{name}" for name in NAMES)])
def test_every_answer_carries_the_policy(site, place):
    headers = site.get(place).headers
    if place == "/page/index.html":
        return  # not served there
    rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert POLICY.items() <= rules.items()
    assert not any("unsafe" in rule or "*" in rule for rule in rules.values())
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "name",
    [
        "nothing.js",
        "index.html",
        "..%2Fapp.py",
        "../app.py",
        "%2Fetc%2Fpasswd",
        "page.js/",
        "%00",
    ],
)
def test_nothing_else_can_be_asked_for(site, name):
    assert site.get(f"/page/{name}", follow_redirects=False).status_code in (404, 307)


def test_what_the_browser_has_is_not_sent_again(site):
    first = site.get("/page/page.js")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    again = site.get("/page/page.js", headers={"If-None-Match": f'"other", W/{tag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert "content-security-policy" in again.headers
    assert site.get("/page/page.js", headers={"If-None-Match": '"other"'}).status_code == 200
    assert site.get("/page/page.css").headers["etag"] != tag


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_never_make_markup_of_text(name):
    makers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|setHTML"
    assert not re.search(makers, text(name))
    assert not re.search(r"\beval\(|new Function|sessionStorage|cookie", text(name))
    if name == "store.js":  # the one place where something is kept, and it knows of no key
        assert "key.js" not in text(name)
    else:
        assert "localStorage" not in text(name)


def test_nothing_is_inline_and_nothing_comes_from_outside():
    index = text("index.html")
    assert re.findall(r"<script[^>]*>(.*?)</script>", index, flags=re.DOTALL) == [""]
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", index)
    for name in NAMES:
        found = text(name).replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|url\(|@import", found), name


def test_every_file_named_is_there():
    for name in ("index.html", *SCRIPTS):
        for asked in re.findall(r'(?:from "\./|(?:src|href)="page/)([^"]+)"', text(name)):
            assert asked in NAMES, f"{name} asks for {asked}"
