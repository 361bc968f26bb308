"""What processes really take is learned from their nodes, and the next one is placed by it."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from corral.contract.hardware import Device
from corral.controller.inventory.observed_usage import UsageRecorder
from corral.controller.replicas.why import PlacementExplainer
from corral.store.tables import model_files, node_files, process_peaks
from corral.store.tables.model_files import StoredFile
from tests.support.replica_fleet import GIB, ReplicaFleet
from tests.support.waiting import until


def parts(fleet: ReplicaFleet) -> tuple[UsageRecorder, PlacementExplainer]:
    made = next(iter(fleet.replicas.values()))
    return made.usage_recorder, made.why


async def peaks(fleet: ReplicaFleet) -> list[tuple[str, int]]:
    async with fleet.fleet.store.read() as tx:
        return [(peak.model, peak.ram_bytes or peak.device_bytes) for peak in await process_peaks.list_(tx)]


async def test_the_most_that_was_seen_counts(fleet: ReplicaFleet) -> None:
    learning, why = parts(fleet)
    barn = await fleet.worker("barn", has="llama-cpp")
    await fleet.define("m")
    await fleet.ask("m")
    [shown] = await fleet.until_ready("m")
    assert (await why.model("m")).memory_bytes == 0
    await barn.set_process(shown.process_id, peak_bytes=2 * GIB)

    async def learned(size: int) -> bool:
        await learning.run_once()
        return await peaks(fleet) == [("m", size)]

    await until(lambda: learned(2 * GIB), "what it took")
    report = await why.model("m")
    assert (report.memory_bytes, report.memory_how) == (int(2 * GIB * 1.05), "the most its processes used")
    await barn.set_process(shown.process_id, peak_bytes=3 * GIB)
    await until(lambda: learned(3 * GIB), "that it took more")
    await barn.set_process(shown.process_id, peak_bytes=1 * GIB)
    await fleet.fleet.until_heard("barn")
    assert await learned(3 * GIB), "never less, of one process"


async def test_one_that_ran_away_is_forgotten_when_the_last_loads_took_less(local: ReplicaFleet) -> None:
    learning, why = parts(local)
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("m")
    sizes = (9, 2, 3, 2, 2, 2)
    for loads, size in enumerate(sizes, 1):
        await local.ask("m")
        [shown] = await local.until_ready("m")
        await barn.set_process(shown.process_id, peak_bytes=size * GIB)

        async def learned(loads: int = loads) -> bool:
            await learning.run_once()
            return await peaks(local) == [("m", size * GIB) for size in sizes[:loads][-5:]]

        await until(learned, f"that it took {size}")
        assert (await why.model("m")).memory_bytes == int(max(sizes[:loads][-5:]) * GIB * 1.05)
        await local.loads.unload("m", force=True)
        await local.until_gone("m")


async def test_what_it_holds_on_its_devices_is_learned_too(local: ReplicaFleet) -> None:
    learning, why = parts(local)
    cards = tuple(
        Device(index=number, vendor="nvidia", uuid=f"GPU-{number}", total_bytes=24 * GIB, free_bytes=24 * GIB)
        for number in range(2)
    )
    known: dict[str, Any] = {"gpu_vendor": "nvidia", "capability": "nvidia-cuda-12", "devices": cards}
    barn = await local.worker("barn", has="llama-cpp", **known)
    await local.define("m", tensor_parallel=2)
    await local.ask("m")
    [shown] = await local.until_ready("m")
    await barn.set_process(shown.process_id, device_peak_bytes=(7 * GIB, 8 * GIB))

    async def learned() -> bool:
        await learning.run_once()
        return await peaks(local) == [("m", 8 * GIB)]

    await until(learned, "what it took")
    report = await why.model("m")
    assert (report.memory_bytes, report.memory_how) == (int(16 * GIB * 1.05), "the most its processes used")


async def test_another_revision_is_learned_anew_and_a_definition_has_the_last_word(local: ReplicaFleet) -> None:
    learning, why = parts(local)
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("m")
    await local.ask("m")
    [shown] = await local.until_ready("m")
    await barn.set_process(shown.process_id, peak_bytes=2 * GIB)

    async def learned() -> bool:
        await learning.run_once()
        return bool(await peaks(local))

    await until(learned, "what it took")
    await local.define("m", context_size=4096)
    assert (await why.model("m")).memory_bytes == 0
    await local.define("m", memory="7GiB")
    assert (await why.model("m")).memory_bytes == 7 * GIB
    await local.forget("m")
    assert await peaks(local) == []


async def test_nonsense_is_not_learned(local: ReplicaFleet) -> None:
    learning, _ = parts(local)
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("m")
    await local.ask("m")
    [shown] = await local.until_ready("m")
    stranger = replace(barn.processes[shown.process_id], process_id="other", model="nobody's", peak_bytes=GIB)
    barn.processes["other"] = stranger
    await barn.set_process(shown.process_id, peak_bytes=1 << 60)
    await local.fleet.until_heard("barn")
    await learning.run_once()
    assert await peaks(local) == []


async def test_where_its_files_are_is_remembered_after_it_is_gone(fleet: ReplicaFleet) -> None:
    learning, why = parts(fleet)
    digest = "a" * 64
    file = {"filename": "w.gguf", "uri": "https://h.test/w", "size": 2 * GIB, "sha256": digest}
    await fleet.worker("attic", has="llama-cpp", total_ram=32 * GIB, available_ram=30 * GIB)
    await fleet.define("m", memory="1GiB", download_files=[file])
    async with fleet.fleet.store.write() as tx:
        await model_files.put(
            tx,
            StoredFile(
                model="m",
                path="w.gguf",
                uri="https://h.test/w",
                resolved="",
                digest=f"sha256:{digest}",
                size_bytes=2 * GIB,
            ),
        )
    await fleet.ask("m")
    await fleet.until_ready("m")

    async def learned() -> bool:
        await learning.run_once()
        async with fleet.fleet.store.read() as tx:
            return await node_files.by_node(tx) == {"id-of-attic": frozenset({f"sha256:{digest}"})}

    await until(learned, "where its files are")
    await fleet.loads.unload("m", force=True)
    await fleet.until_gone("m")
    await fleet.worker("barn", has="llama-cpp")  # it has more room, and would have to fetch two gigabytes
    report = await why.model("m")
    assert [(verdict.node, verdict.fetch_bytes) for verdict in report.nodes] == [("attic", 0), ("barn", 2 * GIB)]
    assert report.nodes[0].notes == ("backend and files are on the node",)
