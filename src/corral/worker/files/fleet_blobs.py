"""Fetches one blob by its digest from the fleet, into any blob store of this worker.

The callers (model files, artifacts of backends) know the digest, the size and the sources that an order names; this
module knows how to reach the sources, which token opens them and what to do when one fails. Resuming and verifying
belong to `blobs/`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

import aiohttp

from corral.blobs.progress import OnProgress, Progress, ignore_progress
from corral.blobs.store import Blob, BlobStore
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.blobs.transfer.remote import UrlRemote
from corral.kit.errors import CorralError, Denied, Failed, NotFound, Unreachable
from corral.kit.log import get_log

log = get_log(__name__)

_HOST = "{host}"


class FleetBlobs:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        controller: str = "",
        fresh_token: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        """`controller` is the URL by which this worker reaches the cluster: its host replaces `{host}` in a source.
        `fresh_token` requests a new token when the one of the order has expired."""
        self._session = session
        self._host = _host_of(controller)
        self._fresh_token = fresh_token

    async def obtain(
        self,
        store: BlobStore,
        wanted: ExpectedBlob,
        sources: Sequence[str],
        token: str,
        on_progress: OnProgress = ignore_progress,
        *,
        name: str,
    ) -> Blob:
        """The verified blob, from the store or from the first source that sends it; bytes that one source sent before
        it failed are kept, and the next source continues there. `name` is for messages and progress.

        Hold the digest in the store before the call. May be cancelled and called again: the transfer is resumed.
        Raises NotFound (no source has it), Unreachable, Denied, Failed, NoSpace, WrongDigest."""
        if (blob := store.find(wanted.digest)) is not None:
            return blob
        if not sources:
            raise NotFound(f"{name} is not on this machine, and the order names no source for it")

        def on_named_progress(progress: Progress) -> None:
            on_progress(replace(progress, file=name))

        failure: CorralError | None = None
        for source in sources:
            url = f"{self._address(source)}/blobs/{wanted.digest}"
            try:
                return await self._obtain_from(store, wanted, url, token, on_named_progress)
            except (Unreachable, NotFound, Denied, Failed) as error:
                log.warning("a source does not send the blob", name=name, source=source, reason=error.message)
                failure = failure or error
        assert failure is not None
        raise type(failure)(f"{name}: {failure.message}") from failure

    async def _obtain_from(
        self, store: BlobStore, wanted: ExpectedBlob, url: str, token: str, on_progress: OnProgress
    ) -> Blob:
        try:
            return await store.obtain(UrlRemote(self._session, url, _authorization(token)), wanted, on_progress)
        except Denied:
            # The order's token may have expired during a long transfer: the received bytes are kept, and a new token
            # opens the rest.
            if self._fresh_token is None:
                raise
            headers = _authorization(await self._fresh_token())
            return await store.obtain(UrlRemote(self._session, url, headers), wanted, on_progress)

    def _address(self, source: str) -> str:
        return source.replace(_HOST, self._host).rstrip("/")


def _authorization(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def _host_of(url: str) -> str:
    try:
        host = urlsplit(url).hostname or "127.0.0.1"
    except ValueError:
        host = "127.0.0.1"
    return f"[{host}]" if ":" in host else host
