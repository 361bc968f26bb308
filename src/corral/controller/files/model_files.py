"""Fetches the files of models to this controller, by digest, before a worker is ordered to fetch them.

The database keeps the digest of each file that was fetched once: from then on the model means these bytes. Each
controller has its own copy on its own disk; one that lacks a file fetches it again and must get the same bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from corral.blobs.digests import PREFIX
from corral.blobs.disk import DiskSpace
from corral.blobs.errors import WrongDigest
from corral.blobs.progress import FilesProgress, OnProgress, Progress, ignore_progress
from corral.blobs.sources.context import unwrapped_task_group
from corral.blobs.store import Blob, BlobStore
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.contract.bundles import BundledFile
from corral.contract.messages.backends import Phase
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.messages.staging import RemovedFiles
from corral.contract.models import Definition, ModelFile
from corral.contract.sources import is_digest
from corral.controller.access.signing import IngressTokens
from corral.controller.files.archives import UNPACK_FACTOR, Archives, list_path, pinned
from corral.controller.files.blob_listener import ControllerBlobUrls
from corral.controller.files.bundled_files import bundled_rows, keys_of
from corral.controller.files.file_resolver import FileResolver, ResolvedFile
from corral.controller.files.model_cache import ModelCache
from corral.controller.files.required_files import (
    digest_of_file,
    is_archive,
    is_member,
    is_named,
    required_files,
    required_snapshots,
    weights_first,
    worker_files,
)
from corral.controller.files.shared_folder import SharedFolder, ordered_files
from corral.controller.files.snapshots import Snapshots, row_path
from corral.controller.models.views import definition_of
from corral.kit.clock import Clock
from corral.kit.errors import Conflict, CorralError, NotFound, Unavailable
from corral.kit.log import get_log
from corral.kit.tasks import run_every
from corral.kit.threads import run_uncancelled
from corral.store.engine.transactions import Store
from corral.store.tables import model_files, models, rollouts
from corral.store.tables.model_files import StoredFile

log = get_log(__name__)

MAX_PARALLEL_LOOKUPS = 16
MAX_PARALLEL_FETCHES = 4  # a repository has many small files, and a line to the hub takes its time to answer for each


@dataclass(frozen=True)
class ModelFilesStatus:
    """The state of one model's files on this controller."""

    progress: Progress | None = None  # None: nothing is being fetched
    error: str = ""  # why the last try failed; empty when it did not


@dataclass(frozen=True)
class FileRetention:
    folder: Path | None = None  # where files without a source may lie: the controller's own models folder
    unused_s: float = 3600.0  # blobs of no model are removed when they are that old
    sweep_every_s: float = 600.0
    collect_grace_s: float = 600.0  # an uploaded file that no model had so far stays for so long


@dataclass(frozen=True)
class _Item:
    file: ModelFile
    pin: StoredFile | None  # what it turned out to be, when it was fetched before
    known: ReplicaFile  # as far as one can say without asking anybody
    archive: bool = False  # to be unpacked: what is inside is not known here yet


