"""A gateway before two scripted nodes, for tests of what happens to requests for models."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp

from corral.gateway.main import Gateway
from tests.integration.gateway.conftest import USER, OpenGateway, bearer
from tests.integration.gateway.scripted_controller import ScriptedController
from tests.integration.gateway.scripted_ingress import ScriptedIngress, running_ingress
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
SMALL = {"id": "small", "revision": "r1"}
SHORT = {
    "receipts_interval_s": 0.02,
    "load_wait_s": 5.0,
    "queue_wait_s": 5.0,
    "load_poll_s": 0.5,
    "eject_s": 0.2,
}


@dataclass
class GatewayFleet:
    """Two nodes, each with an ingress, and what opens gateways before them."""

    controller: ScriptedController
    one: ScriptedIngress
    two: ScriptedIngress
    http: aiohttp.ClientSession
    open_one: OpenGateway
    exits: AsyncExitStack

    async def gateway(self, **more: Any) -> Gateway:
        gateway = await self.exits.enter_async_context(self.open_one(**{**SHORT, **more}))
        await gateway.views.run_once()
        return gateway

    async def ask(
        self, gateway: Gateway, *, secret: str = USER, path: str = CHAT, **body: Any
    ) -> tuple[int, dict[str, Any], Mapping[str, str]]:
        asked = {"model": "small", "messages": [{"role": "user", "content": "hi"}], **body}
        async with self.http.post(f"{gateway.url}{path}", headers=bearer(secret), json=asked) as answer:
            return answer.status, json.loads(await answer.read()), answer.headers

    async def who(self, gateway: Gateway, **body: Any) -> str:
        """The process that answered."""
        status, answer, _ = await self.ask(gateway, **body)
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    def both(self, **more: Any) -> None:
        """A replica on each node."""
        self.controller.change(replicas=[self.one.replica("p1", **more), self.two.replica("p2", **more)])

    async def receipts(self, count: int) -> list[dict[str, Any]]:
        await until(lambda: len(self.controller.receipts) >= count, f"{count} receipts")
        return self.controller.receipts


@contextlib.asynccontextmanager
async def open_fleet(
    controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession
) -> AsyncIterator[GatewayFleet]:
    async with running_ingress("n1") as one, running_ingress("n2") as two, AsyncExitStack() as exits:
        controller.change(models=[SMALL], nodes=[one.view, two.view])
        yield GatewayFleet(controller, one, two, http, open_one, exits)
