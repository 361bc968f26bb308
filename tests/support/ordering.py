"""A worker under orders: a scripted controller, a real bus, and the wire's own words on both sides.

async with ordered_worker(nats_server, tmp_path) as fleet:
    reply = await fleet.ask("backend.install", {"backend": "mock", "uri": "file:///…", "name": "mock"})
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tarfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client, RawCredentials

from tests.support.nats import NatsServer
from tests.support.running_worker import RunningWorker, running_worker
from tests.support.scripted_controller import ScriptedController
from tests.support.supervising import MOCK, TINY, swept
from tests.support.waiting import until

QUICK = {
    "backend_poll": "20ms",
    "backend_grace": "5s",
    "backend_free_timeout": "20s",
    "backend_port_rest": "50ms",
    "galleries": "[]",
    "drain_timeout": "2s",
}


@dataclass(frozen=True)
class Heard:
    subject: str  # without nodes.<id>.
    body: dict[str, Any]
    at: float


class OrderedFleet:
    def __init__(self, controller: ScriptedController, client: Client, worker: RunningWorker | None = None) -> None:
        self.controller = controller
        self._worker = worker
        self.heard: list[Heard] = []
        self._client = client

    @property
    def worker(self) -> RunningWorker:
        assert self._worker is not None, "this one runs in a process of its own"
        return self._worker

    @property
    def node(self) -> str:
        return self.controller.named("w1").id

    async def ask(self, order: str, body: object, *, timeout_s: float = 30.0) -> dict[str, Any]:
        """The worker's answer on nodes.<id>.<order>."""
        subject, payload = f"nodes.{self.node}.{order}", json.dumps(body).encode()
        reply = await self._client.request(subject, payload, timeout=timeout_s)
        answer: dict[str, Any] = json.loads(reply.data)
        return answer

    async def tell(self, order: str, body: object) -> None:
        await self._client.publish(f"nodes.{self.node}.{order}", json.dumps(body).encode())
        await self._client.flush()

    async def follow(self) -> None:
        """Keep all that is said about nodes."""

        async def keep(message: Any) -> None:
            subject = message.subject.split(".", 2)[2]
            with contextlib.suppress(ValueError):
                self.heard.append(Heard(subject, json.loads(message.data), time.monotonic()))

        await self._client.subscribe("nodes.>", cb=keep)
        await self._client.flush()

    def told(self, subject: str) -> list[dict[str, Any]]:
        return [each.body for each in self.heard if each.subject == subject]

    def last_beat(self, having: str = "boot_id") -> dict[str, Any]:
        """The last heartbeat that tells something, or nothing yet."""
        beats = [beat for beat in self.told("heartbeat") if having in beat]
        return beats[-1] if beats else {}

    async def result(self, kind: str, op: str, attempt: int = 1) -> dict[str, Any]:
        """The outcome of an accepted order, as the event tells it."""

        def found() -> list[dict[str, Any]]:
            return [each for each in self.told(f"{kind}.{op}.result") if each.get("attempt") == attempt]

        await until(found, timeout_s=40.0)
        return found()[-1]

    async def order(self, kind: str, op: str, body: dict[str, Any], attempt: int = 1) -> dict[str, Any]:
        """Accepted at once; then its outcome."""
        accepted = await self.ask(f"backend.{kind}", body | {"op_id": op, "attempt": attempt, "accept": True})
        assert accepted == {"success": True, "accepted": True}, accepted
        return await self.result(f"backend.{kind}", op, attempt)

    async def backends(self) -> dict[str, dict[str, Any]]:
        listed = await self.ask("backend.list", {})
        return {row["name"]: row for row in listed["backends"] or ()}

    async def running(self) -> list[dict[str, Any]]:
        models: list[dict[str, Any]] = (await self.ask("models.running", {}))["models"]
        return models


@contextlib.asynccontextmanager
async def connected(server: NatsServer) -> AsyncIterator[Client]:
    """A controller's end of the bus, without any of our own code."""
    user = server.service()
    text = f"-----BEGIN NATS USER JWT-----\n{user.jwt}\n------END NATS USER JWT------\n\n"
    text += f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    client = await nats.connect(
        server.url, user_credentials=RawCredentials(text), inbox_prefix=(user.inbox or "_INBOX").encode()
    )
    try:
        yield client
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def ordered_worker(
    server: NatsServer, folder: Path, *, localai: bool = False, **more: str
) -> AsyncIterator[OrderedFleet]:
    """A worker that has joined and is ready; gone afterwards, with all it started."""
    processes = folder / "w" / "processes"
    async with ScriptedController(server, localai=localai) as controller, connected(server) as client:
        token = controller.shared_token if localai else controller.token()
        told = {"bus_urls": server.url} if localai else {}
        with swept(processes):
            async with running_worker(controller.url, folder / "w", token=token, **{**QUICK, **told, **more}) as worker:
                await worker.ready()
                fleet = OrderedFleet(controller, client, worker)
                await fleet.follow()
                yield fleet


def mock_copy(folder: Path, version: str = "1") -> Path:
    """The mock backend in a folder of its own, saying this version."""
    shutil.copytree(MOCK, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "VERSION").write_text(version + "\n")
    return folder


def tiny_files(want: str = "", *, label: str = "") -> list[dict[str, Any]]:
    """An openai backend as an order's inline source carries it; `want` as in tests/support/supervising.py."""
    head = f'import os\nos.environ.setdefault("TINY", {want!r})\nLABEL = {label!r}\n'
    return [{"path": "tiny.py", "text": head + TINY}]


TINY_MANIFEST = {
    "protocol": "openai",
    "command": ["python", "-I", "-S", "tiny.py", "{host}", "{port}"],
    "ready": {"path": "/health", "timeout_s": 20},
}


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


def tiny_order(letter: str = "a", want: str = "", *, backend: str = "tiny") -> dict[str, Any]:
    """What a Corral controller sends: resolved to the last byte. `letter` makes its digest."""
    source = {"kind": "inline", "uri": "inline", "digest": digest(letter), "files": tiny_files(want, label=letter)}
    return {
        "backend": backend,
        "variant": backend,
        "digest": digest(letter),
        "version": letter,
        "sources": [source],
        "manifest": TINY_MANIFEST,
    }


def tarred(files: dict[str, bytes]) -> bytes:
    """An archive of executables, as a download has it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    return out.getvalue()