class ModelFiles:
    name = "model files"

    def __init__(
        self,
        store: Store,
        blobs: BlobStore,
        resolver: FileResolver,
        tokens: IngressTokens,
        clock: Clock,
        *,
        blob_urls: ControllerBlobUrls,
        credential_of: Callable[[str], str],
        disk: DiskSpace | None = None,
        retention: FileRetention | None = None,
        cache: ModelCache | None = None,
        list_bundled: Callable[[], Sequence[Sequence[BundledFile]]] = list,
        shared: SharedFolder | None = None,
    ) -> None:
        """`credential_of` names the credential that a node holds now: the tokens made for the node end with it.
        `list_bundled`: the files of each model in a loaded bundle. `shared`: the folder whose files are used where
        they lie."""
        self._shared = shared
        self._list_bundled = list_bundled
        self._store = store
        self._blobs = blobs
        self._resolver = resolver
        self._tokens = tokens
        self._clock = clock
        self._blob_urls = blob_urls
        self._credential_of = credential_of
        self._disk = disk or DiskSpace()
        self._retention = retention or FileRetention()
        self._cache = cache or ModelCache(store, blobs, clock, disk=self._disk)
        self._snapshots = Snapshots(blobs, resolver.hubs)
        self._archives = Archives(blobs, self._disk)
        self._status: dict[str, ModelFilesStatus] = {}
        self._had_model: set[str] = set()  # digests that were found to be a model's since the start

    async def ensure(
        self, definition: Definition, on_progress: OnProgress = ignore_progress
    ) -> tuple[ReplicaFile, ...]:
        """All files, as an order for a replica names them, the weights first; none for a model whose engine fetches by
        itself. `on_progress` gets the progress of all of them together. May be cancelled and called again:
        it continues where it stopped.

        Raises Invalid, NotFound, Denied and WrongDigest, which a user has to fix, and Unreachable, Failed, NoSpace and
        Unavailable, which may pass.
        """

        def report(progress: Progress) -> None:
            self._status[definition.name] = ModelFilesStatus(progress)
            on_progress(progress)

        try:
            if self._shared is not None:
                files = await self._ensure_shared(definition, self._shared)
            else:
                files = await self._ensure(definition, report)
        except CorralError as error:
            self._status[definition.name] = ModelFilesStatus(error=error.message)
            raise
        except BaseException:
            self._status.pop(definition.name, None)
            raise
        self._status.pop(definition.name, None)
        return files

    async def known(self, definition: Definition) -> tuple[ReplicaFile, ...] | None:
        """What `ensure` would give, without fetching anything; None when that is not known of every file."""
        if self._shared is not None:
            try:
                return ordered_files(definition, await run_uncancelled(self._shared.rows, definition))
            except (NotFound, Unavailable):
                return None
        items = await self._items(definition)
        if items is None:
            return None
        found = [item.known for item in items]
        if any(item.archive for item in items) or not all(file.digest and file.size_bytes for file in found):
            return None
        return worker_files(definition.name, weights_first(definition, found))

    async def needs_files(self, definition: Definition) -> bool:
        """Whether the model has any: an engine may fetch by itself."""
        folder = self._retention.folder
        return bool(await run_uncancelled(required_files, definition, folder) or required_snapshots(definition, folder))

    async def are_here(self, definition: Definition) -> bool:
        """Whether `ensure` would fetch nothing."""
        if self._shared is not None:
            return await self.known(definition) is not None
        items = await self._items(definition)
        if items is None or any(item.archive for item in items):
            return False
        return all(self.find(item.known.digest) is not None for item in items)

    def find(self, key: str) -> Path | None:
        """The file itself, where it is here: its header tells how much memory the model needs. `key`: its digest; in a
        shared folder its path."""
        if not is_digest(key):
            return self._shared.find(key) if self._shared is not None else None
        blob = self._blobs.find(key)
        return blob.path if blob is not None else None

    def status(self, model: str) -> ModelFilesStatus | None:
        """None: nothing is under way, and the last try, if any, went well."""
        return self._status.get(model)

    def sources_for(self, node_id: str, files: Sequence[ReplicaFile] = ()) -> tuple[tuple[str, ...], str]:
        """Where that node may fetch these files by digest, best first, and what it shows there. `{host}` in a URL is
        the node's to fill in."""
        if self._shared is not None:
            return (), ""  # nothing is fetched
        own, others = (self._blob_urls.own,), self._blob_urls.others
        here = all(self.find(file.digest) for file in files)
        return own + others if here else others + own, self._tokens.sign_for_node(node_id, self._credential_of(node_id))

    async def keep_list(self, document: bytes) -> str:
        """A list of files too long for a message, for a worker to fetch by this digest. It is nobody's, and goes after
        a while; by then the worker has read it."""
        digest = PREFIX + hashlib.sha256(document).hexdigest()
        blob = await self._blobs.write(digest, lambda: iter([document]), ExpectedBlob(digest), "a list of files")
        await run_uncancelled(os.utime, blob.path)
        return digest

    async def refetch(self, digest: str) -> bool:
        """A file some model needs that is not here (any more), from where it came; False when none needs it. Raises
        what keeps it from coming."""
        async with self._store.read() as tx:
            rows = await model_files.list_by_digest(tx, digest)
        last_error: CorralError | None = None
        for row in rows:
            if self.find(digest) is not None:
                break
            if row.is_list:
                continue  # a repository's list: nobody but us reads it, and whoever needs it asks for it
            file = ModelFile(row.path, row.uri, digest.removeprefix(PREFIX), row.size_bytes)
            item = _Item(file, row, ReplicaFile(row.path, digest, row.size_bytes))
            try:
                await self._fetch(row.model, item, await self._find(item), ignore_progress)
            except CorralError as error:
                last_error = error
        if last_error is not None and self.find(digest) is None:
            raise last_error
        return bool(rows)

    async def run(self) -> None:
        await run_every("sweep model files", self._retention.sweep_every_s, self.sweep, clock=self._clock)

    async def sweep(self) -> None:
        """Blobs of no model go: it was deleted, or its files are others now."""
        keep = await self._referenced()
        removed = await self._blobs.sweep(older_than_s=self._retention.unused_s, keep=keep)
        if removed:
            log.info("files of no model were removed", count=removed)

    async def collect(self, *, dry_run: bool) -> list[RemovedFiles]:
        """Remove the blobs of no model at once, except those whose model may not be stored yet; return what went."""
        keep = await self._referenced()
        removed = await self._blobs.collect(
            keep,
            released=self._had_model - keep,
            older_than_s=self._retention.collect_grace_s,
            partial_older_than_s=self._retention.unused_s,
            dry_run=dry_run,
        )
        if not removed:
            return []
        freed = sum(each.freed_bytes for each in removed)
        return [RemovedFiles("downloads", len(removed), freed, "no model refers to them")]

    async def _referenced(self) -> set[str]:
        """Digests of the files that some model has, and of those that a definition declares: an uploaded file has no
        other source, and its model may not have been fetched yet."""
        async with self._store.read() as tx:
            stored = await model_files.list_digests(tx)
            defined = [definition_of(model) for model in await models.list_(tx)]
        declared = (digest_of_file(file) for definition in defined if definition for file in definition.files)
        found = {digest for digest in (*stored, *declared) if digest}
        self._had_model |= found
        return found

    async def _ensure(self, definition: Definition, on_progress: OnProgress) -> tuple[ReplicaFile, ...]:
        await self._remember_bundled(definition)
        lists = await self._list_repositories(definition, on_progress)
        items = await self._items(definition, lists)
        if items is None:
            raise Unavailable("a repository's list was lost again at once")
        with self._blobs.hold(*(item.known.digest for item in items if item.known.digest)):
            missing = {index: item for index, item in enumerate(items) if self.find(item.known.digest) is None}
            if missing:
                on_progress(Progress(Phase.RESOLVING, items[min(missing)].file.path, file_count=len(items)))
            found = await self._locate(missing)
            archives = [index for index, item in enumerate(items) if item.archive]
            await self._free_space(definition.name, found, archives)
            sizes = [
                found[index].size_bytes if index in found else item.known.size_bytes for index, item in enumerate(items)
            ]
            packed = {index for index, origin in found.items() if origin.unpacks}
            bar = FilesProgress(sizes, on_progress, time.monotonic, unpacked={*packed, *archives})
            for index, item in enumerate(items):
                if index not in found:
                    (bar.fetched if item.archive else bar.complete)(index)
            at_once = asyncio.Semaphore(MAX_PARALLEL_FETCHES)

            async def fetch_one(index: int, item: _Item) -> list[ReplicaFile]:
                if index in found:
                    async with at_once:
                        row = await self._fetch(definition.name, item, found[index], bar.listener(index))
                    (bar.fetched if item.archive else bar.complete)(index)
                else:
                    blob = self._blobs.get(item.known.digest)
                    row = item.pin or _row(definition.name, item.file, item.file.uri, blob)
                if item.archive:
                    async with at_once:
                        inside = await self._unpack(definition, item.file, row, bar.listener(index))
                    bar.complete(index)
                    return inside
                if row != item.pin:
                    await self._remember(row)
                return [ReplicaFile(item.file.path, row.digest, row.size_bytes)]

            async with unwrapped_task_group() as tasks:
                fetches = [tasks.create_task(fetch_one(index, item)) for index, item in enumerate(items)]
            files = {file.path: file for task in fetches for file in task.result()}
        inside = {list_path(file) for file in definition.files if is_archive(definition, file)}
        await self._forget_others(definition.name, files.keys() | lists.keys() | inside)
        return worker_files(definition.name, weights_first(definition, list(files.values())))

    async def _ensure_shared(self, definition: Definition, shared: SharedFolder) -> tuple[ReplicaFile, ...]:
        rows = await run_uncancelled(shared.rows, definition)
        stored = await self._rows(definition.name)
        for row in rows:
            before = stored.get(row.path)
            if before is None or (before.uri, before.digest, before.size_bytes) != (row.uri, "", row.size_bytes):
                await self._remember(row)
        await self._forget_others(definition.name, {row.path for row in rows})
        return ordered_files(definition, rows)

    async def _remember_bundled(self, definition: Definition) -> None:
        """Files of a loaded bundle count as fetched before."""
        bundled = self._list_bundled()
        if not bundled:
            return
        folder = self._retention.folder
        wanted = keys_of(
            await run_uncancelled(required_files, definition, folder),
            await run_uncancelled(required_snapshots, definition, folder),
        )
        for row in bundled_rows(definition.name, wanted, await self._rows(definition.name), bundled):
            await self._remember(row)

    async def _unpack(
        self, definition: Definition, file: ModelFile, archive: StoredFile, on_progress: OnProgress
    ) -> list[ReplicaFile]:
        """The files inside, and the archive itself where the definition names it. Their list is remembered last: with
        it, all of them are known."""
        with self._blobs.hold(archive.digest):
            row = await self._archives.unpack(definition.name, file, archive, on_progress)
            members = await run_uncancelled(self._archives.known, file, row)
        rows = [_row(definition.name, each, each.uri, self._blobs.get(PREFIX + each.sha256)) for each in members or ()]
        if is_named(definition, file):
            rows.append(archive)
        else:
            self._blobs.discard(archive.digest)
        for each in (*rows, row):
            await self._remember(each)
        return [ReplicaFile(each.path, each.digest, each.size_bytes) for each in rows]

    async def _items(self, definition: Definition, lists: Mapping[str, StoredFile] | None = None) -> list[_Item] | None:
        """None when a repository's files are not known here. `lists`: of repositories, fresher than what is stored."""
        wanted = list(await run_uncancelled(required_files, definition, self._retention.folder))
        snapshots = await run_uncancelled(required_snapshots, definition, self._retention.folder)
        if not wanted and not snapshots:
            return []
        rows = await self._rows(definition.name) | dict(lists or {})
        items: dict[str, _Item] = {}
        for file in wanted:
            archive, row = is_archive(definition, file), rows.get(list_path(file))
            inside = await run_uncancelled(self._archives.known, file, row) if archive else None
            for member in inside or ():
                items[member.path] = self._item(member, rows.get(member.path))
            if inside is None or is_named(definition, file):
                item = self._item(file, rows.get(file.path) or pinned(file, row))
                items[file.path] = replace(item, archive=archive and inside is None)
        for each in snapshots:
            files = await run_uncancelled(self._snapshots.known, each, rows.get(row_path(each)))
            if files is None:
                return None
            items |= {file.path: self._item(file, rows.get(file.path)) for file in files}
        self._had_model.update(item.known.digest for item in items.values() if item.known.digest)
        return list(items.values())

    async def _list_repositories(self, definition: Definition, on_progress: OnProgress) -> dict[str, StoredFile]:
        """By path, what is stored of each repository's list; asked for where that is not known here."""
        snapshots = await run_uncancelled(required_snapshots, definition, self._retention.folder)
        rows = await self._rows(definition.name) if snapshots else {}
        found = {}
        for each in snapshots:
            row = rows.get(row_path(each))
            if row is None or await run_uncancelled(self._snapshots.known, each, row) is None:
                on_progress(Progress(Phase.RESOLVING, each.repo))
                before, row = row, await self._snapshots.learn(definition.name, each, row)
                if row != before:
                    await self._remember(row)
            found[row.path] = row
        return found

    async def _rows(self, model: str) -> dict[str, StoredFile]:
        async with self._store.read() as tx:
            return {row.path: row for row in await model_files.list_of(tx, model)}

    def _item(self, file: ModelFile, row: StoredFile | None) -> _Item:
        declared = digest_of_file(file)
        # What it turned out to be before counts as long as the definition means the same by it.
        if row is not None and row.uri == file.uri and declared in ("", row.digest):
            return _Item(file, row, ReplicaFile(file.path, row.digest, row.size_bytes))
        blob = self._blobs.find(declared) if declared else None
        return _Item(file, None, ReplicaFile(file.path, declared, blob.size if blob is not None else file.size_bytes))

    async def _locate(self, items: Mapping[int, _Item]) -> dict[int, ResolvedFile]:
        at_once = asyncio.Semaphore(MAX_PARALLEL_LOOKUPS)

        async def find(item: _Item) -> ResolvedFile:
            async with at_once:
                return await self._find(item)

        async with unwrapped_task_group() as tasks:
            tasks_by_index = {index: tasks.create_task(find(item)) for index, item in items.items()}
        return {index: task.result() for index, task in tasks_by_index.items()}

    async def _find(self, item: _Item) -> ResolvedFile:
        if is_member(item.file.uri):
            return self._archives.origin(item.file, self._resolver.find)
        if item.pin is not None and item.pin.resolved != item.file.uri:
            try:
                return await self._resolver.find(item.file, item.pin.resolved)
            except NotFound as error:
                log.warning("the version that was fetched before is gone", file=item.file.path, reason=error.message)
        return await self._resolver.find(item.file)

    async def _free_space(self, model: str, found: Mapping[int, ResolvedFile], archives: Collection[int]) -> None:
        """Before the first byte: half a model is of no use."""
        need = sum(
            (origin.disk_bytes or origin.size_bytes) * (UNPACK_FACTOR if index in archives else 1)
            for index, origin in found.items()
        )
        if found:
            await self._cache.free_space(need, f"the files of {model}")

    async def _fetch(self, model: str, item: _Item, origin: ResolvedFile, on_file_progress: OnProgress) -> StoredFile:
        known = item.known

        def on_progress(progress: Progress) -> None:  # users know the file, not the package that contains it
            on_file_progress(replace(progress, file=known.path))

        try:
            blob = await origin.fetch(
                self._blobs, ExpectedBlob(known.digest or origin.digest, known.size_bytes), on_progress
            )
        except WrongDigest as error:
            if item.pin is None or item.file.sha256:
                raise
            # No digest was declared, and the first bytes are no longer available: the new ones are used.
            log.warning("a file has changed at its source", model=model, file=known.path, reason=error.message)
            origin = await self._resolver.find(item.file)
            blob = await origin.fetch(self._blobs, ExpectedBlob(origin.digest), on_progress)
        log.info("model file fetched", model=model, file=known.path, digest=blob.digest, bytes=blob.size)
        return _row(model, item.file, origin.resolved, blob)

    async def _remember(self, row: StoredFile) -> None:
        try:
            async with self._store.write() as tx:
                await model_files.put(tx, row)
        except Conflict:
            log.info("a model was deleted while its files were fetched", model=row.model)

    async def _forget_others(self, model: str, paths: Collection[str]) -> None:
        """Files the model had before it was edited. While a new revision is on trial, the files of both are kept."""
        async with self._store.read() as tx:
            if await rollouts.find_trial(tx, model) is not None:
                return
            stale = [row.path for row in await model_files.list_of(tx, model) if row.path not in paths]
        if stale:
            async with self._store.write() as tx:
                for path in stale:
                    await model_files.delete(tx, model, path)


def _row(model: str, file: ModelFile, resolved: str, blob: Blob) -> StoredFile:
    return StoredFile(
        model=model, path=file.path, uri=file.uri, resolved=resolved, digest=blob.digest, size_bytes=blob.size
    )
