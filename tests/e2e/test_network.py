"""Two machines on a network: addresses nobody had to give, an ingress that cannot be reached, a cable that is cut."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.fleet import STALE_S, Answer, Fleet
from tests.support.network import Lan, Machine, two_machines
from tests.support.processes import CORRAL, Process, clean_env
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

SILENT = "10.213.9.9"  # packets to it are sent to the other machine, which drops them: a firewall
ROLES = ("nats-server", "controller", "gateway", "worker")


class FleetThere(Fleet):
    """A fleet on another machine, and workers on a third."""

    def __init__(self, root: Path, lan: Lan, *options: str, **env: str) -> None:
        super().__init__(root, *options, **env)
        self.lan = lan
        self.prefix = lan.here.prefix

    def http(self, method: str, path: str, *, key: str = "", body: object = None) -> Answer:
        ask = super().http
        return self.lan.here.run(lambda: ask(method, path, key=key, body=body))

    def bring(self, name: str, *options: str, line: str = "") -> Process:
        """A worker on the other machine; each start is a process of its own, on the same data folder."""
        started = sum(1 for known in self.workers if known.startswith(f"{name} "))
        words = (line or ("corral join" if started else self.line(name))).split()
        command = (*self.lan.there.prefix, *CORRAL, *words[1:], "--name", name, "--port", "0", *options)
        env = clean_env(self.root / "other home", **{key: value for key, value in self.env.items() if "CORRAL" in key})
        env["CORRAL_DATA"] = str(self.root / f"worker-{name}")
        process = Process(command, env, self.root / f"worker-{name}-{started}.log")
        self.workers[f"{name} {started}"] = process
        return process

    def line(self, name: str) -> str:
        made = self.api("POST", "/api/tokens", {"name": name, "pre_approved": True})
        return str(made.json()["join_command"])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetThere]:
    with two_machines() as lan:
        fleet = FleetThere(tmp_path_factory.mktemp("lan"), lan, "--lan", CORRAL_INGRESS_CHECK_TIMEOUT="1s")
        try:
            yield fleet.start()  # type: ignore[misc]
        finally:
            fleet.close()


@pytest.fixture(scope="module")
def barn(fleet: FleetThere) -> Process:
    worker = fleet.bring("barn")
    fleet.wait_status("barn", "healthy")
    return worker


def address_of(machine: Machine, url: str) -> bool:
    return urlsplit(url).hostname == machine.address


def unreachable(fleet: Fleet, name: str, why: str) -> dict[str, Any]:
    """The node whose ingress is told to be so. A check that was slow itself is told in other words, until the next."""
    node = fleet.nodes()[name]
    assert node["ingress_error"].startswith(f"{node['ingress_url']} {why}"), node
    return node


def test_each_machine_is_reached_where_it_was_seen(fleet: FleetThere, barn: Process) -> None:
    assert address_of(fleet.lan.here, fleet.join_line().split()[2])
    own = fleet.newcomer("barn")
    wait_for(lambda: fleet.proven_ingresses() == {own: True, "barn": True}, "both ingresses found in order")
    nodes = fleet.nodes()
    assert address_of(fleet.lan.there, nodes["barn"]["ingress_url"])
    assert address_of(fleet.lan.here, nodes[own]["ingress_url"])
    assert [node.get("ingress_error", "") for node in nodes.values()] == ["", ""]
    wait_for(lambda: not fleet.nodes()["barn"].get("bus_down"), "node on the bus")


def test_an_ingress_that_cannot_be_reached_is_told_with_what_to_do(fleet: FleetThere) -> None:
    fleet.lan.here.ip("route", "add", f"{SILENT}/32", "via", fleet.lan.there.address)
    hidden = fleet.bring("hidden", "--host", "127.0.0.1")
    fleet.bring("firewalled", "--advertise", SILENT)
    for name, why in (("hidden", "cannot be reached (Connection refused)"), ("firewalled", "does not answer")):
        fleet.wait_status(name, "healthy")
        node = wait_for(lambda name=name, why=why: unreachable(fleet, name, why), f"word about {name}")  # type: ignore[misc]
        assert f"set --advertise on {name}" in node["ingress_error"] or "--advertise there" in node["ingress_error"]
        assert node["ingress_error"] in fleet.cli("nodes", "list").stdout
        assert f"{name}: {node['ingress_error']}" in fleet.api("GET", "/api/cluster").json()["attention"]
    assert address_of(fleet.lan.there, fleet.nodes()["hidden"]["ingress_url"])

    assert hidden.stop() == 0
    fleet.bring("hidden", "--host", "0.0.0.0")  # or the worker would use the host that it was given before
    fleet.wait_status("hidden", "healthy")
    wait_for(lambda: fleet.proven_ingresses()["hidden"], "ingress found in order after all")
    assert not fleet.nodes()["hidden"].get("ingress_error")


def test_a_cut_cable_takes_a_node_offline_and_a_mended_one_brings_it_back(fleet: FleetThere, barn: Process) -> None:
    assert fleet.up is not None
    before = fleet.nodes()["barn"]
    processes = [fleet.up.pid, barn.pid, *(fleet.child_pid(role) for role in ROLES)]
    for other in [worker for worker in fleet.workers.values() if worker is not barn]:
        other.close()  # or it is many nodes at once, and nobody is taken offline
    fleet.lan.cut()
    try:
        fleet.wait_status("barn", "offline")
        until = time.monotonic() + 2 * STALE_S  # on top of it
        wait_for(lambda: time.monotonic() > until, "end of the outage")
        near = [node for node in fleet.nodes().values() if address_of(fleet.lan.here, node["ingress_url"])]
        assert [node["status"] for node in near] == ["healthy"]
    finally:
        fleet.lan.mend()
    after = fleet.wait_status("barn", "healthy")
    assert after["id"] == before["id"]
    assert barn.running
    assert [fleet.up.pid, barn.pid, *(fleet.child_pid(role) for role in ROLES)] == processes
    wait_for(lambda: not fleet.nodes()["barn"].get("bus_down"), "node on the bus")


def test_a_machine_that_starts_before_its_network_joins_when_it_is_there(fleet: FleetThere) -> None:
    line = fleet.line("early")
    fleet.lan.cut()
    try:
        early = fleet.bring("early", line=line)
        wait_for(lambda: "asked for again" in early.output(), "a worker that tries on")
    finally:
        fleet.lan.mend()
    fleet.wait_status("early", "healthy")
