"""The interface of the Hugging Face hub: which files a repository has at a revision.

`GET /api/models/{owner}/{name}/revision/{revision}?blobs=true` tells the commit behind a name, and of each file its
size and, of large ones, its SHA-256. The token is shown to the hub and to nobody else.
"""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from corral.controller.files.hubs.hub import MAX_FILES, Hub, HubFile, Listing, checked_files
from corral.kit.errors import Failed, Invalid


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


class HuggingFace(Hub):
    scheme = "huggingface"
    token_hint = "--huggingface-token (CORRAL_HUGGINGFACE_TOKEN for `corral up`)"

    @property
    def url(self) -> str:
        return self._settings.url.rstrip("/")

    @property
    def token(self) -> str:
        return self._settings.token

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    async def list_(self, repository: str, revision: str) -> Listing:
        url = f"{self.url}/api/models/{quote(repository)}/revision/{quote(revision or 'main', safe='')}?blobs=true"
        return read_listing(await self._read_page(url), repository)

    def file_url(self, repository: str, revision: str, path: str) -> str:
        return f"{self.url}/{repository}/resolve/{revision}/{quote(path)}"

    def page_url(self, repository: str) -> str:
        return f"{self.url}/{repository}"


def read_listing(document: bytes, repository: str) -> Listing:
    """Pure."""
    try:
        info = msgspec.json.decode(document, type=_RepositoryInfo)
    except msgspec.MsgspecError as error:
        raise Failed(f"the hub's list of {repository} cannot be read: {error}") from error
    if not info.sha:
        raise Failed(f"the hub does not say which commit of {repository} it means")
    if len(info.siblings) > MAX_FILES:
        raise Invalid(f"{repository} has {len(info.siblings)} files; at most {MAX_FILES} make a model")
    return Listing(info.sha, checked_files(repository, map(_file, info.siblings)))


def _file(sibling: _Sibling) -> HubFile:
    lfs = sibling.lfs or _Lfs()
    return HubFile(sibling.rfilename, lfs.size or sibling.size or 0, lfs.sha256)
