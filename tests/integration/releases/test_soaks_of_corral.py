"""An upgrade of Corral with a soak: the first node of each class is watched, then the others follow, or it returns."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from corral.contract.messages.releases import UpgradeState, UpgradeWorkerReply
from corral.contract.releases import UpgradeFleet
from corral.contract.rollouts import RolloutView
from corral.controller.releases.upgrades import UpgradePace
from corral.kit.errors import Invalid
from corral.kit.signing import Signer
from corral.store.engine.types import to_us
from corral.store.tables import nodes, receipts, rollouts
from tests.support.backend_fleet import Fleet
from tests.support.release_fleet import LEASE, PACE, ReleaseSite, UpgradingWorker, sha256_of, small_wheel, verified
from tests.support.waiting import until

LONG, SHORT = "1h", "300ms"
OLD, NEW = sha256_of(small_wheel("1.0")), sha256_of(small_wheel("2.0"))
BAD = UpgradeWorkerReply(
    state=UpgradeState.FAILED, reason="it was not ready", is_final=True, is_version_bad=True, version="1.0"
)


async def opened(fleet: Fleet, folder: Path) -> AsyncIterator[ReleaseSite]:
    site = await ReleaseSite(fleet, folder).open()
    await site.release("2.0")
    yield site
    for controller in fleet.controllers:
        await controller.kill()


@pytest.fixture
async def site(local_fleet: Fleet, tmp_path: Path) -> AsyncIterator[ReleaseSite]:
    async for site in opened(local_fleet, tmp_path / "site"):
        yield site


@pytest.fixture
async def both(fleet: Fleet, tmp_path: Path) -> AsyncIterator[ReleaseSite]:
    async for site in opened(fleet, tmp_path / "site"):
        yield site


async def farm(site: ReleaseSite, *names: str) -> list[UpgradingWorker]:
    """Workers of one class, which run the version of the controllers."""
    workers = [await site.worker(name) for name in names]
    for worker in workers:
        worker.runs = OLD
    return workers


async def view(site: ReleaseSite, operation: str) -> RolloutView:
    return await site.fleet.first.backends.rollouts.view(operation)


async def until_phase(site: ReleaseSite, operation: str, phase: str) -> RolloutView:
    async def reached() -> bool:
        return (await view(site, operation)).phase == phase

    try:
        await until(reached)
    except AssertionError:
        raise AssertionError(f"not {phase}: {await view(site, operation)}") from None
    return await view(site, operation)


async def until_soak(site: ReleaseSite, *, pace: UpgradePace = PACE) -> str:
    await site.lead(site.fleet.first, pace=pace)
    operation = await site.upgrade(soak=LONG)
    await until_phase(site, operation, "soak")
    return operation


async def until_returned(site: ReleaseSite, operation: str) -> RolloutView:
    found = await until_phase(site, operation, "reverted")
    for each in found.reverted_by:
        await site.fleet.until(each, "done")
    return found


async def test_a_version_that_stays_healthy_goes_everywhere(both: ReleaseSite) -> None:
    attic, barn = await farm(both, "attic", "barn")
    operation = await until_soak(both)
    row = await both.fleet.row(operation, "attic")
    assert (row.status, row.phase) == ("downloading", "soaking")
    (soaking,) = (await view(both, operation)).classes
    assert (soaking.canary, soaking.state, soaking.nodes) == ("attic", "soaking", ("attic", "barn"))
    waiting = await both.fleet.row(operation, "barn")
    assert waiting.error.startswith("waits for the soak on attic")
    asked = attic.questions
    await until(lambda: attic.questions > asked + 3)
    assert (attic.attempts, barn.orders) == ({1}, []), "the canary is only asked, and nobody else begins"
    await both.fleet.first.backends.rollouts.promote(operation, by="boss")
    done = await both.fleet.until(operation, "done")
    assert (done.outcome, done.counts) == ("completed", {"success": 2})
    found = await until_phase(both, operation, "done")
    assert (found.backend, found.is_corral, found.classes[0].passed) == ("corral 2.0", True, "promoted by boss")
    assert (attic.runs, barn.runs) == (NEW, NEW)


async def test_a_soak_of_a_time_passes_without_requests_and_says_so(site: ReleaseSite) -> None:
    attic, barn = await farm(site, "attic", "barn")
    await site.lead(site.fleet.first)
    operation = await site.upgrade(soak=SHORT)
    assert (await site.fleet.until(operation, "done")).counts == {"success": 2}
    passed = (await until_phase(site, operation, "done")).classes[0].passed
    assert passed.startswith("too few requests to judge: 0 by the new version")
    assert passed.endswith("it stayed healthy")
    assert (attic.runs, barn.runs) == (NEW, NEW)


async def until_deaths(site: ReleaseSite, operation: str, count: int) -> None:
    async def counted() -> bool:
        return (await view(site, operation)).classes[0].deaths == count

    await until(counted)


async def break_it(site: ReleaseSite, operation: str, canary: UpgradingWorker, how: str) -> None:
    match how:
        case "is not ready":
            canary.not_ready = "the bus is down"
        case "runs another version":
            canary.runs = OLD
        case "is offline":
            await site.fleet.set_node("attic", status="offline")
        case "restarts":
            canary.boot_id = "second"
            await until_deaths(site, operation, 1)
            canary.boot_id = "third"
        case "fails requests":
            await serve(site, canary, 60, failing=20)


async def serve(site: ReleaseSite, worker: UpgradingWorker, count: int, *, failing: int = 0) -> None:
    def receipt(number: int) -> tuple[object, ...]:
        texts = ("key", "smol", "/v1/chat/completions", "", worker.node_id, "process", "r1", "sha256:1", "")
        status = 502 if number < failing else 200
        numbers = (status, 0, 0, 0, 100_000, 500_000, 10, 50, 1, 0)
        where = f"{worker.node_id}-{to_us(now)}-{number}"
        return (to_us(now) + number, where, *texts, *numbers, False, True, "", "")

    async with site.fleet.store.write() as tx:
        now = await tx.now()
        await receipts.insert(tx, [receipt(number) for number in range(count)])


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("is not ready", r"attic was not healthy for \d+s: the bus is down"),
        ("runs another version", r"attic was not healthy for \d+s: it does not run the new version any more"),
        ("is offline", r"attic was not healthy for \d+s: it is offline"),
        ("restarts", "the worker of the new version ended by itself 2 times on attic"),
        ("fails requests", "failed requests of smol: 33.3 % in 60 requests, 0.0 % in 80 of the old"),
    ],
)
async def test_a_canary_that_is_not_healthy_returns_and_no_other_node_begins(
    site: ReleaseSite, how: str, why: str
) -> None:
    attic, barn = await farm(site, "attic", "barn")
    await serve(site, attic, 40)
    await serve(site, barn, 40)
    operation = await until_soak(site)
    await break_it(site, operation, attic, how)
    found = await until_phase(site, operation, "reverted")
    if how == "is offline":
        await site.fleet.set_node("attic", status="healthy")
    found = await until_returned(site, operation)
    assert re.search(why, found.verdict), found.verdict
    ended = await site.fleet.view(operation)
    assert (ended.outcome, barn.orders, attic.runs) == ("reverted", [], OLD)
    release = verified(attic.orders[-1], site.keys.public_key)
    assert (release.version, release.counter) == ("1.0", 2), "an explicit order, with a higher counter"
    with pytest.raises(Invalid, match="not the newest any more"):
        await site.fleet.operations.retry(operation)


async def test_a_short_fault_only_delays_the_soak(site: ReleaseSite) -> None:
    attic, _ = await farm(site, "attic", "barn")
    operation = await until_soak(site, pace=replace(PACE, unhealthy_s=3600.0))
    attic.not_ready = "the bus is down"

    async def waits() -> bool:
        return (await view(site, operation)).classes[0].waiting == "attic: the bus is down"

    await until(waits)
    attic.not_ready = ""

    async def goes_on() -> bool:
        return (await view(site, operation)).classes[0].waiting == ""

    await until(goes_on)
    async with site.fleet.store.read() as tx:
        (state,) = (await rollouts.get(tx, operation)).classes
    assert (state.soaking, state.unsteady_s, state.deaths) == (True, 0.0, 0)


async def test_nothing_is_held_against_a_canary_while_all_nodes_are_away(site: ReleaseSite) -> None:
    attic, _ = await farm(site, "attic", "barn")
    operation = await until_soak(site)
    for name in ("barn", "attic"):
        await site.fleet.set_node(name, status="offline")

    async def waits() -> bool:
        return "no other node is there either" in (await view(site, operation)).classes[0].waiting

    await until(waits)
    async with site.fleet.store.read() as tx:
        waited_since, before = await tx.now(), (await rollouts.get(tx, operation)).classes[0]

    async def has_ticked() -> bool:
        async with site.fleet.store.read() as tx:
            rollout = await rollouts.get(tx, operation)
        return rollout.ticked_at is not None and rollout.ticked_at - waited_since > 2 * timedelta(
            seconds=PACE.unhealthy_s
        )

    await until(has_ticked)
    async with site.fleet.store.read() as tx:
        after = (await rollouts.get(tx, operation)).classes[0]
    assert (after.unsteady_s, after.soaked_s) == (0.0, before.soaked_s)
    for name in ("attic", "barn"):  # or attic would be away alone for a moment
        await site.fleet.set_node(name, status="healthy")
    await site.fleet.first.backends.rollouts.promote(operation, by="boss")
    assert (await site.fleet.until(operation, "done")).counts == {"success": 2}
    assert attic.runs == NEW


async def test_pause_holds_the_others_and_abort_returns_what_has_switched(site: ReleaseSite) -> None:
    attic, barn = await farm(site, "attic", "barn")
    steer = site.fleet.first.backends.rollouts
    operation = await until_soak(site)
    await steer.pause(operation, by="boss")

    async def is_paused() -> bool:
        return (await view(site, operation)).classes[0].waiting == "paused by boss"

    await until(is_paused)
    held = await site.fleet.row(operation, "barn")
    assert (held.status, held.error) == ("queued", "the rollout was paused by boss")
    await steer.resume(operation)
    await until_phase(site, operation, "soak")
    await steer.abort(operation, by="boss")
    found = await until_returned(site, operation)
    assert (found.verdict, barn.orders, attic.runs) == ("aborted by boss", [], OLD)


async def test_a_bad_version_on_another_class_takes_the_soaking_one_back(site: ReleaseSite) -> None:
    attic, shed = await site.worker("attic", total_ram=2**36), await site.worker("shed", total_ram=2**34)
    attic.runs = shed.runs = OLD
    shed.hold = asyncio.Event()
    shed.replies = [BAD]
    operation = await until_soak(site)
    shed.hold.set()
    found = await until_returned(site, operation)
    assert "shed failed to switch once, and a retry cannot help: it was not ready" in found.verdict
    assert (attic.runs, shed.attempts) == (OLD, {1})


@pytest.mark.parametrize("where", ["soak", "waves", "reverting"])
async def test_another_controller_continues_with_the_same_decision(both: ReleaseSite, where: str) -> None:
    attic, barn = await farm(both, "attic", "barn")
    operation = await until_soak(both)
    second = await both.fleet.controller("c2")
    await both.lead(second)
    if where == "waves":
        barn.hold = asyncio.Event()
        await both.fleet.first.backends.rollouts.promote(operation, by="boss")
        await until(lambda: barn.orders)
    if where == "reverting":
        attic.hold = asyncio.Event()
        await both.fleet.first.backends.rollouts.abort(operation, by="boss")
        await until_phase(both, operation, "reverted")
        await until(lambda: attic.orders[-1].op_id != operation)
    await both.fleet.first.kill()
    both.fleet.controllers.reverse()
    await until(lambda: second.leadership.epoch(LEASE))
    if where == "soak":
        asked = attic.questions
        await until(lambda: attic.questions > asked + 1)
        (state,) = (await view(both, operation)).classes
        assert (state.canary, state.state, barn.orders) == ("attic", "soaking", [])
        await second.backends.rollouts.promote(operation, by="boss")
    if where == "waves":
        assert barn.hold is not None
        barn.hold.set()
    if where == "reverting":
        assert attic.hold is not None
        attic.hold.set()
        await until_returned(both, operation)
        assert (attic.runs, barn.orders) == (OLD, [])
        return
    assert (await both.fleet.until(operation, "done")).counts == {"success": 2}
    assert (attic.attempts, barn.attempts) == ({1}, {1})


async def test_a_cancel_ends_the_soak_and_returns_nothing(site: ReleaseSite) -> None:
    attic, barn = await farm(site, "attic", "barn")
    operation = await until_soak(site)
    await site.fleet.operations.cancel(operation)
    await until_phase(site, operation, "ended")
    assert (attic.runs, barn.orders) == (NEW, [])


async def test_a_canary_that_is_deleted_is_replaced(site: ReleaseSite) -> None:
    _, barn = await farm(site, "attic", "barn")
    operation = await until_soak(site)
    async with site.fleet.store.write() as tx:
        await nodes.delete(tx, "id-of-attic")

    async def is_next() -> bool:
        return (await view(site, operation)).classes[0].canary == "barn"

    await until(is_next)
    await until(lambda: barn.runs == NEW)


async def test_without_the_key_or_the_wheel_the_rollout_stops_and_says_what_to_do(site: ReleaseSite) -> None:
    attic, barn = await farm(site, "attic", "barn")
    operation = await until_soak(site)
    await site.change_key(Signer(Signer.new_private_key()).public_key)
    attic.not_ready = "the bus is down"
    found = await until_phase(site, operation, "reverted")
    error = (await site.fleet.view(operation)).error
    assert (found.reverted_by, attic.runs, barn.orders) == ((), NEW, [])
    assert "attic cannot be returned by itself" in error
    assert "release-sign --counter 2" in error


async def test_the_plan_names_the_soak_and_the_way_back(site: ReleaseSite) -> None:
    attic, barn = await farm(site, "attic", "barn")
    barn.runs = "f" * 64
    plan = await site.releases.upgrade(UpgradeFleet(version="2.0", soak="5m", dry_run=True), by="boss")
    assert plan.soak == "5m"
    assert [(each.node, each.returns_to) for each in plan.nodes] == [("attic", "1.0"), ("barn", "")]
    with pytest.raises(Invalid, match="is no soak"):
        await site.releases.upgrade(UpgradeFleet(version="2.0", soak="5x", dry_run=True), by="boss")
    assert attic.orders == barn.orders == []


async def test_a_dry_run_of_a_wheel_signs_nothing(site: ReleaseSite) -> None:
    attic, barn = await farm(site, "attic", "barn")
    content = small_wheel("3.0")
    sha256 = await site.upload(content)
    barn.runs = sha256
    plan = await site.releases.upgrade(UpgradeFleet(sha256=sha256, dry_run=True), by="boss")
    assert (plan.version, plan.counter, plan.operation) == ("3.0", 2, "")
    assert [(each.node, each.action) for each in plan.nodes] == [("attic", "upgrade"), ("barn", "none")]
    assert [each.version for each in (await site.releases.list_()).releases] == ["2.0"]
    assert attic.orders == []
