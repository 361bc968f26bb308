"""Two Corral controllers with their gateways, and LocalAI workers whose processes and files are real."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai

from tests.compat.localai_files import LocalAIFiles
from tests.compat.localai_processes import LocalAIProcesses
from tests.compat.localai_worker import LocalAIWorker
from tests.support.backend_images import gallery_of
from tests.support.cluster import Cluster, Member
from tests.support.ordering import mock_copy
from tests.support.waiting import until

SHARED = "the-shared-registration-token"


class ServingFleet:
    def __init__(self, folder: Path, store_url: str, *, members: int = 2, **env: str) -> None:
        """`env`: more settings of the controllers."""
        self.folder = folder
        self.source = mock_copy(folder / "mock")
        gallery = gallery_of(
            folder / "galleries",
            {
                "name": "engine",
                "alias": "engine",
                "capabilities": {"default": "cpu", "nvidia-cuda-12": "cuda12-engine"},
            },
            {"name": "cuda12-engine", "alias": "engine", "uri": str(self.source), "version": "1"},
            {
                "name": "http-engine",
                "uri": str(self.source),
                "version": "1",
                "corral": {"protocol": "openai", "command": ["./run.sh", "--http", "{host}:{port}"]},
            },
        )
        self.cluster = Cluster(
            folder,
            store_url,
            members=members,
            CORRAL_COMPAT_LOCALAI="true",
            CORRAL_REGISTRATION_TOKEN=SHARED,
            CORRAL_PEER_CHECK_INTERVAL="300ms",
            CORRAL_REPLICA_INTERVAL="1s",
            CORRAL_STALE_AFTER="10s",
            CORRAL_FILE_FOLDERS=str(folder),
            **gallery,
            **env,
        )

    @property
    def one(self) -> Member:
        return self.cluster.members[0]

    @property
    def two(self) -> Member:
        return self.cluster.members[1]

    async def api(self, method: str, path: str, body: object = None, member: Member | None = None) -> Any:
        answer = await asyncio.to_thread(self.cluster.api, member or self.one, method, path, body)
        assert answer.status < 300, (path, answer.status, answer.body)
        return answer.json() if answer.body else None

    async def model(self, name: str, **definition: object) -> None:
        whole = {"name": name, "backend": "engine", "parallel": 4, **definition}
        await self.api("POST", "/api/models", {"definition": whole})

    async def rows(self, model: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self.api("GET", f"/api/models/{model}/replicas")
        return found

    @contextlib.asynccontextmanager
    async def client(self, member: Member | None = None) -> AsyncIterator[openai.AsyncOpenAI]:
        url = (member or self.one).url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=self.cluster.key, max_retries=0, timeout=40) as client:
            yield client

    @contextlib.asynccontextmanager
    async def worker(
        self, name: str, *, prepare: Callable[[ServingWorker], object] = lambda _worker: None
    ) -> AsyncIterator[ServingWorker]:
        """Approved and healthy; forgotten afterwards, with the models that were installed meanwhile. `prepare` is
        called before it joins."""
        worker = ServingWorker(self, name)
        prepare(worker)
        await worker.files.start()
        worker.http_port = worker.files.port
        await worker.register()
        await self.api("POST", f"/api/nodes/{name}/approve")
        await worker.acquire()
        await worker.connect()
        beating = asyncio.create_task(worker.run_heartbeats())
        try:
            await until(lambda: len(worker.heartbeats) > 0, "first heartbeat")
            yield worker
            assert worker.errors == []
        finally:
            for model in await self.api("GET", "/api/models"):
                await self.api("DELETE", f"/api/models/{model['id']}?force=true")
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            await worker.close()
            await worker.files.close()
            await self.api("DELETE", f"/api/nodes/{name}")


class ServingWorker(LocalAIWorker):
    def __init__(self, yard: ServingFleet, name: str) -> None:
        super().__init__(yard.one.url, yard.cluster.bus_url, SHARED, name, host="localhost")
        root = yard.folder / name
        self.files = LocalAIFiles(root, SHARED)
        self.processes = LocalAIProcesses(yard.source, SHARED, root)
        self.files.logs = self.processes.lines
        self.backends.run = self.processes
        self.backends.models = self.files.models

    def asked(self, kind: str) -> list[dict[str, Any]]:
        return [body for subject, body in self.backends.asked if subject == kind]
