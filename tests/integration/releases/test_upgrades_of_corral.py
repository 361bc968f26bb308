"""An upgrade of Corral is an operation with a row per node: first one node per hardware class, stopped by a bad
version, cancelled, retried, continued by the next leader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from corral.contract.codec import decode, encode
from corral.contract.messages.releases import UpgradeState, UpgradeWorkerReply
from corral.contract.releases import (
    KEY_DOMAIN,
    RELEASE_DOMAIN,
    AddRelease,
    ChangeReleaseKey,
    ReleaseKeyChange,
    ReleaseOrder,
    UpgradeFleet,
)
from corral.kit.errors import Conflict, Invalid, NotFound, Unreachable
from corral.kit.signing import Signer, Verifier
from corral.store.engine.schema_floor import KEY as SCHEMA_FLOOR
from corral.store.engine.schema_floor import SchemaFloor
from corral.store.tables import settings_kv
from tests.support.backend_fleet import Fleet
from tests.support.release_fleet import DEPENDENCY, LEASE, ReleaseSite, sha256_of, small_wheel, verified
from tests.support.waiting import until

BAD = UpgradeWorkerReply(
    state=UpgradeState.FAILED,
    reason="the new version was not ready within 60 s, or ended; the old version serves again",
    is_final=True,
    is_version_bad=True,
)
NO_DISK = UpgradeWorkerReply(state=UpgradeState.FAILED, reason="the disk is full: free some space")


@pytest.fixture
async def site(fleet: Fleet, tmp_path: Path) -> AsyncIterator[ReleaseSite]:
    yield await ReleaseSite(fleet, tmp_path / "site").open()
    for controller in fleet.controllers:
        await controller.kill()


async def test_one_node_of_each_class_begins_and_the_others_follow(site: ReleaseSite) -> None:
    attic, barn = await site.worker("attic", total_ram=2**36), await site.worker("barn", total_ram=2**36)
    shed = await site.worker("shed", total_ram=2**34)
    await site.fleet.localai("cellar")
    attic.hold = shed.hold = asyncio.Event()
    await site.release("2.0")
    await site.lead(site.fleet.first)
    operation = await site.upgrade()
    await until(lambda: attic.orders and shed.orders)
    waiting = await site.fleet.until_row(operation, "barn", "queued")
    await until(lambda: len(attic.orders) > 3)
    assert barn.orders == [], "its class has not been tried"
    view = await site.fleet.view(operation)
    assert (view.kind, view.backend, view.is_backend, view.cancellable) == ("corral-upgrade", "corral", False, True)
    assert {row.node_name: row.phase for row in view.nodes}["attic"] == "building"
    attic.hold.set()
    done = await site.fleet.until(operation, "done")
    assert (done.outcome, done.created_by, done.counts) == ("completed", "boss", {"success": 3, "skipped": 1})
    assert waiting.node_name == "barn"
    assert "a LocalAI worker" in next(row.error for row in done.nodes if row.node_name == "cellar")
    order = attic.orders[0]
    release = verified(order, site.keys.public_key)
    content = small_wheel("2.0")
    assert (release.counter, release.version, release.size_bytes) == (1, "2.0", len(content))
    assert release.sha256 == sha256_of(content) == barn.runs
    assert [(each.name, each.sha256) for each in order.packages] == [(DEPENDENCY.name, DEPENDENCY.sha256)]
    assert (order.sources, order.source_token) == (("http://{host}:8090",), "token-of-id-of-attic")
    assert not (await site.fleet.first.backends.installed.matrix()).backends, "it is no work on a backend"


async def test_a_version_that_does_not_work_stays_on_one_node(site: ReleaseSite) -> None:
    attic, barn = await site.worker("attic"), await site.worker("barn")
    attic.replies = [BAD]
    await site.release("2.0")
    await site.lead(site.fleet.first)
    operation = await site.upgrade()
    await site.fleet.until_row(operation, "attic", "error")

    async def stopped() -> bool:
        return "stopped: attic failed" in (await site.fleet.row(operation, "barn")).error

    await until(stopped)
    view = await site.fleet.view(operation)
    assert (view.state, barn.orders, attic.attempts) == ("failing", [], {1}), "nothing is tried again by itself"
    assert "the old version serves again" in view.error
    with pytest.raises(Conflict, match="upgrades Corral already"):
        await site.upgrade()
    await site.fleet.operations.retry(operation)
    done = await site.fleet.until(operation, "done")
    assert (done.counts, attic.attempts) == ({"success": 2}, {1, 2})


async def test_a_pass_that_read_a_row_before_its_outcome_begins_no_other_attempt(
    site: ReleaseSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading takes time: meanwhile the attempt that the pass before has begun may end."""
    attic = await site.worker("attic")
    attic.hold, attic.replies = asyncio.Event(), [BAD]
    await site.release("2.0")
    upgrades = await site.lead(site.fleet.first)
    advance, read, go_on = upgrades._advance, asyncio.Event(), asyncio.Event()

    def is_running(operation_id: str) -> bool:
        return upgrades._tasks.is_running(operation_id, attic.node_id)

    async def late(*pass_: Any) -> None:
        """The second pass, which has read the row before it was begun."""
        await advance(*pass_)
        (row,) = pass_[1]
        if row.status == "queued" and is_running(pass_[0].id) and not read.is_set():
            read.set()
            await go_on.wait()
            await advance(*pass_)

    monkeypatch.setattr(upgrades, "_advance", late)
    operation = await site.upgrade()
    await read.wait()
    attic.hold.set()
    await site.fleet.until_row(operation, "attic", "error")
    await until(lambda: not is_running(operation))
    go_on.set()
    monkeypatch.undo()
    await upgrades.run_once()
    await until(lambda: not is_running(operation))
    assert (await site.fleet.row(operation, "attic")).status == "error"
    assert attic.attempts == {1}


