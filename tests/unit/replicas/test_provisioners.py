"""A moment without the database fails no load; and what nobody needs to know any more is not kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from corral.contract.messages.replicas import NodeLoad, ReplicaFile
from corral.contract.models import Definition, read_definition
from corral.controller.inventory.activity import KEPT_S, ActivityTracker
from corral.controller.operations.accept import AcceptedOperation
from corral.controller.replicas.provisioners import MAX_ATTEMPTS, BackendProvisioner, FileProvisioner, MemoryEstimator
from corral.kit.errors import Conflict, CorralError, Failed, Invalid, NotFound, OutcomeUnknown, Unavailable
from tests.support.manual_clock import ManualClock

HERE = {("barn", "llama-cpp")}
NODE_OFFLINE = [Unavailable("the database is away"), OutcomeUnknown("while committing"), Conflict("it moved")]


class Door:
    """Accepts, or files: whatever is asked of it, after these failures."""

    def __init__(self, *failures: CorralError) -> None:
        self.failures = list(failures)
        self.asked = 0

    async def accept(self, _wish: object) -> AcceptedOperation:
        self._requested()
        return AcceptedOperation("an operation")

    async def ensure(self, _definition: Definition, _tell: object) -> tuple[ReplicaFile, ...]:
        self._requested()
        return ()

    def find(self, _digest: str) -> Path | None:
        return None

    def sources_for(self, _node_id: str, _files: object = ()) -> tuple[tuple[str, ...], str]:
        return (), ""

    def _requested(self) -> None:
        self.asked += 1
        if self.failures:
            raise self.failures.pop(0)


async def bring(door: Any, clock: ManualClock, *, looks: int = 40) -> BackendProvisioner:
    async with BackendProvisioner(door, clock, rule_shows_s=1e9) as provisioner:
        for _ in range(looks):
            provisioner.ensure(HERE)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            clock.advance(2.0)
    return provisioner


@pytest.mark.parametrize("failure", NODE_OFFLINE, ids=lambda error: error.code)
async def test_a_backend_is_asked_for_again(failure: CorralError) -> None:
    door = Door(failure, failure)
    provisioner = await bring(door, ManualClock())
    assert (door.asked, provisioner.refused) == (3, {})


@pytest.mark.parametrize("failure", [NotFound("no such backend"), Invalid("it is forbidden")], ids=lambda e: e.code)
async def test_what_time_does_not_cure_is_told_at_once(failure: CorralError) -> None:
    door = Door(failure)
    provisioner = await bring(door, ManualClock())
    assert (door.asked, list(provisioner.refused.values())) == (1, [failure.message])


async def test_a_gallery_that_stays_away_is_told_in_the_end() -> None:
    door = Door(*[Unavailable("the gallery does not answer")] * 100)
    provisioner = await bring(door, ManualClock())
    assert door.asked == MAX_ATTEMPTS
    assert provisioner.refused == {("barn", "llama-cpp"): "the gallery does not answer"}


async def test_between_two_tries_is_a_pause() -> None:
    door, clock = Door(*NODE_OFFLINE), ManualClock()
    async with BackendProvisioner(door, clock) as provisioner:  # type: ignore[arg-type]
        for _ in range(20):
            provisioner.ensure(HERE)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    assert door.asked == 1


async def fetch(door: Any) -> FileProvisioner:
    clock, definition = ManualClock(), read_definition({"name": "m", "backend": "llama-cpp"})
    async with FileProvisioner(door, MemoryEstimator(door), clock, on_change=lambda: None) as provisioner:
        for _ in range(40):
            provisioner.ensure({("m", "r"): definition})
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            clock.advance(2.0)
    return provisioner


@pytest.mark.parametrize("failure", NODE_OFFLINE, ids=lambda error: error.code)
async def test_files_are_asked_for_again(failure: CorralError) -> None:
    door = Door(failure, failure)
    provisioner = await fetch(door)
    assert door.asked == 3
    assert provisioner.statuses()[("m", "r")].files == ()


async def test_files_that_nobody_has_fail_at_once() -> None:
    door = Door(Failed("404 from the hub"))
    provisioner = await fetch(door)
    assert door.asked == 1
    assert provisioner.statuses()[("m", "r")].error == "its files could not be fetched: 404 from the hub"


async def test_what_was_used_long_ago_is_forgotten_also_where_nobody_leads() -> None:
    clock, bus = ManualClock(), None
    activity = ActivityTracker(bus, clock)  # type: ignore[arg-type]
    for hour in range(5):
        for number in range(10):
            load = NodeLoad(boot_id="b", seq=1, in_flight={f"p-{hour}-{number}": 1})
            await activity.on_load(load, {"node": f"n-{hour}-{number}"})
        clock.advance(KEPT_S)
    assert activity.used_s_ago("p-0-0") is None
    assert activity.used_s_ago("p-4-9") == KEPT_S
    assert len(activity._used) == len(activity._nodes) == 10
