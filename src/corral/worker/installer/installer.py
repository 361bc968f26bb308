"""Backends on this machine: install, fetch, switch, roll back, delete, list, verify. Read this first.

Requests for one backend run one after another, under any of its names; requests for different backends run in parallel.
Equal requests share one run, which is cancelled with its last caller. A version is fetched and unpacked aside and
exists once its record is written; a rename makes it the current one. A version in use is never removed.

The controller or the gallery decides which build to install; the supervisor stops processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path

from corral.blobs.contents import Contents, OpenedSource
from corral.blobs.errors import WrongDigest, from_os, is_final
from corral.blobs.folder_listing import Difference, compare_listings, list_tree
from corral.blobs.progress import OnProgress, Progress, ignore_progress
from corral.contract.messages.backends import NodeBackend, Phase
from corral.contract.sources import FILE, OCIFILE, PYPI, Source
from corral.kit.clock import Clock, SystemClock
from corral.kit.errors import Conflict, CorralError, Denied, Invalid, NotFound
from corral.kit.log import get_log
from corral.kit.single_flight import SingleFlight
from corral.kit.tasks import NameLocks
from corral.kit.threads import run_in_thread, run_uncancelled
from corral.worker.installer.folder import BackendFolder
from corral.worker.installer.inventory import (
    InstalledBackend,
    Inventory,
    build_of,
    find_loose_program,
    read_build,
    read_inventory,
)
from corral.worker.installer.make_runnable import make_runnable
from corral.worker.installer.names import check_name
from corral.worker.installer.records import METADATA, SEQUENCE, Metadata, Sequence, VersionRecord, write_metadata
from corral.worker.installer.recover import Recovered, import_flat, recover
from corral.worker.installer.remove import plan_removal, remove_aside, set_aside
from corral.worker.installer.requests import InstallFolders, InstallRequest, RemovedBackends
from corral.worker.system.libraries import SystemLibraries
from corral.worker.system.packages import PackageManager

log = get_log(__name__)


def _nothing_runs() -> Collection[Path]:
    return ()


class Installer:
    def __init__(
        self,
        contents: Contents,
        folders: InstallFolders,
        *,
        in_use: Callable[[], Collection[Path]] = _nothing_runs,
        capability: Callable[[], str] = lambda: "",
        clock: Clock | None = None,
        libraries: SystemLibraries | None = None,
    ) -> None:
        """`in_use` returns the folders that processes run from; `capability` that of this machine, for shared aliases;
        `libraries` are those of the system."""
        self._contents = contents
        self._folders = folders
        self._in_use = in_use
        self._capability = capability
        self._clock = clock or SystemClock()
        self._locks = NameLocks()
        self._runs: SingleFlight[tuple[str, bytes], Progress, InstalledBackend] = SingleFlight()
        self._paused: set[str] = set()  # names of backends whose cancelled download is kept
        self._sequence = Sequence(folders.backends / SEQUENCE)
        self._libraries = libraries or SystemLibraries(PackageManager())
        self.needed_libraries: frozenset[str] = frozenset()  # of all builds, as of the last list

    async def start(self) -> Recovered:
        """Once, before any other call: clean up after a crash, import what LocalAI installed."""
        done = await run_uncancelled(recover, self._folders.backends, self._running(), self._now())
        await run_uncancelled(self._sequence.start)
        for what, names in (("imported", done.imported), ("removed", done.removed), ("finished", done.finished)):
            if names:
                log.info("backends recovered", what=what, names=", ".join(names[:20]), count=len(names))
        return done

    # Queries

    @property
    def sequence(self) -> int:
        """Increases with each change of the installed backends, also across restarts."""
        return self._sequence.value

    async def inventory(self) -> Inventory:
        return await run_uncancelled(read_inventory, self._folders.backends, self._folders.system)

    async def list_backends(self) -> tuple[NodeBackend, ...]:
        inventory = await self.inventory()
        needs = [each for build in inventory.builds.values() if (each := build.manifest.needs) is not None]
        self.needed_libraries = frozenset(library for each in needs for library in each.libraries)
        problems = {
            build.name: await self._libraries.problem_of(build.name, build.manifest.needs, build.directory)
            for build in inventory.builds.values()
        }
        return inventory.rows(problems)

    async def find(self, name: str, digest: str = "") -> InstalledBackend | None:
        """The build for a name: its current version, or the version with this digest."""
        build = (await self.inventory()).find(name, self._capability())
        if build is None:
            return await run_uncancelled(find_loose_program, name, self._folders.backends, self._folders.system)
        if not digest or (build.record is not None and build.record.is_known_as(digest)):
            return build
        if build.is_system:
            return None
        return await run_uncancelled(_find_version, self._folder(build.name), digest)

    async def ensure_libraries(self, build: InstalledBackend, on_progress: OnProgress = ignore_progress) -> None:
        """Check the libraries of a build before a process starts. Raises MissingLibraries."""

        def on_install(command: str) -> None:
            on_progress(Progress(Phase.RESOLVING, command))

        await self._libraries.ensure(build.name, build.manifest.needs, on_install, directory=build.directory)

    async def identity(self, name: str) -> frozenset[str]:
        """All names of this backend on this machine."""
        return (await self.inventory()).identity(name, self._capability())

    async def check(self, name: str, digest: str = "", on_progress: OnProgress = ignore_progress) -> Difference:
        """Read every file again: what is missing or changed since it was unpacked. Raises NotFound."""
        build = await self.find(name, digest)
        if build is None or build.record is None:
            raise NotFound(f"{name} is not installed here" if build is None else f"{name} came with the system")
        folder, version = self._folder(build.name), build.record.id
        before = await run_uncancelled(folder.listing, version)
        if before is None:
            return Difference(missing=(f"the list of files of {version}",))
        on_progress(Progress(Phase.VERIFYING, build.name, 0, before.size_bytes))
        now = await run_in_thread(lambda stop: list_tree(folder.directory(version), stop, leave_out=(METADATA,)))
        difference = compare_listings(before, now)
        if not difference.is_whole:
            log.error("an installed backend is damaged", backend=build.name, version=version)
        return difference

    # Changing

    async def install(self, request: InstallRequest, on_progress: OnProgress = ignore_progress) -> InstalledBackend:
        """Have the build and make it the current version. Returns at once when it is so already, unless forced.

        Raises what `Contents.open` raises. Whatever happens, the version that was current stays whole and current
        until the new one is whole.
        """

        async def work(on_progress: OnProgress) -> InstalledBackend:
            async with self._alone(request.names):
                build = await self._satisfied(request, on_progress)
                if build is None:
                    record = await self._obtain(request, on_progress)
                    build = await self._switch(request.name, record.id, on_progress)
                await self._keep_meta(request, build)
                return build

        return await self._runs.run(("install", _checked(request).key), work, on_progress)

    async def fetch_aside(self, request: InstallRequest, on_progress: OnProgress = ignore_progress) -> InstalledBackend:
        """The first half of an upgrade: fetch and unpack the new version, change nothing. `switch` is the second
        half."""

        async def work(on_progress: OnProgress) -> InstalledBackend:
            async with self._alone(request.names):
                record = await self._obtain(request, on_progress)
                await run_uncancelled(self._prune, request.name)
                await self._changed()  # heartbeats also report versions beside the current one
                return await run_uncancelled(build_of, self._folder(request.name), record)

        return await self._runs.run(("aside", _checked(request).key), work, on_progress)

    async def switch(self, name: str, digest: str) -> InstalledBackend:
        """Make an unpacked version the current one. Processes of the old one run on. Raises NotFound."""
        async with self._alone(frozenset({name})):
            folder = await self._installed_folder(name)
            record = await run_uncancelled(folder.find_digest, digest)
            if record is None:
                raise NotFound(f"{folder.name} {digest} is not on this machine")
            await run_uncancelled(folder.describe, record, digest, Metadata(digest=digest), direct=False)
            return await self._switch(folder.name, record.id)

    async def rollback(self, name: str, digest: str = "") -> InstalledBackend:
        """Return to the previous version, or to a given one. Raises NotFound if it was not kept."""
        if digest:
            return await self.switch(name, digest)
        async with self._alone(frozenset({name})):
            folder = await self._installed_folder(name)
            record = await run_uncancelled(folder.previous)
            if record is None:
                raise NotFound(f"no earlier version of {folder.name} is kept on this machine")
            return await self._switch(folder.name, record.id)

    async def discard(self, name: str, digest: str) -> bool:
        """Remove a version that was fetched aside. False when it is current, in use or not installed."""
        async with self._alone(frozenset({name})):
            folder = self._folder(name)
            current = await run_uncancelled(folder.current)
            record = await run_uncancelled(folder.find_digest, digest)
            if record is None or (current is not None and current.id == record.id):
                return False
            if folder.is_in_use(record.id, self._running()):
                return False
            await run_uncancelled(folder.remove_version, record.id)
            await run_uncancelled(folder.tidy)
            await self._changed()
            return True

    async def delete(self, name: str) -> RemovedBackends:
        """Remove a backend and its names. Raises NotFound, Denied for a backend of the system, Conflict while a process
        runs from it: the caller stops those first."""
        async with self._alone(frozenset({name})):
            inventory = await self.inventory()
            build = inventory.find(name, self._capability())
            if build is None and name not in inventory.metas:
                raise NotFound(f"backend not found: {name}")
            if build is not None and build.is_system:
                raise Denied(f"{build.name} came with the system and cannot be deleted")
            gone = plan_removal(inventory, name, build)
            await run_uncancelled(remove_aside, self._folders.backends, gone)
            # Not in a thread: no process can start between the check and the rename.
            set_aside(self._folders.backends, gone, self._running())
            await run_uncancelled(remove_aside, self._folders.backends, gone)
            await self._changed()
            log.info("backend deleted", backend=name, names=", ".join(gone))
            return RemovedBackends(gone)

    def keep_download(self, name: str) -> None:
        """Called before a request for this backend is cancelled: the next one resumes its download."""
        self._paused.add(name)

    def _is_paused(self, request: InstallRequest) -> bool:
        return not self._paused.isdisjoint(request.names)

    # One build

    async def _satisfied(self, request: InstallRequest, on_progress: OnProgress) -> InstalledBackend | None:
        """The installed build, if it satisfies the request."""
        # LocalAI may have installed a backend here since the worker started.
        await run_uncancelled(import_flat, self._folders.backends, request.name, self._running(), self._now())
        if request.force:
            return None
        folder = self._folder(request.name)
        build = await run_uncancelled(read_build, folder)
        if not request.digest:
            return build or (await self.inventory()).builds.get(request.name)
        record = await run_uncancelled(folder.find_digest, request.digest)
        if record is None:
            return None
        if build is not None and build.record is not None and build.record.id == record.id:
            await self._describe(folder, record, request)
            return await run_uncancelled(read_build, folder)
        _report_switch(request.name, on_progress)
        await self._describe(folder, record, request)
        return await self._switch(request.name, record.id, on_progress)

    async def _obtain(self, request: InstallRequest, on_progress: OnProgress) -> VersionRecord:
        """A complete version of the requested build, from the first source that works."""
        folder = self._folder(request.name)
        if request.digest and not request.force:
            record = await run_uncancelled(folder.find_digest, request.digest)
            if record is not None:
                return await self._describe(folder, record, request)
        on_progress(Progress(Phase.RESOLVING, request.name))
        if request.manifest is not None:  # before the download of a build that could not run
            await self._libraries.ensure(
                request.name, request.manifest.needs, lambda command: on_progress(Progress(Phase.RESOLVING, command))
            )
        self._paused -= request.names
        failures: list[CorralError] = []
        for source in request.sources:
            try:
                async with self._contents.open(source, on_progress, keep=lambda: self._is_paused(request)) as opened:
                    record = await self._from(opened, request, on_progress)
                self._contents.discard(opened)  # after it is let go: unpacked, the packed form is not needed
                return record
            except CorralError as error:
                failures.append(error)
                log.warning("a source failed", backend=request.name, uri=source.uri, error=error.message)
        raise _combined_error(failures, request)

    async def _from(self, opened: OpenedSource, request: InstallRequest, on_progress: OnProgress) -> VersionRecord:
        if request.digest and opened.digest != request.digest:
            raise WrongDigest(f"{opened.source.uri} is {opened.digest}, not {request.digest}")
        folder = self._folder(request.name)
        if not request.force:
            for record in (await run_uncancelled(folder.records)).values():
                # The same files under another name (an index was rebuilt around them): nothing to fetch.
                if record.content_digest == opened.content_digest and record.manifest == request.manifest:
                    return await self._describe(folder, record, request, opened)
        return await self._build(folder, opened, request, on_progress)

    async def _build(
        self, folder: BackendFolder, opened: OpenedSource, request: InstallRequest, on_progress: OnProgress
    ) -> VersionRecord:
        """Fetch and unpack into the version's final folder. An interruption leaves nothing behind."""
        version = await run_uncancelled(folder.begin, opened.content_digest)
        directory = folder.directory(version)
        try:
            await opened.write_to(directory, on_progress)
            await run_uncancelled(make_runnable, directory, request.manifest)
            listing = await run_in_thread(lambda stop: list_tree(directory, stop, leave_out=(METADATA,)))
            metadata = self._metadata(request, opened.source, opened.digest)
            before = await run_uncancelled(folder.current)
            record = VersionRecord(
                id=version,
                digest=opened.digest,
                content_digest=opened.content_digest,
                tree_digest=listing.digest,
                size_bytes=listing.size_bytes,
                metadata=metadata,
                manifest=request.manifest,
                direct=_is_direct(request) or (before is not None and before.direct),
                made_at=self._now(),
            )
            await run_uncancelled(write_metadata, directory, metadata)
            await run_uncancelled(folder.finish, record, listing)
        except BaseException:
            await run_uncancelled(folder.give_up, version)
            raise
        log.info("backend fetched", backend=request.name, version=version, bytes=listing.size_bytes)
        return record

    async def _describe(
        self, folder: BackendFolder, record: VersionRecord, request: InstallRequest, opened: OpenedSource | None = None
    ) -> VersionRecord:
        """Describe an unpacked version by the digest, version and alias of this request."""
        digest = opened.digest if opened is not None else request.digest
        metadata = self._metadata(request, opened.source if opened is not None else None, digest)
        described = await run_uncancelled(folder.describe, record, digest, metadata, direct=_is_direct(request))
        if described != record:
            await self._changed()
        return described

    async def _switch(self, name: str, version: str, on_progress: OnProgress = ignore_progress) -> InstalledBackend:
        _report_switch(name, on_progress)
        folder = self._folder(name)
        await run_uncancelled(folder.switch, version, self._now())
        await run_uncancelled(self._prune, name)
        await self._changed()
        log.info("backend switched", backend=name, version=version)
        build = await run_uncancelled(read_build, folder)
        if build is None:
            raise Conflict(f"{name} was removed while it was being switched")
        return build

    async def _keep_meta(self, request: InstallRequest, build: InstalledBackend) -> None:
        """Write the folder of a meta backend: its name, and the build it stands for."""
        name = request.requested_as
        if not name or name == request.name or await run_uncancelled(self._folder(name).exists):
            return
        known = (await self.inventory()).metas.get(name)
        if known is not None and (known.meta_backend_for, known.version) == (build.name, request.version):
            return
        meta = Metadata(
            name=name,
            meta_backend_for=build.name,
            gallery_url=request.gallery_url,
            installed_at=self._local_now(),
            version=request.version,
        )
        await run_uncancelled(_write_meta, self._folders.backends / name, meta)
        await self._changed()

    def _metadata(self, request: InstallRequest, source: Source | None, digest: str) -> Metadata:
        return Metadata(
            name=request.name,
            alias=request.alias,
            gallery_url=request.gallery_url,
            installed_at=self._local_now(),
            version=request.version,
            uri=_uri_of(source) if source is not None else "",
            digest=digest,
        )

    # Helpers

    @contextlib.asynccontextmanager
    async def _alone(self, names: frozenset[str]) -> AsyncIterator[None]:
        inventory = await self.inventory()
        known = frozenset(each for name in names for each in inventory.identity(name, self._capability()))
        async with self._locks.hold(known | names):
            try:
                yield
            except OSError as error:
                raise from_os(error, f"changing backends in {self._folders.backends}") from error

    async def _installed_folder(self, name: str) -> BackendFolder:
        build = (await self.inventory()).find(name, self._capability())
        if build is None or build.is_system:
            raise NotFound(f"{name} is not installed here")
        return self._folder(build.name)

    async def _changed(self) -> None:
        await run_uncancelled(self._sequence.bump)

    def _folder(self, name: str) -> BackendFolder:
        return BackendFolder(self._folders.backends / check_name(name))

    def _prune(self, name: str) -> None:
        for version in self._folder(name).prune(self._running()):
            log.info("old version removed", backend=name, version=version)

    def _running(self) -> frozenset[Path]:
        return frozenset(path.resolve() for path in self._in_use())

    def _now(self) -> str:
        return self._clock.now().isoformat()

    def _local_now(self) -> str:
        # RFC 3339 as the contract has it, and finer than a second: a controller may have nothing but this date to tell
        # what it forced from what was there, and small backends take less.
        return self._clock.now().astimezone().isoformat(timespec="milliseconds")