async def test_a_full_disk_is_tried_again_and_stops_no_other_class(site: ReleaseSite) -> None:
    attic = await site.worker("attic", total_ram=2**36)
    shed = await site.worker("shed", total_ram=2**34)
    attic.replies = [NO_DISK, NO_DISK]
    await site.release("2.0")
    await site.lead(site.fleet.first)
    operation = await site.upgrade()
    done = await site.fleet.until(operation, "done")
    assert (done.counts, attic.attempts, shed.attempts) == ({"success": 2}, {1, 2, 3}, {1})


async def test_a_refusal_is_skipped_with_the_reason(site: ReleaseSite) -> None:
    attic, barn = await site.worker("attic"), await site.worker("barn")
    why = "it runs in a container: replace the container by one of the new image"
    attic.replies = [UpgradeWorkerReply(state=UpgradeState.REFUSED, reason=why, is_final=True)]
    await site.release("2.0")
    await site.lead(site.fleet.first)
    done = await site.fleet.until(await site.upgrade(), "done")
    assert {row.node_name: (row.status, row.error) for row in done.nodes} == {
        "attic": ("skipped", why),
        "barn": ("success", ""),
    }
    assert barn.runs


async def test_a_node_that_is_away_waits_and_a_worker_without_the_order_is_skipped(site: ReleaseSite) -> None:
    attic = await site.worker("attic", total_ram=2**36)
    await site.fleet.corral("elder", total_ram=2**34)  # its version knows no such order
    await site.fleet.until_heard("attic")
    await site.fleet.set_node("attic", status="offline")
    await site.release("2.0")
    await site.lead(site.fleet.first)
    operation = await site.upgrade()
    waiting = await site.fleet.until_row(operation, "attic", "queued")
    elder = await site.fleet.until_row(operation, "elder", "skipped", 60)
    assert "its version cannot upgrade itself yet" in elder.error
    waiting = await site.fleet.row(operation, "attic")
    assert waiting.error == "node offline, will be upgraded when it is healthy"
    await site.fleet.set_node("attic", status="healthy")
    assert (await site.fleet.until(operation, "done")).counts == {"success": 1, "skipped": 1}
    assert attic.attempts == {1}


@pytest.mark.parametrize("phase", ["fetching", "building", "starting", "watching"])
async def test_another_controller_continues_with_the_same_attempt(site: ReleaseSite, phase: str) -> None:
    attic, barn = await site.worker("attic"), await site.worker("barn")
    attic.hold, attic.phase = asyncio.Event(), phase
    await site.release("2.0")
    await site.lead(site.fleet.first)
    second = await site.fleet.controller("c2")
    await site.lead(second)
    operation = await site.upgrade()
    await until(lambda: attic.orders)
    await site.fleet.first.kill()
    site.fleet.controllers.reverse()
    await until(lambda: second.leadership.epoch(LEASE))
    before = len(attic.orders)
    await until(lambda: len(attic.orders) > before)

    async def is_shown() -> bool:  # the reply is written after the order has come
        return (await site.fleet.row(operation, "attic")).phase == phase

    await until(is_shown)
    attic.hold.set()
    assert (await site.fleet.until(operation, "done")).counts == {"success": 2}
    assert (attic.attempts, barn.attempts) == ({1}, {1})


