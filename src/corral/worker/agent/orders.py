"""Orders from the bus: the list of subjects (docs/reference/wire/subjects.md#subject-list). A new subject is its line
here and its function in the module of its noun. Decoding, refusing what cannot be decoded, and answering are the bus's
part.

Installs and upgrades run side by side, one after another for the same backend: that is the installer's part.
"""

from __future__ import annotations

from collections.abc import Callable

from corral.bus.api import Bus, Tokens
from corral.contract.messages.backends import (
    CANCEL_BACKEND,
    DELETE_BACKEND,
    INSTALL_BACKEND,
    LIST_BACKENDS,
    STOP_BACKEND,
    UPGRADE_BACKEND,
    VERIFY_BACKEND,
)
from corral.contract.messages.models import DELETE_MODEL, KEEP_MODELS, LIST_RUNNING_MODELS, STOP_MODEL, UNLOAD_MODEL
from corral.contract.messages.nodes import STOP_NODE
from corral.contract.messages.replicas import START_REPLICA, STOP_REPLICA
from corral.kit.log import get_log
from corral.worker.agent.backend_orders import BackendOrders
from corral.worker.agent.model_orders import ModelOrders
from corral.worker.agent.replica_orders import ReplicaOrders

log = get_log(__name__)

MANY = 256  # side by side, of those that are answered when they are done


class Orders:
    def __init__(
        self, backends: BackendOrders, models: ModelOrders, replicas: ReplicaOrders, *, leave: Callable[[], None]
    ) -> None:
        self._backends = backends
        self._models = models
        self._replicas = replicas
        self._leave = leave

    async def listen(self, bus: Bus, node: str) -> None:
        backends, models, replicas = self._backends, self._models, self._replicas
        await bus.serve(INSTALL_BACKEND, backends.install, concurrency=MANY, node=node)
        await bus.serve(UPGRADE_BACKEND, backends.upgrade, concurrency=MANY, node=node)
        await bus.serve(DELETE_BACKEND, backends.delete, node=node)
        await bus.serve(CANCEL_BACKEND, backends.cancel, node=node)
        await bus.serve(LIST_BACKENDS, backends.list_backends, node=node)
        await bus.serve(VERIFY_BACKEND, backends.verify, concurrency=MANY, node=node)
        await bus.subscribe(STOP_BACKEND, backends.stop, node=node)
        await bus.serve(UNLOAD_MODEL, models.unload, node=node)
        await bus.serve(STOP_MODEL, models.stop, node=node)
        await bus.serve(DELETE_MODEL, models.delete, node=node)
        await bus.serve(LIST_RUNNING_MODELS, models.list_running, node=node)
        await bus.subscribe(KEEP_MODELS, models.keep, node=node)
        await bus.serve(START_REPLICA, replicas.start, concurrency=MANY, node=node)
        await bus.serve(STOP_REPLICA, replicas.stop, concurrency=MANY, node=node)
        await bus.subscribe_bytes(STOP_NODE, self.stop_node, node=node)

    async def stop_node(self, _payload: bytes, _tokens: Tokens) -> None:
        log.info("told to leave over the bus")
        self._leave()
