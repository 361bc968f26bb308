"""Releases of Corral in a simulated fleet: a person who publishes them and upgrades the fleet, somebody on the bus who
repeats old orders and forges new ones, and what must hold meanwhile (docs/adr/0048-a-fleet-upgrades-itself.md).

Which machines a release works on is decided with the release: everywhere, nowhere, or not on those of some class.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from corral.bus.local import LocalBus
from corral.contract.codec import encode
from corral.contract.messages.releases import UPGRADE_WORKER, UpgradeWorker
from corral.contract.releases import RELEASE_DOMAIN, ReleaseOrder
from corral.controller.access.release_keys import COUNTER
from corral.controller.operations.corral_operations import BAD_VERSION, open_corral_upgrade
from corral.controller.operations.views import CORRAL_UPGRADE
from corral.controller.rollouts.hardware_class import hardware_of
from corral.controller.runtime.change_feed import RULES
from corral.kit.errors import CorralError
from corral.kit.signing import Signer
from corral.store.records import ENDED, OperationNode, OperationNodeStatus, Scope, ScopeKind
from corral.store.tables import nodes, operations, release_wheels, releases, revisions
from corral.store.tables.operations import Operation
from corral.store.tables.releases import Release
from corral.worker.upgrade.release_pin import Pin
from tests.simulation.census import kind_of
from tests.simulation.controllers import Controller, Died
from tests.simulation.facts import at_once
from tests.simulation.upgrades import VersionsOnDisk
from tests.simulation.workers import Worker
from tests.support.invariants import Facts

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

_QUALITIES = ("fails its check", "does not start", "is never ready")
_DECIDED_WITHIN_S = 5.0  # between reading the world and writing what follows from it, a controller takes less


class ReleaseWorld:
    def __init__(self, simulation: Simulation, chance: Random) -> None:
        self._sim = simulation
        self._chance = chance
        self._signer, self._forger = (_signer(chance) for _ in range(2))
        self._qualities: dict[str, tuple[str, str]] = {}  # by wheel: what it does, and on which platforms ("" = all)
        self._signed: list[str] = []  # every order that was ever published
        self._classes: dict[str, str] = {}  # by node
        self._bad_since: dict[tuple[str, str], float] = {}  # rows whose version did not work
        self._intruders = 0
        simulation.packages.fails = chance.choice((0.0, 0.3))

    def equip(self, worker: Worker) -> None:
        worker.disk.versions = VersionsOnDisk(Pin(key=self._signer.public_key))
        worker.knows_releases = self._chance.choices(("yes", "not", "refuses"), (8, 1, 1))[0]

    def is_release(self, wheel: str) -> bool:
        return wheel in self._qualities

    def quality_of(self, wheel: str, worker: Worker) -> str:
        quality, where = self._qualities[wheel]
        return quality if where in ("", worker.known.get("arch", "amd64")) else ""

    # What people do, and who is no friend of theirs.

    async def run(self) -> None:
        every_s = self._chance.choice((40.0, 90.0))
        while True:
            await asyncio.sleep(self._chance.expovariate(1 / every_s))
            what: Callable[[Controller], Awaitable[Any]] = self._chance.choices(
                (
                    self._upgrades_the_fleet,
                    self._goes_back,
                    self._retries_an_upgrade,
                    self._cancels_an_upgrade,
                    self._old_order_repeated,
                    self._order_forged,
                ),
                (8, 2, 2, 2, 3, 1),
            )[0]
            controller = self._sim.some_controller()
            if controller is None:
                continue
            counts = self._sim.census.faults if what in (self._old_order_repeated, self._order_forged) else None
            (counts if counts is not None else self._sim.census.requests)[kind_of(what)] += 1
            try:
                await controller.asked(partial(what, controller))
            except Died:
                self._sim.note("person", "never hears from", controller.name)
            except CorralError as error:
                self._sim.note("person", "is told", error.code, error.message)

    async def _upgrades_the_fleet(self, controller: Controller) -> None:
        wheel = hashlib.sha256(self._chance.randbytes(8)).hexdigest()
        quality = self._chance.choice(("", "", "", *_QUALITIES))
        self._qualities[wheel] = (quality, self._chance.choice(("", "amd64", "arm64")) if quality else "")
        self._sim.note("person", "releases", wheel[:4], *self._qualities[wheel])
        await self._order(controller, await self._publish(controller, wheel))

    async def _goes_back(self, controller: Controller) -> None:
        """To an older wheel, which is signed again with a higher counter."""
        async with controller.store.read() as tx:
            found = await releases.list_(tx)
        if len(found) > 1:
            await self._order(controller, await self._publish(controller, self._chance.choice(found[1:]).sha256))

    async def _publish(self, controller: Controller, wheel: str) -> Release:
        """As `Releases._release` leaves it."""
        async with controller.store.write() as tx:
            await revisions.hold(tx, COUNTER)
            found = await releases.list_(tx)
            counter = found[0].counter + 1 if found else 1
            version = f"2.{len(self._qualities)}"
            order = ReleaseOrder(counter=counter, version=version, sha256=wheel, size_bytes=1000)
            signed = self._signer.sign(encode(order), domain=RELEASE_DOMAIN)
            release = Release(counter, version, wheel, 1000, signed, await tx.now())
            await releases.insert(tx, release)
            await release_wheels.put(tx, wheel, b"wheel")
            await revisions.bump(tx, COUNTER)
        self._signed.append(signed)
        return release

    async def _order(self, controller: Controller, release: Release) -> None:
        parallel = self._chance.choice(("1", "50%", "100%"))
        async with controller.store.write() as tx:
            await revisions.hold(tx, RULES)
            operation = await open_corral_upgrade(tx, release, Scope(ScopeKind.ALL), parallel, "somebody")
        controller.feed.notify("operations", operation.id)
        self._sim.note("person", "upgrades the fleet", release.counter, operation.id)
        self._sim.accepted[operation.id] = CORRAL_UPGRADE

    async def _retries_an_upgrade(self, controller: Controller) -> None:
        if operation := await self._open(controller):
            await controller.backends.operations.retry(operation.id)

    async def _cancels_an_upgrade(self, controller: Controller) -> None:
        if operation := await self._open(controller):
            await controller.backends.operations.cancel(operation.id)

    async def _open(self, controller: Controller) -> Operation | None:
        async with controller.store.read() as tx:
            found = await operations.list_open(tx, kind=CORRAL_UPGRADE)
        return found[0] if found else None

    async def _old_order_repeated(self, _controller: Controller) -> None:
        """By somebody who has recorded what went over the bus."""
        if self._signed:
            await self._intrude(self._chance.choice(self._signed[-4:-1] or self._signed))

    async def _order_forged(self, _controller: Controller) -> None:
        order = ReleaseOrder(counter=10_000, version="9.0", sha256="f" * 64, size_bytes=1000)
        await self._intrude(self._forger.sign(encode(order), domain=RELEASE_DOMAIN))

    async def _intrude(self, signed: str) -> None:
        self._intruders += 1
        bus: LocalBus = self._sim.join_bus(f"intruder-{self._intruders}")
        worker = self._sim.workers[self._chance.choice(sorted(self._sim.workers))]
        self._sim.note(bus.name, "orders a release on", worker.name)
        try:
            order = UpgradeWorker(op_id=f"intrusion-{self._intruders}", attempt=1, signed=signed)
            await bus.call(UPGRADE_WORKER, order, timeout_s=5.0, node=worker.node_id)
        finally:
            await bus.close()

    # What must hold after every commit.

    def breaches(self, before: Facts, after: Facts) -> list[str]:
        upgrades = {id for id, operation in after.operations.items() if operation.kind == CORRAL_UPGRADE}
        if not upgrades:
            return []
        if unknown := {key[1] for key in after.rows if key[0] in upgrades} - self._classes.keys():
            self._classes |= {node_id: name for node_id, name in at_once(self._read_classes()).items()}
            self._classes |= dict.fromkeys(unknown - self._classes.keys(), "")
        rows = {key: row for key, row in after.rows.items() if key[0] in upgrades}
        wrong = [
            why
            for key, row in rows.items()
            if row is not before.rows.get(key)
            for why in self._wrong(key, before, rows)
        ]
        wrong += [why for key, row in rows.items() for why in self._unproven(after, before.rows.get(key), row)]
        now = self._sim.loop.time()
        self._bad_since = {key: self._bad_since.get(key, now) for key, row in rows.items() if _is_bad(row)}
        return wrong

    async def _read_classes(self) -> dict[str, str]:
        async with self._sim.store.read() as tx:
            return {outline.id: hardware_of(outline) for outline in await nodes.list_outlines(tx)}

    def _wrong(self, key: tuple[str, str], before: Facts, rows: dict[tuple[str, str], OperationNode]) -> Iterator[str]:
        """Of a node that begins."""
        row, old = rows[key], before.rows.get(key)
        if row.status is not OperationNodeStatus.DOWNLOADING or (old is not None and old.attempt == row.attempt):
            return
        others = [each for other, each in rows.items() if other[0] == key[0] and other != key]
        own = [each for each in others if self._classes[each.node_id] == self._classes[row.node_id]]
        has_passed = any(each.status is OperationNodeStatus.SUCCESS for each in own)
        for each in own:
            if each.status is OperationNodeStatus.DOWNLOADING and not has_passed:
                yield f"{row.node_name} is upgraded while {each.node_name}, of its class, has not shown that it works"
        for other, since in self._bad_since.items():
            if other[0] == key[0] and other != key and self._sim.loop.time() - since > _DECIDED_WITHIN_S:
                yield f"{row.node_name} is upgraded, and the version does not work on {rows[other].node_name}"

    def _unproven(self, after: Facts, old: OperationNode | None, row: OperationNode) -> Iterator[str]:
        """3, by what the machine really ran."""
        was = old is not None and old.status is OperationNodeStatus.SUCCESS
        worker = next((each for each in self._sim.workers.values() if each.node_id == row.node_id), None)
        if row.status is not OperationNodeStatus.SUCCESS or was or worker is None or worker.disk.versions is None:
            return
        wheel, since = row.digest.removeprefix("sha256:"), after.operations[row.operation_id].created_at
        if not worker.disk.versions.has_run_since(wheel, since):
            yield f"{row.node_name} is called upgraded to {wheel[:4]}, and has not run it"


def says_why(operation: Operation, row: OperationNode) -> bool:
    """Whether an open row of an upgrade of Corral waits for a person, or for a node, and names the cause."""
    if operation.kind != CORRAL_UPGRADE or row.status in ENDED or not row.reason:
        return False
    return row.waits or (row.status is OperationNodeStatus.ERROR and row.next_try_at is None)


def _is_bad(row: OperationNode) -> bool:
    return row.status is OperationNodeStatus.ERROR and row.phase == BAD_VERSION


def _signer(chance: Random) -> Signer:
    return Signer(base64.urlsafe_b64encode(chance.randbytes(32)).decode().rstrip("="))
