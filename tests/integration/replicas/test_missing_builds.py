"""What people want of a backend may have no build for some kinds of machine, though the galleries have another:
placement must not wait there for what never comes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from corral.contract.messages.backends import NodeBackend
from corral.controller.inventory.activity import ProcessActivity
from corral.controller.replicas.lifecycle import Prerequisites
from corral.controller.replicas.snapshot import FleetSnapshot, read_snapshot
from corral.controller.scheduler.world import Build, BuildState, Memory
from corral.store import Store, open_store
from corral.store.tables import (
    backend_rules,
    backend_targets,
    load_jobs,
    models,
    node_backends,
    nodes,
)
from tests.integration.store.rows import a_job, a_model, a_node, a_rule, a_target, an_inventory
from tests.support.sqlite import sqlite_url

WHY = "no linux/arm64 build"
MACHINE = {"capability": "cpu", "os": "linux", "arch": "arm64", "python": "3.11", "protocol": 1, "approved": True}


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(sqlite_url(tmp_path)) as opened:
        yield opened


async def take_snapshot(store: Store) -> FleetSnapshot:
    async with store.read() as tx:
        return await read_snapshot(
            tx,
            idle_unload_s=0,
            build=lambda _backend, _machine: Build(BuildState.INSTALLABLE),
            activity=lambda _node, _process: ProcessActivity(),
            memory=lambda _definition, _files, _seen: Memory(),
        )


async def test_a_machine_without_the_wanted_build_is_no_place_and_says_why(store: Store) -> None:
    lacking, lucky = a_node(id="n1", **MACHINE), a_node(id="n2", **(MACHINE | {"arch": "amd64"}))
    missing = a_target(capability="cpu", platform="linux/arm64", build=None, reason=WHY)
    async with store.write() as tx:
        for node in (lacking, lucky):
            await nodes.insert(tx, node)
        await models.put(tx, a_model())
        await load_jobs.put(tx, [a_job(state="pending", error="")])
        await backend_rules.insert(tx, a_rule(backend="llama-cpp"))
        await backend_targets.add(tx, [missing, a_target(capability="cpu")])
    snapshot = await take_snapshot(store)
    assert snapshot.nodes["n1"].builds == {"llama-cpp": Build(BuildState.MISSING, WHY)}
    assert snapshot.backends[("n1", "llama-cpp")] == Prerequisites(error=f"llama-cpp cannot be installed there: {WHY}")
    assert snapshot.nodes["n2"].builds == {"llama-cpp": Build(BuildState.INSTALLABLE)}
    assert snapshot.backends[("n2", "llama-cpp")] == Prerequisites()


async def test_one_that_has_it_anyway_serves_with_what_it_has(store: Store) -> None:
    async with store.write() as tx:
        await nodes.insert(tx, a_node(id="n1", **MACHINE))
        await models.put(tx, a_model())
        await load_jobs.put(tx, [a_job(state="pending", error="")])
        await backend_rules.insert(tx, a_rule(backend="llama-cpp"))
        await backend_targets.add(tx, [a_target(capability="cpu", platform="linux/arm64", build=None, reason=WHY)])
        await node_backends.put(tx, an_inventory("n1", backends=(NodeBackend("llama-cpp", False, True),)))
    snapshot = await take_snapshot(store)
    assert snapshot.nodes["n1"].builds == {"llama-cpp": Build(BuildState.INSTALLED)}
    assert snapshot.backends[("n1", "llama-cpp")].backend


async def test_nothing_is_started_of_one_that_shall_be_deleted_though_it_is_still_there(store: Store) -> None:
    """A replica that was placed before was started while the worker removed its backend (seed 596)."""
    async with store.write() as tx:
        await nodes.insert(tx, a_node(id="n1", **MACHINE))
        await models.put(tx, a_model())
        await load_jobs.put(tx, [a_job(state="pending", error="")])
        await backend_rules.insert(tx, a_rule(backend="llama-cpp", want="absent"))
        await node_backends.put(tx, an_inventory("n1", backends=(NodeBackend("llama-cpp", False, True),)))
    snapshot = await take_snapshot(store)
    assert snapshot.nodes["n1"].builds == {"llama-cpp": Build(BuildState.FORBIDDEN, "a user deleted it there")}
    assert snapshot.backends[("n1", "llama-cpp")] == Prerequisites(backend=True, error="llama-cpp was deleted there")
