"""`corral service` on a machine that boots with systemd: what the README promises of a restart, in systemd-nspawn."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.booted import BootedMachine
from tests.support.dockerfile import ROOT, ImageBuilder
from tests.support.waiting import wait_for

START_S = 120.0
pytestmark = [
    pytest.mark.long,
    pytest.mark.root,
    pytest.mark.timeout(1800),  # debootstrap, apt-get and pip over the network
    pytest.mark.skipif(os.geteuid() != 0, reason="only root boots machines"),
]
MACHINE = """
FROM debian:bookworm-slim AS machine
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates curl dbus procps python3 python3-venv \
    systemd systemd-sysv
RUN python3 -m venv /opt/corral
COPY requirements/runtime.txt /build/
RUN /opt/corral/bin/pip install --require-hashes --only-binary :all: -r /build/runtime.txt
COPY dist/*.whl /build/
RUN /opt/corral/bin/pip install --no-index --no-deps /build/*.whl && ln -s /opt/corral/bin/corral /usr/local/bin/corral
"""
ASK = json.dumps({"model": "echo", "messages": [{"role": "user", "content": "hello service"}]})


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootedMachine]:
    for program, package in (("debootstrap", "debootstrap"), ("systemd-nspawn", "systemd-container")):
        if shutil.which(program) is None:
            subprocess.run([ROOT / "scripts" / "_debian", package], check=False)
        if shutil.which(program) is None:
            pytest.skip(f"Debian's package {package} is not installed")
    folder = tmp_path_factory.mktemp("machine")
    (folder / "Dockerfile").write_text(MACHINE)
    (folder / "Dockerfile.dockerignore").write_text("*\n!dist/*.whl\n!requirements/runtime.txt\n")
    built = subprocess.run([ROOT / "scripts" / "build", folder / "dist"], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    root = ImageBuilder(folder / "Dockerfile", folder, folder / "roots").build("machine")
    machine = BootedMachine(root, folder / "console.log")
    try:
        machine.boot()
        yield machine
    finally:
        machine.close()
        shutil.rmtree(folder, ignore_errors=True)


def corral(machine: BootedMachine, *words: str) -> Any:
    """What a command prints as JSON."""
    return json.loads(machine.run("corral", *words, "--json"))


def call(machine: BootedMachine, path: str, body: str) -> Any:
    key = machine.run("cat", "/var/lib/corral/secrets/admin.key").strip()
    headers = ("--header", f"Authorization: Bearer {key}", "--header", "Content-Type: application/json")
    url = f"http://127.0.0.1:8080{path}"
    return json.loads(machine.run("curl", "--silent", "--show-error", "--fail-with-body", *headers, "-d", body, url))


def chat(machine: BootedMachine) -> str:
    return str(call(machine, "/v1/chat/completions", ASK)["choices"][0]["message"]["content"])


def wait_healthy(machine: BootedMachine, count: int = 1) -> None:
    def healthy() -> bool:
        found = {node["name"]: node["status"] for node in corral(machine, "nodes", "list")}
        assert list(found.values()) == ["healthy"] * count, found
        return True

    wait_for(healthy, "healthy nodes", START_S)


def backend(machine: BootedMachine) -> tuple[str, str]:
    """Process id and user."""
    listed = machine.run("ps", "-e", "-o", "pid=,user:32=,args=").splitlines()
    (found,) = (line.split() for line in listed if "mock.py" in line)
    return found[0], found[1]


def test_a_fleet_as_a_service_survives_reboots_power_cuts_and_kills(machine: BootedMachine) -> None:
    machine.run("corral", "service", "install", "--set", "CORRAL_GALLERIES=[]", "--set", "CORRAL_MODEL_GALLERIES=[]")
    wait_healthy(machine)
    call(machine, "/api/models", '{"definition": {"name": "echo", "backend": "mock"}}')
    assert "hello service" in chat(machine)
    pid, user = backend(machine)
    assert user == "corral-backend"
    stolen = machine.run(
        "setpriv", "--reuid=corral-backend", "--clear-groups", "cat", "/var/lib/corral/secrets/admin.key", check=False
    )
    assert stolen == ""

    machine.run("systemctl", "kill", "--kill-whom=main", "--signal=KILL", "corral.service")
    wait_healthy(machine)
    wait_for(lambda: "hello service" in chat(machine), "answer after kill -9", START_S)
    assert backend(machine)[0] == pid, "the worker adopts it"

    for leave in (machine.shut_down, machine.pull_the_plug):
        leave()
        machine.boot()
        wait_healthy(machine)
        wait_for(lambda: "hello service" in chat(machine), "answer after a reboot", START_S)
    journal = machine.run("journalctl", "--unit=corral", "--no-pager")
    assert journal.count("Corral is ready.") == 4
    assert "To join another machine: `corral token create`" in journal
    assert not any(prefix in journal for prefix in ("cj_", "ck_")), "others may read the journal"


def test_a_joined_worker_is_a_service_too_and_reloads(machine: BootedMachine) -> None:
    secret = corral(machine, "token", "create", "--pre-approved")["secret"]
    place = ("--name", "second", "--data", "/var/lib/corral-second")
    machine.run("corral", "join", "http://127.0.0.1:8080", "--token", secret, *place, "--service")
    wait_healthy(machine, 2)
    machine.shut_down()
    machine.boot()
    wait_healthy(machine, 2)
    before = machine.run("systemctl", "show", "--property=MainPID", "corral-worker")
    machine.run("systemctl", "reload", "corral-worker")
    wait_healthy(machine, 2)
    assert machine.run("systemctl", "show", "--property=MainPID", "corral-worker") == before
    for role in ("worker", "up"):
        machine.run("corral", "service", "uninstall", role)
    assert machine.run("systemctl", "list-unit-files", "corral*", "--no-legend", check=False).strip() == ""
    assert corral(machine, "service", "status") == []
