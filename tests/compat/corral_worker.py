"""A Corral worker in a process of its own, under a scripted LocalAI controller."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.compat.localai_controller import LocalAIController
from tests.support.fleet import http
from tests.support.nats import NatsServer
from tests.support.ordering import tarred
from tests.support.processes import CORRAL, Process, clean_env, free_port
from tests.support.supervising import MOCK, swept
from tests.support.waiting import until

OPENAI = {"protocol": "openai", "command": ["./run.sh"]}


class CorralWorker:
    """The worker, and what it was told."""

    def __init__(self, controller: LocalAIController, process: Process, folder: Path, base: int) -> None:
        self.controller = controller
        self.process = process
        self.folder = folder
        self.base = base

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.base - 1}"

    async def ask(self, subject: str, payload: object) -> dict[str, Any]:
        return await self.controller.ask("w1", subject, payload)

    async def install(self, backend: str, **more: Any) -> dict[str, Any]:
        order = {"backend": backend, "backend_galleries": self.controller.galleries} | more
        return await self.ask("backend.install", order)

    async def rows(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in (await self.ask("backend.list", {}))["backends"] or ()}


@asynccontextmanager
async def run_worker(
    server: NatsServer, folder: Path, *, bus_url: str = "", auto_approve: bool = True, **more: str
) -> AsyncIterator[CorralWorker]:
    """Set up with nothing but the settings LocalAI's workers have; durations apart. `more`: further variables."""
    base = free_port()  # the ingress takes the port below it
    base += 1
    async with LocalAIController(server, auto_approve=auto_approve) as controller:
        env = clean_env(
            folder,
            LOCALAI_REGISTER_TO=controller.url,
            LOCALAI_NATS_URL=bus_url or server.url,
            LOCALAI_NATS_REQUIRE_AUTH="true",
            LOCALAI_REGISTRATION_TOKEN=controller.token,
            LOCALAI_NODE_NAME="w1",
            LOCALAI_NODE_LABELS="tier=fast, room=barn",
            LOCALAI_ADDR=f"127.0.0.1:{base}",
            LOCALAI_GRPC_MAX_PORT=str(base + 400),
            LOCALAI_BACKENDS_PATH=str(folder / "backends"),
            LOCALAI_MODELS_PATH=str(folder / "models"),
            LOCALAI_HEARTBEAT_INTERVAL="300ms",
            CORRAL_DATA=str(folder / "w"),
            CORRAL_BACKEND_POLL="50ms",
            CORRAL_BACKEND_PORT_REST="1s",
            CORRAL_RETRY_FIRST="100ms",
            CORRAL_RETRY_CAP="1s",
            **more,
        )
        with swept(folder / "w" / "processes"):
            process = Process((*CORRAL, "worker"), env, folder / "worker.log")
            try:
                found = CorralWorker(controller, process, folder, base)
                if auto_approve:
                    await until(lambda: is_ready(found), "ready worker", 60)
                yield found
            finally:
                await asyncio.to_thread(process.close)


async def is_ready(worker: CorralWorker) -> bool:
    assert worker.process.running, worker.process.output()
    answer = await asyncio.to_thread(http, "GET", worker.http_url + "/readyz")
    return answer.status == 200 and bool(worker.controller.beats)


def publish(controller: LocalAIController, version: str) -> None:
    """The mock, saying this version, as an archive beside the gallery."""
    program = {path.name: path.read_bytes() for path in MOCK.iterdir() if path.is_file()}
    name = f"mock-{version}.tar"
    controller.files[name] = tarred(program | {"VERSION": f"{version}\n".encode()})
    known = {"uri": f"{controller.url}/files/{name}", "sha256": hashlib.sha256(controller.files[name]).hexdigest()}
    controller.gallery = [
        {"name": "mock", "alias": "mock", "capabilities": {"default": "mock-grpc"}},
        {"name": "mock-grpc", "alias": "mock", "version": version} | known,
        {"name": "spoken", "corral": OPENAI} | known,
    ]
