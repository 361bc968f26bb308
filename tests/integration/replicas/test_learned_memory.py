"""What processes really take is learned from their nodes, and the next one is placed by it."""

from __future__ import annotations

from msgspec.structs import replace

from corral.controller.peaks import Peaks
from corral.controller.why import Why
from corral.store import model_peaks
from tests.support.replica_fleet import GIB, ReplicaFleet
from tests.support.waiting import until


def parts(fleet: ReplicaFleet) -> tuple[Peaks, Why]:
    made = next(iter(fleet.replicas.values()))
    return made.peaks, made.why


async def peaks(fleet: ReplicaFleet) -> list[tuple[str, int]]:
    async with fleet.fleet.store.read() as tx:
        return [(peak.model, peak.peak_bytes) for peak in await model_peaks.list_(tx)]


async def test_the_most_that_was_seen_counts(fleet: ReplicaFleet) -> None:
    learning, why = parts(fleet)
    barn = await fleet.worker("barn", has="llama-cpp")
    await fleet.define("m")
    await fleet.ask("m")
    [shown] = await fleet.until_ready("m")
    assert (await why.model("m")).memory_bytes == 0
    await barn.set_process(shown.process_id, peak_bytes=2 * GIB)

    async def learned(size: int) -> bool:
        await learning.look()
        return await peaks(fleet) == [("m", size)]

    await until(lambda: learned(2 * GIB), "what it took")
    told = await why.model("m")
    assert (told.memory_bytes, told.memory_how) == (int(2 * GIB * 1.05), "the most it was seen to use")
    await barn.set_process(shown.process_id, peak_bytes=3 * GIB)
    await until(lambda: learned(3 * GIB), "that it took more")
    await barn.set_process(shown.process_id, peak_bytes=1 * GIB)
    await fleet.fleet.until_heard("barn")
    assert await learned(3 * GIB), "never less"


async def test_another_revision_is_learned_anew_and_a_definition_has_the_last_word(local: ReplicaFleet) -> None:
    learning, why = parts(local)
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("m")
    await local.ask("m")
    [shown] = await local.until_ready("m")
    await barn.set_process(shown.process_id, peak_bytes=2 * GIB)

    async def learned() -> bool:
        await learning.look()
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
    await learning.look()
    assert await peaks(local) == []
