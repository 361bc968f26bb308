"""`corral up --lan` with a certificate of one's own: clients of its names get it, and the printed line still works."""

from __future__ import annotations

import re
import shlex
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.controller.distribution.fetch_wheels import Controller
from corral.kit.certificates import fingerprint
from tests.support.fleet import PATIENT, Fleet, http
from tests.support.own_certificates import OwnCa
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(180)

PUBLIC = socket.gethostname().lower()  # a name that leads here
CHECK = {"CORRAL_TLS_CHECK": "200ms"}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> OwnCa:
    own = OwnCa(tmp_path_factory.mktemp("own"))
    own.issue(PUBLIC)
    return own


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, own: OwnCa) -> Iterator[Fleet]:
    options = ("--lan", "--tls-cert", str(own.certificate), "--tls-key", str(own.key))
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), *options, **PATIENT, **CHECK)
    try:
        yield fleet.start()
    finally:
        fleet.close()


def presented(fleet: Fleet, name: str) -> bytes:
    """The certificate for clients that ask for this name."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", fleet.port), timeout=60) as line,
        context.wrap_socket(line, server_hostname=name) as secure,
    ):
        return secure.getpeercert(binary_form=True) or b""


def test_names_of_the_certificate_get_it_and_addresses_get_the_fleets(fleet: Fleet, own: OwnCa) -> None:
    trust = ssl.create_default_context(cafile=str(own.file))
    assert http("GET", f"https://{PUBLIC}:{fleet.port}/readyz", trust=trust).status == 200
    for host in ("127.0.0.1", "localhost"):
        assert http("GET", f"https://{host}:{fleet.port}/readyz", trust=fleet.trust).status == 200, host
    served = http("GET", f"https://{PUBLIC}:{fleet.port}/ca.pem", trust=trust).body.decode()
    assert served == own.pem + fleet.ca.read_text(), "the one that verifies this name comes first"


def test_the_printed_line_pins_what_is_presented_and_joins(fleet: Fleet, own: OwnCa) -> None:
    first = fleet.own_node()
    printed = fleet.printed_line()
    assert printed.startswith("printf %s cj_")
    assert f"u=https://{PUBLIC}:{fleet.port};" in printed
    assert printed.endswith(f" corral --ca {own.fingerprint}")
    line = fleet.join_line()
    assert re.fullmatch(
        rf"corral join https://{re.escape(PUBLIC)}:{fleet.port} --token cj_\S+ --ca {own.fingerprint}", line
    )
    fleet.paste(line, "second")
    name = fleet.newcomer(first)
    assert fleet.cli("nodes", "approve", name).returncode == 0
    fleet.wait_status(name, "healthy")
    wait_for(lambda: fleet.proven_ingresses() == {first: True, name: True}, "both ingresses proven by the fleet's CA")
    bus = (fleet.root / "pasted-second" / "bus-ca.crt").read_text()
    assert fingerprint(bus) == fingerprint(fleet.ca.read_text()), "the bus keeps the fleet's CA"


def test_the_printed_line_verifies_before_it_fetches(fleet: Fleet, own: OwnCa) -> None:
    made = fleet.cli("token", "create")
    printed = next(line for line in made.stdout.splitlines() if line.startswith("printf"))
    url = f"https://{PUBLIC}:{fleet.port}"
    with Controller(url, own.fingerprint, fleet.token()).get("/install.sh") as answer:
        assert answer.status == 200
    home = fleet.root / "bare"
    home.mkdir()
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "CORRAL_DATA": str(home / "data")}
    wrong = printed.replace(own.fingerprint, "sha256:" + "0" * 64)
    ran = subprocess.run(wrong, shell=True, env=env, capture_output=True, text=True, timeout=120)
    assert ran.returncode != 0
    assert "is not the one of this installer" in ran.stderr
    assert not list((home / "data").rglob("*.whl"))


def test_renewed_files_are_used_and_a_broken_pair_keeps_the_old_one(fleet: Fleet, own: OwnCa) -> None:
    log = fleet.data / "logs" / "gateway.log"
    before = presented(fleet, PUBLIC)
    own.issue(PUBLIC)
    wait_for(lambda: presented(fleet, PUBLIC) != before, "renewed certificate")
    renewed = presented(fleet, PUBLIC)
    own.key.write_text("-----BEGIN PRIVATE KEY-----\nhalf of")
    wait_for(lambda: "certificate cannot be used, the old one stays" in log.read_text(), "line in the log")
    assert presented(fleet, PUBLIC) == renewed
    own.issue(PUBLIC)
    wait_for(lambda: presented(fleet, PUBLIC) != renewed, "certificate after the broken one")


@pytest.mark.long
def test_a_certificate_that_the_system_trusts_needs_no_pin(
    tmp_path_factory: pytest.TempPathFactory, own: OwnCa
) -> None:
    options = ("--lan", "--no-worker", "--tls-cert", str(own.certificate), "--tls-key", str(own.key))
    fleet = Fleet(tmp_path_factory.mktemp("public"), *options, **PATIENT, SSL_CERT_FILE=str(own.file))
    try:
        fleet.start()
        line = fleet.join_line()
        assert re.fullmatch(rf"corral join https://{re.escape(PUBLIC)}:{fleet.port} --token cj_\S+", line)
        assert "--ca" not in shlex.split(fleet.printed_line())
        fleet.paste(line, "second")
        name = fleet.newcomer()
        assert fleet.cli("nodes", "approve", name).returncode == 0
        fleet.wait_status(name, "healthy")
    finally:
        fleet.close()


def test_bad_files_at_the_start_get_one_line(tmp_path: Path) -> None:
    own = OwnCa(tmp_path)
    certificate, _ = own.issue("fleet.test")
    other = tmp_path / "other.key"
    other.write_text("no key")
    address, address_key = tmp_path / "address.crt", tmp_path / "address.key"
    own.issue("192.0.2.7")[0].rename(address)
    own.key.rename(address_key)
    own.issue("fleet.test")
    fleet = Fleet(tmp_path, *PATIENT)
    for flags, told in (
        (("--tls-cert", certificate), "must be given together"),
        (("--tls-cert", certificate, "--tls-key", tmp_path / "absent"), "absent"),
        (("--tls-cert", certificate, "--tls-key", other), "cannot be used"),
        (("--tls-cert", address, "--tls-key", address_key), "has no host name"),
    ):
        words = ("up", "--lan", "--data", str(fleet.data), "--port", str(fleet.port), *map(str, flags))
        said = fleet.cli(*words)
        assert said.returncode != 0
        assert told in said.stderr
        assert "Traceback" not in said.stderr
        assert len([line for line in said.stderr.splitlines() if line.strip()]) == 1, said.stderr
