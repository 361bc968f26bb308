"""Orders about models: one function per subject (contract: nats.md §4.6–4.9)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from corral.bus.api import Tokens
from corral.contract.messages.models import (
    DeleteModel,
    DoneReply,
    ListRunningModels,
    ModelStopped,
    RunningModels,
    StopModel,
    UnloadModel,
)
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.worker.agent.model_files import remove_model
from corral.worker.supervisor.localai import list_running, stop_model, unload_model
from corral.worker.supervisor.supervisor import Supervisor

log = get_log(__name__)


class ModelOrders:
    def __init__(
        self,
        supervisor: Supervisor,
        models: Path,
        hosts: Callable[[], Collection[str]],
        *,
        tidy: Callable[[], Awaitable[None]],
    ) -> None:
        """`hosts`: the names under which the controller knows this machine. `tidy` gives back the room of files that
        went."""
        self._supervisor = supervisor
        self._tidy = tidy
        self._models = models
        self._hosts = hosts

    async def unload(self, order: UnloadModel, _tokens: Tokens) -> DoneReply:
        return await unload_model(self._supervisor, order, self._hosts())

    async def stop(self, order: StopModel, _tokens: Tokens) -> ModelStopped:
        return await stop_model(self._supervisor, order, self._hosts())

    async def delete(self, order: DeleteModel, _tokens: Tokens) -> DoneReply:
        try:
            await asyncio.to_thread(remove_model, self._models, order.model_name)
            await self._tidy()
        except CorralError as error:
            log.warning("model not deleted", model=order.model_name, reason=error.message)
            return DoneReply(success=False, error=error.message)
        log.info("model deleted", model=order.model_name)
        return DoneReply(success=True)

    async def list_running(self, _asked: ListRunningModels, _tokens: Tokens) -> RunningModels:
        return list_running(self._supervisor)
