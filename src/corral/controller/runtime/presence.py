"""Which controllers are alive: each writes its own row.

A controller keeps its id in its data folder, so after a restart, also after a crash, it writes the same row again and
the previous process does not count as a second controller.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from corral import __version__
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.tasks import run_every
from corral.store.engine.transactions import Store
from corral.store.tables import controllers

log = get_log(__name__)

_FORGET_AFTER = timedelta(days=7)
_ID_FILE = "instance-id"


@contextlib.contextmanager
def hold_instance_id(folder: Path) -> Iterator[str]:
    """The id of the controller in this data folder, for as long as the process runs. A second process on the same
    folder gets an id of its own, and so does a copy of the folder on another host."""
    try:
        descriptor = os.open(folder / _ID_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        log.warning("the controller's id cannot be kept; a restart will look like another one", error=str(error))
        yield str(uuid.uuid4())
        return
    try:
        yield _locked_id(descriptor) or str(uuid.uuid4())
    finally:
        os.close(descriptor)


def _locked_id(descriptor: int) -> str | None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return _read_or_make_id(descriptor, socket.gethostname())


def _read_or_make_id(descriptor: int, host: str) -> str:
    known, _, where = os.pread(descriptor, 1024, 0).decode(errors="replace").strip().partition(" ")
    with contextlib.suppress(ValueError):
        if where == host:
            return str(uuid.UUID(known))
    made = str(uuid.uuid4())
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{made} {host}\n".encode(), 0)
    return made


class Presence:
    name = "presence"

    def __init__(self, store: Store, instance: str, clock: Clock, *, interval_s: float, blob_url: str = "") -> None:
        self._store = store
        self._instance = instance
        self._clock = clock
        self._interval_s = interval_s
        self._blob_url = blob_url
        self._announced = False

    async def run(self) -> None:
        await run_every("presence", self._interval_s, self.tell, clock=self._clock, max_wait_s=self._interval_s)

    async def tell(self) -> None:
        async with self._store.write() as tx:
            await controllers.seen(
                tx,
                self._instance,
                host=socket.gethostname(),
                version=__version__,
                blob_url=self._blob_url,
                started=not self._announced,
            )
            await controllers.prune(tx, await tx.now() - _FORGET_AFTER)
        self._announced = True

    async def leave(self) -> None:
        try:
            async with self._store.write() as tx:
                await controllers.delete(tx, self._instance)
        except CorralError as error:
            log.warning("not signed off; it will show", error=error.message)
