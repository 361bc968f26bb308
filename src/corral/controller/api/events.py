"""`/api/events`: every change, as server-sent events. The same from every controller: they read the same database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from litestar import Request, get
from litestar.response import Stream

from corral.contract.codec import encode
from corral.controller.access.keys import Access
from corral.controller.api.auth import principal_of, viewers
from corral.controller.watch import END, Change, Watch
from corral.kit.errors import CorralError, NoCapacity

_PING_S = 15.0  # a comment now and then, so that proxies and browsers do not take silence for death
_MOST = 1000  # followers of one controller; each costs memory and a write per change


def frame(name: str, data: bytes) -> bytes:
    """One event. JSON from our encoder has no line breaks, so one data line is enough."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


@get(
    "/api/events",
    guards=[viewers],
    tags=["events"],
    summary="Follow changes: node, node-removed, changed; first the present state, then `ready`",
    media_type="text/event-stream",
)
async def events(request: Request[Any, Any, Any], watch: Watch, access: Access) -> Stream:
    if watch.followers >= _MOST:
        raise NoCapacity(f"{_MOST} others follow already")
    principal = principal_of(request)

    async def is_welcome() -> bool:
        try:
            return await access.is_welcome(principal)
        except CorralError:  # the database is away: no reason to think otherwise of anybody
            return True

    return Stream(
        frames(watch, is_welcome),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def frames(
    watch: Watch, is_welcome: Callable[[], Awaitable[bool]], *, ping_s: float = _PING_S
) -> AsyncIterator[bytes]:
    """Until the controller stops, or the key or session that opened the stream has ended."""
    now = asyncio.get_running_loop().time
    check_at = now() + ping_s
    async with watch.follow() as following:
        yield b"retry: 2000\n\n"
        while True:
            try:
                async with asyncio.timeout(ping_s):
                    change = await following.next()
            except TimeoutError:
                yield b": still here\n\n"
            else:
                if change is END:
                    return
                yield _as_frame(change)
            if now() >= check_at:
                if not await is_welcome():
                    return
                check_at = now() + ping_s


def _as_frame(change: Change) -> bytes:
    return frame(change.kind, encode(change.data))
