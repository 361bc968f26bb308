"""A gRPC mock behind a real ingress, and OpenAI's own client in front of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.ingress_with_backends import Worksite, open_site
from tests.support.supervising import mock_grpc


class Bridged:
    """A running mock, asked as any client would ask."""

    def __init__(self, site: Worksite, process_id: str) -> None:
        self.site = site
        self.process_id = process_id
        self.client = openai.AsyncOpenAI(base_url=self.url + "/v1", api_key=site.token(), max_retries=0)

    @property
    def url(self) -> str:
        return f"{self.site.url}/replicas/{self.process_id}"

    async def ask(self, path: str, body: Any = None, *, method: str = "POST") -> tuple[int, Any]:
        return await self.site.ask(f"/replicas/{self.process_id}{path}", method=method, body=body)

    @property
    def in_flight(self) -> int:
        return self.site.routes.in_flight.of(self.process_id)


Serve = Callable[..., Awaitable[Bridged]]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """`await serve("busy:1", definition={…})` starts a mock with those options."""
    opened: list[Bridged] = []
    async with open_site(tmp_path) as site:

        async def start(*options: str, **more: Any) -> Bridged:
            load = json.dumps({"Model": "weights.bin", "Options": options})
            running = await site.supervisor.start(mock_grpc(load=load, **more))
            opened.append(Bridged(site, running.process_id))
            return opened[-1]

        yield start
        for bridged in opened:
            await bridged.client.close()
