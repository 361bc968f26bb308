"""The artifacts of a backend's source (layers, archive, wheels) through the fleet: the controller fetches each once.

The controller sends the bytes that it has while it still downloads the rest. When it cannot provide a blob, the caller
is told so and may try the origin. `fleet_blobs.py` moves the bytes; `blobs/sources/` knows the kinds of sources.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from corral.blobs.digests import hex_of
from corral.blobs.errors import WrongDigest
from corral.blobs.progress import OnProgress, Progress
from corral.blobs.sources.context import ProvidedBlob
from corral.blobs.store import Blob, BlobStore
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.blobs.transfer.remote import display_url
from corral.contract.messages.artifacts import ArtifactBlob, ArtifactOffer, ArtifactRequest, request_for
from corral.contract.messages.backends import Phase
from corral.contract.sources import Source
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Denied, Failed, NotFound, Unreachable
from corral.kit.humanize import format_bytes
from corral.kit.log import get_log
from corral.kit.tasks import background
from corral.worker.files.fleet_blobs import FleetBlobs

log = get_log(__name__)

FIRST_PAUSE_S = 0.1

Ask = Callable[[ArtifactRequest], Awaitable[ArtifactOffer]]


@dataclass(frozen=True)
class OfferPace:
    ask_again_s: float = 1.0  # while the controller does not know the blobs, or has not sent one
    renew_s: float = 10.0  # the controller forgets a worker that is silent for a minute
    patience_s: float = 90.0  # without progress of the controller, before the origin is tried
    release_s: float = 3.0


class FleetSources:
    def __init__(
        self, ask: Ask, fleet: FleetBlobs, clock: Clock, *, nearby: Path | None = None, pace: OfferPace | None = None
    ) -> None:
        """`ask` asks the controller; it raises NotFound if the controller does not know the source or has no such
        call, Unreachable if it does not answer. `nearby`: finished artifacts of a controller on this machine."""
        self._ask = ask
        self._fleet = fleet
        self._clock = clock
        self._nearby = nearby
        self._pace = pace or OfferPace()

    @contextlib.asynccontextmanager
    async def open(self, source: Source, platform: str, on_progress: OnProgress) -> AsyncIterator[FleetSource | None]:
        """None: the controller does not know this source, and the worker fetches it from its origin."""
        request = request_for(source, platform)
        opened = FleetSource(request, self._ask, self._fleet, self._clock, self._nearby, self._pace, on_progress)
        try:
            if not await opened.find_out():
                yield None
                return
            async with background(opened.renew()):
                yield opened
        finally:
            await opened.release()


class FleetSource:
    """One source while it is being installed."""

    def __init__(
        self,
        request: ArtifactRequest,
        ask: Ask,
        fleet: FleetBlobs,
        clock: Clock,
        nearby: Path | None,
        pace: OfferPace,
        on_progress: OnProgress,
    ) -> None:
        self._request = request
        self._ask = ask
        self._fleet = fleet
        self._clock = clock
        self._nearby = nearby
        self._pace = pace
        self._on_progress = on_progress
        self._offer = ArtifactOffer()
        self._is_known = False
        self.refusal = ""

    @property
    def digest(self) -> str:
        return self._offer.digest

    @property
    def content_digest(self) -> str:
        return self._offer.content_digest

    @property
    def blobs(self) -> tuple[ProvidedBlob, ...]:
        return tuple(ProvidedBlob(blob.digest, blob.size_bytes) for blob in self._offer.blobs)

    async def find_out(self) -> bool:
        """Wait until the controller knows the blobs, or says why it cannot. False: it does not know the source."""
        patience = _Patience(self._clock, self._pace.patience_s)
        while True:
            try:
                offer = await self._ask(self._request)
            except (NotFound, Denied) as error:
                log.debug("the controller does not provide a source", uri=self._request.uri, reason=error.message)
                return False
            except CorralError as error:
                offer, self.refusal = ArtifactOffer(), error.message
            else:
                self._is_known = True
                self.refusal = offer.error
            if offer.blobs or offer.error or not patience.has_left(offer.have_bytes):
                self._offer = offer
                self.refusal = self.refusal or ("" if offer.blobs else "it has not fetched the source in time")
                return True
            self._report_listing(offer)
            await self._clock.sleep(self._pace.ask_again_s)

    async def obtain(
        self, store: BlobStore, wanted: ExpectedBlob, on_progress: OnProgress, *, name: str
    ) -> Blob | None:
        """The blob from the fleet; None if the fleet cannot provide it, with the reason in `refusal`. Raises
        NoSpace."""
        patience, received = _Patience(self._clock, self._pace.patience_s), 0

        def on_bytes(progress: Progress) -> None:
            nonlocal received
            received = max(received, progress.current_bytes)
            on_progress(progress)

        pause_s = min(FIRST_PAUSE_S, self._pace.ask_again_s)
        while (blob := self._find(wanted.digest)) is not None:
            if (found := await self._find_nearby(store, wanted)) is not None:
                return found
            has_begun = bool(blob.have_bytes) or not blob.size_bytes
            try:
                if has_begun:
                    return await self._fleet.obtain(
                        store, wanted, self._offer.sources, self._offer.token, on_bytes, name=name
                    )
            except WrongDigest as error:
                self.refusal = error.message
                return None
            except (NotFound, Unreachable, Denied, Failed) as error:
                log.info("the controller has not sent a blob", digest=wanted.digest, reason=error.message)
                self.refusal = error.message
            if not patience.has_left(received + blob.have_bytes):
                self.refusal = self.refusal or "it has not begun to fetch in time"
                return None
            self._on_progress(Progress(Phase.DOWNLOADING, f"waiting for the controller to fetch {name}"))
            await self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, self._pace.ask_again_s)
            await self._ask_again()
        return None

    async def renew(self) -> None:
        """Tell the controller now and then that this worker still needs the source."""
        while True:
            await self._clock.sleep(self._pace.renew_s)
            await self._ask_again()

    async def release(self) -> None:
        """Tell the controller that this worker needs the source no more. A lost message costs a minute."""
        if not self._is_known:
            return
        with contextlib.suppress(CorralError, TimeoutError):
            async with asyncio.timeout(self._pace.release_s):
                await self._ask(replace(self._request, wanted=False))

    def _find(self, digest: str) -> ArtifactBlob | None:
        """The blob in the offer; None, with the reason, if the controller cannot provide it."""
        blob = next((each for each in self._offer.blobs if each.digest == digest), None)
        if blob is None:
            self.refusal = self._offer.error or self.refusal or "it does not know this blob"
            return None
        if blob.error:
            self.refusal = blob.error
            return None
        return blob

    async def _find_nearby(self, store: BlobStore, wanted: ExpectedBlob) -> Blob | None:
        if self._nearby is None or store.find(wanted.digest) is not None or not wanted.size:
            return None
        return await store.adopt(wanted.digest, self._nearby / hex_of(wanted.digest), wanted.size)

    async def _ask_again(self) -> None:
        """Without an answer the last offer stays."""
        try:
            offer = await self._ask(self._request)
        except CorralError as error:
            log.debug("the controller does not answer", uri=self._request.uri, reason=error.message)
            return
        if offer.blobs or offer.error:
            self._offer = offer

    def _report_listing(self, offer: ArtifactOffer) -> None:
        name = display_url(self._request.uri)
        if not offer.have_bytes:
            self._on_progress(Progress(Phase.RESOLVING, f"waiting for the controller to look up {name}"))
            return
        total = f" of {format_bytes(offer.size_bytes)}" if offer.size_bytes else ""
        text = f"the controller fetches {name}: {format_bytes(offer.have_bytes)}{total}"
        self._on_progress(Progress(Phase.DOWNLOADING, text))


class _Patience:
    """Ends when a number has not risen for a while."""

    def __init__(self, clock: Clock, limit_s: float) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._most = 0
        self._since_s = clock.monotonic()

    def has_left(self, number: int) -> bool:
        now = self._clock.monotonic()
        if number > self._most:
            self._most, self._since_s = number, now
        return now - self._since_s < self._limit_s
