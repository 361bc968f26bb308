"""Checks which installed backends have a newer version in the galleries
(docs/reference/wire/http-backends.md#upgradeinfo): every few hours, on demand, and after changes.

One controller checks and stores the report; all controllers show it. With `auto_upgrade` the controller also requests
the upgrades, except where the only difference is a digest that a node does not report.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime

import msgspec

from corral.contract.messages.backends import UpgradeInfo
from corral.controller.backends.catalogue import Catalogue, NodeInventory
from corral.controller.backends.world import kind_of
from corral.controller.inventory.nodes import takes_backends
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.gallery.backends.upgrades import is_proven
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.tasks import Wake, run_every
from corral.store.engine.transactions import Store, Transaction
from corral.store.tables import backend_targets, node_backends, nodes, revisions, settings_kv

log = get_log(__name__)

_LEASE = "upgrades"
_KEY = "backend_upgrades"
_REQUESTED = "upgrade_check"
_INVENTORY = "inventory"


class UpgradeReport(msgspec.Struct, frozen=True):
    checked_at: str = ""
    upgrades: dict[str, UpgradeInfo] = {}
    inventory: int = 0  # the counters at the time of the check
    requested: int = msgspec.field(default=0, name="asked")  # so stored by earlier releases


class UpgradeCheck:
    name = "upgrades"

    def __init__(
        self,
        store: Store,
        catalogue: Catalogue,
        leadership: Leadership,
        feed: ChangeFeed,
        clock: Clock,
        *,
        interval_s: float,
        rest_s: float = 10.0,
        poll_s: float = 60.0,
        upgrade: Callable[[str], Awaitable[object]] | None = None,
    ) -> None:
        """`rest_s`: changes within this time lead to one check. `poll_s`: how often each controller tests whether a
        check is due. `upgrade`: called with each backend that has a newer version; None = users decide."""
        self._store = store
        self._catalogue = catalogue
        self._leadership = leadership
        self._feed = feed
        self._clock = clock
        self._interval_s = interval_s
        self._rest_s = rest_s
        self._upgrade = upgrade
        self._wake = Wake()
        self._poll_s = min(interval_s, poll_s)

    def check_soon(self) -> None:
        """Wake the loop: something changed, and the store knows whether a check is due."""
        self._wake.set()

    async def request_check(self) -> None:
        """Request a check with fresh galleries; the controller that leads runs it."""
        async with self._store.write() as tx:
            await revisions.bump(tx, _REQUESTED)
        self._feed.notify(_REQUESTED)

    async def run(self) -> None:
        self._feed.on(_INVENTORY, self.check_soon)
        self._feed.on(_REQUESTED, self.check_soon)
        await self._clock.sleep(self._rest_s)
        await run_every(self.name, self._poll_s, self._run_and_rest, clock=self._clock, wake=self._wake)

    async def _run_and_rest(self) -> None:
        await self.run_once()
        await self._clock.sleep(self._rest_s)

    async def run_once(self) -> None:
        """Check if that is due. The time of the last check is stored, so the next leader knows it, too."""
        if not await self._leadership.lead(_LEASE):
            return
        async with self._store.read() as tx:
            last, counters, now = await _last(tx), await revisions.read_all(tx), await tx.now()
        requested = counters.get(_REQUESTED, 0) != last.requested
        overdue = not last.checked_at or _age_s(last, now) >= self._interval_s
        if requested or overdue:
            await self.check(refresh=True)
        elif counters.get(_INVENTORY, 0) != last.inventory:
            await self.check()

    async def check(self, *, refresh: bool = False) -> dict[str, UpgradeInfo]:
        """`refresh`: read the galleries again."""
        async with self._store.read() as tx:  # first, so that later changes lead to another check
            last, counters = await _last(tx), await revisions.read_all(tx)
        if refresh:
            await self._catalogue.refresh()
            await self._look_again_for_missing()
        async with self._store.read() as tx:
            inventories = await read_inventories(tx)
        found = await self._catalogue.upgrades(inventories)
        async with self._store.write() as tx:
            moment = (await tx.now()).isoformat(timespec="seconds").replace("+00:00", "Z")
            requested = counters.get(_REQUESTED, 0) if refresh else last.requested
            checked = UpgradeReport(moment, dict(sorted(found.items())), counters.get(_INVENTORY, 0), requested)
            await settings_kv.put(tx, _KEY, checked)
            await revisions.bump(tx, self.name)
        self._feed.notify(self.name)
        await self._act_on(found)
        return found

    async def read(self) -> UpgradeReport:
        """The last report."""
        async with self._store.read() as tx:
            return await _last(tx)

    async def _look_again_for_missing(self) -> None:
        """A gallery that was read again may have a build that was missing."""
        async with self._store.write() as tx:
            if await backend_targets.forget_missing(tx):
                await revisions.bump(tx, "rules")
        self._feed.notify("rules")

    async def _act_on(self, found: dict[str, UpgradeInfo]) -> None:
        """Only upgrades that reports prove: a node that reports no digest would be upgraded after every check."""
        if self._upgrade is None:
            return
        for backend in sorted(name for name, info in found.items() if is_proven(info)):
            try:
                await self._upgrade(backend)
            except CorralError as error:
                log.warning("automatic upgrade was not accepted", backend=backend, error=error.message)


async def _last(tx: Transaction) -> UpgradeReport:
    return await settings_kv.find(tx, _KEY, UpgradeReport) or UpgradeReport()


def _age_s(checked: UpgradeReport, now: datetime) -> float:
    return (now - datetime.fromisoformat(checked.checked_at)).total_seconds()


async def read_inventories(tx: Transaction) -> list[NodeInventory]:
    """Of every node that takes backends and has reported an inventory, in name order."""
    inventories = {row.node_id: row for row in await node_backends.list_(tx)}
    return [
        NodeInventory(outline.id, outline.name, *kind_of(outline)[:2], inventories[outline.id].backends, outline.python)
        for outline in await nodes.list_outlines(tx)
        if takes_backends(outline) and outline.id in inventories
    ]
