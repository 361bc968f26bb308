"""Orders from the bus: one function per subject, and the list that ties them (contract: nats.md §2–4).

A new subject is its line in `listen` and its function here. Decoding, refusing what cannot be decoded, and answering
are the bus's part.
"""

from __future__ import annotations

from collections.abc import Callable

from corral.bus.api import Bus, Tokens
from corral.contract.messages.backends import LIST_BACKENDS, STOP_BACKEND, BackendList, ListBackends, StopBackend
from corral.contract.messages.models import LIST_RUNNING_MODELS, ListRunningModels, RunningModels
from corral.contract.messages.nodes import STOP_NODE
from corral.kit.log import get_log

log = get_log(__name__)


class Orders:
    def __init__(self, *, leave: Callable[[], None]) -> None:
        self._leave = leave

    async def listen(self, bus: Bus, node: str) -> None:
        await bus.serve(LIST_BACKENDS, self.list_backends, node=node)
        await bus.serve(LIST_RUNNING_MODELS, self.list_running_models, node=node)
        await bus.subscribe(STOP_BACKEND, self.stop_backend, node=node)
        await bus.subscribe_bytes(STOP_NODE, self.stop_node, node=node)

    async def list_backends(self, _asked: ListBackends, _tokens: Tokens) -> BackendList:
        return BackendList(backends=())

    async def list_running_models(self, _asked: ListRunningModels, _tokens: Tokens) -> RunningModels:
        return RunningModels(models=())

    async def stop_backend(self, order: StopBackend, _tokens: Tokens) -> None:
        # An empty name means all of them; a payload nobody can read must not be taken for that, and never gets here.
        log.info("told to stop a backend, none runs", backend=order.backend or "all")

    async def stop_node(self, _payload: bytes, _tokens: Tokens) -> None:
        # Any payload counts, so it is not decoded. A second stop finds the worker on its way already.
        log.info("told to leave over the bus")
        self._leave()
