"""Orders about models: one function per subject (docs/reference/wire/models.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from corral.bus.api import Tokens
from corral.contract.messages.models import (
    DeleteModel,
    DoneReply,
    KeepModels,
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


class StagedFiles(Protocol):
    """Of `worker/files`."""

    async def tidy(self) -> None:
        """Give back the room of files that went."""

    async def keep_only(self, models: Collection[str]) -> None:
        """Files of other models may go."""


class ModelOrders:
    def __init__(
        self,
        supervisor: Supervisor,
        models: Path,
        hosts: Callable[[], Collection[str]],
        *,
        files: StagedFiles,
    ) -> None:
        """`hosts`: the names under which the controller knows this machine."""
        self._supervisor = supervisor
        self._files = files
        self._models = models
        self._hosts = hosts

    async def unload(self, order: UnloadModel, _tokens: Tokens) -> DoneReply:
        return await unload_model(self._supervisor, order, self._hosts())

    async def stop(self, order: StopModel, _tokens: Tokens) -> ModelStopped:
        return await stop_model(self._supervisor, order, self._hosts())

    async def delete(self, order: DeleteModel, _tokens: Tokens) -> DoneReply:
        try:
            await asyncio.to_thread(remove_model, self._models, order.model_name)
            await self._files.tidy()
        except CorralError as error:
            log.warning("model not deleted", model=order.model_name, reason=error.message)
            return DoneReply(success=False, error=error.message)
        log.info("model deleted", model=order.model_name)
        return DoneReply(success=True)

    async def keep(self, told: KeepModels, _tokens: Tokens) -> None:
        await self._files.keep_only(told.models)

    async def list_running(self, _asked: ListRunningModels, _tokens: Tokens) -> RunningModels:
        return list_running(self._supervisor)
