"""Why a model is, or is not, where it is: by a controller that reads the whole world for it."""

from __future__ import annotations

import asyncio

import pytest

from corral.controller.replicas.why import PlacementExplainer
from corral.kit.errors import NotFound
from tests.support.replica_fleet import GIB, ReplicaFleet
from tests.support.waiting import until


def why(fleet: ReplicaFleet) -> PlacementExplainer:
    return next(iter(fleet.replicas.values())).why


async def test_a_model_nobody_asked_for_is_judged_for_every_node(local: ReplicaFleet) -> None:
    await local.worker("barn", has="llama-cpp")
    await local.worker("attic", total_ram=1 * GIB, available_ram=1 * GIB)
    await local.define("m", memory="4GiB")
    report = await why(local).model("m")
    assert report.decision == "placed"
    assert report.text.startswith("barn: needs 4.0 GiB of RAM; RAM: 59.0 GiB free of 63.0 GiB")
    assert (report.memory_bytes, report.memory_how) == (4 * GIB, "as its definition says")
    barn, attic = report.nodes
    assert (barn.node, barn.eligible) == ("barn", True)
    assert attic.text == "needs 4.0 GiB of RAM; RAM: 972.8 MiB free of 972.8 MiB"
    # Nobody had asked what the galleries say of its backend: that was looked up first.
    assert [check.text for check in attic.checks if check.name == "backend"] == ["llama-cpp can be installed"]
    assert (report.load, report.replicas) == (None, ())


async def test_what_is_loading_and_what_serves_is_told(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("m", memory="4GiB")
    barn.starts.hold = asyncio.Event()
    await local.ask("m")
    await until(lambda: barn.processes)
    report = await why(local).model("m")
    assert report.load is not None
    assert [(replica.node, replica.state) for replica in report.replicas] == [("barn", "starting")]
    assert report.replicas[0].reason.startswith("barn: needs 4.0 GiB of RAM")
    barn.starts.hold.set()
    await local.until_ready("m")

    async def is_told() -> bool:
        shown = (await why(local).model("m")).replicas
        return [(each.state, each.memory_bytes) for each in shown] == [("ready", 4 * GIB)]

    await until(is_told, "the replica that is ready")


async def test_whether_broken_streams_are_continued(local: ReplicaFleet) -> None:
    await local.worker("barn", has="llama-cpp")
    await local.define("plain")
    await local.define("m", resume_streams=True)
    assert (await why(local).model("plain")).streams == ""
    report = await why(local).model("m")
    assert (report.streams_limited, report.streams[:13]) == (True, "not continued")


async def test_a_node_tells_what_it_has_left(local: ReplicaFleet) -> None:
    await local.worker("barn", has="llama-cpp")
    await local.define("m", memory="4GiB")
    await local.define("huge", memory="100GiB")
    await local.ask("m")
    await local.until_ready("m")
    report = await why(local).node("id-of-barn")
    assert (report.node, report.accepts) == ("barn", True)
    [ram] = report.spaces
    assert (ram.name, ram.reserved_bytes, ram.replicas) == ("RAM", 4 * GIB, 1)
    assert [replica.model for replica in report.replicas] == ["m"]
    assert [(each.model, each.eligible) for each in report.models] == [("huge", False), ("m", False)]
    huge, m = report.models
    assert huge.text.startswith("needs 100.0 GiB of RAM")
    assert m.text == "runs 1 of at most 1 replicas of this model"


async def test_what_is_not_there_is_said_to_be(local: ReplicaFleet) -> None:
    with pytest.raises(NotFound):
        await why(local).model("m")
    with pytest.raises(NotFound):
        await why(local).node("nobody")
