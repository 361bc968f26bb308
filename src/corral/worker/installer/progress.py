"""Progress of an order as events (docs/reference/wire/progress.md#publishing): at most one each 250 ms, the latest, and
always a last one.

`Window` and `PhaseScale` decide, purely, with the time handed in; `ProgressPublisher` owns the timer and the bytes of
an event. Those count within a phase; the percentage is one over all phases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import msgspec

from corral.blobs.progress import Progress
from corral.contract.messages.backends import InstallProgress, Phase
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.humanize import format_bytes
from corral.kit.log import get_log

log = get_log(__name__)

WINDOW_S = 0.25
FLUSH_TIMEOUT_S = 2.0
ORDER = tuple(Phase)
# Where each phase ends on the one scale of an order; 100 is its success, which the controller tells.
PHASE_ENDS = {
    Phase.RESOLVING: 0.0,
    Phase.DOWNLOADING: 60.0,
    Phase.VERIFYING: 65.0,
    Phase.EXTRACTING: 95.0,
    Phase.STARTING: 99.0,
}

T = TypeVar("T")


class Window(Generic[T]):
    """The first event after an empty window is sent at once; of those within the window only the latest is sent, at its
    end."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._sent_s: float | None = None
        self._pending: T | None = None

    @property
    def due_s(self) -> float | None:
        """When the pending one must go out; None where nothing waits."""
        return None if self._pending is None or self._sent_s is None else self._sent_s + self._window_s

    def tick(self, event: T, now_s: float) -> T | None:
        """What to send now."""
        if self._sent_s is None or now_s - self._sent_s >= self._window_s:
            self._pending, self._sent_s = None, now_s
            return event
        self._pending = event
        return None

    def close(self, now_s: float) -> T | None:
        """The window ends, or all of it: the pending one, if any. A second call finds nothing."""
        event, self._pending = self._pending, None
        if event is not None:
            self._sent_s = now_s
        return event


def forward_only(before: Progress | None, now: Progress) -> Progress:
    """Progress never goes back within one attempt, also when a second source is tried or a transfer restarts."""
    if before is None or ORDER.index(now.phase) > ORDER.index(before.phase):
        return now
    if now.phase != before.phase:
        return replace(before, rate=now.rate)
    current = max(before.current_bytes, now.current_bytes)
    total = max(now.total_bytes, current) if now.total_bytes else before.total_bytes
    return replace(now, current_bytes=current, total_bytes=total)


class PhaseScale:
    """One percentage over all phases of an order, which never goes back. A phase begins where the one before it came
    to, so that one which is absent, or whose size is unknown, leaves no gap: its part falls to the next. Only
    `starting` begins at a fixed point: all else is done by then."""

    def __init__(self) -> None:
        self._phase: Phase | None = None
        self._from = 0.0
        self._reached = 0.0

    def at(self, progress: Progress) -> float:
        if progress.phase != self._phase:
            if progress.phase is Phase.STARTING:
                self._reached = max(self._reached, PHASE_ENDS[Phase.EXTRACTING])
            self._phase, self._from = progress.phase, self._reached
        share = min(1.0, progress.current_bytes / progress.total_bytes) if progress.total_bytes else 0.0
        now = round(self._from + (PHASE_ENDS[progress.phase] - self._from) * share, 1)
        self._reached = max(self._reached, now)
        return self._reached


@dataclass(frozen=True)
class ProgressSubject:
    """What the progress belongs to. Without `op_id` it is not published."""

    op_id: str
    node_id: str
    backend: str
    attempt: int = 0


class ProgressPublisher:
    """Pass `tell` to the installer, and wrap the work in `async with`: the last event is sent before the reply."""

    def __init__(
        self,
        order: ProgressSubject,
        publish: Callable[[InstallProgress], Awaitable[None]],
        clock: Clock,
        *,
        after_seq: int = 0,
        window_s: float = WINDOW_S,
        flush_timeout_s: float = FLUSH_TIMEOUT_S,
    ) -> None:
        """`after_seq`: the number before the first event's. The same attempt may be sent again to a restarted worker,
        whose events must have higher numbers than those of the worker before."""
        self._order = order
        self._flush_timeout_s = flush_timeout_s
        self._publish = publish
        self._clock = clock
        self._window: Window[InstallProgress] = Window(window_s)
        self._last: Progress | None = None
        self._scale = PhaseScale()  # never back: a LocalAI controller shows the latest event as it is
        self._seq = after_seq
        # At most two events, the second is the latest: a slow bus gets no backlog of old events.
        self._outgoing: list[InstallProgress] = []
        self._wake = asyncio.Event()
        self._over = False
        self._sender: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def phase(self) -> str:
        """The last phase: the result of a failed order names it."""
        return self._last.phase if self._last is not None else ""

    def tell(self, progress: Progress) -> None:
        """Never waits: an event that cannot be sent is followed by others."""
        self._last = forward_only(self._last, progress)
        if self._sender is None:
            return
        now_s = self._clock.monotonic()
        if (event := self._window.tick(self._event(self._last), now_s)) is not None:
            self._send(event)
        elif self._timer is None and (due_s := self._window.due_s) is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due_s - now_s), self._close_window)

    async def __aenter__(self) -> ProgressPublisher:
        if self._order.op_id:
            self._sender = asyncio.get_running_loop().create_task(self._send_all(), name="progress")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Send the pending event, also after an error or a cancellation, and no more after it."""
        if self._sender is None:
            return
        self._close_window()
        self._over = True
        self._wake.set()
        sender, self._sender = self._sender, None
        try:
            async with asyncio.timeout(self._flush_timeout_s):
                await sender
        except TimeoutError:
            log.warning("the last progress event could not be sent", op=self._order.op_id)

    def _close_window(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (event := self._window.close(self._clock.monotonic())) is not None:
            self._send(event)

    def _send(self, event: InstallProgress) -> None:
        self._outgoing = [*self._outgoing[:1], event]
        self._wake.set()

    async def _send_all(self) -> None:
        while self._outgoing or not self._over:
            if not self._outgoing:
                self._wake.clear()
                await self._wake.wait()
                continue
            event = self._outgoing.pop(0)
            self._seq += 1  # numbered in the order they go out: one that was overwritten leaves no gap
            try:
                await self._publish(msgspec.structs.replace(event, seq=self._seq))
            except CorralError as error:
                log.debug("progress not published", op=self._order.op_id, reason=error.message)

    def _event(self, progress: Progress) -> InstallProgress:
        return InstallProgress(
            op_id=self._order.op_id,
            node_id=self._order.node_id,
            backend=self._order.backend,
            file_name=progress.file,
            current=format_bytes(progress.current_bytes) if progress.current_bytes or progress.total_bytes else "",
            total=format_bytes(progress.total_bytes) if progress.total_bytes else "",
            percentage=self._scale.at(progress),
            phase=progress.phase.value,
            attempt=self._order.attempt,
            current_bytes=progress.current_bytes,
            total_bytes=progress.total_bytes,
            rate=round(progress.rate, 1),
            sources=dict(progress.sources),
            bad_sources=progress.banned,
        )
