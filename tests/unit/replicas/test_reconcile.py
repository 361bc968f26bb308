"""One pass of the reconciler: its input, and what is kept of a pass that could not be written."""

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
from corral.controller.replicas.reconcile import ReplicaPace, ReplicaReconciler
from corral.controller.replicas.snapshot import FleetSnapshot, files_known, storable_job
from corral.controller.scheduler.world import Memory, Model, ModelFile
from corral.controller.settings.models import ReplicaSettings
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


def a_reconciler(read: Any = None, **given: Any) -> ReplicaReconciler:
    other: Any = SimpleNamespace(
        refused={},
        statuses=dict,
        read=read,
        epoch=lambda _name: 1,
        resign_if_unknown=lambda _name: nullcontext(),
        is_looking_up=lambda _backend: False,
    )
    other.builds = other.activity = other
    store: Any = AwayForWriting()
    return ReplicaReconciler(
        store,
        other,
        other,
        other,
        SystemClock(),
        snapshots=other,
        sender=other,
        backend_provisioner=other,
        file_provisioner=other,
        settings=ReplicaSettings(),
        pace=ReplicaPace(),
        **given,
    )


async def test_a_capacity_change_is_kept_when_the_pass_is_not_written() -> None:
    async def read_nothing() -> FleetSnapshot:
        return FleetSnapshot(NOON)

    reconciler = a_reconciler(read_nothing)
    observation = OrderAccepted(OrderId("n", "op", 1))
    reconciler.observe(observation)
    reconciler._on_capacity_change()
    with pytest.raises(Unavailable):
        await reconciler._reconcile()
    assert (reconciler._observations, reconciler._capacity_may_have_changed) == ([observation], True)


def test_what_gateways_tell_of_those_who_wait_is_looked_at() -> None:
    """Nothing of a model is given up while requests wait for it, and more of it comes at once where all is busy."""
    models = {name: Model(name, "b", "r", Memory()) for name in ("m", "other")}
    data = a_reconciler(waiting=lambda: {"m": 3})._plan_input(FleetSnapshot(NOON, models=models), [], {})
    assert {name: model.waiting for name, model in data.world.models.items()} == {"m": 3, "other": 0}


def test_a_load_is_told_from_requests_that_wait() -> None:
    models = {name: Model(name, "b", "r", Memory(), waiting=1, only_load_waits=True) for name in ("m", "other")}
    data = a_reconciler(waiting=lambda: {"m": 1})._plan_input(FleetSnapshot(NOON, models=models), [], {})
    assert {name: model.only_load_waits for name, model in data.world.models.items()} == {"m": False, "other": True}


def test_pressure_counts_from_the_newest_replica_on() -> None:
    """What led to that one is answered by it, and must not lead to another."""
    models = {name: Model(name, "b", "r", Memory()) for name in ("m", "other")}
    asked: dict[str, float] = {}

    def pressure(model: str, within_s: float) -> int:
        asked[model] = within_s
        return 4 if model == "m" else 0

    rows = [
        DesiredReplica("n", "m", index, "r", "b", ReplicaStage.PLACED, "op", "p", NOON - timedelta(seconds=age_s), NOON)
        for index, age_s in enumerate((500, 7))
    ]
    data = a_reconciler(pressure=pressure)._plan_input(FleetSnapshot(NOON, models=models, rows=rows), [], {})
    assert {name: model.pressure for name, model in data.world.models.items()} == {"m": 4, "other": 0}
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