def _report_switch(name: str, on_progress: OnProgress) -> None:
    """All files are on the disk: a failure from here on is a failed switch, which stops a rollout."""
    on_progress(Progress(Phase.STARTING, name))


def _checked(request: InstallRequest) -> InstallRequest:
    for name in request.names:
        check_name(name)
    if not request.sources:
        raise Invalid(f"the request for {request.name} names no source")
    return request


def _combined_error(failures: list[CorralError], request: InstallRequest) -> CorralError:
    """One error for all sources; a retryable one if there is one."""
    best = next((error for error in failures if not is_final(error)), failures[0])
    if len(failures) > 1:
        best.message = "; ".join(dict.fromkeys(error.message for error in failures))
        best.args = (best.message,)
    return best


def _is_direct(request: InstallRequest) -> bool:
    return request.requested_as in ("", request.name)


def _find_version(folder: BackendFolder, digest: str) -> InstalledBackend | None:
    record = folder.find_digest(digest)
    return build_of(folder, record) if record is not None else None


def _write_meta(folder: Path, meta: Metadata) -> None:
    if folder.is_file():
        folder.unlink()  # a stray file at that path (docs/reference/wire/gallery.md#installation)
    folder.mkdir(exist_ok=True)
    write_metadata(folder, meta)


def _uri_of(source: Source) -> str:
    """As galleries write it. An image's reference stands alone there: LocalAI cannot look up a digest with a prefix."""
    return {PYPI: "pypi://", OCIFILE: "ocifile://", FILE: "file://"}.get(source.kind, "") + source.uri
