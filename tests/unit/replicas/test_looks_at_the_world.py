"""Looks at the world: what goes into one, and what is left of one that could not be written down."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from corral.contract.loads import LoadState
from corral.contract.models import read_definition
from corral.controller.orders.observations import OrderAccepted
from corral.controller.orders.order import OrderId
from corral.controller.replicas import reconcile
from corral.controller.replicas.reconcile import ReplicaLoop
from corral.controller.replicas.world import Read, files_known, storable_job
from corral.controller.scheduler.world import Memory, Model, ModelFile
from corral.kit.clock import SystemClock
from corral.kit.errors import Unavailable
from corral.store.records import DesiredReplica, LoadJob, ReplicaStage
from corral.store.tables.model_files import StoredFile

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class AwayForWriting:
    @asynccontextmanager
    async def read(self) -> AsyncIterator[None]:
        yield

    def write(self) -> object:
        raise Unavailable("the database is away")


def a_loop(**given: Any) -> ReplicaLoop:
    other: Any = SimpleNamespace(
        refused={},
        known=dict,
        find=None,
        of=None,
        installed=None,
        epoch=lambda _name: 1,
        resign_if_unknown=lambda _name: nullcontext(),
        is_looking=lambda _backend: False,
    )
    store: Any = AwayForWriting()
    return ReplicaLoop(
        store,
        other,
        other,
        other,
        other,
        other,
        SystemClock(),
        builds=other,
        bringing=other,
        fetching=other,
        files=other,
        quiet=other,
        memory=other,
        **given,
    )


async def test_room_that_came_meanwhile_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read_nothing(_tx: object, **_how: object) -> Read:
        return Read(NOON)

    monkeypatch.setattr(reconcile, "read_all", read_nothing)
    loop = a_loop()
    heard = OrderAccepted(OrderId("n", "op", 1))
    loop._hear(heard)
    loop._look_for_room_again()
    with pytest.raises(Unavailable):
        await loop._pass()
    assert (loop._heard, loop._room_may_have_come) == ([heard], True)


def test_what_gateways_tell_of_those_who_wait_is_looked_at() -> None:
    """Nothing of a model is given up while requests wait for it, and more of it comes at once where all is busy."""
    models = {name: Model(name, "b", "r", Memory()) for name in ("m", "other")}
    facts = a_loop(waiting=lambda: {"m": 3})._facts(Read(NOON, models=models), [], {})
    assert {name: model.waiting for name, model in facts.world.models.items()} == {"m": 3, "other": 0}


def test_a_load_is_told_from_requests_that_wait() -> None:
    models = {name: Model(name, "b", "r", Memory(), waiting=1, only_load_waits=True) for name in ("m", "other")}
    facts = a_loop(waiting=lambda: {"m": 1})._facts(Read(NOON, models=models), [], {})
    assert {name: model.only_load_waits for name, model in facts.world.models.items()} == {"m": False, "other": True}


def test_pressure_counts_from_the_newest_replica_on() -> None:
    """What led to that one is mended by it, and must not lead to another."""
    models = {name: Model(name, "b", "r", Memory()) for name in ("m", "other")}
    asked: dict[str, float] = {}

    def pressure(model: str, within_s: float) -> int:
        asked[model] = within_s
        return 4 if model == "m" else 0

    rows = [
        DesiredReplica("n", "m", index, "r", "b", ReplicaStage.PLACED, "op", "p", NOON - timedelta(seconds=age_s), NOON)
        for index, age_s in enumerate((500, 7))
    ]
    facts = a_loop(pressure=pressure)._facts(Read(NOON, models=models, rows=rows), [], {})
    assert {name: model.pressure for name, model in facts.world.models.items()} == {"m": 4, "other": 0}
    assert asked == {"m": 7.0, "other": math.inf}


def a_stored(path: str) -> StoredFile:
    return StoredFile(
        model="m",
        path=path,
        uri=f"file:///{path}",
        resolved=f"file:///{path}",
        digest=f"sha256:{path}",
        size_bytes=len(path),
    )


@pytest.mark.parametrize(
    ("definition", "stored", "known"),
    [
        ({"parameters": {"model": "w.gguf"}, "download_files": [{"filename": "w.gguf", "uri": "oci://x/w"}]}, [], None),
        (
            {"parameters": {"model": "w.gguf"}, "download_files": [{"filename": "w.gguf", "uri": "oci://x/w"}]},
            ["w.gguf"],
            ["w.gguf"],
        ),
        ({"parameters": {"model": "w.gguf"}}, [], []),  # nothing to bring, as far as anybody knows
        ({"parameters": {"model": "w.gguf"}}, ["w.gguf"], ["w.gguf"]),  # it lay in the models folder
        ({"parameters": {"model": "huggingface://o/r"}}, [], None),
        ({"parameters": {"model": "huggingface://o/r"}}, ["o/r/a", "o/r/b"], ["o/r/a", "o/r/b"]),
    ],
)
def test_files_are_known_once_they_were_fetched(
    definition: dict[str, Any], stored: list[str], known: list[str] | None
) -> None:
    found = files_known(
        read_definition({"name": "m", "backend": "b"} | definition), [a_stored(path) for path in stored]
    )
    assert found == (None if known is None else tuple(ModelFile(f"sha256:{path}", len(path)) for path in known))


def test_why_a_node_failed_ends_with_what_was_said_in_the_end() -> None:
    lines = [f"line {number} of what it said before" for number in range(100)]
    why = "\n".join(["x ended with code 1; its last lines:", *lines, "no such file"])
    row = storable_job(LoadJob("m", LoadState.FAILED, NOON, NOON, error=why, failed_on={"id-of-barn": why}))
    assert row.failed_on == {"id-of-barn": "x ended with code 1; its last lines: … no such file"}
    assert row.error == why, "whoever waits for the load sees all of it"
