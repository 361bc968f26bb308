"""The controller's HTTP doors for backends and operations, served for real in this process: controllers on one database
and the bus's twin, with scripted workers, and a caller.

async with open_api(tmp_path) as api:
    barn = await api.fleet.corral("barn")
    answer = await api.post("/api/operations", {"backend": "vllm"})
    assert answer.status == 202
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

from corral.contract.admin import CreateKey
from corral.contract.models import ModelFile
from corral.controller.access.gateway_trust import GatewayTrust
from corral.controller.access.keys import Access
from corral.controller.api.server import serve_app
from corral.controller.backends.gallery_status import GalleryStatus
from corral.controller.files.file_resolver import ResolvedFile
from corral.controller.files.hubs.hub import HubSettings
from corral.controller.fleetfile.service import FleetFiles
from corral.controller.install.catalogue_fits import CatalogueFits, SizeLookups
from corral.controller.install.planner import InstallPlanner
from corral.controller.models.schedules import Schedules
from corral.controller.registry.nodes import NodeAdmin
from corral.controller.scheduler.world import World
from corral.controller.settings.serving import ListenSettings
from corral.controller.web.routes import dependencies
from corral.kit.errors import Unreachable
from tests.support.backend_fleet import Controller, Fleet, open_fleet
from tests.support.model_catalogue import NothingToFetch, models_of
from tests.support.processes import free_port
from tests.support.shared_app import shared_app
from tests.support.sqlite import sqlite_url
from tests.support.trials import NoTrials

_UNUSED = (
    "join_tokens",
    "node_api",
    "blob_peers",
    "nodes",
    "ingresses",
    "views",
    "overview",
    "readiness",
    "receipts",
    "controller_metrics",
    "loads",
    "replica_rows",
    "explaining",
    "uploads",
    "upload_operations",
)


@dataclass(frozen=True)
class Answer:
    status: int
    raw: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.raw)


async def not_found(file: ModelFile) -> ResolvedFile:
    raise Unreachable(f"{file.uri} is not looked up in tests")


class EmptyFleet:
    async def world(self, backends: Collection[str], *, wait_s: float | None = None) -> World:
        return World(datetime(2026, 1, 1, tzinfo=UTC))


class Api:
    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession, stack: contextlib.AsyncExitStack) -> None:
        self.fleet = fleet
        self.admin = ""
        self.viewer = ""
        self.urls: list[str] = []
        self._session = session
        self._stack = stack

    async def serve(self, controller: Controller, *, settle_s: float = 10.0, **more: Any) -> str:
        """`more`: services of other rooms, by the names their doors know them by."""
        access = Access(controller.store, controller.feed, self.fleet.clock, session_ttl_s=600)
        if not self.admin:
            self.admin = (await access.create(CreateKey(name="boss", role="admin"))).secret
            self.viewer = (await access.create(CreateKey(name="eyes", role="viewer"))).secret
        models = models_of(controller.store, controller.feed, backends=self.fleet.catalogue)
        schedules = Schedules(controller.store, controller.feed)
        nodes = NodeAdmin(controller.store, controller.changes, None, None)  # type: ignore[arg-type]
        services = dict.fromkeys(_UNUSED) | {
            "access": access,
            "feed": controller.feed,
            "operations": controller.backends.operations,
            "rollouts": controller.backends.rollouts,
            "installed": controller.backends.installed,
            "integrity": controller.backends.integrity,
            "upgrades": controller.backends.upgrades,
            "catalogue": controller.backends.catalogue,
            "models": models,
            "schedules": schedules,
            "fetches": NothingToFetch(),
            "trials": NoTrials(),
            "planner": InstallPlanner(self._session, HubSettings("http://127.0.0.1:9", wait_s=0.01), EmptyFleet()),
            "fits": CatalogueFits(EmptyFleet(), SizeLookups(not_found, self.fleet.clock), wait_s=0.01),
            "gallery_status": GalleryStatus({}),
            "fleet_files": FleetFiles(controller.store, models, schedules, controller.backends.operations, nodes),
            "nodes": nodes,
            **more,
        }
        given = services | dependencies(self.fleet.clock)
        app = self._stack.enter_context(
            shared_app(given, access_service=access, trust=GatewayTrust(None), settle_s=settle_s)
        )
        port = free_port()
        await self._stack.enter_async_context(serve_app(app, ListenSettings(host="127.0.0.1", port=port)))
        self._stack.callback(controller.feed.end)  # before the server stops: open streams end first
        self.urls.append(f"http://127.0.0.1:{port}")
        return self.urls[-1]

    async def call(
        self, method: str, path: str, body: object = None, *, key: str = "", on: int = 0, raw: bytes | None = None
    ) -> Answer:
        content = raw if raw is not None else json.dumps(body).encode() if body is not None else None
        data = io.BytesIO(content) if content is not None else None
        headers = {"Authorization": f"Bearer {key or self.admin}"}
        # Already encoded: what a test writes is what is sent.
        url = URL(self.urls[on] + path, encoded=True)
        async with self._session.request(method, url, data=data, headers=headers) as answer:
            return Answer(answer.status, await answer.read(), dict(answer.headers))

    async def get(self, path: str, **more: Any) -> Answer:
        return await self.call("GET", path, **more)

    async def post(self, path: str, body: object = None, **more: Any) -> Answer:
        return await self.call("POST", path, body, **more)

    async def install(self, backend: str = "vllm", **more: Any) -> str:
        answer = await self.post("/api/operations", {"backend": backend, **more})
        assert answer.status == 202, answer.raw
        return str(answer.json["jobID"])

    @contextlib.asynccontextmanager
    async def events(self, path: str, *, on: int = 0) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
        """(event, data) as they come."""
        headers = {"Authorization": f"Bearer {self.viewer}"}
        async with self._session.get(self.urls[on] + path, headers=headers) as answer:
            assert answer.status == 200, await answer.read()
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            yield _events(answer.content)


async def _events(lines: aiohttp.StreamReader) -> AsyncIterator[tuple[str, Any]]:
    name, data = "", ""
    async for line in lines:
        text = line.decode().rstrip("\n")
        if text.startswith("event: "):
            name = text[7:]
        elif text.startswith("data: "):
            data = text[6:]
        elif not text and name:
            yield name, json.loads(data)
            name, data = "", ""


@contextlib.asynccontextmanager
async def open_api(folder: Path, *, settle_s: float = 10.0) -> AsyncIterator[Api]:
    async with (
        open_fleet(sqlite_url(folder)) as fleet,
        contextlib.AsyncExitStack() as stack,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30), read_bufsize=2**22) as session,
    ):
        api = Api(fleet, session, stack)
        await api.serve(fleet.first, settle_s=settle_s)
        yield api
        await session.close()  # our own streams first: the server waits for them
