"""`corral up --lan`: every door has TLS from the fleet's own CA, and the printed line is all a second machine needs."""

from __future__ import annotations

import json
import re
import shlex
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from http.cookiejar import CookieJar
from typing import Any

import pytest

from corral.kit.certificates import fingerprint
from tests.support.fleet import PATIENT, Fleet, http
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("lan"), "--lan", **PATIENT)
    try:
        yield fleet.start()
    finally:
        fleet.close()


def ingress_answers(fleet: Fleet, node: dict[str, Any], *, server_name: str) -> bool:
    """Whether the ingress answers with a certificate of the fleet's CA for this name."""
    where, trust = urllib.parse.urlsplit(node["ingress_url"]), fleet.trust
    assert trust is not None
    with (
        socket.create_connection((str(where.hostname), where.port or 443), timeout=60) as line,
        trust.wrap_socket(line, server_hostname=server_name) as secure,
    ):
        secure.sendall(b"GET /healthz HTTP/1.1\r\nHost: ingress\r\nConnection: close\r\n\r\n")
        return secure.recv(64).startswith(b"HTTP/1.1 200")


def test_the_gateway_is_believed_by_its_own_ca_and_by_nobody_elses(fleet: Fleet) -> None:
    address = urllib.parse.urlsplit(shlex.split(fleet.join_line())[2]).hostname
    for host in ("127.0.0.1", "localhost", address):
        assert http("GET", f"https://{host}:{fleet.port}/readyz", trust=fleet.trust).status == 200, host
    with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
        http("GET", f"{fleet.url}/readyz")


def test_the_printed_line_brings_a_second_machine_whose_every_door_has_tls(fleet: Fleet) -> None:
    own = fleet.own_node()
    fleet.wait_status(own, "healthy")
    line = fleet.join_line()
    pem = fleet.ca.read_text()
    assert re.fullmatch(rf"corral join https://\S+:{fleet.port} --token cj_\S+ --ca {fingerprint(pem)}", line)

    worker = fleet.paste(line, "second")
    name = fleet.newcomer(own)
    assert fleet.status(name) == "pending"
    assert fleet.cli("nodes", "approve", name).returncode == 0
    fleet.wait_status(name, "healthy")

    wait_for(lambda: fleet.proven_ingresses() == {own: True, name: True}, "both ingresses found in order")
    for node in fleet.nodes().values():
        assert node["ingress_url"].startswith("https://")
        assert node.get("ingress_error", "") == ""
        assert ingress_answers(fleet, node, server_name=node["id"])
        with pytest.raises(ssl.SSLCertVerificationError, match="is not valid for"):
            ingress_answers(fleet, node, server_name=str(urllib.parse.urlsplit(node["ingress_url"]).hostname))
        with pytest.raises(urllib.error.URLError, match="certificate verify failed"):
            http("GET", node["ingress_url"] + "/healthz")
    assert fleet.api("GET", "/api/cluster").json()["bus"] == {"connected": True, "isolation": True, "revocation": True}
    assert worker.running


def test_a_wrong_pin_is_refused_before_the_token_is_shown(fleet: Fleet) -> None:
    token = fleet.token()
    told = fleet.refused(
        *("join", fleet.url, "--token", token, "--ca", "sha256:" + "0" * 64),
        *("--data", str(fleet.root / "mistrusting"), "--name", "mistrusting"),
    )
    assert "the controller's CA is not the pinned one" in told
    assert fingerprint(fleet.ca.read_text()) in told
    assert token not in told
    assert "mistrusting" not in fleet.nodes()
    tokens = json.loads(fleet.cli("token", "list", "--json").stdout)
    assert any(each["uses_left"] == 1 and each["uses"] == 0 for each in tokens), "nobody has seen the token"


def test_plain_http_at_a_tls_port_fails_cleanly_and_harms_nobody(fleet: Fleet) -> None:
    with closing(HTTPConnection("127.0.0.1", fleet.port, timeout=60)) as plain:
        plain.request("GET", "/readyz")
        with pytest.raises((HTTPException, ConnectionError)):
            plain.getresponse()
    url = f"http://127.0.0.1:{fleet.port}"
    told = fleet.refused("nodes", "list", "--url", url, "--key", fleet.key)
    assert url in told
    assert "is it an https:// address?" in told
    assert fleet.http("GET", "/readyz").status == 200
    assert "Traceback" not in (fleet.data / "logs" / "gateway.log").read_text()


