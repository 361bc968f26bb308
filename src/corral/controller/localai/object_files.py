"""Files of LocalAI workers through an object storage (docs/reference/wire/files.md#object-store): this controller
uploads an object and tells the worker to fetch it (`files.ensure`); results come back as objects (`files.stage`).

Callers fall back to the worker's file server when the storage, or the worker's access to it, fails. Objects of requests
are deleted after the request; `cleanup.py` deletes what controllers that died have left, and files of former models.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from corral.blobs.digests import PREFIX
from corral.blobs.errors import from_os
from corral.blobs.object_store import SHA256, ObjectStore
from corral.controller.localai.calls import PeerCalls
from corral.kit.errors import CorralError, Failed
from corral.kit.log import get_log
from corral.kit.single_flight import SingleFlight
from corral.kit.tasks import KeyedTasks

log = get_log(__name__)

FLEET = "corral-fleet"  # user metadata
OnSent = Callable[[int], None]


class ObjectFiles:
    """`async with` it: leaving ends the deletions that are under way; the sweep does the rest."""

    def __init__(self, store: ObjectStore, calls: PeerCalls, *, fleet: str) -> None:
        """`fleet` marks the objects of this fleet: another one may use the same bucket."""
        self.store = store
        self.fleet = fleet
        self._calls = calls
        self._uploads: SingleFlight[str, int, None] = SingleFlight()
        self._deletions: KeyedTasks[str] = KeyedTasks()

    async def __aenter__(self) -> ObjectFiles:
        await self._deletions.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._deletions.__aexit__(None, None, None)

    async def ensure(self, node_id: str, key: str, file: Path, digest: str, on_sent: OnSent) -> str:
        """Put the file on the node, and return its path there. Raises what the storage or the worker raises, and
        Unreachable if no worker listens for such orders."""

        async def upload(on_progress: Callable[[int], None]) -> None:
            await self._upload(key, file, digest.removeprefix(PREFIX), on_progress)

        await self._uploads.run(key, upload, on_sent)
        return await self._calls.ensure_file(node_id, key)

    async def fetch(self, node_id: str, there: str, key: str, file: Path, *, max_bytes: int) -> None:
        """Bring the node's file here. `key`: of the object in between, which is deleted. Raises Failed for a file that
        is larger than `max_bytes`."""
        try:
            await self._calls.stage_file(node_id, there, key)
            found = await self.store.get(key)
            if found.size > max_bytes:
                raise Failed(f"{posixpath.basename(there)} is larger than {max_bytes} bytes")
            await self.store.get_file(key, file)
        finally:
            self.delete_soon([key])

    async def list_(self, node_id: str, key: str) -> tuple[str, ...]:
        """Names of the files in a folder of the node's cache."""
        return await self._calls.list_files(node_id, key)

    def delete_soon(self, keys: Collection[str]) -> None:
        """In the background: no caller waits for it."""
        for key in keys:
            self._deletions.start(key, partial(self._delete, key), name=f"delete {key}")

    async def _upload(self, key: str, file: Path, sha256: str, on_sent: OnSent) -> None:
        """Unless the same bytes are there: upstream looks at the key alone, and never sends a changed file again."""
        try:
            size = (await asyncio.to_thread(file.stat)).st_size
        except OSError as error:
            raise from_os(error, f"reading {key}") from error
        found = await self.store.find(key)
        if found is None or (found.size, found.metadata.get(SHA256, "")) != (size, sha256):
            metadata = {SHA256: sha256, FLEET: self.fleet}
            await self.store.put_file(file, key, metadata=metadata, on_bytes=lambda have, _total: on_sent(have))
            log.info("file sent to the object storage", key=key, size_bytes=size)
        on_sent(size)

    async def _delete(self, key: str) -> None:
        try:
            await self.store.delete(key)
        except CorralError as error:
            log.warning("an object was left in the object storage", key=key, reason=error.message)
