"""The server's door: of Flower's interfaces one is open, without TLS and keys on this machine alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

pytest.importorskip("flwr")
import httpx

from privrep.errors import InputError
from privrep.federated.wire.superlink import MOST_BYTES, Link, open_link


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    with open_link("127.0.0.1", 0, None, None) as opened:
        yield opened


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "/v1/runtime/push-messages",
        "/v1/fleet/../control/start-run",
        "/docs",
        "/openapi.json",
        "/",
    ],
)
def test_only_the_fleet_interface_is_open(link: Link, path: str) -> None:
    answer = httpx.post(f"http://127.0.0.1:{link.port}{path}", content=b"")
    assert answer.status_code == 404
    assert answer.content == b""


def test_the_fleet_interface_answers_but_not_to_strangers(link: Link) -> None:
    asked = {"content": b"", "headers": {"content-type": "application/x-protobuf"}}
    answer = httpx.post(f"http://127.0.0.1:{link.port}/v1/fleet/pull-messages", **asked)  # type: ignore[arg-type]
    assert answer.status_code not in (200, 404)


@pytest.mark.parametrize("length", [f"content-length: {MOST_BYTES + 1}", "transfer-encoding: chunked"])
def test_long_requests_are_refused_before_they_are_read(link: Link, length: str) -> None:
    with socket.create_connection(("127.0.0.1", link.port), timeout=10) as raw:
        raw.sendall(f"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\n{length}\r\n\r\n".encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 413")


def test_a_port_in_use_is_one_sentence(link: Link) -> None:
    with pytest.raises(InputError, match="choose another port"), open_link("127.0.0.1", link.port, None, None):
        pass


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.org"])
def test_elsewhere_than_on_loopback_it_takes_tls_and_keys(host: str) -> None:
    with pytest.raises(InputError, match="on loopback alone"), open_link(host, 0, None, {"a": b""}):
        pass
    with pytest.raises(InputError, match="on loopback alone"), open_link(host, 0, None, None):
        pass


def test_nobody_is_there_at_first(link: Link) -> None:
    assert link.nodes() == {}