def test_the_commands_want_the_fleets_ca(fleet: Fleet) -> None:
    assert fleet.cli("nodes", "list").returncode == 0, "the fleet on this machine is known with its CA"
    pin = fingerprint(fleet.ca.read_text())
    elsewhere = {"CORRAL_CONFIG_DIR": str(fleet.root / "another person")}
    fleet.env |= elsewhere
    try:
        words = ("nodes", "list", "--url", fleet.url, "--key", fleet.key)
        assert "is not trusted" in fleet.refused(*words)
        assert "not the pinned one" in fleet.refused(*words, "--ca", "sha256:" + "0" * 64)
        for ca in (pin, str(fleet.ca)):
            assert fleet.cli(*words, "--ca", ca).returncode == 0
    finally:
        for name in elsewhere:
            del fleet.env[name]


def test_the_bus_speaks_tls_only(fleet: Fleet) -> None:
    with socket.create_connection(("127.0.0.1", fleet.bus_port), timeout=60) as line:
        told = json.loads(line.recv(4096).removeprefix(b"INFO "))
        assert told["tls_required"] is True
        trust = fleet.trust
        assert trust is not None
        with trust.wrap_socket(line, server_hostname="127.0.0.1") as secure:
            secure.sendall(b'CONNECT {"verbose":false,"protocol":1}\r\nPING\r\n')
            assert b"Authorization Violation" in secure.recv(4096)
    with socket.create_connection(("127.0.0.1", fleet.bus_port), timeout=60) as line:
        line.recv(4096)
        line.sendall(b'CONNECT {"verbose":false,"protocol":1}\r\nPING\r\n')
        answer = b""
        while piece := _received(line):
            answer += piece
        assert b"PONG" not in answer


def _received(line: socket.socket) -> bytes:
    try:
        return line.recv(4096)
    except ConnectionError:
        return b""


def test_the_page_keeps_its_session_for_https_alone(fleet: Fleet) -> None:
    jar = CookieJar()
    browser = urllib.request.build_opener(
        urllib.request.HTTPSHandler(context=fleet.trust), urllib.request.HTTPCookieProcessor(jar)
    )
    with browser.open(f"{fleet.url}/login", timeout=60) as answer:
        hidden = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', answer.read().decode()))
    form = urllib.parse.urlencode({**hidden, "key": fleet.key}).encode()
    with browser.open(f"{fleet.url}/login", data=form, timeout=60) as answer:
        assert answer.url == f"{fleet.url}/"
        assert fleet.own_node() in answer.read().decode()
    session = next(cookie for cookie in jar if cookie.name == "corral_session")
    assert session.secure
    assert session.has_nonstandard_attr("HttpOnly")
    assert session.get_nonstandard_attr("SameSite", "").lower() == "strict"


def test_another_start_is_the_same_fleet_to_those_who_trust_it(fleet: Fleet) -> None:
    """The last test with this fleet: it is stopped and started."""
    worker = fleet.join("faithful", token=fleet.token("--pre-approved"))
    before = fleet.wait_status("faithful", "healthy")
    pem = fleet.ca.read_text()
    assert fleet.up is not None
    assert fleet.up.stop() == 0
    fleet.start()
    assert fleet.ca.read_text() == pem

    def back() -> dict[str, Any]:
        node = fleet.nodes()["faithful"]
        assert node["last_heartbeat"] > before["last_heartbeat"]
        assert not node.get("bus_down")
        assert node["status"] == "healthy"
        return node

    after = wait_for(back, "worker that comes back by itself")
    assert (after["id"], worker.running) == (before["id"], True)


def test_without_tls_a_person_has_said_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    fleet = Fleet(tmp_path_factory.mktemp("plain"), "--lan", "--plain")
    try:
        fleet.start()
        line = fleet.join_line()
        assert re.fullmatch(rf"corral join http://\S+:{fleet.port} --token cj_\S+", line)
        own = fleet.own_node()
        fleet.paste(line, "second")
        name = fleet.newcomer(own)
        assert fleet.cli("nodes", "approve", name).returncode == 0
        assert fleet.wait_status(name, "healthy")["ingress_url"].startswith("http://")
        wait_for(lambda: fleet.proven_ingresses() == {own: True, name: True}, "both ingresses found in order")
    finally:
        fleet.close()
