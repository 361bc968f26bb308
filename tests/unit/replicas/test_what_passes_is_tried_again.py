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
from corral.controller.replicas.backend_provisioner import Bringing
from corral.controller.replicas.file_provisioner import Fetching
from corral.controller.replicas.memory_needs import MemoryNeeds
from corral.controller.replicas.retry import MOST_TRIES
from corral.kit.errors import Conflict, CorralError, Failed, Invalid, NotFound, OutcomeUnknown, Unavailable
from tests.support.manual_clock import ManualClock

HERE = {("barn", "llama-cpp")}
AWAY = [Unavailable("the database is away"), OutcomeUnknown("while committing"), Conflict("it moved")]


class Door:
    """Accepts, or files: whatever is asked of it, after these failures."""

    def __init__(self, *failures: CorralError) -> None:
        self.failures = list(failures)
        self.asked = 0

    async def accept(self, _wish: object) -> AcceptedOperation:
        self._asked()
        return AcceptedOperation("an operation")

    async def ensure(self, _definition: Definition, _tell: object) -> tuple[ReplicaFile, ...]:
        self._asked()
        return ()

    def find(self, _digest: str) -> Path | None:
        return None

    def sources_for(self, _node_id: str, _files: object = ()) -> tuple[tuple[str, ...], str]:
        return (), ""

    def _asked(self) -> None:
        self.asked += 1
        if self.failures:
            raise self.failures.pop(0)


async def bring(door: Any, clock: ManualClock, *, looks: int = 40) -> Bringing:
    async with Bringing(door, clock, rule_shows_s=1e9) as bringing:
        for _ in range(looks):
            bringing.want(HERE)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            clock.advance(2.0)
    return bringing


@pytest.mark.parametrize("failure", AWAY, ids=lambda error: error.code)
async def test_a_backend_is_asked_for_again(failure: CorralError) -> None:
    door = Door(failure, failure)
    bringing = await bring(door, ManualClock())
    assert (door.asked, bringing.refused) == (3, {})


@pytest.mark.parametrize("failure", [NotFound("no such backend"), Invalid("it is forbidden")], ids=lambda e: e.code)
async def test_what_time_does_not_cure_is_told_at_once(failure: CorralError) -> None:
    door = Door(failure)
    bringing = await bring(door, ManualClock())
    assert (door.asked, list(bringing.refused.values())) == (1, [failure.message])


async def test_a_gallery_that_stays_away_is_told_in_the_end() -> None:
    door = Door(*[Unavailable("the gallery does not answer")] * 100)
    bringing = await bring(door, ManualClock())
    assert door.asked == MOST_TRIES
    assert bringing.refused == {("barn", "llama-cpp"): "the gallery does not answer"}


async def test_between_two_tries_is_a_pause() -> None:
    door, clock = Door(*AWAY), ManualClock()
    async with Bringing(door, clock) as bringing:  # type: ignore[arg-type]
        for _ in range(20):
            bringing.want(HERE)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    assert door.asked == 1


async def fetch(door: Any) -> Fetching:
    clock, definition = ManualClock(), read_definition({"name": "m", "backend": "llama-cpp"})
    async with Fetching(door, MemoryNeeds(door), clock, moved=lambda: None) as fetching:
        for _ in range(40):
            fetching.want({("m", "r"): definition})
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            clock.advance(2.0)
    return fetching


@pytest.mark.parametrize("failure", AWAY, ids=lambda error: error.code)
async def test_files_are_asked_for_again(failure: CorralError) -> None:
    door = Door(failure, failure)
    fetching = await fetch(door)
    assert door.asked == 3
    assert fetching.known()[("m", "r")].files == ()


async def test_files_that_nobody_has_fail_at_once() -> None:
    door = Door(Failed("404 from the hub"))
    fetching = await fetch(door)
    assert door.asked == 1
    assert fetching.known()[("m", "r")].trouble == "its files could not be fetched: 404 from the hub"


async def test_what_was_used_long_ago_is_forgotten_also_where_nobody_leads() -> None:
    clock, bus = ManualClock(), None
    quiet = ActivityTracker(bus, clock)  # type: ignore[arg-type]
    for hour in range(5):
        for number in range(10):
            load = NodeLoad(boot_id="b", seq=1, in_flight={f"p-{hour}-{number}": 1})
            await quiet.on_load(load, {"node": f"n-{hour}-{number}"})
        clock.advance(KEPT_S)
    assert quiet.used_s_ago("p-0-0") is None
    assert quiet.used_s_ago("p-4-9") == KEPT_S
    assert len(quiet._used) == len(quiet._nodes) == 10
