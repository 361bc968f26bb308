"""Where the ingress listens, and what the registration says about it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from corral.kit.hosts import is_in_clear, is_loopback
from corral.worker.addresses import HostPort, Told, listen_on, read_host_port, tell


@dataclass(frozen=True)
class Given:
    host: str = ""
    port: int | None = None
    advertise: str = ""
    address: str = ""
    advertise_address: str = ""
    serve_address: str = ""
    bus_urls: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("given", "controller", "where"),
    [
        (Given(), "https://c:8080", HostPort("", 50050, chosen=False)),
        (Given(), "http://127.0.0.1:8080", HostPort("127.0.0.1", 50050, chosen=False)),
        (Given(), "http://localhost:8080", HostPort("127.0.0.1", 50050, chosen=False)),
        (Given(), "http://[::1]:8080", HostPort("127.0.0.1", 50050, chosen=False)),
        (Given(host="10.0.0.7"), "http://127.0.0.1:8080", HostPort("10.0.0.7", 50050, chosen=False)),
        (Given(port=0), "https://c", HostPort("", 0)),
        (Given(address="w1:60051"), "https://c", HostPort("", 60050)),
        (Given(serve_address="0.0.0.0:60051"), "https://c", HostPort("", 60050)),
        (Given(address="w1:60051", serve_address="0.0.0.0:7"), "https://c", HostPort("", 60050)),
        (Given(address="w1:60051", port=9), "https://c", HostPort("", 9)),
    ],
)
def test_listen_on(given: Given, controller: str, where: HostPort) -> None:
    assert listen_on(given, controller) == where


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (Given(), Told()),
        (Given(advertise="w1"), Told("w1:50051", "w1:50050", "w1")),
        (Given(advertise="w1:6000"), Told("w1:50051", "w1:6000", "w1:6000")),
        (Given(advertise="fd00::1"), Told("[fd00::1]:50051", "[fd00::1]:50050", "[fd00::1]")),
        (Given(address="w1:50051"), Told("w1:50051", "w1:50050", "w1:50050")),
        (Given(advertise_address="pub:7001", address="w1:50051"), Told("pub:7001", "pub:50050", "pub:50050")),
        (Given(advertise_address="pub:7001"), Told("pub:7001", "pub:50050", "pub:50050")),
        (Given(advertise_address="pub"), Told("pub", "pub:50050", "pub:50050")),
        (Given(address="w1:50051", port=50050), Told("w1:50051", "w1:50050", "w1:50050")),
        # A LocalAI controller wants an address and is recognised by its bus URL; ours sees for itself.
        (Given(bus_urls=("nats://b",)), Told("box:50051", "box:50050", "")),
    ],
)
def test_tell(given: Given, told: Told) -> None:
    assert tell(given, port=50050, host_name="box") == told


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("h", ("h", None)),
        ("h:1", ("h", 1)),
        (":1", ("", 1)),
        ("::1", ("::1", None)),
        ("[::1]:2", ("::1", 2)),
        ("[::1]", ("::1", None)),
    ],
)
def test_host_port(text: str, parts: tuple[str, int | None]) -> None:
    found = read_host_port(text)
    assert (found.host, found.port) == parts


@pytest.mark.parametrize("text", ["", "http://h", "h:x", "h:", "h:70000", "[::1", "[::1]x", "[zz]:1", "1:2:3:4", "a b"])
def test_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"address|port"):
        read_host_port(text)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("box", False)],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8080", False),
        ("http://[::1]:8080", False),
        ("http://localhost:8080", False),
        ("https://fleet:8080", False),
        ("http://fleet:8080", True),
        ("http://192.168.7.5:8080", True),
    ],
)
def test_plain_http_beyond_this_machine_is_noticed(url: str, expected: bool) -> None:
    assert is_in_clear(url) is expected
