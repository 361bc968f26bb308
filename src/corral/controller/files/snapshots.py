"""Whole repositories of the hub as files of a model: what was in one when it was first asked for is what it is.

The list is kept as a blob of its own, named in the database under the snapshot's folder (`owner/name/`): any controller
can read it, and one that has lost it asks the hub again, for the very same commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from urllib.parse import quote, urlencode

import msgspec

from corral.blobs.store import BlobStore
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.contract.artifacts import HubSnapshot
from corral.contract.models import ModelFile
from corral.contract.sources import parse_repository
from corral.controller.files.hubs import Hubs
from corral.controller.files.hubs.hub import HubFile, Listing
from corral.kit.errors import NotFound
from corral.kit.log import get_log
from corral.store.tables.model_files import StoredFile

log = get_log(__name__)


class Snapshots:
    def __init__(self, blobs: BlobStore, hubs: Hubs) -> None:
        self._blobs = blobs
        self._hubs = hubs

    def known(self, wanted: HubSnapshot, row: StoredFile | None) -> tuple[ModelFile, ...] | None:
        """Its files, without asking anybody; None when that cannot be told. `row`: what is stored of it. Blocking."""
        if row is None or row.uri != uri_of(wanted):
            return None
        blob = self._blobs.find(row.digest)
        if blob is None:
            return None
        return files_of(wanted, msgspec.json.decode(blob.path.read_bytes(), type=Listing))

    async def learn(self, model: str, wanted: HubSnapshot, row: StoredFile | None) -> StoredFile:
        """Ask the hub, of the commit that was meant before if there is one. Raises what `Hub.list_` raises."""
        listing = await self._list(wanted, row)
        chosen = tuple(file for file in listing.files if is_chosen(file.path, wanted.allow, wanted.ignore))
        if not chosen:
            raise NotFound(f"no file of {wanted.repo} is among those that are wanted")
        document = msgspec.json.encode(Listing(listing.commit, chosen))
        uri = uri_of(wanted)
        blob = await self._blobs.write(f"{uri}@{listing.commit}", lambda: iter([document]), ExpectedBlob(), wanted.repo)
        log.info("repository listed", model=model, repo=wanted.repo, commit=listing.commit, files=len(chosen))
        return StoredFile(
            model=model,
            path=row_path(wanted),
            uri=uri,
            resolved=f"{_scheme(wanted)}{wanted.repo}@{listing.commit}",
            digest=blob.digest,
            size_bytes=blob.size,
        )

    async def _list(self, wanted: HubSnapshot, row: StoredFile | None) -> Listing:
        hub = self._hubs.choose(is_modelscope=wanted.is_modelscope)
        before = parse_repository(row.resolved) if row is not None and row.uri == uri_of(wanted) else None
        if before is not None:
            try:
                return await hub.list_(wanted.repo, before.revision)
            except NotFound as error:
                log.warning("the commit that was fetched before is gone", repo=wanted.repo, reason=error.message)
        return await hub.list_(wanted.repo, wanted.revision)


def row_path(wanted: HubSnapshot) -> str:
    """Under which its list is stored: no file has such a path."""
    return f"{wanted.folder}/"


def uri_of(wanted: HubSnapshot) -> str:
    """All that is meant: the same URI, the same files."""
    chosen = [("allow", pattern) for pattern in wanted.allow] + [("ignore", pattern) for pattern in wanted.ignore]
    return f"{_scheme(wanted)}{wanted.repo}@{wanted.revision}" + (f"?{urlencode(chosen)}" if chosen else "")


def files_of(wanted: HubSnapshot, listing: Listing) -> tuple[ModelFile, ...]:
    return tuple(_file(wanted, listing.commit, file) for file in listing.files)


def _file(wanted: HubSnapshot, commit: str, file: HubFile) -> ModelFile:
    uri = f"{_scheme(wanted)}{wanted.repo}@{commit}/{quote(file.path)}"
    return ModelFile(f"{wanted.folder}/{file.path}", uri, file.sha256, file.size_bytes)


def _scheme(wanted: HubSnapshot) -> str:
    return "modelscope://" if wanted.is_modelscope else "huggingface://"


def is_chosen(path: str, allow: Sequence[str], ignore: Sequence[str]) -> bool:
    """As the hub's own tools choose: shell patterns over the whole path, in which `*` also stands for slashes."""
    if allow and not any(fnmatchcase(path, _whole(pattern)) for pattern in allow):
        return False
    return not any(fnmatchcase(path, _whole(pattern)) for pattern in ignore)


def _whole(pattern: str) -> str:
    return f"{pattern}*" if pattern.endswith("/") else pattern
