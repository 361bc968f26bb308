"""Sends a file that is still being downloaded: its bytes go out as they arrive. Blocking, for the listener's threads.

The reader of a large artifact need not wait until this process has all of it. The bytes are not verified yet: a reader
compares the digest of the whole, as it does with any server.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from corral.blobs.serving.http_request import ByteRange

_SEND_BYTES = 1 << 20
_POLL_S = 0.05  # between two looks at the size of the file


@dataclass(frozen=True)
class GrowingFile:
    path: Path
    size: int  # once it is complete
    is_growing: Callable[[], bool] = field(repr=False)  # False: complete, or given up


def send_growing(
    connection: socket.socket, descriptor: int, part: ByteRange, file: GrowingFile, is_closing: Callable[[], bool]
) -> Iterator[int]:
    """Send the range as far as it arrives; yields the bytes sent by each step, 0 while it waits. Ends early when the
    download was given up or started over: the caller closes the connection, and the reader asks again."""
    sent = 0
    buffer = memoryview(bytearray(_SEND_BYTES))
    while sent < part.count and not is_closing():
        was_growing = file.is_growing()  # before the size: a download that ends in between is seen whole
        size = os.fstat(descriptor).st_size
        if size < part.start + sent and sent:
            return  # started over: what was sent is not a part of it any more
        ready = min(size - part.start, part.count) - sent
        if ready > 0:
            read = os.preadv(descriptor, [buffer[: min(ready, _SEND_BYTES)]], part.start + sent)
            connection.sendall(buffer[:read])
            sent += read
            yield read
        elif not was_growing:
            return
        else:
            yield 0
            time.sleep(_POLL_S)
