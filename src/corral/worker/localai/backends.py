"""Install and upgrade as LocalAI controllers order them (docs/reference/wire/backends.md#install-without-accept): an
install also starts a process, an upgrade stops the processes of the old version and starts none. Unlike LocalAI, no
process stops before the new build is on the disk.
"""

from __future__ import annotations

import msgspec

from corral.blobs.progress import OnProgress, Progress
from corral.contract.manifest import OPENAI
from corral.contract.messages.backends import InstallBackend, Phase, UpgradeBackend
from corral.kit.errors import Failed, Invalid, NotFound
from corral.kit.log import get_log
from corral.worker.agent.orders.backend_changes import BackendChanges, from_disk
from corral.worker.installer.installer import Installer
from corral.worker.installer.inventory import InstalledBackend
from corral.worker.installer.requests import InstallRequest
from corral.worker.localai.peer import Peer
from corral.worker.supervisor.keys import process_key
from corral.worker.supervisor.spec import ProcessSpec
from corral.worker.supervisor.states import NEVER
from corral.worker.supervisor.supervisor import Supervisor
from corral.worker.supervisor.table import Running

log = get_log(__name__)


class DirectChanges:
    def __init__(self, changes: BackendChanges, installer: Installer, supervisor: Supervisor) -> None:
        self._changes = changes
        self._installer = installer
        self._supervisor = supervisor

    async def install(self, order: InstallBackend, on_progress: OnProgress, peer: Peer) -> Running | None:
        """Install a build and start one process. None for an openai backend without a model: nobody could use it."""
        name = order.backend or order.name
        key = process_key(order.model_id, name, order.replica_index)
        if not order.force and (running := await self._find_running(key, name)) is not None:
            return running
        build = None if order.force else await self._changes.find_installed(order)
        if build is None:
            build = await self._obtain(order, key, on_progress, peer)
        _check_protocol(build.name, build.manifest.protocol, peer)
        if build.manifest.protocol == OPENAI and not order.model_id:
            return None
        await self._installer.ensure_libraries(build, on_progress)
        on_progress(Progress(Phase.STARTING, build.name))
        return await self._supervisor.start(
            ProcessSpec(
                backend=name,
                directory=str(build.directory),
                manifest=build.manifest,
                model=order.model_id,
                replica=order.replica_index,
                digest=build.digest,
                # The controller loads the model into the process, so only the controller can start it again.
                restart=NEVER,
                listen_host=peer.listen_host,
                token=peer.token,
            )
        )

    async def upgrade(
        self, order: UpgradeBackend, on_progress: OnProgress, stopped: list[str], peer: Peer
    ) -> InstalledBackend:
        """Fetch the build even if it is installed, stop the backend's processes, switch to it, start no process."""
        on_progress(Progress(Phase.RESOLVING, order.backend))
        request = msgspec.structs.replace(await self._changes.resolve(order), force=True)
        _check_request(request, peer)
        build = await self._installer.fetch_aside(request, on_progress)
        key = process_key("", order.backend, order.replica_index)
        return await self._stop_and_switch(request, build, key, stopped)

    async def _find_running(self, key: str, name: str) -> Running | None:
        """A process of this backend under this key, found without reading gallery or disk. A process of another backend
        is stopped: the key is needed."""
        running = self._supervisor.find_key(key)
        if running is None:
            return None
        if running.backend == name or running.backend in await self._installer.identity(name):
            return running
        log.info("a process of another backend is stopped", key=key, had=running.backend, wanted=name)
        stopped = await self._supervisor.stop(running.process_id)
        if not stopped.terminated:
            raise Failed(f"{key} runs {running.backend} and could not be stopped: {stopped.error}")
        return None

    async def _obtain(self, order: InstallBackend, key: str, on_progress: OnProgress, peer: Peer) -> InstalledBackend:
        on_progress(Progress(Phase.RESOLVING, order.backend or order.name))
        request = await self._changes.resolve(order)
        _check_request(request, peer)
        if not order.force:
            build = await self._installer.install(request, on_progress)
        else:
            build = await self._installer.fetch_aside(request, on_progress)
            build = await self._stop_and_switch(request, build, key, [])
        if await self._changes.find_installed(order) is None:
            raise NotFound(f"backend {order.backend or order.name} was not found after it was installed")
        return build

    async def _stop_and_switch(
        self, request: InstallRequest, build: InstalledBackend, key: str, stopped: list[str]
    ) -> InstalledBackend:
        changes = self._changes
        names = await changes.names_of(request)
        async with changes.locks.hold(names):
            await changes.stop_users(names, (key,), stopped, force=True)
            log.info("reinstalled by force", backend=request.name, stopped=", ".join(stopped))
            now = await self._installer.install(from_disk(request, build))
            # A process that was requested in the meantime, in place of a stopped one, runs the old version.
            users = changes.replacer.users(names).values()
            late = {spec.key for spec in users if spec.directory != str(now.directory)}
            again: list[str] = []
            await changes.stop_users(frozenset(), tuple(late), again, force=True)
            stopped += [key for key in again if key not in stopped]
            return now


def _check_request(request: InstallRequest, peer: Peer) -> None:
    if request.manifest is not None:
        _check_protocol(request.name, request.manifest.protocol, peer)


def _check_protocol(name: str, protocol: str, peer: Peer) -> None:
    if peer.is_localai and protocol == OPENAI:
        raise Invalid(f"{name} speaks OpenAI's HTTP, and a LocalAI controller calls backends by gRPC only")
