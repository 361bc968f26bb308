"""Where the ingress listens, and what the registration says about it."""

from __future__ import annotations

from typing import Any

import pytest

from corral.kit.hosts import HostPort, is_in_clear, is_loopback, parse_host_port
from corral.kit.settings import build_settings
from corral.worker.agent.join.registration import AdvertisedAddresses, advertised_addresses, listen_address
from corral.worker.settings import WorkerSettings


def given(**values: Any) -> WorkerSettings:
    return build_settings(WorkerSettings, values)


@pytest.mark.parametrize(
    ("given", "controller", "where"),
    [
        (given(), "https://c:8080", HostPort("", 50050, is_chosen=False)),
        (given(), "http://127.0.0.1:8080", HostPort("127.0.0.1", 50050, is_chosen=False)),
        (given(), "http://localhost:8080", HostPort("127.0.0.1", 50050, is_chosen=False)),
        (given(), "http://[::1]:8080", HostPort("127.0.0.1", 50050, is_chosen=False)),
        (given(host="10.0.0.7"), "http://127.0.0.1:8080", HostPort("10.0.0.7", 50050, is_chosen=False)),
        (given(port=0), "https://c", HostPort("", 0)),
        (given(address="w1:60051"), "https://c", HostPort("", 60050)),
        (given(serve_address="0.0.0.0:60051"), "https://c", HostPort("", 60050)),
        (given(address="w1:60051", serve_address="0.0.0.0:7"), "https://c", HostPort("", 60050)),
        (given(address="w1:60051", port=9), "https://c", HostPort("", 9)),
    ],
)
def test_listen_address(given: WorkerSettings, controller: str, where: HostPort) -> None:
    assert listen_address(given, controller) == where


def test_the_port_of_the_last_start_is_used_again_unless_a_person_chose_one() -> None:
    assert listen_address(given(), "https://c", 50123) == HostPort("", 50123, is_chosen=False)
    assert listen_address(given(port=9), "https://c", 50123) == HostPort("", 9)
    assert listen_address(given(address="w1:60051"), "https://c", 50123) == HostPort("", 60050)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (given(), AdvertisedAddresses()),
        (given(advertise="w1"), AdvertisedAddresses("w1:50051", "w1:50050", "w1")),
        (given(advertise="w1:6000"), AdvertisedAddresses("w1:50051", "w1:6000", "w1:6000")),
        (given(advertise="fd00::1"), AdvertisedAddresses("[fd00::1]:50051", "[fd00::1]:50050", "[fd00::1]")),
        (given(address="w1:50051"), AdvertisedAddresses("w1:50051", "w1:50050", "w1:50050")),
        (
            given(advertise_address="pub:7001", address="w1:50051"),
            AdvertisedAddresses("pub:7001", "pub:50050", "pub:50050"),
        ),
        (given(advertise_address="pub:7001"), AdvertisedAddresses("pub:7001", "pub:50050", "pub:50050")),
        (given(advertise_address="pub"), AdvertisedAddresses("pub", "pub:50050", "pub:50050")),
        (given(address="w1:50051", port=50050), AdvertisedAddresses("w1:50051", "w1:50050", "w1:50050")),
        # A LocalAI controller wants an address and is recognised by its bus URL; ours sees for itself.
        (given(bus_urls=("nats://b",)), AdvertisedAddresses("box:50051", "box:50050", "")),
    ],
)
def test_advertised_addresses(given: WorkerSettings, expected: AdvertisedAddresses) -> None:
    assert advertised_addresses(given, port=50050, host_name="box") == expected


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
    found = parse_host_port(text)
    assert (found.host, found.port) == parts


@pytest.mark.parametrize("text", ["", "http://h", "h:x", "h:", "h:70000", "[::1", "[::1]x", "[zz]:1", "1:2:3:4", "a b"])
def test_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"address|port"):
        parse_host_port(text)


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
