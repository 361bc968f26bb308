"""The environment a LocalAI worker needs, with the contract's names."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from pathlib import Path

import pytest

from corral.cli.main import main
from corral.cli.nodes.join import connection_failure, localai_environment, warn_if_unreachable
from corral.client import LocalFleet, local_file, write_local
from corral.worker.settings import WorkerSettings
from corral.worker.settings.node import NodeSettings


@pytest.fixture(autouse=True)
def own_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CORRAL_CONFIG_DIR", str(tmp_path))


def test_the_plain_environment() -> None:
    assert localai_environment("http://fleet:8080/", token="shared", name="w1") == [
        ("LOCALAI_REGISTER_TO", "http://fleet:8080"),
        ("LOCALAI_REGISTRATION_TOKEN", "shared"),
        ("LOCALAI_NATS_URL", "nats://fleet:4222"),
        ("LOCALAI_NATS_REQUIRE_AUTH", "true"),
        ("LOCALAI_REGISTRATION_REQUIRE_AUTH", "true"),
        ("LOCALAI_NODE_NAME", "w1"),
    ]


def test_with_tls_the_ca_file_is_named_for_bus_and_registration() -> None:
    found = dict(localai_environment("https://[fd00::1]:8080", token="t", ca="/ca.pem"))
    assert found["LOCALAI_NATS_URL"] == "tls://[fd00::1]:4222"
    assert found["LOCALAI_NATS_TLS_CA"] == found["SSL_CERT_FILE"] == "/ca.pem"
    pinned = dict(localai_environment("https://x:1", token="t", ca="sha256:ab"))
    assert "SSL_CERT_FILE" not in pinned


def test_it_is_printed_for_a_shell_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", "http://fleet:8080", "--token", "it's", "--localai"]) == 0
    printed = capsys.readouterr()
    assert """export LOCALAI_REGISTRATION_TOKEN='it'"'"'s'""" in printed.out
    assert all(line.startswith("export ") for line in printed.out.splitlines())
    assert "--compat-localai" in printed.err


def test_the_bus_of_the_local_fleet_is_known_by_its_port(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = LocalFleet(
        url="https://127.0.0.1:18080", public_url="https://192.168.7.5:18080", bus_url="tls://127.0.0.1:14222", pid=1
    )
    write_local(local_file(os.environ), fleet)
    assert main(["join", "https://192.168.7.5:18080", "--token", "t", "--localai"]) == 0
    printed = capsys.readouterr()
    assert "export LOCALAI_NATS_URL=tls://192.168.7.5:14222" in printed.out
    assert "/ca.pem" in printed.err


def test_url_and_token_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", "--localai"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_address_without_a_listener_is_reported_with_the_cause_and_what_to_check(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        warn_if_unreachable(WorkerSettings(node=NodeSettings(controller=url)))
        assert capsys.readouterr().err == ""
    warn_if_unreachable(WorkerSettings(node=NodeSettings(controller=url)))
    assert capsys.readouterr().err == (
        f"corral: cannot connect to {url}: Connection refused; the worker retries at least every 30s until Ctrl-C. "
        "Check the address, that the fleet runs there with `corral up --lan`, and that no firewall blocks the port\n"
    )


def test_a_worker_that_has_joined_before_needs_no_address(capsys: pytest.CaptureFixture[str]) -> None:
    warn_if_unreachable(WorkerSettings())
    assert capsys.readouterr().err == ""


def test_a_host_that_never_answers_is_a_failure_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", time_out)
    assert connection_failure("https://fleet:8080") == "no answer within 3 s"
