"""Backends change while somebody uses them: three machines, a real registry, callers that never stop asking."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.backend_images import gallery_of, mock_image, openai_entry
from tests.support.callers import Caller, ProcessTable, calling, process_table
from tests.support.fleet import Fleet
from tests.support.grown_fleet import ask_ingress, grown_fleet, order
from tests.support.image_registry import ImageRegistry, push_image, registry
from tests.support.processes import alive
from tests.support.supervising import get, identities, listens, swept
from tests.support.waiting import wait_for

__all__ = ["registry"]

WORKERS = ("barn", "byre")
BACKEND = "farm-mock"
BROKEN = "import sys\nprint('this build has no engine', file=sys.stderr)\nsys.exit(3)\n"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, registry: ImageRegistry) -> Iterator[Fleet]:
    """Everybody has version one of the backend, from a tag that will move."""
    folder = tmp_path_factory.mktemp("serving")
    with contextlib.ExitStack() as stack:
        for data in (folder / "data" / "worker", *(folder / f"worker-{name}" for name in WORKERS)):
            stack.enter_context(swept(data / "processes"))  # those of a worker that was killed have no other end
        env = gallery_of(folder / "galleries", openai_entry(BACKEND, f"oci://{registry.host}/farm/mock:latest"))
        fleet = stack.enter_context(grown_fleet(folder, *WORKERS, env=env))
        publish(registry, "one")
        done(fleet, "install", BACKEND)
        assert set(versions(fleet)) == set(fleet.nodes())
        for name in WORKERS:
            (told,) = fleet.root.glob(f"worker-{name}/backends/{BACKEND}/versions/*/PLATFORM")
            assert told.read_text().strip() == fleet.nodes()[name]["platform"]
        yield fleet


@pytest.fixture(scope="module")
def table(fleet: Fleet) -> Iterator[ProcessTable]:
    with process_table(fleet) as table:
        yield table


def publish(registry: ImageRegistry, version: str, program_text: str = "") -> None:
    push_image(registry.url, "farm/mock", "latest", mock_image(version, program_text=program_text))


def done(fleet: Fleet, *words: str) -> dict[str, Any]:
    """The operation, which has ended well everywhere."""
    operation = asked(fleet, *words)
    assert {row["status"] for row in operation["nodes"]} == {"success"}, operation
    assert len(operation["nodes"]) == len(fleet.nodes())
    return operation


def asked(fleet: Fleet, *words: str, code: int = 0) -> dict[str, Any]:
    ran = fleet.cli("backends", *words, "--json", timeout_s=120)
    assert ran.returncode == code, ran.stdout + ran.stderr
    (operation,) = json.loads(ran.stdout)
    assert isinstance(operation, dict)
    return operation


def versions(fleet: Fleet) -> dict[str, str]:
    """The digest each node says it has."""
    listed = {node: order(fleet, node, "backend.list", {})["backends"] or () for node in fleet.nodes()}
    return {node: row["digest"] for node, rows in listed.items() for row in rows if row["name"] == BACKEND}


def start(fleet: Fleet, node: str, process_id: str) -> str:
    body = {"op_id": f"op-{process_id}", "attempt": 1, "process_id": process_id}
    body |= {"model": "m", "replica": 0, "backend": BACKEND}
    started = order(fleet, node, "replica.start", body, timeout_s=60)
    assert started["success"], started
    return str(started["process_id"])


def stop(fleet: Fleet, table: ProcessTable, *nodes: str) -> None:
    for node in nodes:
        for process_id in table.ready(fleet.nodes()[node]["id"]):
            assert order(fleet, node, "replica.stop", {"process_id": process_id})["success"]
    wait_for(lambda: not any(table.ready(fleet.nodes()[node]["id"]) for node in nodes), "end of the replicas")


def answers(fleet: Fleet, node: str, process_id: str) -> str:
    """The version that answers at the node's ingress under this id."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    answer = ask_ingress(fleet, node, "POST", f"/replicas/{process_id}/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    return str(answer.json()["choices"][0]["message"]["content"]).split()[1].rstrip(":")


def pid_of(fleet: Fleet, node: str, process_id: str) -> int:
    found = {each.process_id: each.pid for each in identities(_processes(fleet, node))}
    return found[process_id]


def kill(pid: int) -> None:
    """Gone when it returns: a killed process may go on for a moment."""
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not alive(pid), f"end of {pid}")


def asked_directly(fleet: Fleet, node: str, process_id: str) -> dict[str, Any]:
    """What the process itself answers, whoever else is there or not."""
    record = json.loads((_processes(fleet, node) / process_id / "spec.json").read_text())
    return get(int(record["port"]), "/v1/models", timeout_s=30, token=record["token"])


def _processes(fleet: Fleet, node: str) -> Path:
    return fleet.root / f"worker-{node}" / "processes"


def hear(callers: list[Caller], version: str, more: int = 5) -> None:
    """Every caller hears this version, a few times from now on."""
    before = [caller.heard.get(version, 0) for caller in callers]

    def heard() -> bool:
        now = [caller.heard.get(version, 0) for caller in callers]
        return all(after - first >= more for first, after in zip(before, now, strict=True))

    wait_for(heard, f"answers of {version}", 60)


