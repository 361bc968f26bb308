"""Loading and unloading models, for `corral chat` and `corral models load|unload`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from corral.client.connection import ApiConnection, segment
from corral.client.errors import NO_ANSWER
from corral.contract.loads import LoadState, LoadStatus
from corral.kit.errors import NotFound
from corral.kit.retry import Backoff

_WAIT_S = 20.0  # the controller answers at once when something moves


class Loads:
    def __init__(self, api: ApiConnection, *, retry_s: tuple[float, float] = (0.5, 5.0)) -> None:
        """`retry_s`: first and longest wait before a controller that does not answer is called again."""
        self._api = api
        self._retry_s = retry_s

    async def ask(self, model: str) -> LoadStatus:
        """Load a replica of the model; a model that the fleet does not have is installed from a gallery."""
        return await self._api.call("POST", f"/api/models/{segment(model)}/load", LoadStatus, timeout_s=120.0)

    async def find(self, model: str) -> LoadStatus | None:
        """The progress of its load; None: it is not being loaded. Any key that may use models is enough."""
        try:
            return await self._api.call("GET", f"/api/models/{segment(model)}/load-status", LoadStatus)
        except NotFound:
            return None

    async def follow(self, begun: LoadStatus) -> AsyncGenerator[LoadStatus, None]:
        """Every change since `begun`, until the model is loaded or the load has failed. Waits for a controller that
        does not answer: the load does not depend on it."""
        answer = begun
        backoff = Backoff(*self._retry_s)
        yield answer
        while answer.state not in (LoadState.LOADED, LoadState.FAILED):
            path = f"/api/models/{segment(begun.model)}/load-status?since={max(answer.version, 1)}&wait_s={_WAIT_S:g}"
            try:
                answer = await self._api.call("GET", path, LoadStatus, timeout_s=_WAIT_S + 30)
            except NotFound:  # the load was withdrawn
                return
            except NO_ANSWER:
                yield msgspec.structs.replace(answer, message="waiting for the controller, which does not answer now")
                await asyncio.sleep(backoff.next_s())
                continue
            backoff.reset()
            yield answer

    async def unload(self, model: str, *, node: str = "", force: bool = False) -> str:
        """Returns a message that tells what will happen."""
        if node:
            path, body = f"/api/nodes/{segment(node)}/models/unload", {"model_name": model}
            answer = await self._api.call("POST", path, dict[str, Any], body)
        else:
            path = f"/api/models/{segment(model)}/unload" + ("?force=true" if force else "")
            answer = await self._api.call("POST", path, dict[str, Any])
        return str(answer.get("message", ""))

    async def replicas(self, model: str = "", *, node: str = "") -> list[dict[str, Any]]:
        """Replica rows (docs/reference/wire/http-nodes.md#replica-row): of a model, of a node, or all that are
        ready."""
        path = "/api/nodes/models"
        if model:
            path = f"/api/models/{segment(model)}/replicas"
        elif node:
            path = f"/api/nodes/{segment(node)}/models"
        return await self._api.call("GET", path, list[dict[str, Any]])
