"""Connections to upstreams: made on demand, kept while idle, never trusted beyond their age."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable

from corral.contract.http import Target, UpstreamFailed
from corral.relay.counters import Counters
from corral.relay.fields import FieldsWriter
from corral.relay.head import AnswerHeads
from corral.relay.limits import PoolLimits
from corral.relay.quick import QuickUpstream, may_arrive
from corral.relay.shapes import Shapes
from corral.relay.sockets import unacknowledged_s
from corral.relay.upstream import Upstream
from corral.relay.wheel import Wheel

_REFUSED_AT_ONCE = (ConnectionRefusedError, ConnectionResetError)


class Lane:
    """The connections to one target: how many are open, and those that are idle, the one used last at the end."""

    __slots__ = ("idle", "open")

    def __init__(self) -> None:
        self.idle: list[Upstream] = []
        self.open = 0


class UpstreamPool:
    """One per process. `tls` gives the context for a target with `tls`; without it the system's trust is used."""

    def __init__(
        self,
        limits: PoolLimits | None = None,
        *,
        tls: ssl.SSLContext | Callable[[Target], ssl.SSLContext] | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.limits = limits or PoolLimits()
        self.counters = counters or Counters()
        self.heads = AnswerHeads(self.limits.header_count)
        self.shapes = Shapes(self.heads, may_arrive, head_bytes=self.limits.head_bytes, twice=False)
        self.writer = FieldsWriter()
        self.wheel = Wheel(self.limits.tick_s())
        self._tls = tls
        self._system_tls: ssl.SSLContext | None = None
        self._lanes: dict[Target, Lane] = {}
        self._open: set[Upstream] = set()
        self._connecting: dict[asyncio.Task[Upstream], tuple[Target, float]] = {}  # where to, and since when
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._closed = False

    def lane(self, target: Target) -> Lane | None:
        """Where connections to `target` are, as long as there are any."""
        return self._lanes.get(target)

    def take(self, target: Target) -> Upstream | None:
        """The idle connection used last: the others may then grow old and go."""
        lane = self._lanes.get(target)
        while lane is not None and lane.idle:
            upstream = lane.idle.pop()
            if upstream.expires_at > self.wheel.now:
                self.counters.upstream_reuses += 1
                return upstream
            upstream.discard()
        return None

    def give_back(self, upstream: Upstream) -> bool:
        """True if it is kept for another request."""
        idle = upstream.lane.idle
        if len(idle) >= self.limits.idle_per_target or upstream.expires_at <= self.wheel.now or self._closed:
            return False
        idle.append(upstream)
        return True

    def forget(self, upstream: Upstream) -> None:
        """It is closed, or about to be."""
        with contextlib.suppress(ValueError):
            upstream.lane.idle.remove(upstream)

    def opened(self, upstream: Upstream) -> None:
        lane = self._lanes.get(upstream.target)
        if lane is None:
            lane = self._lanes[upstream.target] = Lane()
        lane.open += 1
        upstream.lane = lane
        self._open.add(upstream)
        self._none_open.clear()
        self.counters.upstream_open += 1
        self.wheel.add(upstream)

    def closed(self, upstream: Upstream) -> None:
        self.forget(upstream)
        upstream.lane.open -= 1
        if not upstream.lane.open:
            del self._lanes[upstream.target]
        self._open.discard(upstream)
        if not self._open:
            self._none_open.set()
        self.counters.upstream_open -= 1
        self.wheel.discard(upstream)

    def start_connecting(self, target: Target) -> asyncio.Task[Upstream]:
        """A task of its own, so that a client who leaves can have it stopped. Raises `UpstreamFailed`."""
        task = asyncio.get_running_loop().create_task(self._connect(target), name="relay-connect")
        self._connecting[task] = target, time.monotonic()
        task.add_done_callback(self._connecting.pop)
        return task

    def waiting_since(self) -> dict[Target, float]:
        """Targets with a request whose answer has not begun, connecting included, and since when the oldest waits."""
        found: dict[Target, float] = {}
        for target, since in self._connecting.values():
            found[target] = min(since, found.get(target, since))
        for upstream in self._open:
            sent_at = upstream.waiting_since()
            if sent_at is not None:
                found[upstream.target] = min(sent_at, found.get(upstream.target, sent_at))
        return found

    # Handlers may run to their ends in here. They cannot run inside of another task, so callbacks of the loop do this.

    def give_up(self, target: Target, why: str) -> None:
        """`target` has stopped responding: soon every request fails whose answer has not begun, and no kept connection
        is used again. Answers that have begun go on as long as their connections last."""
        asyncio.get_running_loop().call_soon(self._give_up, target, why)

    def give_up_unacknowledged(self, is_watched: Callable[[Target], bool], longest_s: float, why: str) -> None:
        """The same for single connections to watched targets that acknowledge nothing of a request for so long."""
        asyncio.get_running_loop().call_soon(self._give_up_unacknowledged, is_watched, longest_s, why)

    def _give_up(self, target: Target, why: str) -> None:
        lane = self._lanes.get(target)
        for upstream in [] if lane is None else list(lane.idle):
            upstream.discard()
        for upstream in [each for each in self._open if each.target == target]:
            upstream.give_up(why)
        for task in [task for task, (where, _) in self._connecting.items() if where == target]:
            task.cancel()

    def _give_up_unacknowledged(self, is_watched: Callable[[Target], bool], longest_s: float, why: str) -> None:
        sent_before = time.monotonic() - longest_s
        for upstream in list(self._open):
            sent_at = upstream.waiting_since()
            if sent_at is None or sent_at > sent_before or not is_watched(upstream.target):
                continue
            if unacknowledged_s(upstream.transport.get_extra_info("socket")) >= longest_s:
                upstream.give_up(why)

    async def _connect(self, target: Target) -> Upstream:
        if self._closed:
            raise UpstreamFailed("the relay is closing", refused=True)
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.limits.connect_s):
                try:
                    return await self._open_one(target)
                except _REFUSED_AT_ONCE:  # perhaps it was just restarting; nothing was sent, so once more is safe
                    self.counters.upstream_retries += 1
                    return await self._open_one(target)
        except TimeoutError as error:
            self.counters.upstream_connect_failures += 1
            waited = time.monotonic() - started
            raise UpstreamFailed(f"no connection after {waited:.1f} s", refused=True, timed_out=True) from error
        except (OSError, ssl.SSLError) as error:
            self.counters.upstream_connect_failures += 1
            raise UpstreamFailed(f"cannot connect: {error}", refused=True) from error

    async def _open_one(self, target: Target) -> Upstream:
        loop = asyncio.get_running_loop()
        if target.unix_path:
            _, upstream = await loop.create_unix_connection(lambda: QuickUpstream(self, target), target.unix_path)
        elif target.tls:
            _, upstream = await loop.create_connection(
                lambda: QuickUpstream(self, target),
                target.host,
                target.port,
                ssl=self.tls_for(target),
                server_hostname=target.server_name or target.host,
                ssl_handshake_timeout=self.limits.connect_s,
            )
        else:
            _, upstream = await loop.create_connection(lambda: QuickUpstream(self, target), target.host, target.port)
        self.counters.upstream_connects += 1
        return upstream

    def tls_for(self, target: Target) -> ssl.SSLContext:
        if self._tls is None:
            if self._system_tls is None:
                self._system_tls = ssl.create_default_context()
            return self._system_tls
        return self._tls if isinstance(self._tls, ssl.SSLContext) else self._tls(target)

    def idle_count(self, target: Target) -> int:
        lane = self._lanes.get(target)
        return 0 if lane is None else len(lane.idle)

    async def close(self) -> None:
        """Cut every connection, busy ones too; wait until they are gone."""
        self._closed = True
        for task in list(self._connecting):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, UpstreamFailed):
                await task
        for upstream in list(self._open):
            upstream.discard()
        await self._none_open.wait()
