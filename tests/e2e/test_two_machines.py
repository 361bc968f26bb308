"""From the wheel to an answer of the second machine, as the README says: `uvx … corral up --lan` on this one, and the
line that it prints pasted on a bare Debian with a network of its own, which reaches nothing but this one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.containers import DEFAULT_CAPABILITIES, Container, ContainerSpec, Network
from tests.support.dockerfile import ROOT, ImageBuilder
from tests.support.fleet import PATIENT, Answer, Fleet, http
from tests.support.processes import clean_env
from tests.support.uv import find_uv
from tests.support.waiting import promised, wait_for

JOIN_S = 60.0  # promised, from the pasted line to a healthy node
pytestmark = [
    pytest.mark.long,
    pytest.mark.root,
    pytest.mark.timeout(1800),  # debootstrap and all dependencies come over the network
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes roots and networks"),
]
MACHINE = """
FROM debian:bookworm-slim AS machine
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates curl python3 python3-venv
"""


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A machine that somebody has just set up."""
    if shutil.which("debootstrap") is None:
        pytest.skip("a minimal Debian is made with debootstrap")
    folder = tmp_path_factory.mktemp("debian")
    (folder / "Dockerfile").write_text(MACHINE)
    try:
        yield ImageBuilder(folder / "Dockerfile", folder, folder / "roots").build("machine")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    built = subprocess.run([ROOT / "scripts" / "build", folder], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(params=[("--lan",), ("--lan", "--plain")], ids=["TLS", "plain"])
def fleet(request: pytest.FixtureRequest, wheel: Path, tmp_path: Path) -> Iterator[Fleet]:
    pinned = re.findall(r"^[\w.-]+==[^ \\]+", (ROOT / "requirements" / "runtime.txt").read_text(), re.MULTILINE)
    (tmp_path / "versions.txt").write_text("\n".join(pinned))
    fleet = Fleet(tmp_path, *request.param, CORRAL_EXPOSE_NODE_HEADER="true", **PATIENT)
    here = clean_env(tmp_path / "home", UV_CONSTRAINT=str(tmp_path / "versions.txt"), UV_PYTHON=sys.executable)
    fleet.env = here | {name: value for name, value in fleet.env.items() if name.startswith("CORRAL_")}
    fleet.program = tuple(map(str, (find_uv(), "tool", "run", "--from", wheel, "corral")))
    try:
        yield fleet.start()
    finally:
        fleet.close()


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network(f"corral-{os.getpid()}-lan", with_host=True)
    try:
        yield network
    finally:
        network.close()


class Machine:
    """What is typed on it runs until the machine is switched off."""

    def __init__(self, name: str, root: Path, folder: Path, network: Network) -> None:
        self._root = root
        self._container = Container(name, self._typing("true"), folder / name, network)

    def type(self, line: str) -> None:
        self._container.spec = self._typing(line)
        self._container.start()

    def output(self) -> str:
        return self._container.output()

    def switch_off(self) -> None:
        """Without a word to anybody."""
        self._container.kill()

    def close(self) -> None:
        self._container.close()

    def _typing(self, line: str) -> ContainerSpec:
        return ContainerSpec(self._root, ("sh", "-c", line), capabilities=(*DEFAULT_CAPABILITIES, "SYS_PTRACE"))


def ask(fleet: Fleet) -> Answer:
    body = {"model": "echo", "messages": [{"role": "user", "content": "hello second machine"}]}
    return http("POST", f"{fleet.url}/v1/chat/completions", key=fleet.key, body=body, trust=fleet.trust)


def answering_node(fleet: Fleet) -> str:
    answer = ask(fleet)
    assert answer.status == 200, answer.body
    assert "hello second machine" in answer.json()["choices"][0]["message"]["content"]
    return answer.headers["x-corral-node"]


def test_the_second_machine_answers_and_both_survive_a_restart(
    fleet: Fleet, debian: Path, network: Network, tmp_path: Path
) -> None:
    own = fleet.own_node()
    machine, other = (Machine(name, debian, tmp_path, network) for name in ("second", "third"))
    try:
        line = f"{fleet.printed_line()} --name second"
        machine.type(line)
        wait_for(lambda: "Waiting for approval" in machine.output() or "pending" in machine.output(), "pending", 300)
        approved = fleet.cli("nodes", "approve", "second")
        assert approved.returncode == 0, approved.stderr
        fleet.wait_status("second", "healthy")

        added = fleet.api("POST", "/api/models", {"definition": {"name": "echo", "backend": "mock"}})
        assert added.status == 201, added.body
        assert fleet.cli("nodes", "drain", own, "--yes").returncode == 0
        assert answering_node(fleet) == "second"

        created = fleet.cli("token", "create", "--pre-approved")
        assert created.returncode == 0, created.stderr
        started_at = time.monotonic()
        other.type(f"{created.stdout.strip()} --name third")
        fleet.wait_status("third", "healthy", 180)
        assert time.monotonic() - started_at < promised(JOIN_S)

        machine.switch_off()
        other.switch_off()
        fleet.start()
        machine.type("corral worker")
        fleet.wait_status("second", "healthy")
        wait_for(lambda: answering_node(fleet) == "second", "answer of the second machine")
    finally:
        machine.close()
        other.close()
