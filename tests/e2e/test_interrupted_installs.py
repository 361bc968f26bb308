"""Installs that something happens to: a node leaves, a process is killed, the registry is away, a person changes her
mind. Three machines, a real registry, and a line to it that is as slow as a test needs it to be.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.backend_images import SteadyLine, gallery_of, line_to, mock_image, openai_entry
from tests.support.fleet import Fleet
from tests.support.grown_fleet import grown_fleet, order
from tests.support.image_registry import ImageRegistry, push_image, registry
from tests.support.processes import CORRAL, Process
from tests.support.waiting import promised, wait_for

__all__ = ["registry"]

WORKERS = ("barn", "byre")
NOISE_BYTES = 2_000_000
CRAWL = 50_000.0  # bytes per second and connection: nobody finishes before the line is let go
CANCEL_S = 5.0  # promised; a cancel that does not reach the node costs the whole download, 40 s
BACKENDS = ("leaving", "orphaned", "silenced", "unwanted", "elsewhere")


@pytest.fixture(scope="module")
def line(registry: ImageRegistry) -> Iterator[SteadyLine]:
    with line_to(registry.port) as line:
        yield line


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, registry: ImageRegistry, line: SteadyLine) -> Iterator[Fleet]:
    """Each test has a backend of its own."""
    folder = tmp_path_factory.mktemp("trouble")
    for name in BACKENDS:
        push_image(registry.url, f"farm/{name}", "1", mock_image(name, noise_bytes=NOISE_BYTES))
    entries = [openai_entry(name, f"oci://{line.host}/farm/{name}:1") for name in BACKENDS]
    with grown_fleet(folder, *WORKERS, env=gallery_of(folder / "galleries", *entries)) as fleet:
        yield fleet


@pytest.fixture
def slow(line: SteadyLine) -> Iterator[SteadyLine]:
    line.at(CRAWL)
    yield line
    line.at(0)


def ask(fleet: Fleet, backend: str, *options: str) -> str:
    """The id of an install that nobody watches."""
    ran = fleet.cli("backends", "install", backend, "--detach", *options)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@contextlib.contextmanager
def running(fleet: Fleet, name: str, *words: str) -> Iterator[Process]:
    """A command that stays, as in another terminal."""
    process = Process((*CORRAL, *words), fleet.env, fleet.root / f"{name}.log")
    try:
        yield process
    finally:
        process.close()


def rows(fleet: Fleet, operation: str) -> dict[str, dict[str, Any]]:
    answer = fleet.api("GET", f"/api/operations/{operation}")
    assert answer.status == 200, answer.body
    return {row["node_name"]: row for row in answer.json()["nodes"]}


def wait_until_all_download(fleet: Fleet, operation: str) -> None:
    def all_download() -> bool:
        found = rows(fleet, operation)
        assert len(found) == len(fleet.nodes())
        assert all(row["status"] == "downloading" and row.get("current_bytes") for row in found.values()), found
        return True

    wait_for(all_download, "bytes on every node")


def wait_until_done(fleet: Fleet, operation: str) -> None:
    def done() -> bool:
        found = rows(fleet, operation)
        assert {row["status"] for row in found.values()} == {"success"}, found
        return len(found) == len(fleet.nodes())

    wait_for(done, "success everywhere", 60)


def have(fleet: Fleet, backend: str) -> set[str]:
    """The nodes that list it themselves."""
    listed = {node: order(fleet, node, "backend.list", {})["backends"] or () for node in fleet.nodes()}
    return {node for node, found in listed.items() if any(row["name"] == backend for row in found)}


def test_a_node_that_leaves_in_mid_install_finishes_it_by_itself_when_it_is_back(
    fleet: Fleet, slow: SteadyLine
) -> None:
    """One is stopped in order, one is killed. Whoever waited is told that only they remain."""
    before = slow.passed
    with running(fleet, "leaving", "backends", "install", "leaving") as command:
        operation = str(wait_for(lambda: _under_way(fleet, "leaving"), "operation"))
        wait_until_all_download(fleet, operation)
        stopped, killed = (fleet.workers[f"{name}-0"] for name in WORKERS)
        killed.kill()
        assert stopped.stop() == 0, stopped.output()
        for name in WORKERS:
            fleet.wait_status(name, "offline")
        slow.at(0)
        assert command.wait(60) == 3, command.output()
        assert all(f"{name}" in command.output() for name in WORKERS), command.output()
    waiting = rows(fleet, operation)
    assert {waiting[name]["status"] for name in WORKERS} == {"queued"}
    again = fleet.cli("backends", "install", "leaving")
    assert again.returncode == 3, again.stdout + again.stderr

    with running(fleet, "to-the-end", "ops", "watch", operation, "--to-the-end") as watch:
        for name in WORKERS:
            fleet.join(name)
        assert watch.wait(60) == 0, watch.output()
    assert {row["status"] for row in rows(fleet, operation).values()} == {"success"}
    assert have(fleet, "leaving") == set(fleet.nodes())
    assert slow.passed - before < 3.5 * NOISE_BYTES, "what had come was fetched again"


def _under_way(fleet: Fleet, backend: str) -> str:
    ran = fleet.cli("ops", "list", "--json")
    return next((each["job_id"] for each in json.loads(ran.stdout) if each["backend"] == backend), "")


@pytest.mark.parametrize(("role", "backend"), [("controller", "orphaned"), ("nats-server", "silenced")])
def test_kill_9_in_mid_install_loses_nothing(fleet: Fleet, slow: SteadyLine, role: str, backend: str) -> None:
    for name in WORKERS:
        fleet.wait_status(name, "healthy")
    operation = ask(fleet, backend)
    wait_until_all_download(fleet, operation)
    with running(fleet, f"watch-{role}", "ops", "watch", operation) as watch:
        wait_for(lambda: "barn" in watch.output(), "first look")
        victim = fleet.child_pid(role)
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: fleet.child_pid(role) != victim, f"new {role}")
        wait_for(fleet.controller_ready, "controller")
        assert set(rows(fleet, operation)) == set(fleet.nodes())
        slow.at(0)
        wait_until_done(fleet, operation)
        assert watch.wait(60) == 0, watch.output()
    assert "Traceback" not in watch.output()
    assert have(fleet, backend) == set(fleet.nodes())


def test_cancel_stops_the_bytes_on_every_node(fleet: Fleet, slow: SteadyLine) -> None:
    operation = ask(fleet, "unwanted")
    wait_until_all_download(fleet, operation)
    cancelled = fleet.cli("ops", "cancel", operation)
    assert cancelled.returncode == 0, cancelled.stderr
    assert last_byte_after_s(slow) < promised(CANCEL_S)
    passed = slow.passed
    ended = wait_for(lambda: _all_in(fleet, operation, "cancelled"), "cancelled rows")
    assert set(ended) == set(fleet.nodes())
    watched = fleet.cli("ops", "watch", operation)
    assert watched.returncode == 1, watched.stdout + watched.stderr
    assert have(fleet, "unwanted") == set()
    # What newer builds there are is looked up now and then, which costs an index and a manifest; a layer is megabytes.
    assert slow.passed - passed < 100_000


def last_byte_after_s(line: SteadyLine) -> float:
    """Seconds from now to the last byte before it is quiet. A download that lives has some every 80 ms."""
    began = last = time.monotonic()
    passed = line.passed

    def quiet() -> bool:
        nonlocal last, passed
        if line.passed != passed:
            passed, last = line.passed, time.monotonic()
        return time.monotonic() - last > 1.5

    wait_for(quiet, "silence on the line")
    return last - began


def _all_in(fleet: Fleet, operation: str, status: str) -> dict[str, dict[str, Any]]:
    found = rows(fleet, operation)
    assert {row["status"] for row in found.values()} == {status}, found
    return found


def test_while_the_registry_is_away_the_node_fails_and_goes_on_when_it_is_back(fleet: Fleet, slow: SteadyLine) -> None:
    with running(fleet, "elsewhere", "backends", "install", "elsewhere", "--node", "barn") as command:
        operation = str(wait_for(lambda: _under_way(fleet, "elsewhere"), "operation"))
        wait_for(lambda: rows(fleet, operation)["barn"]["current_bytes"], "bytes on the node")
        slow.down()
        try:
            assert command.wait(90) == 1, command.output()
            assert "cannot be reached" in command.output(), command.output()
        finally:
            slow.at(0)
            slow.up()
    wait_for(lambda: rows(fleet, operation)["barn"]["status"] == "success", "success by itself")
    assert fleet.cli("ops", "watch", operation).returncode == 0
    assert have(fleet, "elsewhere") == {"barn"}


def test_a_machine_that_joins_later_gets_what_every_node_should_have(fleet: Fleet) -> None:
    """After the others: what was asked for all nodes, not what was cancelled or meant for one."""
    fleet.join("attic", token=fleet.token("--pre-approved"))

    def listed() -> set[str]:
        return {row["name"] for row in order(fleet, "attic", "backend.list", {})["backends"] or ()}

    wait_for(lambda: fleet.status("attic") == "healthy", "new node", 60)
    wanted = {"leaving", "orphaned", "silenced"}
    wait_for(lambda: listed() >= wanted, "backends of the new node", 60)
    assert listed() == wanted
    # The node knows first that it has them all; the controller hears of it.
    wait_for(lambda: json.loads(fleet.cli("ops", "list", "--json").stdout) == [], "end of all that was under way")