async def test_a_controller_that_ends_before_the_first_order_is_replaced_too(site: ReleaseSite) -> None:
    attic = await site.worker("attic")
    site.packages.hold = asyncio.Event()
    await site.release("2.0")
    await site.lead(site.fleet.first)
    second = await site.fleet.controller("c2")
    await site.lead(second)
    operation = await site.upgrade()
    await until(lambda: site.packages.asked)
    await site.fleet.first.kill()
    site.fleet.controllers.reverse()
    assert attic.orders == []
    site.packages.hold.set()
    assert (await site.fleet.until(operation, "done")).counts == {"success": 1}
    assert attic.attempts == {1}


async def test_a_cancelled_one_stops_on_the_node_and_can_be_requested_again(site: ReleaseSite) -> None:
    attic, barn = await site.worker("attic"), await site.worker("barn")
    attic.hold = asyncio.Event()
    await site.release("2.0")
    await site.lead(site.fleet.first)
    operation = await site.upgrade()
    await until(lambda: attic.orders)
    await site.fleet.operations.cancel(operation)
    await until(lambda: attic.cancelled == [operation])
    assert ((await site.fleet.view(operation)).outcome, barn.orders) == ("cancelled", [])
    attic.hold.set()
    again = await site.fleet.operations.retry(operation)
    assert (await site.fleet.until(again.operation_id, "done")).counts == {"success": 2}


async def test_a_controller_without_the_packages_lets_workers_use_the_index(site: ReleaseSite) -> None:
    attic = await site.worker("attic")
    site.packages.errors = [Unreachable("the index does not answer")]
    await site.release("2.0")
    await site.lead(site.fleet.first)
    attic.replies = [UpgradeWorkerReply(state=UpgradeState.FAILED, reason="the packages could not be installed")]
    await site.fleet.until(await site.upgrade(), "done")
    assert attic.orders[0].packages == ()
    assert attic.orders[-1].packages, "the controller has tried again"


async def test_the_way_back_is_signed_again_with_a_higher_counter(site: ReleaseSite) -> None:
    attic = await site.worker("attic")
    await site.release("2.0")
    await site.release("3.0")
    assert (await site.release("3.0")).counter == 2, "the newest release again is the same release"
    await site.lead(site.fleet.first)
    plan = await site.releases.upgrade(UpgradeFleet(version="2.0", dry_run=True), by="boss")
    assert (plan.counter, plan.version, plan.operation) == (3, "2.0", "")
    assert [(each.node, each.action, each.is_canary) for each in plan.nodes] == [("attic", "upgrade", True)]
    await site.fleet.until(await site.upgrade("2.0"), "done")
    assert verified(attic.orders[-1], site.keys.public_key).counter == 3
    own = await site.releases.upgrade(UpgradeFleet(dry_run=True), by="boss")
    assert (own.version, own.counter) == ("1.0", 4), "without a name: the version of the controllers"
    assert (await site.releases.list_()).releases[0].counter == 3, "a dry run signs nothing"
    with pytest.raises(NotFound, match=r"they have: 2\.0, 3\.0"):
        await site.upgrade("9.9")


async def test_what_is_no_wheel_of_corral_is_refused(site: ReleaseSite) -> None:
    with pytest.raises(NotFound, match="upload it first"):
        await site.releases.add(AddRelease("a" * 64), by="boss")
    with pytest.raises(Invalid, match="no wheel of Corral"):
        await site.releases.add(AddRelease(await site.upload(b"not a zip")), by="boss")
    with pytest.raises(Invalid, match="wheel of other, not of Corral"):
        await site.releases.add(AddRelease(await site.upload(small_wheel("2.0", name="other"))), by="boss")


