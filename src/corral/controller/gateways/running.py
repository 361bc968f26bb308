"""Requests under way, as gateways report them while somebody looks.

A look publishes a hint, gateways report to their controller every 2 s for a while, and that controller passes the
report on to the others. Nothing is stored; a gateway that does not report any more is forgotten after a few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from datetime import UTC, datetime

from corral.bus.api import Bus, Tokens
from corral.contract.messages.hints import GATEWAY_RUNNING, RUNNING_WANTED, GatewayRunning, RunningWanted
from corral.contract.receipts import MAX_RUNNING, RunningList, RunningReport, RunningRequest, RunningView
from corral.controller.runtime.node_views import rfc3339
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.store.engine.transactions import Store
from corral.store.tables import api_keys, nodes

log = get_log(__name__)
_WANTED_S = 10.0
_ASK_EVERY_S = 4.0
_FRESH_S = 5.0  # gateways report every 2 s
_KNOWN_S = 600.0  # gateways that reported before are waited for
MAX_GATEWAYS = 256
_LATEST_S = 2.0**33


class RunningRequests:
    name = "requests under way"

    def __init__(self, store: Store, bus: Bus, clock: Clock) -> None:
        self._store = store
        self._bus = bus
        self._clock = clock
        self._own = uuid.uuid4().hex  # our own messages come back
        self._reports: dict[str, tuple[float, RunningReport]] = {}  # by gateway process: when it came, and what
        self._requested_at = -_ASK_EVERY_S
        self._received = asyncio.Event()

    async def run(self) -> None:
        await self._bus.subscribe(GATEWAY_RUNNING, self._on_other_controller)
        await asyncio.Event().wait()

    async def take(self, report: RunningReport) -> None:
        """What a gateway reported to this controller."""
        self._keep(report)
        try:
            await self._bus.publish(GATEWAY_RUNNING, GatewayRunning(self._own, report))
        except CorralError as error:
            log.debug("requests under way not passed on", reason=error.message)

    async def list_views(
        self, *, model: str = "", key: str = "", node: str = "", key_id: str | None = None, wait_s: float = 0.0
    ) -> RunningList:
        """`key` and `node`: an id or a name. `key_id`: only requests of this key, and no other is counted. `wait_s`:
        how long the first look may wait for the gateways."""
        await self._request_reports(wait_s)
        reports = self._fresh()
        found = [each for report in reports for each in report.requests if key_id in (None, each.key_id)]
        if not found:
            return RunningList()
        async with self._store.read() as tx:
            keys = {each.id: each.name for each in await api_keys.list_(tx)}
            names = await nodes.list_names(tx)
        now = self._clock.now()
        views = [_view(each, keys, names, now) for each in sorted(found, key=lambda each: each.at)]
        wanted = [view for view in views if _matches(view, model, key, node)]
        is_whole = key_id is None and not (model or key or node)
        total = sum(report.total for report in reports) if is_whole else len(wanted)
        return RunningList(tuple(wanted[:MAX_RUNNING]), max(total, len(wanted)))

    async def _request_reports(self, wait_s: float) -> None:
        now = self._clock.monotonic()
        is_first = now - self._requested_at > _WANTED_S
        if now - self._requested_at >= _ASK_EVERY_S:
            self._requested_at = now
            try:
                await self._bus.publish(RUNNING_WANTED, RunningWanted(_WANTED_S))
            except CorralError as error:
                log.debug("gateways cannot be asked for the requests under way", reason=error.message)
                return
        if is_first and wait_s and not self._fresh():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wait_for_known(now)

    async def _wait_for_known(self, since: float) -> None:
        """Until every gateway that reported lately has reported again. Others cannot be known, so where there is none
        the caller's deadline ends this."""
        while True:
            self._received.clear()
            if self._reports and all(at >= since for at, _ in self._reports.values()):
                return
            await self._received.wait()

    async def _on_other_controller(self, message: GatewayRunning, _tokens: Tokens) -> None:
        if message.controller != self._own:
            self._keep(message.report)

    def _keep(self, report: RunningReport) -> None:
        now = self._clock.monotonic()
        self._reports.pop(report.gateway, None)
        self._reports[report.gateway] = (now, report)
        for gateway in [each for each, (at, _) in self._reports.items() if at < now - _KNOWN_S]:
            del self._reports[gateway]
        while len(self._reports) > MAX_GATEWAYS:
            del self._reports[next(iter(self._reports))]
        self._received.set()

    def _fresh(self) -> list[RunningReport]:
        since = self._clock.monotonic() - _FRESH_S
        return [report for at, report in self._reports.values() if at >= since]


def _matches(view: RunningView, model: str, key: str, node: str) -> bool:
    return (
        model in ("", view.model, view.served_by)
        and key in ("", view.key, view.key_id)
        and node in ("", view.node, view.node_id)
    )


def _view(request: RunningRequest, keys: dict[str, str], names: dict[str, str], now: datetime) -> RunningView:
    at = datetime.fromtimestamp(min(max(request.at, 0.0), _LATEST_S), UTC)
    return RunningView(
        id=request.id,
        at=rfc3339(at),
        running_ms=max(0.0, round((now - at).total_seconds() * 1000)),
        state="running" if request.node_id else "waiting",
        key_id=request.key_id,
        key=keys.get(request.key_id, ""),
        model=request.model,
        served_by=request.served_by,
        path=request.path,
        node_id=request.node_id,
        node=names.get(request.node_id, ""),
        process_id=request.process_id,
        replica=request.replica,
        tokens=request.tokens,
    )
