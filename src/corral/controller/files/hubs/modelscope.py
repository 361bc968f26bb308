"""The interface of ModelScope: which files a repository has on a branch or at a tag.

`GET /api/v1/models/{owner}/{name}/repo/files?Revision=…&Recursive=True` tells the path, the size and the SHA-256 of
each file; `GET /api/v1/models/{owner}/{name}/repo?Revision=…&FilePath=…` sends one. The answer names no commit of the
repository. A token goes with both as a bearer token and as the cookie that older parts of ModelScope want.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import msgspec

from corral.contract.sources import HubFilePath, modelscope_url
from corral.controller.files.hubs.hub import Hub, HubFile, Listing, checked_files
from corral.kit.errors import Failed, Invalid, NotFound

MASTER = "master"
MAX_LISTED = 3000  # the server sends no more, and does not say when it leaves files out
_OK = 200
_FILE = re.compile(r"/api/v1/models/([^/]+/[^/]+)/repo\?")


class _Entry(msgspec.Struct, rename="pascal"):
    path: str = ""
    type: str = "blob"  # or tree
    size: int = 0
    sha256: str = ""


class _Data(msgspec.Struct, rename="pascal"):
    files: list[_Entry] | None = None


class _Answer(msgspec.Struct, rename="pascal"):
    code: int = _OK
    message: str = ""
    data: _Data | None = None


class ModelScope(Hub):
    scheme = "modelscope"
    token_hint = "--modelscope-token (CORRAL_MODELSCOPE_TOKEN for `corral up`)"

    @property
    def url(self) -> str:
        return self._settings.modelscope_url.rstrip("/")

    @property
    def token(self) -> str:
        return self._settings.modelscope_token

    @property
    def headers(self) -> dict[str, str]:
        if not self.token:
            return {}
        return {"Authorization": f"Bearer {self.token}", "Cookie": f"m_session_id={self.token}"}

    async def list_(self, repository: str, revision: str) -> Listing:
        revision = branch_of(revision)
        chosen = urlencode({"Revision": revision, "Recursive": "True"})
        url = f"{self.url}/api/v1/models/{quote(repository)}/repo/files?{chosen}"
        return Listing(revision, read_files(await self._read_page(url), repository))

    def file_url(self, repository: str, revision: str, path: str) -> str:
        return modelscope_url(HubFilePath(repository, branch_of(revision), quote(path)), self.url)

    def _label(self, url: str) -> str:
        found = _FILE.match(url.removeprefix(self.url))
        path = parse_qs(urlsplit(url).query).get("FilePath", [""])[0]
        return f"modelscope://{found[1]}/{path}" if found and path else ""

    def page_url(self, repository: str) -> str:
        return f"{self.url}/models/{repository}"


def branch_of(revision: str) -> str:
    """The main branch of the Hugging Face hub has another name here."""
    return MASTER if revision in ("", "main") else revision


def read_files(document: bytes, repository: str) -> tuple[HubFile, ...]:
    """Pure. Refusals come as documents too, some of them with status 200."""
    try:
        answer = msgspec.json.decode(document, type=_Answer)
    except msgspec.MsgspecError as error:
        raise Failed(f"ModelScope's list of {repository} cannot be read: {error}") from error
    if answer.code != _OK or answer.data is None:
        raise Failed(f"ModelScope does not list {repository}: {answer.message[:300] or f'code {answer.code}'}")
    entries = answer.data.files or []
    if len(entries) >= MAX_LISTED:
        raise Invalid(
            f"{repository} has {MAX_LISTED} files or more, and ModelScope lists no more than that: name one file, "
            f"modelscope://{repository}/file.gguf"
        )
    if not entries:
        raise NotFound(f"there are no files in {repository}")
    files = (HubFile(each.path, each.size, each.sha256.lower()) for each in entries if each.type != "tree")
    return checked_files(repository, files)
