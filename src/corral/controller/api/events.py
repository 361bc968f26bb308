"""`/api/events`: every change, as server-sent events. All controllers send the same: they read the same database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Annotated, Any

from litestar import Request, get
from litestar.params import Parameter
from litestar.response import Stream
from msgspec.structs import replace

from corral.contract.admin import OperationView
from corral.contract.codec import encode
from corral.controller.access.keys import Access
from corral.controller.access.principal import Principal
from corral.controller.api.auth import principal_of, viewers
from corral.controller.operations.service import Operations
from corral.controller.runtime.change_feed import END, Change, ChangeFeed
from corral.kit.errors import CorralError, NoCapacity

_PING_S = 15.0  # a comment now and then, so that proxies and browsers do not take silence for death
MAX_SUBSCRIBERS = 1000  # of one controller; each costs memory and a write per change
_TELL_S = 0.25
_PING = b": still here\n\n"
Welcome = Callable[[], Awaitable[bool]]
Frames = Callable[[ChangeFeed, Welcome], AsyncIterator[bytes]]


def frame(name: str, data: bytes) -> bytes:
    """One event. JSON from our encoder has no line breaks, so one data line is enough."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


@get(
    "/api/events",
    guards=[viewers],
    tags=["events"],
    summary="Follow changes: node, operation, node-removed, operation-removed, changed; first the present state, then "
    "`ready`",
    media_type="text/event-stream",
)
async def events(
    request: Request[Any, Any, Any],
    feed: ChangeFeed,
    access: Access,
    rows: Annotated[bool, Parameter(description="false: operations without their nodes")] = True,
) -> Stream:
    return stream_of(feed, access, principal_of(request), partial(frames, rows=rows))


def stream_of(feed: ChangeFeed, access: Access, principal: Principal, made: Frames) -> Stream:
    if feed.subscribers >= MAX_SUBSCRIBERS:
        raise NoCapacity(f"{MAX_SUBSCRIBERS} others follow already")

    async def is_welcome() -> bool:
        try:
            return await access.is_welcome(principal)
        except CorralError:  # the database is away: no reason to think otherwise of anybody
            return True

    return Stream(
        made(feed, is_welcome),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def frames(
    feed: ChangeFeed, is_welcome: Welcome, *, rows: bool = True, ping_s: float = _PING_S
) -> AsyncIterator[bytes]:
    """Runs until the controller stops, or the key or session of the client has ended."""
    yield b"retry: 2000\n\n"
    async for change in _changes(feed, is_welcome, ping_s):
        yield _as_frame(change, rows) if change is not None else _PING


def operation_frames(operations: Operations, operation_id: str) -> Frames:
    """One operation as it is now and as it changes, until it has ended."""

    async def made(feed: ChangeFeed, is_welcome: Welcome) -> AsyncIterator[bytes]:
        yield b"retry: 2000\n\n"
        last = None
        async for change in _changes(feed, is_welcome, _PING_S):
            if change is None:
                yield _PING
                continue
            if change.kind == "ready":  # the state that every caller sees has been sent; ours may have ended long ago
                view: object = await operations.find_view(operation_id)
            elif change.kind == "operation" and getattr(change.data, "job_id", "") == operation_id:
                view = change.data
            else:
                continue
            if not isinstance(view, OperationView):
                return
            if view != last:
                last = view
                yield frame("operation", encode(view))
            if view.finished_at:
                return

    return made


async def _changes(feed: ChangeFeed, is_welcome: Welcome, ping_s: float) -> AsyncIterator[Change | None]:
    """None: no change within the interval."""
    now = asyncio.get_running_loop().time
    check_at = now() + ping_s
    pace = StreamPace(_TELL_S)
    async with feed.subscribe() as subscription:
        while True:
            due = pace.due_in(now())
            try:
                async with asyncio.timeout(ping_s if due is None else min(ping_s, due)):
                    change = await subscription.next()
            except TimeoutError:
                held = pace.take(now())
                for each in held:
                    yield each
                if not held and due is None:
                    yield None
            else:
                if change is END:
                    return
                for each in pace.put(change, now()):
                    yield each
            if now() >= check_at:
                if not await is_welcome():
                    return
                check_at = now() + ping_s


class StreamPace:
    """Limits the rate of operation events: a client gets the latest view of each operation, all together."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._held: dict[str, Change] = {}
        self._next_at = float("-inf")

    def put(self, change: Change, now: float) -> list[Change]:
        """The changes to send now."""
        if change.kind == "ready":  # the present state ends here, and was sent completely
            return [*self._flush(now), change]
        if change.kind == "operation-removed" and isinstance(change.data, dict):
            self._held.pop(str(change.data.get("id")), None)
        if change.kind != "operation":
            return [change]
        self._held[getattr(change.data, "job_id", "")] = change
        return self.take(now)

    def take(self, now: float) -> list[Change]:
        return self._flush(now) if self._held and now >= self._next_at else []

    def due_in(self, now: float) -> float | None:
        return max(0.0, self._next_at - now) if self._held else None

    def _flush(self, now: float) -> list[Change]:
        held, self._held = list(self._held.values()), {}
        self._next_at = now + self._every_s
        return held


def _as_frame(change: Change, rows: bool) -> bytes:
    data = change.data
    if not rows and isinstance(data, OperationView):
        data = replace(data, nodes=())
    return frame(change.kind, encode(data))
