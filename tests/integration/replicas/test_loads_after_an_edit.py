"""A model whose definition was edited while it serves: what people ask for is the definition as it is now."""

from __future__ import annotations

from corral.contract.loads import LoadStatus
from corral.store.tables import model_files
from corral.store.tables.model_files import StoredFile
from tests.support.replica_fleet import GIB, ReplicaFleet
from tests.support.waiting import until

FILE = {"filename": "w.gguf", "uri": "https://h.test/w"}


async def ask_as_a_person(fleet: ReplicaFleet, model: str) -> LoadStatus:
    status: LoadStatus = await fleet.loads.request(model, current=True)
    return status


async def failed_for_people(fleet: ReplicaFleet, model: str) -> LoadStatus:
    async def failed() -> bool:
        status = await fleet.loads.find(model, current=True)
        return status is not None and status.state == "failed"

    await until(failed, f"failed load of {model}")
    status: LoadStatus = await fleet.loads.find(model, current=True)
    return status


async def test_a_definition_that_can_run_nowhere_is_not_called_ready(local: ReplicaFleet) -> None:
    """The replica of the definition before serves on, for gateways it is loaded; for people the load has failed."""
    await local.worker("barn", has="llama-cpp")
    before = await local.define("m")
    await local.ask("m")
    await local.until_ready("m")
    await local.define("m", memory="500GiB")
    assert (await ask_as_a_person(local, "m")).state != "loaded"
    status = await failed_for_people(local, "m")
    assert "500.0 GiB" in status.error
    assert status.error.endswith("replicas of the definition before the edit still serve requests")
    for_gateways = await local.status("m")
    assert for_gateways is not None
    assert for_gateways.state == "loaded"
    assert [each.revision for each in await local.shown("m")] == [before.revision]
    listing = local.replicas["c1"].rows
    assert [each["model_name"] for each in await listing.list_(answering=True)] == ["m"], "it still answers"


async def test_a_definition_that_can_run_replaces_the_one_before(local: ReplicaFleet) -> None:
    await local.worker("barn", has="llama-cpp")
    await local.define("m")
    await local.ask("m")
    await local.until_ready("m")
    after = await local.define("m", context_size=4096)
    await ask_as_a_person(local, "m")

    async def replaced() -> bool:
        return [each.revision for each in await local.shown("m")] == [after.revision]

    await until(replaced, "a replica of the new definition")
    assert (await ask_as_a_person(local, "m")).state == "loaded"


async def test_without_memory_for_both_the_earlier_replica_gives_way(local: ReplicaFleet) -> None:
    await local.worker("barn", has="llama-cpp", total_ram=16 * GIB, available_ram=15 * GIB)
    await local.define("m", memory="10GiB")
    await local.ask("m")
    await local.until_ready("m")
    after = await local.define("m", memory="11GiB")
    await ask_as_a_person(local, "m")

    async def replaced() -> bool:
        return [each.revision for each in await local.shown("m")] == [after.revision]

    await until(replaced, "a replica of the new definition")


async def test_weights_of_the_definition_before_do_not_count(local: ReplicaFleet) -> None:
    await local.worker("barn", has="llama-cpp")
    await local.define("m", download_files=[FILE])
    async with local.fleet.store.write() as tx:
        weights = StoredFile(
            model="m",
            path="w.gguf",
            uri=FILE["uri"],
            resolved=FILE["uri"],
            digest="sha256:" + "a" * 64,
            size_bytes=10 * GIB,
        )
        await model_files.put(tx, weights)
    explain = next(iter(local.replicas.values())).why
    assert (await explain.model("m")).memory_bytes >= 10 * GIB
    await local.define("m", backend="mock")
    report = await explain.model("m")
    assert report.memory_bytes == 0, report.memory_how
