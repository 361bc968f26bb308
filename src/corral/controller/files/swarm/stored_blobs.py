"""Model files in an object storage, from which workers read them as well as from this controller.

Workers need no keys of the storage: they get a signed URL for one blob, which expires. A file is uploaded when a worker
looks for it; until then, and whenever the storage fails, the controller and other workers send it. The blob's own chunk
list stays with the controller: a chunk from the storage is verified like any other.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from corral.blobs.digests import PREFIX
from corral.blobs.object_store import SHA256, ObjectStore
from corral.blobs.store import BlobStore
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.tasks import run_every
from corral.store.engine.transactions import Store
from corral.store.tables import model_files

log = get_log(__name__)

URL_LIFE_S = 3600.0
RENEW_BEFORE_S = 1800.0  # a worker that begins now reads for a while
RETRY_S = 60.0  # after a failure
SWEEP_EVERY_S = 3600.0
KEEP_UNNEEDED = timedelta(hours=1)  # the model of a new file is stored by then
UPLOADS_AT_ONCE = 2
MAX_PENDING = 1000


def fleet_mark(public_key: str) -> str:
    """Tells the objects of this fleet from those of others in the same bucket."""
    return hashlib.sha256(public_key.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class SignedUrl:
    url: str
    expires_s: float  # monotonic


class StoredBlobs:
    name = "model files in the object storage"

    def __init__(self, objects: ObjectStore, blobs: BlobStore, store: Store, clock: Clock, *, fleet: str) -> None:
        """`fleet` is a part of the keys: another fleet may use the same bucket."""
        self._objects = objects
        self._blobs = blobs
        self._store = store
        self._clock = clock
        self._folder = f"corral/{fleet}/blobs"
        self._urls: dict[str, SignedUrl] = {}
        self._retry_s: dict[str, float] = {}
        self._pending: set[str] = set()
        self._queue: asyncio.Queue[str] = asyncio.Queue()

    def find_url(self, digest: str) -> str:
        """Where a worker can read the blob now; empty if the storage does not have it (yet)."""
        now_s = self._clock.monotonic()
        known = self._urls.get(digest)
        if known is None or known.expires_s - now_s < RENEW_BEFORE_S:
            self._request(digest, now_s)
        return known.url if known is not None and known.expires_s > now_s else ""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(UPLOADS_AT_ONCE):
                tasks.create_task(self._work())
            tasks.create_task(run_every(self.name, SWEEP_EVERY_S, self.sweep, clock=self._clock))

    async def sweep(self) -> None:
        """Delete files that no model needs. Each controller may: they agree on what models need."""
        async with self._store.read() as tx:
            needed = {self._key(digest) for digest in await model_files.list_digests(tx)}
        old = datetime.now(UTC) - KEEP_UNNEEDED
        async for each in self._objects.list_(self._folder):
            if each.key not in needed and each.modified_at < old:
                await self._objects.delete(each.key)
                log.info("a file that no model needs was deleted from the object storage", key=each.key)

    def _request(self, digest: str, now_s: float) -> None:
        is_due = self._retry_s.get(digest, now_s) <= now_s
        if is_due and digest not in self._pending and len(self._pending) < MAX_PENDING:
            self._pending.add(digest)
            self._queue.put_nowait(digest)

    async def _work(self) -> None:
        while True:
            digest = await self._queue.get()
            try:
                await self._provide(digest)
            except CorralError as error:
                self._pause(digest)
                log.warning("a model file is not in the object storage", digest=digest, reason=error.message)
            except Exception:
                self._pause(digest)
                log.exception("a model file is not in the object storage", digest=digest)
            finally:
                self._pending.discard(digest)

    async def _provide(self, digest: str) -> None:
        """Upload the file unless it is there, and sign a URL. Files of backends are not stored: they are small, and
        only this controller knows how long they are needed."""
        blob = self._blobs.find(digest)
        async with self._store.read() as tx:
            is_of_a_model = bool(await model_files.list_by_digest(tx, digest))
        if blob is None or not is_of_a_model:
            self._pause(digest)
            return
        key, sha256 = self._key(digest), digest.removeprefix(PREFIX)
        found = await self._objects.find(key)
        if found is None or (found.size, found.metadata.get(SHA256, "")) != (blob.size, sha256):
            await self._objects.put_file(blob.path, key, metadata={SHA256: sha256})
            log.info("model file sent to the object storage", digest=digest, size_bytes=blob.size)
        url = await self._objects.sign(key, life_s=URL_LIFE_S)
        now_s = self._clock.monotonic()
        self._urls = {each: signed for each, signed in self._urls.items() if signed.expires_s > now_s}
        self._urls[digest] = SignedUrl(url, now_s + URL_LIFE_S - 1.0)
        self._retry_s.pop(digest, None)

    def _pause(self, digest: str) -> None:
        now_s = self._clock.monotonic()
        self._retry_s = {each: at_s for each, at_s in self._retry_s.items() if at_s > now_s}
        self._retry_s[digest] = now_s + RETRY_S

    def _key(self, digest: str) -> str:
        return f"{self._folder}/{digest.replace(':', '-')}"
