"""The pool of connections to upstreams: opened on demand, kept while idle, closed at their maximum age."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable

from corral.contract.http import Target, UpstreamFailed
from corral.relay.fast_path import FastPathUpstream, is_fast_path_response
from corral.relay.http1.fields import FieldsWriter
from corral.relay.http1.head import ResponseHeads
from corral.relay.http1.head_templates import HeadTemplates
from corral.relay.limits import Counters, PoolLimits
from corral.relay.loop.sockets import unacknowledged_s
from corral.relay.loop.ticker import Ticker
from corral.relay.pooled_connection import PooledConnection
from corral.relay.upstream import UpstreamConnection

_REFUSED_AT_ONCE = (ConnectionRefusedError, ConnectionResetError)


class TargetPool:
    """The connections to one target: the number of open ones, and the idle ones, the last used at the end."""

    __slots__ = ("idle", "open")

    def __init__(self) -> None:
        self.idle: list[PooledConnection] = []
        self.open = 0


class UpstreamPool:
    """One per process. `tls` is the context for targets with TLS, or returns it; default: the system's CAs."""

    def __init__(
        self,
        limits: PoolLimits | None = None,
        *,
        tls: ssl.SSLContext | Callable[[Target], ssl.SSLContext] | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.limits = limits or PoolLimits()
        self.counters = counters or Counters()
        self.heads = ResponseHeads(self.limits.header_count)
        self.templates = HeadTemplates(
            self.heads, is_fast_path_response, head_bytes=self.limits.head_bytes, twice=False
        )
        self.writer = FieldsWriter()
        self.ticker = Ticker(self.limits.tick_s())
        self._tls = tls
        self._system_tls: ssl.SSLContext | None = None
        self._target_pools: dict[Target, TargetPool] = {}
        self._open: set[PooledConnection] = set()
        self._connecting: dict[asyncio.Task[UpstreamConnection], tuple[Target, float]] = {}  # where to, and since when
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._closed = False

    def find(self, target: Target) -> TargetPool | None:
        """The connections to `target`; None: there are none."""
        return self._target_pools.get(target)

    def take(self, target: Target) -> UpstreamConnection | None:
        """The idle connection used last, so that the others may expire."""
        target_pool = self._target_pools.get(target)
        while target_pool is not None and target_pool.idle:
            upstream = target_pool.idle.pop()
            if upstream.expires_at > self.ticker.now:
                self.counters.upstream_reuses += 1
                return upstream  # type: ignore[return-value]  # `_open_one` makes no others
            upstream.discard()
        return None

    def give_back(self, upstream: PooledConnection) -> bool:
        """True if the pool keeps it for another request."""
        idle = upstream.target_pool.idle
        if len(idle) >= self.limits.idle_per_target or upstream.expires_at <= self.ticker.now or self._closed:
            return False
        idle.append(upstream)
        return True

    def forget(self, upstream: PooledConnection) -> None:
        """Remove it from the idle connections: it is closed, or about to be."""
        with contextlib.suppress(ValueError):
            upstream.target_pool.idle.remove(upstream)

    def on_opened(self, upstream: PooledConnection) -> None:
        target_pool = self._target_pools.get(upstream.target)
        if target_pool is None:
            target_pool = self._target_pools[upstream.target] = TargetPool()
        target_pool.open += 1
        upstream.target_pool = target_pool
        self._open.add(upstream)
        self._none_open.clear()
        self.counters.upstream_open += 1
        self.ticker.add(upstream)

    def on_closed(self, upstream: PooledConnection) -> None:
        self.forget(upstream)
        upstream.target_pool.open -= 1
        if not upstream.target_pool.open:
            del self._target_pools[upstream.target]
        self._open.discard(upstream)
        if not self._open:
            self._none_open.set()
        self.counters.upstream_open -= 1
        self.ticker.discard(upstream)

    def start_connecting(self, target: Target) -> asyncio.Task[UpstreamConnection]:
        """A separate task, so that it can be cancelled when the client leaves. Raises `UpstreamFailed`."""
        task = asyncio.get_running_loop().create_task(self._connect(target), name="relay-connect")
        self._connecting[task] = target, time.monotonic()
        task.add_done_callback(self._connecting.pop)
        return task

    def waiting_since(self) -> dict[Target, float]:
        """Targets with requests whose responses have not begun, connecting included: when the oldest was sent."""
        found: dict[Target, float] = {}
        for target, since in self._connecting.values():
            found[target] = min(since, found.get(target, since))
        for upstream in self._open:
            sent_at = upstream.waiting_since()
            if sent_at is not None:
                found[upstream.target] = min(sent_at, found.get(upstream.target, sent_at))
        return found

    # Handlers may run to their ends in here. They cannot run inside another task, so the loop calls these.

    def give_up(self, target: Target, why: str) -> None:
        """`target` has stopped responding: fail every request there whose response has not begun, and close its idle
        connections. Responses that have begun continue while their connections last."""
        asyncio.get_running_loop().call_soon(self._give_up, target, why)

    def give_up_unacknowledged(self, is_watched: Callable[[Target], bool], longest_s: float, why: str) -> None:
        """`give_up` for single connections to watched targets that acknowledged nothing of a request for
        `longest_s`."""
        asyncio.get_running_loop().call_soon(self._give_up_unacknowledged, is_watched, longest_s, why)

    def _give_up(self, target: Target, why: str) -> None:
        target_pool = self._target_pools.get(target)
        for upstream in [] if target_pool is None else list(target_pool.idle):
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

    async def _connect(self, target: Target) -> UpstreamConnection:
        if self._closed:
            raise UpstreamFailed("the relay is closing", refused=True)
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.limits.connect_s):
                try:
                    return await self._open_one(target)
                except _REFUSED_AT_ONCE:  # the upstream may have been restarting; nothing was sent, so a retry is safe
                    self.counters.upstream_retries += 1
                    return await self._open_one(target)
        except TimeoutError as error:
            self.counters.upstream_connect_failures += 1
            waited = time.monotonic() - started
            raise UpstreamFailed(f"no connection after {waited:.1f} s", refused=True, timed_out=True) from error
        except (OSError, ssl.SSLError) as error:
            self.counters.upstream_connect_failures += 1
            raise UpstreamFailed(f"cannot connect: {error}", refused=True) from error

    async def _open_one(self, target: Target) -> UpstreamConnection:
        upstream = await self._open_unix(target) if target.unix_path else None
        if upstream is None:
            upstream = await self._open_tcp(target)
        self.counters.upstream_connects += 1
        return upstream

    async def _open_unix(self, target: Target) -> UpstreamConnection | None:
        """None: nothing accepts there, and the target has an address as well. A failed attempt costs no time, so each
        new connection tries again."""
        loop = asyncio.get_running_loop()
        try:
            _, upstream = await loop.create_unix_connection(lambda: FastPathUpstream(self, target), target.unix_path)
        except OSError:
            if target.host:
                return None
            raise
        self.counters.upstream_local_connects += bool(target.host)
        return upstream

    async def _open_tcp(self, target: Target) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        if target.tls:
            _, upstream = await loop.create_connection(
                lambda: FastPathUpstream(self, target),
                target.host,
                target.port,
                ssl=self.tls_for(target),
                server_hostname=target.server_name or target.host,
                ssl_handshake_timeout=self.limits.connect_s,
            )
        else:
            _, upstream = await loop.create_connection(lambda: FastPathUpstream(self, target), target.host, target.port)
        return upstream

    def tls_for(self, target: Target) -> ssl.SSLContext:
        if self._tls is None:
            if self._system_tls is None:
                self._system_tls = ssl.create_default_context()
            return self._system_tls
        return self._tls if isinstance(self._tls, ssl.SSLContext) else self._tls(target)

    def idle_count(self, target: Target) -> int:
        target_pool = self._target_pools.get(target)
        return 0 if target_pool is None else len(target_pool.idle)

    async def close(self) -> None:
        """Close every connection, also busy ones; wait until all are closed."""
        self._closed = True
        for task in list(self._connecting):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, UpstreamFailed):
                await task
        for upstream in list(self._open):
            upstream.discard()
        await self._none_open.wait()
