"""A scripted LocalAI worker, exact to docs/reference/wire/nodes.md and docs/reference/wire/subjects.md.

Written from the contract, not from our code: plain HTTP, and a plain NATS client with that client's default inbox. What
it does with backends is `localai_backends.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aiohttp
import nats
from nats.aio.client import Client

from tests.compat.localai_backends import LocalAIBackends


class LocalAIWorker:
    def __init__(
        self, controller: str, bus_url: str, token: str, name: str, *, heartbeat_s: float = 0.3, host: str = ""
    ) -> None:
        """`host`: where it says it is; its name where it is nowhere really."""
        self.controller = controller
        self.bus_url = bus_url
        self.token = token
        self.name = name
        self.heartbeat_s = heartbeat_s
        self.node_id = ""
        self.statuses: list[str] = []  # every status a registration told us
        self.heartbeats: list[int] = []  # HTTP status of every heartbeat
        self.errors: list[str] = []
        self.nats: Client | None = None
        self.host = host or name
        self.http_port = 50050
        self.backends = LocalAIBackends(self.host, "nvidia-cuda-12")
        self._jwt = ""
        self._seed = ""

    async def register(self) -> dict[str, Any]:
        body = {
            "name": self.name,
            "address": f"{self.host}:50051",
            "http_address": f"{self.host}:{self.http_port}",
            "token": self.token,
            "total_vram": 25769803776,
            "available_vram": 25769803776,
            "gpu_vendor": "nvidia",
            "gpu_compute_capability": "8.9",
            "capability": "nvidia-cuda-12",
            "max_replicas_per_model": 1,
            "total_disk": 1000000000000,
            "available_disk": 400000000000,
            "labels": {"node.replica-slots": "1", "tier": "fast"},
        }
        status, answer = await self.post("/api/node/register", body)
        assert status == 201, (status, answer)
        assert isinstance(answer, dict)
        self.node_id = answer["id"]
        self.statuses.append(answer["status"])
        self._jwt = answer.get("nats_jwt", "")
        self._seed = answer.get("nats_user_seed", "")
        return answer

    async def acquire(self, *, tries: int = 100, wait_s: float = 0.2) -> None:
        """The acquire loop with require-auth: register again while pending or without credentials."""
        for _ in range(tries):
            answer = await self.register()
            if answer["status"] != "pending" and self._jwt:
                return
            await asyncio.sleep(wait_s)
        raise AssertionError(f"no credentials after {tries} tries: {self.statuses}")

    async def connect(self) -> None:
        async def failed(error: Exception) -> None:
            self.errors.append(str(error))

        def user_jwt() -> bytearray:
            return bytearray(self._jwt.encode())

        def sign(nonce: str) -> bytes:
            import base64

            import nkeys

            return base64.b64encode(nkeys.from_seed(bytearray(self._seed.encode())).sign(nonce.encode()))

        self.nats = await nats.connect(
            self.bus_url,
            user_jwt_cb=user_jwt,
            signature_cb=sign,
            error_cb=failed,
            connect_timeout=30,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.2,
        )
        await self.backends.listen(self.nats, self.node_id)

    async def run_heartbeats(self) -> None:
        """Only while NATS is connected; the result's status is ignored, as upstream does."""
        while True:
            if self.nats is not None and self.nats.is_connected:
                beat = {"available_vram": 20000000000, "available_disk": 300000000000}
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):  # the next one comes all the same
                    status, _ = await self.post(f"/api/node/{self.node_id}/heartbeat", beat)
                    self.heartbeats.append(status)
            await asyncio.sleep(self.heartbeat_s)

    async def shut_down(self) -> list[int]:
        """Drain, wait until nothing is in flight, deregister."""
        drained, _ = await self.post(f"/api/node/{self.node_id}/drain")
        status, rows = await self.get(f"/api/node/{self.node_id}/models")
        assert sum(row["in_flight"] for row in rows) == 0
        left, _ = await self.post(f"/api/node/{self.node_id}/deregister")
        return [drained, status, left]

    async def close(self) -> None:
        await self.backends.close()
        if self.nats is not None:
            with contextlib.suppress(Exception):
                await self.nats.close()

    async def post(self, path: str, body: object = None) -> tuple[int, Any]:
        return await self._call("POST", path, body)

    async def get(self, path: str) -> tuple[int, Any]:
        return await self._call("GET", path, None)

    async def _call(self, method: str, path: str, body: object) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.token}"}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http,
            http.request(method, self.controller + path, json=body, headers=headers) as answer,
        ):
            return answer.status, await answer.json()
