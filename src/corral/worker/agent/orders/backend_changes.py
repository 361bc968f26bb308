"""Carries out orders for backends: install a build and replace the processes that run an older one, or delete it.

New processes start beside the old ones, and an old process stops only when its successor serves. `backends.py` replies
and reports; `worker/localai` has the variants that LocalAI controllers order.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from corral.blobs.progress import OnProgress, Progress
from corral.contract.messages.backends import InstallBackend, Phase, UpgradeBackend
from corral.kit.log import get_log
from corral.kit.tasks import NameLocks
from corral.worker.agent.orders.replacement import ProcessReplacer, StillRunning, successor
from corral.worker.installer.installer import Installer
from corral.worker.installer.inventory import InstalledBackend
from corral.worker.installer.requests import InstallRequest, request_of
from corral.worker.installer.resolver import BackendResolver, Order

log = get_log(__name__)


class BackendChanges:
    def __init__(self, installer: Installer, resolver: BackendResolver, replacer: ProcessReplacer) -> None:
        self._installer = installer
        self._resolver = resolver
        self.replacer = replacer
        # One order at a time changes the processes of a backend; the installer guards the files.
        self.locks = NameLocks()
        self.has_builtin_gallery = True  # False: names in orders mean LocalAI's builds

    async def install(
        self, order: InstallBackend, on_progress: OnProgress, on_commit: Callable[[], None]
    ) -> InstalledBackend:
        """Install a build and let running processes use it. `on_commit` is called when the change becomes final."""
        on_progress(Progress(Phase.RESOLVING, order.backend))
        if not (order.force or order.sources or order.digest):
            found = await self.find_installed(order)
            if found is not None:
                return found
        return await self._change(await self.resolve(order), on_progress, on_commit)

    async def upgrade(
        self, order: UpgradeBackend, on_progress: OnProgress, on_commit: Callable[[], None]
    ) -> InstalledBackend:
        """The same; with `fetch_only` the new version is only fetched beside the current one."""
        on_progress(Progress(Phase.RESOLVING, order.backend))
        request = await self.resolve(order)
        if not request.digest:
            # Without a digest only a download shows what the source has now: the installed build may be an older one.
            request = msgspec.structs.replace(request, force=True)
        if order.fetch_only:
            return await self._installer.fetch_aside(request, on_progress)
        return await self._change(request, on_progress, on_commit, in_place=order.in_place)

    async def delete(self, name: str, stopped: list[str]) -> None:
        """Stop the processes of a backend, then remove it. `stopped` gets the keys of stopped processes, also when this
        raises (NotFound, Denied, Conflict, Failed)."""
        names = await self._installer.identity(name)
        async with self.locks.hold(names | {name}):
            build = await self._installer.find(name)
            if (
                build is None or not build.is_system
            ):  # the installer refuses to delete one of the system, which serves on
                await self.stop_users(names, (), stopped, force=False)
            await self._installer.delete(name)

    async def _change(
        self, request: InstallRequest, on_progress: OnProgress, on_commit: Callable[[], None], *, in_place: bool = False
    ) -> InstalledBackend:
        names = await self.names_of(request)
        if not self.replacer.users(names):
            return await self._installer.install(request, on_progress)
        build = await self._installer.fetch_aside(request, on_progress)
        async with self.locks.hold(names):
            on_progress(Progress(Phase.STARTING, build.name))
            if in_place:
                on_commit()
                return await self._change_in_place(request, build, names)
            try:
                pairs = await self.replacer.start_beside(names, build)
                on_commit()
                # The pointer to the current version moves only now. The build is on the disk: nothing is fetched here.
                build = await self._installer.install(from_disk(request, build))
            except BaseException:
                await self.replacer.cancel(names, build)
                raise
            await self.replacer.retire(pairs)
            await self.replacer.catch_up(names, build)
        return build

    async def _change_in_place(
        self, request: InstallRequest, build: InstalledBackend, names: frozenset[str]
    ) -> InstalledBackend:
        before = await self._installer.find(request.name)
        specs = await self.replacer.take_down(names, build)
        try:
            build = await self._installer.install(from_disk(request, build))
            await self.replacer.bring_up({old: successor(spec, build) for old, spec in specs.items()})
        except BaseException:
            now = await self._installer.find(request.name)
            if before is not None and now is not None and now.directory != before.directory:
                await self._installer.rollback(request.name, before.digest)
            await self.replacer.restore(specs)
            raise
        return build

    # Shared with `worker/localai`

    async def find_installed(self, order: Order) -> InstalledBackend | None:
        name = order.backend or order.name
        if not name:
            return None
        return await self._installer.find(name) or await self._installer.find(name.rpartition("@")[2])

    async def resolve(self, order: Order) -> InstallRequest:
        """Raises Invalid, NotResolved."""
        if order.sources:
            return request_of(order)
        return await self._resolver.request_for(order, built_in=self.has_builtin_gallery)

    async def names_of(self, request: InstallRequest) -> frozenset[str]:
        """Every name that the requested backend is installed under."""
        names = set(request.names)
        for name in request.names:
            names |= await self._installer.identity(name)
        return frozenset(names)

    async def stop_users(
        self, names: frozenset[str], keys: tuple[str, ...], stopped: list[str], *, force: bool
    ) -> None:
        """Stop the processes of a backend; `stopped` gets their keys, also when this raises."""
        try:
            stopped += await self.replacer.stop_users(names, keys, force=force)
        except StillRunning as error:
            stopped += error.stopped
            raise


def from_disk(request: InstallRequest, build: InstalledBackend) -> InstallRequest:
    """The request for a build that was fetched already."""
    return msgspec.structs.replace(request, force=False, digest=build.digest)
