"""What orders about backends come to on this machine: have a build, replace what runs of it, or have none of it.

`install`, `upgrade` and `delete` are between Corral peers: new processes beside old ones, nothing stopped before its
successor serves. `serve_install` and `serve_upgrade` are LocalAI's
(docs/reference/wire/backends.md#install-without-accept), for those who call without `accept`; they differ in that
nothing is stopped before its successor is on the disk. Answering is `backend_orders`'s.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from corral.blobs.progress import OnProgress, Progress
from corral.contract.manifest import OPENAI
from corral.contract.messages.backends import InstallBackend, Phase, UpgradeBackend
from corral.kit.errors import Failed, Invalid, NotFound
from corral.kit.log import get_log
from corral.worker.agent.peer import CORRAL, Peer
from corral.worker.agent.replacing import Replacing, StillThere, successor
from corral.worker.agent.resolving import Order, Resolving
from corral.worker.installer.installer import Installer
from corral.worker.installer.inventory import InstalledBackend
from corral.worker.installer.locks import NameLocks
from corral.worker.installer.requests import InstallRequest
from corral.worker.supervisor.keys import process_key
from corral.worker.supervisor.spec import ProcessSpec
from corral.worker.supervisor.states import NEVER
from corral.worker.supervisor.supervisor import Supervisor
from corral.worker.supervisor.table import Running

log = get_log(__name__)


class BackendChanges:
    def __init__(
        self, installer: Installer, supervisor: Supervisor, resolving: Resolving, replacing: Replacing
    ) -> None:
        self._installer = installer
        self._supervisor = supervisor
        self._resolving = resolving
        self._replacing = replacing
        # Processes of one backend are changed by one order at a time; its files are the installer's to guard.
        self._changing = NameLocks()
        self.peer: Peer = CORRAL  # whom we work for at the moment

    # Between Corral peers

    async def install(self, order: InstallBackend, tell: OnProgress, hold_on: Callable[[], None]) -> InstalledBackend:
        """Have it, and have what runs of it run from it. `hold_on` is called when there is no way back any more."""
        tell(Progress(Phase.RESOLVING, order.backend))
        if not (order.force or order.sources or order.digest) and (found := await self._there(order)) is not None:
            return found
        return await self._change(await self._request(order), tell, hold_on)

    async def upgrade(self, order: UpgradeBackend, tell: OnProgress, hold_on: Callable[[], None]) -> InstalledBackend:
        """The same; with `fetch_only`, what is beside the current version now."""
        tell(Progress(Phase.RESOLVING, order.backend))
        request = await self._request(order)
        if not request.digest:
            # Nobody could say what the source has now, so it is fetched to see: what is here may be an older one.
            request = msgspec.structs.replace(request, force=True)
        if order.fetch_only:
            return await self._installer.fetch_aside(request, tell)
        return await self._change(request, tell, hold_on, in_place=order.in_place)

    async def _change(
        self, request: InstallRequest, tell: OnProgress, hold_on: Callable[[], None], *, in_place: bool = False
    ) -> InstalledBackend:
        names = await self._names(request)
        if not self._replacing.users(names):
            return await self._installer.install(request, tell)
        build = await self._installer.fetch_aside(request, tell)
        async with self._changing.hold(names):
            tell(Progress(Phase.STARTING, build.name))
            if in_place:
                hold_on()
                return await self._change_in_place(request, build, names)
            try:
                pairs = await self._replacing.start_beside(names, build)
                hold_on()
                # The pointer moves only now. What was asked for is on the disk, so nothing is fetched any more.
                build = await self._installer.install(_on_disk(request, build))
            except BaseException:
                await self._replacing.give_up(names, build)
                raise
            await self._replacing.retire(pairs)
            await self._replacing.catch_up(names, build)
        return build

    async def _change_in_place(
        self, request: InstallRequest, build: InstalledBackend, names: frozenset[str]
    ) -> InstalledBackend:
        before = await self._installer.find(request.name)
        specs = await self._replacing.take_down(names, build)
        try:
            build = await self._installer.install(_on_disk(request, build))
            await self._replacing.bring_up([successor(spec, build) for spec in specs])
        except BaseException:
            now = await self._installer.find(request.name)
            if before is not None and now is not None and now.directory != before.directory:
                await self._installer.rollback(request.name, before.digest)
            await self._replacing.bring_back(specs)
            raise
        return build

    async def delete(self, name: str, stopped: list[str]) -> None:
        """Stop what runs of it, then remove it. `stopped` gets the keys of what was stopped, also when this raises
        (NotFound, Denied, Conflict, Failed)."""
        names = await self._installer.identity(name)
        async with self._changing.hold(names | {name}):
            build = await self._installer.find(name)
            if build is None or not build.is_system:  # else it is refused below, and serves on
                await self._stop_users(names, (), stopped, force=False)
            await self._installer.delete(name)

    # As the contract has it

    async def serve_install(self, order: InstallBackend, tell: OnProgress) -> Running | None:
        """Have it and start one process. None where the process would be an openai one that nobody could use."""
        name = order.backend or order.name
        key = process_key(order.model_id, name, order.replica_index)
        if not order.force and (running := await self._fast_path(key, name)) is not None:
            return running
        build = None if order.force else await self._there(order)
        if build is None:
            build = await self._obtain(order, key, tell)
        self._check_protocol(build.name, build.manifest.protocol)
        if build.manifest.protocol == OPENAI and not order.model_id:
            return None  # without a model there is nothing it could be asked
        await self._installer.ensure_libraries(build, tell)
        tell(Progress(Phase.STARTING, build.name))
        return await self._supervisor.start(
            ProcessSpec(
                backend=name,
                directory=str(build.directory),
                manifest=build.manifest,
                model=order.model_id,
                replica=order.replica_index,
                digest=build.digest,
                # The controller loads the model into it, so nobody but the controller can bring it back.
                restart=NEVER,
                listen_host=self.peer.listen_host,
                token=self.peer.token,
            )
        )

    async def serve_upgrade(self, order: UpgradeBackend, tell: OnProgress, stopped: list[str]) -> InstalledBackend:
        """Fetch it again whatever is there, stop what runs of it, switch, start nothing."""
        tell(Progress(Phase.RESOLVING, order.backend))
        request = msgspec.structs.replace(await self._request(order), force=True)
        self._check_request(request)
        build = await self._installer.fetch_aside(request, tell)
        key = process_key("", order.backend, order.replica_index)
        return await self._stop_and_switch(request, build, key, stopped)

    async def _fast_path(self, key: str, name: str) -> Running | None:
        """A process that runs is the answer, without a look at gallery or disk, if it is of this backend."""
        running = self._supervisor.find_key(key)
        if running is None:
            return None
        if running.backend == name or running.backend in await self._installer.identity(name):
            return running
        log.info("a process of another backend makes room", key=key, had=running.backend, wanted=name)
        stopped = await self._supervisor.stop(running.process_id)
        if not stopped.terminated:
            raise Failed(f"{key} runs {running.backend} and could not be stopped: {stopped.error}")
        return None

    async def _obtain(self, order: InstallBackend, key: str, tell: OnProgress) -> InstalledBackend:
        tell(Progress(Phase.RESOLVING, order.backend or order.name))
        request = await self._request(order)
        self._check_request(request)
        if not order.force:
            build = await self._installer.install(request, tell)
        else:
            build = await self._installer.fetch_aside(request, tell)
            build = await self._stop_and_switch(request, build, key, [])
        if await self._there(order) is None:
            raise NotFound(f"backend {order.backend or order.name} was not found after it was installed")
        return build

    async def _stop_and_switch(
        self, request: InstallRequest, build: InstalledBackend, key: str, stopped: list[str]
    ) -> InstalledBackend:
        names = await self._names(request)
        async with self._changing.hold(names):
            await self._stop_users(names, (key,), stopped, force=True)
            log.info("reinstalled by force", backend=request.name, stopped=", ".join(stopped))
            now = await self._installer.install(_on_disk(request, build))
            # Whoever asked for a process meanwhile, because theirs was stopped, got one of the version before.
            users = self._replacing.users(names).values()
            late = {spec.key for spec in users if spec.directory != str(now.directory)}
            again: list[str] = []
            await self._stop_users(frozenset(), tuple(late), again, force=True)
            stopped += [key for key in again if key not in stopped]
            return now

    # Small things

    async def _there(self, order: Order) -> InstalledBackend | None:
        name = order.backend or order.name
        if not name:
            return None
        return await self._installer.find(name) or await self._installer.find(name.rpartition("@")[2])

    async def _request(self, order: Order) -> InstallRequest:
        return await self._resolving.request_for(order, built_in=not self.peer.localai)

    async def _names(self, request: InstallRequest) -> frozenset[str]:
        names = set(request.names)
        for name in request.names:
            names |= await self._installer.identity(name)
        return frozenset(names)

    async def _stop_users(
        self, names: frozenset[str], keys: tuple[str, ...], stopped: list[str], *, force: bool
    ) -> None:
        try:
            stopped += await self._replacing.stop_users(names, keys, force=force)
        except StillThere as error:
            stopped += error.stopped
            raise

    def _check_request(self, request: InstallRequest) -> None:
        if request.manifest is not None:
            self._check_protocol(request.name, request.manifest.protocol)

    def _check_protocol(self, name: str, protocol: str) -> None:
        if self.peer.localai and protocol == OPENAI:
            raise Invalid(f"{name} speaks OpenAI's HTTP, and a LocalAI controller calls backends by gRPC only")


def _on_disk(request: InstallRequest, build: InstalledBackend) -> InstallRequest:
    return msgspec.structs.replace(request, force=False, digest=build.digest)
