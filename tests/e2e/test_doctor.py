"""`corral doctor` beside a real fleet: one that is well, and one whose parts are broken in turn."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from corral.cli.common.data_folder import DataFolder
from corral.cli.doctor.port_checks import check_ports
from tests.support.fleet import PATIENT, Fleet
from tests.support.processes import alive
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(180)

GIB = 2**30


@dataclass(frozen=True)
class Advice:
    code: int
    findings: dict[str, list[dict[str, str]]]  # about → findings

    def bad(self) -> dict[str, str]:
        """The problems: about → observation and fix."""
        failed = [each for found in self.findings.values() for each in found if each["level"] == "fail"]
        return {each["about"]: f"{each['seen']} → {each['fix']}" for each in failed}


def ask(fleet: Fleet, *more: str) -> Advice:
    ran = fleet.cli("doctor", "--json", *more, timeout_s=60)
    findings: dict[str, list[dict[str, str]]] = {}
    for each in json.loads(ran.stdout):
        findings.setdefault(each["about"], []).append(each)
    advice = Advice(ran.returncode, findings)
    assert advice.code == (1 if advice.bad() else 0)
    return advice


@pytest.fixture(
    scope="module", params=[pytest.param((), id="loopback", marks=pytest.mark.long), pytest.param(("--lan",), id="lan")]
)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("doctor")
    assert shutil.disk_usage(root).free > 2 * GIB, "the doctor would rightly complain about this machine's disk"
    fleet = Fleet(root, *request.param, **PATIENT)
    try:
        fleet.start()
        fleet.join_line()
        fleet.wait_status(fleet.own_node(), "healthy")
        yield fleet
    finally:
        fleet.close()


def test_a_healthy_fleet_gets_a_clean_bill(fleet: Fleet) -> None:
    advice = ask(fleet)
    assert advice.bad() == {}
    assert advice.code == 0
    assert advice.findings.keys() >= {
        *("python", "nats-server", "open files", "data folder", "disk", "secrets", "database", "running"),
        *("gateway", "controller", "key", "clock", "controllers", "bus", "bus access", "nodes"),
    }
    assert ("certificate" in advice.findings) == fleet.tls
    for about, seen in (
        ("nodes", "1 of 1 without problems"),
        ("bus", "each node can use only its own subjects"),
        ("bus access", "refuses clients without credentials"),
        ("clock", "agrees"),
    ):
        assert [each["level"] for each in advice.findings[about]] == ["ok"]
        assert seen in advice.findings[about][0]["seen"]
    table = fleet.cli("doctor")
    assert table.returncode == 0
    assert all(line.startswith(("ok ", "warn ", " ")) for line in table.stdout.splitlines()), table.stdout


def test_its_ports_are_no_strangers_to_a_doctor_of_another_folder(fleet: Fleet, tmp_path: Path) -> None:
    used = json.loads((fleet.data / "ports.json").read_bytes())
    ports = tuple((used[flag], flag) for flag in ("--port", "--bus-port", "--ingress-port"))
    for env in (fleet.env, {"CORRAL_CONFIG_DIR": str(tmp_path)}):  # known by its context; by its processes alone
        found = list(check_ports(DataFolder(tmp_path), env, ports))
        assert [each.level for each in found] == ["ok", "ok", "ok"], found


def test_a_secret_that_others_can_read_is_found(fleet: Fleet) -> None:
    for place, closed, opened in (
        (fleet.data / "secrets" / "admin.key", 0o600, 0o644),
        (fleet.data / "secrets", 0o700, 0o755),
    ):
        place.chmod(opened)
        try:
            advice = ask(fleet)
        finally:
            place.chmod(closed)
        assert advice.bad() == {"secrets": f"other users can read {place} → chmod {closed:o} {place}"}
    assert ask(fleet).code == 0


def test_a_machine_that_waits_is_no_fault(fleet: Fleet) -> None:
    worker = fleet.join("waiting", token=fleet.token())
    fleet.wait_status("waiting", "pending")
    advice = ask(fleet)
    assert advice.code == 0
    assert [(each["level"], each["fix"]) for each in advice.findings["node"]] == [
        ("warn", "corral nodes approve waiting")
    ]
    worker.close()
    assert fleet.cli("nodes", "delete", "waiting", "--yes").returncode == 0


def test_with_the_bus_away_it_says_where_to_look(fleet: Fleet) -> None:
    with fleet.restarts_suspended():
        os.kill(fleet.child_pid("nats-server"), signal.SIGKILL)
        wait_for(lambda: not fleet.api("GET", "/api/cluster").json()["bus"]["connected"], "controller without a bus")
        wait_for(lambda: next(iter(fleet.nodes().values())).get("bus_down"), "node without a bus")
        bad = ask(fleet).bad()
    assert bad.keys() == {"bus", "bus access", "node"}
    assert bad["bus"].startswith("the controller is not connected to the bus → ")
    assert "logs/bus.log" in bad["bus"]
    assert f":{fleet.bus_port}" in bad["bus access"]
    assert "cannot reach the bus" in bad["node"]


def test_with_the_controller_away_it_says_where_to_look(fleet: Fleet) -> None:
    with fleet.restarts_suspended():
        os.kill(fleet.child_pid("controller"), signal.SIGKILL)
        wait_for(lambda: not fleet.controller_ready(), "gateway without a controller")
        bad = ask(fleet).bad()
    assert "controller" in bad
    assert "logs/controller.log" in bad["controller"]


def test_after_a_hard_end_it_says_that_nothing_answers(fleet: Fleet) -> None:
    assert fleet.up is not None
    children = [fleet.child_pid(role) for role in ("nats-server", "controller", "gateway", "worker")]
    fleet.up.kill()
    wait_for(lambda: not any(alive(pid) for pid in children), "end of all children")
    bad = ask(fleet).bad()
    assert bad.keys() == {"gateway", "bus access"}
    assert f"nothing answers at {fleet.url} (Connection refused)" in bad["gateway"]
    assert "start the fleet with `corral up`" in bad["gateway"]


def test_without_a_fleet_it_looks_at_the_machine(tmp_path: Path) -> None:
    lonely = Fleet(tmp_path)
    advice = ask(lonely, "--data", str(lonely.data))
    assert advice.code == 0
    assert [each["level"] for each in advice.findings["fleet"]] == ["warn"]
    assert "corral up" in advice.findings["fleet"][0]["fix"]
    assert "does not exist yet" in advice.findings["data folder"][0]["seen"]
