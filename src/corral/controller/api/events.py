"""`/api/events`: every change, as server-sent events. The same from every controller: they read the same database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from litestar import Request, get
from litestar.response import Stream

from corral.contract.codec import encode
from corral.controller.api.auth import viewers
from corral.controller.watch import END, Change, Watch

_PING_S = 15.0  # a comment now and then, so that proxies and browsers do not take silence for death


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
async def events(request: Request[Any, Any, Any], watch: Watch) -> Stream:
    return Stream(
        _frames(watch),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _frames(watch: Watch) -> AsyncIterator[bytes]:
    async with watch.follow() as following:
        yield b"retry: 2000\n\n"
        while True:
            try:
                async with asyncio.timeout(_PING_S):
                    change = await following.next()
            except TimeoutError:
                yield b": still here\n\n"
                continue
            if change is END:
                return
            yield _as_frame(change)


def _as_frame(change: Change) -> bytes:
    return frame(change.kind, encode(change.data))
