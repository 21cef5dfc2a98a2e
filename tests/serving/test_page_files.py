"""The page's files as they are served: known names only, under a policy without gaps."""

import re
from importlib.resources import files

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from domino_spec.serving.app import page_routes

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
def client():
    app = FastAPI()
    app.include_router(page_routes())
    return TestClient(app)


def test_the_index_is_at_the_root(client):
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text == text("index.html")
    assert client.head("/").headers["etag"] == answer.headers["etag"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("page.css", "text/css; charset=utf-8"),
        ("page.js", "text/javascript; charset=utf-8"),
        ("icon.svg", "image/svg+xml"),
    ],
)
def test_files_come_with_their_types(client, name, kind):
    answer = client.get(f"/page/{name}")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == kind
    assert answer.content == FOLDER.joinpath(name).read_bytes()


@pytest.mark.parametrize("place", ["/", *(f"/page/{name}" for name in NAMES)])
def test_every_answer_carries_the_policy(client, place):
    headers = client.get(place).headers
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
def test_nothing_else_can_be_asked_for(client, name):
    assert client.get(f"/page/{name}", follow_redirects=False).status_code in (404, 307)


def test_what_the_browser_has_is_not_sent_again(client):
    first = client.get("/page/page.js")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    again = client.get("/page/page.js", headers={"If-None-Match": f'"other", W/{tag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert "content-security-policy" in again.headers
    assert client.get("/page/page.js", headers={"If-None-Match": '"other"'}).status_code == 200
    assert client.get("/page/page.css").headers["etag"] != tag


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_never_make_markup_of_text(name):
    makers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|setHTML"
    assert not re.search(makers, text(name))
    assert not re.search(r"\beval\(|new Function|localStorage|sessionStorage|cookie", text(name))


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
