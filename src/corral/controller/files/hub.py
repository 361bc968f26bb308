"""The hub's own interface: which files a repository has at a revision, and what it means when it says no.

`GET /api/models/{owner}/{name}/revision/{revision}?blobs=true` tells the commit behind a name, and of each file its
size and, of large ones, its SHA-256. The token is shown to the hub and to nobody else.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from urllib.parse import quote

import aiohttp
import msgspec

from corral.blobs.transfer.range_responses import ServerBusy, ServerRefused, interpret_response
from corral.blobs.transfer.remote import TransferBroken, UrlRemote, read_bounded
from corral.contract.sources import HUB, is_safe_path
from corral.kit.errors import CorralError, Denied, Failed, Invalid, NotFound, Unreachable

MAX_BYTES = 64 << 20
MAX_FILES = 20_000
_TRIES = 3


@dataclass(frozen=True)
class HubSettings:
    url: str = HUB
    token: str = field(default="", repr=False)
    ask_s: float = 60.0
    wait_s: float = 0.5  # before the second try; the third waits twice as long


class HubFile(msgspec.Struct, frozen=True):
    path: str
    size_bytes: int
    sha256: str = ""  # bare hex; of small files the hub tells none


class Listing(msgspec.Struct, frozen=True):
    """A repository at one commit."""

    commit: str
    files: tuple[HubFile, ...] = ()


class _Lfs(msgspec.Struct):
    sha256: str = ""
    size: int = 0


class _Sibling(msgspec.Struct):
    rfilename: str
    size: int | None = 0
    lfs: _Lfs | None = None


class _RepositoryInfo(msgspec.Struct):
    sha: str = ""
    siblings: list[_Sibling] = []


class Hub:
    def __init__(self, session: aiohttp.ClientSession, settings: HubSettings) -> None:
        self._session = session
        self._settings = settings

    @property
    def headers(self) -> dict[str, str]:
        token = self._settings.token
        return {"Authorization": f"Bearer {token}"} if token else {}

    async def list_(self, repository: str, revision: str) -> Listing:
        """Raises NotFound, Denied, Unreachable, Failed, Invalid."""
        base = self._settings.url.rstrip("/")
        url = f"{base}/api/models/{quote(repository)}/revision/{quote(revision, safe='')}?blobs=true"
        page = UrlRemote(self._session, url, self.headers)
        for tries in range(_TRIES):
            wait_s = self._settings.wait_s * 2**tries
            try:
                async with asyncio.timeout(self._settings.ask_s), page.open({}) as response:
                    headers = {name.lower(): value for name, value in response.headers.items()}
                    judged = interpret_response(response.status, headers, have_bytes=0, what=page.name)
                    if isinstance(judged, ServerRefused):
                        raise self.refused(judged.error)
                    if not isinstance(judged, ServerBusy):
                        return read_listing(await read_bounded(response, MAX_BYTES, page.name), repository)
                trouble, wait_s = judged.why, judged.after_s or wait_s
            except TransferBroken as error:
                trouble = str(error)
            except TimeoutError:
                trouble = f"{page.name}: nothing came for too long"
            if tries < _TRIES - 1:
                await asyncio.sleep(wait_s)
        raise Unreachable(trouble)

    def refused(self, error: CorralError) -> CorralError:
        """The same with what a person can do about it."""
        if not isinstance(error, Denied):
            return error
        if self._settings.token:
            return Denied(f"{error.message}: perhaps its terms must be accepted first, with the account of the token")
        return Denied(
            f"{error.message}: it is private, gated, or not there at all; "
            "give the controller a token with --huggingface-token (CORRAL_HUGGINGFACE_TOKEN for `corral up`)"
        )


def read_listing(document: bytes, repository: str) -> Listing:
    """Pure. Empty files, and those whose names begin with a dot, say nothing to an engine and are left out."""
    try:
        info = msgspec.json.decode(document, type=_RepositoryInfo)
    except msgspec.MsgspecError as error:
        raise Failed(f"the hub's list of {repository} cannot be read: {error}") from error
    if not info.sha:
        raise Failed(f"the hub does not say which commit of {repository} it means")
    if len(info.siblings) > MAX_FILES:
        raise Invalid(f"{repository} has {len(info.siblings)} files; at most {MAX_FILES} make a model")
    files = []
    for each in info.siblings:
        lfs = each.lfs or _Lfs()
        size = lfs.size or each.size or 0
        hidden = any(part.startswith(".") for part in each.rfilename.split("/"))
        if hidden or not size:
            continue
        if not is_safe_path(each.rfilename):
            raise Invalid(f"{repository} has a file {each.rfilename[:200]!r} that leads out of its folder")
        files.append(HubFile(each.rfilename, size, lfs.sha256))
    if not files:
        raise NotFound(f"there are no files in {repository}")
    return Listing(info.sha, tuple(sorted(files, key=lambda file: file.path)))