async def test_a_key_is_replaced_only_by_one_that_is_named(site: ReleaseSite) -> None:
    """A misspelt field is ignored: it must not make a new key."""
    before = site.keys.public_key
    with pytest.raises(Invalid, match="name the public_key, or set is_new"):
        await site.releases.change_key(ChangeReleaseKey(), by="boss")
    with pytest.raises(Invalid, match="name the public_key, or set is_new"):
        await site.releases.change_key(ChangeReleaseKey("x", is_new=True), by="boss")
    assert site.keys.public_key == before


async def test_a_key_that_is_kept_elsewhere(site: ReleaseSite) -> None:
    offline, foreign = Signer(Signer.new_private_key()), Signer(Signer.new_private_key())
    before = site.keys.public_key
    await site.change_key(offline.public_key)
    assert site.keys.public_key == offline.public_key
    assert len(site.keys.changes) == 1, "the key before has signed it"
    listed = await site.releases.list_()
    assert (listed.key.is_held, listed.key.next_counter) == (False, 1)
    with pytest.raises(Invalid, match="not on the controllers"):
        await site.release("2.0")

    content = small_wheel("2.0")

    def sign(counter: int, *, by: Signer = offline, wheel: bytes = content) -> str:
        order = ReleaseOrder(counter, "2.0", sha256_of(wheel), len(wheel))
        return by.sign(encode(order), domain=RELEASE_DOMAIN)

    with pytest.raises(Invalid, match="not of the release key of this fleet"):
        await site.release("2.0", signed=sign(1, by=foreign))
    with pytest.raises(Invalid, match="sign this wheel"):
        await site.release("2.0", signed=sign(1, wheel=small_wheel("2.0", extra="X: y")))
    assert (await site.release("2.0", signed=sign(5))).counter == 5
    with pytest.raises(Invalid, match="6 is the lowest that is free"):
        await site.release("2.0", signed=sign(5))

    with pytest.raises(Invalid, match="sign the new one where it is"):
        await site.change_key(foreign.public_key)
    with pytest.raises(Invalid, match="not signed by the present key"):
        await site.change_key(foreign.public_key, sign(9))
    with pytest.raises(Conflict, match="has done so before"):
        await site.change_key(before)
    change = ReleaseKeyChange(offline.public_key, foreign.public_key)
    await site.change_key(foreign.public_key, offline.sign(encode(change), domain=KEY_DOMAIN))
    assert len(site.keys.changes) == 2


async def test_a_key_that_was_lost_and_one_that_the_controllers_keep(site: ReleaseSite) -> None:
    first = site.keys.public_key
    await site.change_key("")
    assert (site.keys.public_key != first, len(site.keys.changes)) == (True, 1), "a new key, signed by the first"
    assert (await site.release("2.0")).counter == 1
    elsewhere = Signer(Signer.new_private_key())
    await site.change_key(elsewhere.public_key)
    with pytest.raises(Invalid, match="if the key is gone, add --lost"):
        await site.change_key("")
    assert site.keys.public_key == elsewhere.public_key
    await site.change_key("", is_lost=True)
    assert len(site.keys.changes) == 2, "nothing leads to it: a person names it to the workers"
    release = await site.release("3.0")
    assert release.counter == 2
    assert decode(ReleaseOrder, Verifier(site.keys.public_key).verify(release.signed, domain=RELEASE_DOMAIN))


async def test_the_way_back_ends_with_an_after_migration(site: ReleaseSite) -> None:
    old, kept = small_wheel("2.0", schema="0020"), small_wheel("2.1", schema="0024")
    await site.releases.add(AddRelease(await site.upload(old)), by="boss")
    await site.release("3.0")
    floor = SchemaFloor("0024", "3.0", "0025 (drop zones)")
    async with site.fleet.store.write() as tx:
        await settings_kv.put(tx, SCHEMA_FLOOR, floor)
    why = r"corral 2\.0 \(schema 0020\) cannot be installed again: corral 3\.0 has removed what it needs"
    for request in (UpgradeFleet(version="2.0"), UpgradeFleet(version="2.0", dry_run=True)):
        with pytest.raises(Invalid, match=why):
            await site.releases.upgrade(request, by="boss")
    with pytest.raises(Invalid, match=why):
        await site.releases.add(
            AddRelease(await site.upload(small_wheel("2.0", schema="0020", extra="A: b"))), by="boss"
        )
    added = await site.releases.add(AddRelease(await site.upload(kept)), by="boss")
    assert (added.version, added.counter) == ("2.1", 3)
