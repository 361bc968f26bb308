"""Handlers of the orders that only LocalAI controllers send (docs/reference/wire/models.md,
docs/reference/wire/backends.md#install-without-accept).

`model.*`, `models.running` and `backend.stop` are subjects of their own. `backend.install`, `backend.upgrade` and
`backend.delete` without `accept` come through `agent/orders/backends.py`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from corral.bus.api import Bus, Tokens
from corral.contract.messages.backends import (
    STOP_BACKEND,
    DeleteBackend,
    InstallBackend,
    InstallReply,
    StopBackend,
    StoppedReply,
    UpgradeBackend,
)
from corral.contract.messages.models import (
    DELETE_MODEL,
    LIST_RUNNING_MODELS,
    STOP_MODEL,
    UNLOAD_MODEL,
    DeleteModel,
    DoneReply,
    ListRunningModels,
    ModelStopped,
    RunningModels,
    StopModel,
    UnloadModel,
)
from corral.contract.messages.nodes import NodeRegistered
from corral.kit.errors import CorralError
from corral.kit.hosts import HostPort
from corral.kit.log import get_log
from corral.worker.agent.orders.backend_changes import BackendChanges
from corral.worker.files.model_files import WorkerFiles, remove_model
from corral.worker.installer.installer import Installer
from corral.worker.installer.progress import ProgressPublisher
from corral.worker.localai.backends import DirectChanges
from corral.worker.localai.file_keys import MODELS, FileFolders
from corral.worker.localai.models import list_running, stop_model, unload_model
from corral.worker.localai.peer import CORRAL, localai_peer
from corral.worker.settings.network import LocalAISettings
from corral.worker.supervisor.supervisor import Supervisor

if TYPE_CHECKING:
    from corral.worker.localai.file_orders import FileOrders

log = get_log(__name__)


class LocalAIOrders:
    def __init__(
        self,
        settings: LocalAISettings,
        changes: BackendChanges,
        installer: Installer,
        supervisor: Supervisor,
        files: WorkerFiles,
        models_dir: Path,
        *,
        token: str,
        file_orders: FileOrders | None = None,
    ) -> None:
        """`token` is the fleet's registration token: a LocalAI controller shows it to processes. `file_orders`: None
        without an object storage."""
        self._settings = settings
        self._changes = changes
        self._direct = DirectChanges(changes, installer, supervisor)
        self._installer = installer
        self._supervisor = supervisor
        self._files = files
        self._models_dir = models_dir
        self._cached_models = FileFolders.beside(models_dir).cache / MODELS
        self._token = token
        self._file_orders = file_orders
        self._own_ports = supervisor.ports
        self._peer = CORRAL

    def start_session(self, reply: NodeRegistered, *, grpc_address: str) -> None:
        """A controller accepted the registration: start processes from now on as this controller reaches them."""
        if reply.protocol > 0:
            self._peer = CORRAL
        else:
            self._peer = localai_peer(self._settings, grpc_address=grpc_address, token=self._token)
        self._changes.has_builtin_gallery = not self._peer.is_localai
        self._supervisor.use_ports(self._peer.ports or self._own_ports)

    async def subscribe(self, bus: Bus, node: str) -> None:
        await bus.subscribe(STOP_BACKEND, self.stop_backend, node=node)
        await bus.serve(UNLOAD_MODEL, self.unload_model, node=node)
        await bus.serve(STOP_MODEL, self.stop_model, node=node)
        await bus.serve(DELETE_MODEL, self.delete_model, node=node)
        await bus.serve(LIST_RUNNING_MODELS, self.list_running_models, node=node)
        if self._file_orders is not None:
            await self._file_orders.subscribe(bus, node)

    # One handler for each subject

    async def stop_backend(self, order: StopBackend, _tokens: Tokens) -> None:
        """Stop the processes of a backend; an empty name means all. The bus drops a payload that cannot be decoded."""
        if order.backend:
            names = await self._installer.identity(order.backend)
            stopped = await self._supervisor.stop_named(order.backend, names, force=order.force)
        else:
            stopped = await self._supervisor.stop_all(force=order.force)
        log.info("processes stopped by order", backend=order.backend or "all", stopped=len(stopped))

    async def unload_model(self, order: UnloadModel, _tokens: Tokens) -> DoneReply:
        return await unload_model(self._supervisor, order, self._peer.hosts)

    async def stop_model(self, order: StopModel, _tokens: Tokens) -> ModelStopped:
        return await stop_model(self._supervisor, order, self._peer.hosts)

    async def delete_model(self, order: DeleteModel, _tokens: Tokens) -> DoneReply:
        try:
            await asyncio.to_thread(remove_model, self._models_dir, order.model_name)
            # Files that came through an object storage are there; upstream forgets them.
            await asyncio.to_thread(remove_model, self._cached_models, order.model_name)
            await self._files.tidy()
        except CorralError as error:
            log.warning("model not deleted", model=order.model_name, reason=error.message)
            return DoneReply(success=False, error=error.message)
        log.info("model deleted", model=order.model_name)
        return DoneReply(success=True)

    async def list_running_models(self, _request: ListRunningModels, _tokens: Tokens) -> RunningModels:
        return list_running(self._supervisor)

    # Orders for backends without `accept`

    async def install(self, order: InstallBackend, progress: ProgressPublisher) -> InstallReply:
        try:
            running = await self._direct.install(order, progress.tell, self._peer)
        except CorralError as error:
            log.warning("install failed", backend=order.backend, error=error.message)
            return InstallReply(success=False, error=error.message)
        address = str(HostPort(self._peer.host, running.port)) if running is not None else ""
        return InstallReply(success=True, address=address)

    async def upgrade(self, order: UpgradeBackend, progress: ProgressPublisher) -> StoppedReply:
        stopped: list[str] = []
        try:
            await self._direct.upgrade(order, progress.tell, stopped, self._peer)
        except CorralError as error:
            log.warning("upgrade failed", backend=order.backend, error=error.message)
            return _stopped_reply(error.message, stopped)
        return _stopped_reply("", stopped)

    async def delete(self, order: DeleteBackend) -> StoppedReply:
        stopped: list[str] = []
        try:
            await self._changes.delete(order.backend, stopped)
        except CorralError as error:
            log.warning("delete failed", backend=order.backend, error=error.message)
            return _stopped_reply(error.message, stopped)
        return _stopped_reply("", stopped)


def _stopped_reply(error: str, stopped: list[str]) -> StoppedReply:
    return StoppedReply(
        success=not error, error=error, stopped_process_keys=tuple(stopped), reports_stopped_processes=True
    )
