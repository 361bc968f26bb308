"""A connection to an upstream as the pool sees it: opened, idle, reused, expired, closed.

Requests and responses on the connection belong to `upstream.py`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from corral.contract.http import Target
from corral.kit.sockets import abort
from corral.relay.loop.sockets import watch_for_dead_peers
from corral.relay.loop.ticker import NEVER

if TYPE_CHECKING:
    from corral.relay.pool import TargetPool, UpstreamPool


class PooledConnection(asyncio.Protocol):
    """Registers itself with the pool, returns to it when idle, and closes when it expires or its peer stalls."""

    __slots__ = (
        "_deadline",
        "_is_lost",
        "_pool",
        "_stall_at",
        "_stalled_bytes",
        "_ticker",
        "expires_at",
        "reused",
        "target",
        "target_pool",
        "transport",
    )

    def __init__(self, pool: UpstreamPool, target: Target) -> None:
        self._pool = pool
        self._ticker = pool.ticker
        self.target = target
        self.transport = cast(asyncio.Transport, None)  # until connected
        self.target_pool = cast("TargetPool", None)  # until connected
        self.reused = False
        self.expires_at = NEVER
        self._deadline = NEVER
        self._stall_at = NEVER
        self._stalled_bytes = 0
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._pool.on_opened(self)
        self.expires_at = self._ticker.now + self._pool.limits.max_age_s
        watch_for_dead_peers(transport.get_extra_info("socket"), self._pool.limits.dead_after_s, sends=True)
        self._deadline = self._ticker.deadline(self._pool.limits.idle_s)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._pool.on_closed(self)

    # For the pool.

    def discard(self) -> None:
        """Close at once. A connection that serves a request reports the failure to it."""
        self._leave_pool()

    def waiting_since(self) -> float | None:
        """The time at which a request was sent whose response has not begun; None: there is none."""
        return None

    def give_up(self, why: str) -> None:
        """Fail the request whose response has not begun, if there is one."""

    # Idle and closed.

    def _become_idle(self, is_reusable: bool) -> None:
        pool = self._pool
        self.reused = True
        self._deadline = self._ticker.now + pool.limits.idle_s
        # With bytes of the last request still unsent, they would precede the next one.
        if not is_reusable or self._stall_at != NEVER or not pool.give_back(self):
            self._leave_pool()

    def _leave_pool(self) -> None:
        self._pool.forget(self)
        self._abort()

    def _abort(self) -> None:
        if not self._is_lost:  # asyncio would report the loss a second time
            abort(self.transport)

    def check(self, now: float) -> None:
        if now >= self._deadline or now >= self.expires_at:
            self._pool.forget(self)
            if self.transport.is_closing():
                self._abort()
            else:
                self.transport.close()
            self._deadline = self.expires_at = NEVER

    # Deadlines.

    def postpone(self, span_s: float) -> None:
        self._deadline += span_s
        self._stall_at += span_s

    def _watch_stall(self) -> None:
        """The upstream takes no more bytes for now."""
        self._stalled_bytes = self.transport.get_write_buffer_size()
        self._stall_at = self._ticker.deadline(self._pool.limits.send_stall_s)

    def _has_stalled(self) -> bool:
        """At the deadline: whether the upstream took no byte since the last look. If it took some, watch on."""
        if self.transport.get_write_buffer_size() < self._stalled_bytes:
            self._watch_stall()
            return False
        return True
