"""An overview of the fleet, and the problems that need a person; for the CLI, the page and `doctor`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime

from corral import __version__
from corral.bus.api import Bus
from corral.contract.admin import Cluster, ControllerView, NodeView
from corral.contract.codec import PROTOCOL
from corral.controller.access.bus_issuer import BusIssuer
from corral.controller.access.revocations import Revocations
from corral.controller.health.monitor import HealthMonitor
from corral.controller.runtime.node_views import NodeViewCache, rfc3339
from corral.store.engine.transactions import Store
from corral.store.tables import controllers
from corral.store.tables.controllers import Controller


class Overview:
    def __init__(
        self,
        store: Store,
        bus: Bus,
        issuer: BusIssuer,
        revoked: Revocations,
        health: HealthMonitor,
        *,
        live_for_s: float,
        compat_localai: bool,
        more: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`more`: sentences of other parts that a person should act on."""
        self._store = store
        self._bus = bus
        self._issuer = issuer
        self._revocations = revoked
        self._health = health
        self._live_for_s = live_for_s
        self._compat_localai = compat_localai
        self._more = more
        self._views = NodeViewCache()

    async def read(self) -> Cluster:
        return (await self.read_with_nodes())[0]

    async def read_with_nodes(self) -> tuple[Cluster, list[NodeView]]:
        """Both from one moment; the page shows them side by side."""
        async with self._store.read() as tx:
            views = list((await self._views.read(tx)).values())
            peers = await controllers.list_(tx)
            now = await tx.now()
        return self._cluster(views, peers, now), views

    async def read_without_nodes(self) -> Cluster:
        """What concerns the fleet as a whole, for the header of every page: a thousand nodes cost nothing here."""
        async with self._store.read() as tx:
            peers = await controllers.list_(tx)
            now = await tx.now()
        return self._cluster((), peers, now)

    def _cluster(self, views: Sequence[NodeView], peers: Sequence[Controller], now: datetime) -> Cluster:
        notices = (*self._about_us(), *self._more())
        return Cluster(
            version=__version__,
            protocol=PROTOCOL,
            controllers=without_replaced([self._controller(row, now) for row in peers]),
            nodes_by_status=dict(Counter(view.status for view in views)),
            bus={
                "connected": self._bus.connected,
                "isolation": self._issuer.isolates,
                "revocation": self._revocations.possible,
            },
            store=self._store.kind,
            attention=(*notices, *attention(views)),
            compat_localai=self._compat_localai,
            notices=notices,
        )

    def _about_us(self) -> list[str]:
        lines = []
        if not self._bus.connected:
            lines.append("The bus cannot be reached: nodes are heard over HTTP only and get no new orders.")
        if not self._issuer.isolates:
            lines.append("The bus uses shared credentials: every node can read every other node's messages.")
        if self._health.held:
            lines.append(
                f"{self._health.held} nodes fell silent at once and were not taken offline: "
                "check the network between them and this controller."
            )
        return lines

    def _controller(self, row: Controller, now: datetime) -> ControllerView:
        return ControllerView(
            id=row.id,
            host=row.host,
            version=row.version,
            started_at=rfc3339(row.started_at),
            seen_at=rfc3339(row.seen_at),
            live=(now - row.seen_at).total_seconds() < self._live_for_s,
        )


def without_replaced(views: Sequence[ControllerView]) -> tuple[ControllerView, ...]:
    """All controllers except silent ones that were replaced on the same host. Pure."""
    live = [view for view in views if view.live]
    return tuple(
        view
        for view in views
        if view.live or not any(each.host == view.host and each.started_at >= view.seen_at for each in live)
    )


def attention(views: Sequence[NodeView]) -> list[str]:
    """One sentence per problem that a person can fix, the most urgent first. Pure."""
    pending = [view.name for view in views if view.status == "pending"]
    lines = []
    if pending:
        names = ", ".join(pending[:5]) + (" …" if len(pending) > 5 else "")
        waiting = "node waits" if len(pending) == 1 else "nodes wait"
        lines.append(f"{len(pending)} {waiting} for approval: {names}. Run `corral nodes approve NAME`.")
    lines.extend(
        f"{view.name}: {view.ingress_error}" for view in views if view.ingress_error and view.status != "offline"
    )
    lines.extend(
        f"{view.name} cannot reach the bus: it serves, but gets no new work." for view in views if view.bus_down
    )
    return lines
