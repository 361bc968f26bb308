"""A client for image registries (OCI distribution): resolves references, lists platforms, opens layers.

Implements `contract.sources.Registry`. Layers are `Remote`s, which the store fetches, resumes and verifies.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import aiohttp
from yarl import URL

from corral.blobs.digests import digest_of
from corral.blobs.errors import WrongDigest
from corral.blobs.oci.auth import RegistryAuth
from corral.blobs.oci.credentials import HUB, Credentials, FixedLogins
from corral.blobs.oci.documents import (
    ACCEPT,
    Descriptor,
    Index,
    Manifest,
    check_platform,
    choose_image,
    read_config,
    read_document,
)
from corral.blobs.transfer.range_responses import Append, ServerBusy, ServerRefused, WholeBody, interpret_response
from corral.blobs.transfer.remote import TransferBroken, read_bounded, refuse_downgrade, translate_errors
from corral.contract.sources import ImageIndex, ImageReference, PlatformImage, parse_reference
from corral.kit.clock import Clock, SystemClock
from corral.kit.errors import CorralError, Failed, Unreachable
from corral.kit.retry import Backoff

MAX_DOCUMENT_BYTES = 4 << 20
MAX_SIZED_IMAGES = 16  # of one index; the sizes of further images stay unknown
DOCUMENT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RegistrySettings:
    insecure: frozenset[str] = frozenset()  # hosts that use plain http; this machine always does
    mirrors: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # host → hosts with the same images, queried first
    tries: int = 3
    first_wait_s: float = 1.0
    cap_wait_s: float = 10.0


@dataclass(frozen=True)
class Image:
    """The image of one platform that a reference points to."""

    reference: ImageReference
    digest: str  # of the document that the reference points to: the index, if there is one
    content_digest: str  # of this platform's manifest: equal digests mean equal files
    layers: tuple[Descriptor, ...]
    platforms: tuple[str, ...]  # offered

    @property
    def size_bytes(self) -> int:
        return sum(layer.size for layer in self.layers)


class RegistryClient:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        credentials: Credentials | None = None,
        settings: RegistrySettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._session = session
        self._clock = clock or SystemClock()
        self._settings = settings or RegistrySettings()
        self._auth = RegistryAuth(session, credentials or FixedLogins(), self._clock)

    async def look_up(self, reference: str) -> ImageIndex:
        """The digest that the reference points to, and its platforms. Raises NotFound, Denied, Unreachable, Failed, and
        BadArchive for what is not an image."""
        parsed = parse_reference(reference)
        match await self._document(parsed):
            case Index() as index:
                sizes = await self._sizes(parsed, index)
                images = tuple(
                    PlatformImage(platform, manifest.digest, sizes.get(manifest.digest, 0))
                    for platform, manifest in index.images
                )
                return ImageIndex(index.digest, images)
            case Manifest() as manifest:
                config = read_config(await self._blob(parsed, manifest.config), reference)
                image = PlatformImage(config.platform, manifest.digest, manifest.size_bytes)
                return ImageIndex(manifest.digest, (image,))

    async def resolve(self, reference: str, platform: str) -> Image:
        """The image for os/arch. Raises NoBuild with the offered platforms, and what `look_up` raises."""
        parsed = parse_reference(reference)
        document = await self._document(parsed)
        if isinstance(document, Manifest):
            config = read_config(await self._blob(parsed, document.config), reference)
            check_platform(config, platform, reference)
            return Image(parsed, document.digest, document.digest, document.layers, (config.platform,))
        chosen = choose_image(document, platform, reference)
        manifest = await self._document(_pinned(parsed, chosen.digest))
        if not isinstance(manifest, Manifest):
            raise Failed(f"{reference} points to an index of indexes")
        return Image(parsed, document.digest, manifest.digest, manifest.layers, document.platforms)

    async def artifact(self, reference: str, platform: str) -> Image:
        """The image or other artifact that the reference points to: its layers may have any media type. Of an index,
        the only manifest, or the one for os/arch. Raises what `resolve` raises."""
        parsed = parse_reference(reference)
        document = await self._document(parsed, any_kind=True)
        if isinstance(document, Manifest):
            return Image(parsed, document.digest, document.digest, document.layers, ())
        images = document.images
        chosen = images[0][1] if len(images) == 1 else choose_image(document, platform, reference)
        manifest = await self._document(_pinned(parsed, chosen.digest), any_kind=True)
        if not isinstance(manifest, Manifest):
            raise Failed(f"{reference} points to an index of indexes")
        return Image(parsed, document.digest, manifest.digest, manifest.layers, document.platforms)

    def layer(self, image: Image, layer: Descriptor) -> RegistryBlob:
        return RegistryBlob(self, image.reference, layer.digest)

    async def _sizes(self, parsed: ImageReference, index: Index) -> dict[str, int]:
        """Bytes to fetch per image. Optional: a size that cannot be read now is left out."""

        async def size(digest: str) -> int:
            try:
                manifest = await self._document(_pinned(parsed, digest))
            except CorralError:
                return 0
            return manifest.size_bytes if isinstance(manifest, Manifest) else 0

        async with asyncio.TaskGroup() as tasks:
            pending = {
                manifest.digest: tasks.create_task(size(manifest.digest))
                for _, manifest in index.images[:MAX_SIZED_IMAGES]
            }
        return {digest: task.result() for digest, task in pending.items()}

    async def _document(self, reference: ImageReference, *, any_kind: bool = False) -> Index | Manifest:
        name = reference.digest or reference.tag
        body = await self._read(reference, f"manifests/{name}", {"Accept": ACCEPT}, reference.digest)
        return read_document(body, digest_of(body), str(reference), any_kind=any_kind)

    async def _blob(self, reference: ImageReference, descriptor: Descriptor) -> bytes:
        return await self._read(reference, f"blobs/{descriptor.digest}", {}, descriptor.digest)

    async def _read(self, reference: ImageReference, path: str, headers: Mapping[str, str], digest: str) -> bytes:
        """Read a small document and verify it, with a few retries."""
        backoff = Backoff(self._settings.first_wait_s, self._settings.cap_wait_s)
        wrong = False
        while True:
            after_s = 0.0
            try:
                async with asyncio.timeout(DOCUMENT_TIMEOUT_S):
                    return await self._read_once(reference, path, headers, digest)
            except WrongDigest:
                if wrong:
                    raise
                wrong = True
            except TransferBroken as error:
                if backoff.failures + 1 >= self._settings.tries:
                    raise Unreachable(str(error)) from error
                after_s = error.after_s
            except TimeoutError as error:
                if backoff.failures + 1 >= self._settings.tries:
                    raise Unreachable(f"{reference}: no answer within {DOCUMENT_TIMEOUT_S} s") from error
            await self._clock.sleep(max(backoff.next_s(), after_s))

    async def _read_once(self, reference: ImageReference, path: str, headers: Mapping[str, str], digest: str) -> bytes:
        async with self.open(reference, path, headers) as response:
            lower = {name.lower(): value for name, value in response.headers.items()}
            match interpret_response(response.status, lower, have_bytes=0, what=str(reference)):
                case WholeBody() | Append():
                    body = await read_bounded(response, MAX_DOCUMENT_BYTES, str(reference))
                case ServerBusy(why, after_s):
                    raise TransferBroken(why, after_s or 0.0)
                case ServerRefused(error):
                    raise error
                case _:
                    raise Failed(f"{reference} answered {response.status}")
            promised = digest or lower.get("docker-content-digest", "")
        if promised.startswith("sha256:") and digest_of(body) != promised:
            raise WrongDigest(f"{reference} is {digest_of(body)}, not {promised}")
        return body

    @contextlib.asynccontextmanager
    async def open(
        self, reference: ImageReference, path: str, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """GET a path of the repository, from the first host that has it."""
        async with await self._first_response(reference, path, headers) as response:
            yield response

    async def _first_response(
        self, reference: ImageReference, path: str, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        for host in self._settings.mirrors.get(reference.host, ()):
            with contextlib.suppress(
                TransferBroken, CorralError
            ):  # an error of a mirror is ignored: the host itself decides
                response = await self._request_host(host, reference, path, headers)
                if response.status < 400 or response.status == 416:
                    return response
                response.close()
        return await self._request_host(reference.host, reference, path, headers)

    async def _request_host(
        self, host: str, reference: ImageReference, path: str, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        what, plain = str(reference), self._is_plain(host)
        machine = f"registry-1.{HUB}" if host == HUB else host
        url = URL(f"{'http' if plain else 'https'}://{machine}/v2/{reference.repository}/{path}", encoded=True)
        known_header = self._auth.header(host, reference.repository)
        async with translate_errors(what):
            response = await self._session.get(url, headers={**headers, **known_header})
        if response.status == 401:
            async with response:
                header = await self._auth.answer(host, reference.repository, response, plain=plain)
            if header:
                async with translate_errors(what):
                    response = await self._session.get(url, headers={**headers, **header})
        try:
            refuse_downgrade(response, url, what)
        except CorralError:
            response.close()
            raise
        return response

    def _is_plain(self, host: str) -> bool:
        name = host.rpartition(":")[0] or host
        return host in self._settings.insecure or name == "localhost" or name.startswith("127.") or name == "[::1]"


@dataclass(frozen=True)
class RegistryBlob:
    """A layer as a `Remote`."""

    registry: RegistryClient
    reference: ImageReference
    digest: str

    @property
    def name(self) -> str:
        return f"{self.reference.repository}@{self.digest[:19]}"

    @property
    def key(self) -> str:
        return f"{self.reference.host}/{self.reference.repository}@{self.digest}"

    def open(self, headers: Mapping[str, str]) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self.registry.open(self.reference, f"blobs/{self.digest}", headers)


def _pinned(reference: ImageReference, digest: str) -> ImageReference:
    return ImageReference(reference.host, reference.repository, digest=digest)