def test_an_upgrade_and_the_way_back_fail_nobody(fleet: Fleet, table: ProcessTable, registry: ImageRegistry) -> None:
    nodes, old = sorted(fleet.nodes()), versions(fleet)
    for node in nodes:
        assert start(fleet, node, f"first-{node}") == f"first-{node}"
    with calling(fleet, table, *nodes) as callers:
        hear(callers, "one")
        publish(registry, "two")
        assert BACKEND in fleet.cli("backends", "upgrades", "--check").stdout
        done(fleet, "upgrade", BACKEND)
        hear(callers, "two")
        new = versions(fleet)
        assert all(new[node] != old[node] for node in nodes)
        done(fleet, "rollback", BACKEND)
        hear(callers, "one")
    assert [caller.failures for caller in callers] == [[]] * len(nodes)
    assert versions(fleet) == old
    # Those who know the old ids only are relayed to the processes of today.
    assert [answers(fleet, node, f"first-{node}") for node in nodes] == ["one"] * len(nodes)
    assert not any(f"first-{node}" in table.ready(fleet.nodes()[node]["id"]) for node in nodes)
    stop(fleet, table, *nodes)


def test_an_upgrade_whose_new_process_crashes_is_reverted_and_stops_there(
    fleet: Fleet, table: ProcessTable, registry: ImageRegistry
) -> None:
    nodes, old = sorted(fleet.nodes()), versions(fleet)
    for node in nodes:
        start(fleet, node, f"steady-{node}")
    publish(registry, "three", BROKEN)
    with calling(fleet, table, *nodes) as callers:
        hear(callers, "one")
        operation = asked(fleet, "upgrade", BACKEND, code=1)
        failing = [row for row in operation["nodes"] if row["status"] == "error"]
        assert len(failing) == 1, json.dumps(operation["nodes"], indent=1)
        assert "this build has no engine" in failing[0]["error"]
        waiting = [row for row in operation["nodes"] if row["status"] == "queued"]
        assert len(waiting) == len(nodes) - 1, operation
        hear(callers, "one")
        assert versions(fleet) == old
        cancelled = fleet.cli("ops", "cancel", operation["job_id"])
        assert cancelled.returncode == 0, cancelled.stderr
    assert [caller.failures for caller in callers] == [[]] * len(nodes)
    assert [answers(fleet, node, f"steady-{node}") for node in nodes] == ["one"] * len(nodes)
    stop(fleet, table, *nodes)
    publish(registry, "one")


def test_a_load_after_a_backend_was_killed_behind_the_workers_back_gets_a_live_process(
    fleet: Fleet, table: ProcessTable
) -> None:
    def fresh() -> str:
        ready = table.ready(fleet.nodes()["barn"]["id"])
        return next((each for each in ready if each not in ("victim", loaded)), "none")

    start(fleet, "barn", "victim")
    assert answers(fleet, "barn", "victim") == "one"
    kill(pid_of(fleet, "barn", "victim"))
    loaded = start(fleet, "barn", "heir")
    assert answers(fleet, "barn", loaded) == "one"
    assert ask_ingress(fleet, "barn", "GET", "/replicas/victim/health").status == 410

    kill(pid_of(fleet, "barn", loaded))
    installed = order(fleet, "barn", "backend.install", {"backend": BACKEND, "model_id": "m", "replica_index": 0})
    assert installed["success"], installed
    assert listens(int(installed["address"].rpartition(":")[2]))
    assert wait_for(lambda: answers(fleet, "barn", fresh()), "answer of the new process") == "one"
    stop(fleet, table, "barn")


def test_kill_9_of_a_worker_leaves_its_backend_answering_and_the_next_worker_adopts_it(
    fleet: Fleet, table: ProcessTable
) -> None:
    start(fleet, "byre", "orphan")
    assert answers(fleet, "byre", "orphan") == "one"
    pid = pid_of(fleet, "byre", "orphan")
    fleet.workers["byre-0"].kill()
    fleet.wait_status("byre", "offline")
    assert alive(pid)
    assert asked_directly(fleet, "byre", "orphan")
    fleet.join("byre")
    fleet.wait_status("byre", "healthy")
    assert wait_for(lambda: answers(fleet, "byre", "orphan"), "answer of the adopted process") == "one"
    assert pid_of(fleet, "byre", "orphan") == pid
    assert alive(pid)
    wait_for(lambda: table.ready(fleet.nodes()["byre"]["id"]) == ["orphan"], "adopted process in the table")


def test_a_delete_everywhere_ends_what_runs_and_leaves_nothing(fleet: Fleet) -> None:
    serving = {node: start(fleet, node, f"last-{node}") for node in fleet.nodes()}
    assert {answers(fleet, node, process_id) for node, process_id in serving.items()} == {"one"}
    done(fleet, "delete", BACKEND, "--all-nodes", "--yes")
    assert versions(fleet) == {}
    for node, process_id in serving.items():
        assert ask_ingress(fleet, node, "GET", f"/replicas/{process_id}/health").status == 410
    folders = [fleet.data / "worker", *(fleet.root / f"worker-{name}" for name in WORKERS)]
    assert not any((folder / "backends" / BACKEND).exists() for folder in folders)
