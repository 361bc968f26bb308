"""What lives as long as the process is not looked through again and again.

A full collection walks every object there is. Most of ours are code and configuration that came at the start and never
go: with a hundred megabytes of them each walk held up every request for a tenth of a second.
"""

from __future__ import annotations

import asyncio
import gc

_STARTED_S = 3.0  # by then everything that comes late at the start (lazy imports, first views) is there


def settle_after_start(loop: asyncio.AbstractEventLoop, after_s: float = _STARTED_S) -> None:
    """For a process of its own, once: from then on collections look only at what came later."""
    loop.call_later(after_s, settle)


def settle() -> None:
    gc.collect()
    gc.freeze()
