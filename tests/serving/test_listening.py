"""Taking the address, and what is said when it cannot be had."""

import socket

import pytest

from domino_spec.errors import InputError
from domino_spec.serving import config
from domino_spec.serving.config import ServerConfig, bind_sockets
from domino_spec.serving.server import serve
from tests.serving.live import live, tiny_decoder


def settings(**told) -> ServerConfig:
    return ServerConfig(model="m", **{"port": 0, **told})


def taken(**told):
    held = bind_sockets(settings(**told))
    for each in held:
        each.close()
    return held


def test_nobody_connects_before_the_server_listens():
    (held,) = bind_sockets(settings())
    with held, pytest.raises(ConnectionRefusedError):
        socket.create_connection(held.getsockname())


def test_a_taken_port():
    with live() as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(InputError, match=f"another program listens on port {port} of 127"):
            taken(port=port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "a b", "\ud800"])
def test_an_address_of_nobody_here(host):
    with pytest.raises(InputError, match="this machine has no address"):
        taken(host=host)


def test_a_port_of_the_system(monkeypatch):
    def refused(*_):
        raise PermissionError(13, "not you")

    monkeypatch.setattr(config, "_bind", refused)
    with pytest.raises(InputError, match="this user may not listen on port 80"):
        taken(port=80)


def test_a_port_that_another_took_while_the_model_was_loaded():
    """Two may hold a port; the first to listen has it."""
    (ours,) = bind_sockets(settings())
    port = ours.getsockname()[1]
    with live(port=port), pytest.raises(InputError, match="another program listens"):
        serve(tiny_decoder(), settings(port=port), sockets=[ours], log=lambda _: None)


def test_where_the_page_is():
    said: list[str] = []
    with live(log=said.append) as server:
        assert said == [f"listening on {server.address}", f"chat page: {server.address}/"]
    said.clear()
    with live(log=said.append, page=False):
        assert len(said) == 1
