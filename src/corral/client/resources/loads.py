"""Having a model ready, and letting it go: what `corral chat` and `corral models load|unload` ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from corral.client.caller import Caller, segment
from corral.client.errors import AWAY
from corral.contract.loads import LoadState, LoadStatus
from corral.kit.backoff import Backoff
from corral.kit.errors import NotFound

_WAIT_S = 20.0  # the controller answers at once when something moves


class Loads:
    def __init__(self, caller: Caller, *, retry_s: tuple[float, float] = (0.5, 5.0)) -> None:
        """`retry_s`: when a controller that went away is asked again, first and at most."""
        self._caller = caller
        self._retry_s = retry_s

    async def ask(self, model: str) -> LoadStatus:
        """Have a replica of it; out of a gallery when the fleet does not have the model yet."""
        return await self._caller.call("POST", f"/api/models/{segment(model)}/load", LoadStatus, timeout_s=120.0)

    async def find(self, model: str) -> LoadStatus | None:
        """How far its load is; None: it is not being loaded. Whoever may use models may ask."""
        try:
            return await self._caller.call("GET", f"/api/models/{segment(model)}/load-status", LoadStatus)
        except NotFound:
            return None

    async def follow(self, begun: LoadStatus) -> AsyncGenerator[LoadStatus, None]:
        """From what `ask` said, every change, until it answers or has failed. A controller that goes away meanwhile is
        waited for: the load is not lost with it."""
        told = begun
        backoff = Backoff(*self._retry_s)
        yield told
        while told.state not in (LoadState.LOADED, LoadState.FAILED):
            path = f"/api/models/{segment(begun.model)}/load-status?since={max(told.version, 1)}&wait_s={_WAIT_S:g}"
            try:
                told = await self._caller.call("GET", path, LoadStatus, timeout_s=_WAIT_S + 30)
            except NotFound:  # somebody took it back
                return
            except AWAY:
                yield msgspec.structs.replace(told, message="waiting for the controller, which does not answer now")
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            yield told

    async def unload(self, model: str, *, node: str = "", force: bool = False) -> str:
        """In words, what will happen."""
        if node:
            path, body = f"/api/nodes/{segment(node)}/models/unload", {"model_name": model}
            told = await self._caller.call("POST", path, dict[str, Any], body)
        else:
            path = f"/api/models/{segment(model)}/unload" + ("?force=true" if force else "")
            told = await self._caller.call("POST", path, dict[str, Any])
        return str(told.get("message", ""))

    async def replicas(self, model: str = "", *, node: str = "") -> list[dict[str, Any]]:
        """Replica rows (docs/reference/wire/http-nodes.md#replica-row): of a model, of a node, or all that can
        answer."""
        path = "/api/nodes/models"
        if model:
            path = f"/api/models/{segment(model)}/replicas"
        elif node:
            path = f"/api/nodes/{segment(node)}/models"
        return await self._caller.call("GET", path, list[dict[str, Any]])
