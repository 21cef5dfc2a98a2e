"""Who may ask, and what every response carries."""

import asyncio
import hmac
from collections import Counter

import pytest

from domino_spec.serving import middleware
from domino_spec.serving.config import ServerConfig
from domino_spec.serving.metrics import Metrics
from tests.serving.conftest import error_of
from tests.serving.fake import MODEL

KEYS = ("first-key", "zweiter-schlüssel")


def bearer(key: str, scheme: str = "Bearer") -> dict[str, bytes]:
    return {"authorization": f"{scheme} {key}".encode()}


@pytest.fixture
def locked(make_client):
    return make_client(config=ServerConfig(model=MODEL, page=False, api_keys=KEYS))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/domino", "/metrics", "/openapi.json"])
def test_every_key_opens(locked, key, path):
    assert locked.get(path, headers=bearer(key)).status_code == 200
    assert locked.get(path, headers=bearer(key, "bearer")).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {}, bearer(""), bearer("first-ke"), bearer("first-key2"), bearer("first-key", "Basic"),
        {"authorization": b"first-key"}, {"api-key": b"first-key"},
        {"authorization": b"Bearer \xff"},
    ],
)  # fmt: skip
def test_nothing_else_does(locked, headers):
    for path in ("/v1/models", "/v1/chat/completions", "/metrics", "/v1/nothing", "/nothing"):
        response = locked.get(path, headers=headers)
        assert response.status_code == 401, path
        assert error_of(response)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


def test_nobody_is_asked_for_a_key_to_see_whether_it_is_up(locked):
    assert locked.get("/health").status_code == 200
    assert locked.get("/").status_code == 404  # no page here, but no key either


def test_all_keys_are_looked_at_even_when_the_first_fits(locked, monkeypatch):
    lengths = []
    real = hmac.compare_digest
    monkeypatch.setattr(
        middleware.hmac,
        "compare_digest",
        lambda a, b: lengths.append((len(a), len(b))) or real(a, b),
    )
    for key in (*KEYS, "wrong", ""):
        lengths.clear()
        locked.get("/v1/models", headers=bearer(key))
        assert lengths == [(32, 32)] * len(KEYS)


def test_clients_are_told_apart_for_the_queue(locked, client):
    body = {"model": MODEL, "prompt": "x"}
    for key in KEYS:
        locked.send("POST", "/v1/completions", json=body, headers=bearer(key))
    assert len(set(locked.service.clients)) == 2
    client.complete()
    assert client.service.clients == ["none/127.0.0.1"]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8000", "localhost:99", "LOCALHOST", "[::1]:8000", "localhost."]
)
def test_this_machine_calls_itself_by_these_names(client, host):
    assert client.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[::2]", "", "localhost@e"],
)
def test_a_name_that_was_made_to_mean_this_machine_is_refused(client, host):
    for path in ("/v1/models", "/health", "/"):
        response = client.get(path, headers={"host": host})
        assert response.status_code == 403
        assert error_of(response)["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ([("content-length", "2"), ("transfer-encoding", "chunked")], "both Content-Length and"),
        ([("content-length", "2"), ("content-length", "3")], "Content-Length is not one whole"),
        ([("content-length", "+2")], "Content-Length is not one whole"),
        ([("transfer-encoding", "gzip, chunked")], "Transfer-Encoding is not chunked"),
        ([("host", "127.0.0.1"), ("host", "localhost")], "2 Host headers"),
    ],
)
def test_a_request_that_a_proxy_may_read_as_another(client, headers, found):
    """Whatever the parser lets through: it differs between its versions."""
    response = client.send("POST", "/v1/completions", headers=headers)
    assert response.status_code == 400
    assert response.headers["connection"] == "close"
    assert error_of(response)["code"] == "invalid_http"
    assert found in error_of(response)["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/nothing", "/"])
@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_connections_are_not_upgraded(client, path, protocol):
    headers = {"connection": "keep-alive, Upgrade", "upgrade": protocol}
    response = client.get(path, headers=headers)
    assert response.status_code == 400
    assert response.headers["connection"] == "close"
    assert error_of(response)["code"] == "upgrade_not_supported"


def test_a_public_server_has_any_name(make_client):
    client = make_client(config=ServerConfig(model=MODEL, page=False, host="0.0.0.0"))
    assert client.get("/health", headers={"host": "models.example"}).status_code == 200


def test_headers_of_every_response(client, locked):
    refused = client.get("/health", headers={"host": "evil.example"})
    responses = [
        client.get("/health"), client.get("/nothing"), client.chat(), client.chat(stream=True),
        client.chat(n=0), locked.get("/v1/models"), refused,
    ]  # fmt: skip
    for response in responses:
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
        assert response.headers["x-request-id"].startswith("req_")
    assert len({response.headers["x-request-id"] for response in responses}) == len(responses)


def test_no_other_site_may_ask(client):
    origin = {"origin": "https://evil.example"}
    wanted = {**origin, "access-control-request-method": "POST"}
    for method, headers in (("GET", origin), ("OPTIONS", wanted)):
        response = client.send(method, "/v1/models", headers=headers)
        assert not [name for name in response.headers if name.startswith("access-control")]
    assert client.send("OPTIONS", "/v1/models", headers=wanted).status_code == 405


def test_the_event_loop_turns_to_others_in_the_midst_of_a_burst():
    """Handling a prompt takes a millisecond; tokens of running requests must not wait for all."""
    passes, entered = 0, Counter()

    async def app(*_):
        entered[passes] += 1

    async def others():
        nonlocal passes
        while entered.total() < 32:
            passes += 1
            await asyncio.sleep(0)

    async def burst():
        config = ServerConfig(model=MODEL)
        served = middleware.Middleware(app, config=config, metrics=Metrics(), posted={})
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        waiting = [served({**scope, "state": {}}, None, None) for _ in range(32)]
        async with asyncio.timeout(10):
            await asyncio.gather(*waiting, others())

    asyncio.run(burst())
    assert entered.total() == 32
    assert max(entered.values()) <= 8
