"""Small tools around asyncio's transports."""

from __future__ import annotations

import asyncio
import contextlib


def abort(transport: asyncio.WriteTransport) -> None:
    """`transport.abort()`, which does nothing where the connection is closed already.

    Over TLS a second `close()` makes asyncio forget the connection, and early releases of Python 3.11 (Debian 12's is
    one) raise AttributeError here. The first `close()` ends the connection in order, within its own time limit.
    """
    with contextlib.suppress(AttributeError):
        transport.abort()
