"""The subjects that a worker serves (docs/reference/wire/subjects.md#subject-list). A new subject is one line here and
one handler in the module of its noun. The bus decodes, refuses what cannot be decoded, and replies. Subjects that only
LocalAI controllers use are in `worker/localai/orders.py`.

Installs and upgrades run in parallel; the installer serialises those of the same backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from corral.bus.api import Bus, Tokens
from corral.contract.messages.backends import (
    CANCEL_BACKEND,
    DELETE_BACKEND,
    INSTALL_BACKEND,
    LIST_BACKENDS,
    UPGRADE_BACKEND,
    VERIFY_BACKEND,
)
from corral.contract.messages.blobs import REVOKE_BLOB_TOKENS, RevokeBlobTokens
from corral.contract.messages.models import KEEP_MODELS, DoneReply, KeepModels
from corral.contract.messages.nodes import STOP_NODE
from corral.contract.messages.releases import (
    CANCEL_UPGRADE,
    UPGRADE_WORKER,
    CancelUpgrade,
    UpgradeWorker,
    UpgradeWorkerReply,
)
from corral.contract.messages.replicas import START_REPLICA, STOP_REPLICA
from corral.contract.messages.staging import CANCEL_STAGE, COLLECT_FILES, LIST_FILES, STAGE_MODEL
from corral.kit.log import get_log
from corral.worker.agent.orders.backends import BackendOrders
from corral.worker.agent.orders.replicas import ReplicaOrders
from corral.worker.agent.orders.staging import StageOrders
from corral.worker.files.model_files import WorkerFiles

log = get_log(__name__)

MAX_PARALLEL = 256  # of orders that are answered when they are done


class CorralUpgrades(Protocol):
    """The part of `worker/upgrade` that serves orders."""

    async def upgrade(self, order: UpgradeWorker, tokens: Tokens, /) -> UpgradeWorkerReply: ...
    async def cancel(self, order: CancelUpgrade, tokens: Tokens, /) -> DoneReply: ...


class OrderSubscriptions:
    def __init__(
        self,
        backends: BackendOrders,
        replicas: ReplicaOrders,
        staging: StageOrders,
        files: WorkerFiles,
        upgrades: CorralUpgrades,
        *,
        on_revoked: Callable[[str, int], None],
        on_subscribed: Callable[[], None],
    ) -> None:
        """`on_revoked` gets a node and a time: its tokens that expire until then are not valid any more."""
        self._backends = backends
        self._replicas = replicas
        self._staging = staging
        self._files = files
        self._upgrades = upgrades
        self._on_revoked = on_revoked
        self._on_subscribed = on_subscribed

    async def subscribe(self, bus: Bus, node: str, *, on_stop: Callable[[], None]) -> None:
        """`on_stop` is called when the controller orders this node to leave."""
        backends, replicas, staging = self._backends, self._replicas, self._staging

        async def stop_node(_payload: bytes, _tokens: Tokens) -> None:
            log.info("the controller orders this node to leave")
            on_stop()

        await bus.serve(INSTALL_BACKEND, backends.install, concurrency=MAX_PARALLEL, node=node)
        await bus.serve(UPGRADE_BACKEND, backends.upgrade, concurrency=MAX_PARALLEL, node=node)
        await bus.serve(DELETE_BACKEND, backends.delete, node=node)
        await bus.serve(CANCEL_BACKEND, backends.cancel, node=node)
        await bus.serve(LIST_BACKENDS, backends.list_backends, node=node)
        await bus.serve(VERIFY_BACKEND, backends.verify, concurrency=MAX_PARALLEL, node=node)
        await bus.serve(START_REPLICA, replicas.start, concurrency=MAX_PARALLEL, node=node)
        await bus.serve(STOP_REPLICA, replicas.stop, concurrency=MAX_PARALLEL, node=node)
        await bus.serve(STAGE_MODEL, staging.stage, concurrency=MAX_PARALLEL, node=node)
        await bus.serve(CANCEL_STAGE, staging.cancel, node=node)
        await bus.serve(LIST_FILES, staging.list_files, concurrency=MAX_PARALLEL, node=node)
        await bus.serve(COLLECT_FILES, staging.collect, node=node)
        await bus.serve(UPGRADE_WORKER, self._upgrades.upgrade, node=node)
        await bus.serve(CANCEL_UPGRADE, self._upgrades.cancel, node=node)
        await bus.subscribe(KEEP_MODELS, self.keep_models, node=node)
        await bus.subscribe(REVOKE_BLOB_TOKENS, self.revoke_blob_tokens, node=node)
        await bus.subscribe_bytes(STOP_NODE, stop_node, node=node)
        self._on_subscribed()

    async def revoke_blob_tokens(self, event: RevokeBlobTokens, _tokens: Tokens) -> None:
        self._on_revoked(event.node_id, event.until)

    async def keep_models(self, event: KeepModels, _tokens: Tokens) -> None:
        await self._files.keep_only(event.models)
