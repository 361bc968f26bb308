"""What the hubs of models have in common: settings, listings of repositories, and requests that are repeated."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import aiohttp
import msgspec

from corral.blobs.transfer.range_responses import ServerBusy, ServerRefused, interpret_response
from corral.blobs.transfer.remote import TransferBroken, UrlRemote, read_bounded
from corral.contract.sources import HUB, MODELSCOPE, is_safe_path
from corral.kit.errors import CorralError, Denied, Invalid, NotFound, Unreachable

MAX_BYTES = 64 << 20
MAX_FILES = 20_000
_TRIES = 3


@dataclass(frozen=True)
class HubSettings:
    url: str = HUB
    token: str = field(default="", repr=False)
    ask_s: float = 60.0
    wait_s: float = 0.5  # before the second try; the third waits twice as long
    modelscope_url: str = MODELSCOPE
    modelscope_token: str = field(default="", repr=False)
    prefers_modelscope: bool = False  # hf:// and huggingface:// lead to ModelScope


class HubFile(msgspec.Struct, frozen=True):
    path: str
    size_bytes: int
    sha256: str = ""  # bare hex; empty: the hub does not say


class Listing(msgspec.Struct, frozen=True):
    """A repository at one commit. ModelScope names no commit: there it is the branch or the tag, and the hashes of the
    files tell whether they have changed."""

    commit: str
    files: tuple[HubFile, ...] = ()


class Hub(ABC):
    scheme: str  # of URIs in definitions
    token_hint: str  # how the controller gets a token

    def __init__(self, session: aiohttp.ClientSession, settings: HubSettings) -> None:
        self._session = session
        self._settings = settings

    @property
    @abstractmethod
    def url(self) -> str: ...

    @property
    @abstractmethod
    def token(self) -> str: ...

    @property
    @abstractmethod
    def headers(self) -> Mapping[str, str]:
        """Of requests to the hub, and to no other server."""

    @abstractmethod
    async def list_(self, repository: str, revision: str) -> Listing:
        """Raises NotFound, Denied, Unreachable, Failed, Invalid."""

    @abstractmethod
    def file_url(self, repository: str, revision: str, path: str) -> str: ...

    @abstractmethod
    def page_url(self, repository: str) -> str:
        """For browsers."""

    def remote(self, url: str) -> UrlRemote:
        return UrlRemote(self._session, url, self.headers, self._label(url))

    def _label(self, _url: str) -> str:
        """Of a file in messages; empty: its URL."""
        return ""

    def refused(self, error: CorralError) -> CorralError:
        """The same with what a person can do about it."""
        if not isinstance(error, Denied):
            return error
        if self.token:
            return Denied(f"{error.message}: perhaps its terms must be accepted first, with the account of the token")
        return Denied(
            f"{error.message}: it is private, gated, or not there at all; give the controller a token with "
            + self.token_hint
        )

    async def _read_page(self, url: str) -> bytes:
        """A document of the hub's interface; asked again while the hub is busy."""
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
                        return await read_bounded(response, MAX_BYTES, page.name)
                trouble, wait_s = judged.why, judged.after_s or wait_s
            except TransferBroken as error:
                trouble = str(error)
            except TimeoutError:
                trouble = f"{page.name}: nothing came for too long"
            if tries < _TRIES - 1:
                await asyncio.sleep(wait_s)
        raise Unreachable(trouble)


def checked_files(repository: str, files: Iterable[HubFile]) -> tuple[HubFile, ...]:
    """Pure. Empty files, and those whose names begin with a dot, say nothing to an engine and are left out."""
    chosen = []
    for file in files:
        if not file.size_bytes or any(part.startswith(".") for part in file.path.split("/")):
            continue
        if not is_safe_path(file.path):
            raise Invalid(f"{repository} has a file {file.path[:200]!r} that leads out of its folder")
        chosen.append(file)
    if not chosen:
        raise NotFound(f"there are no files in {repository}")
    return tuple(sorted(chosen, key=lambda file: file.path))
