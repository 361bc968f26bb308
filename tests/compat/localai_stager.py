"""How a LocalAI controller puts files on a worker and gets them back, exact to docs/reference/wire/files.md: over HTTP,
or through an object storage and the bus.

Written from the contract, not from our code, weaknesses included: keys are not percent-encoded, a redirect is an error,
only 308, 416 and broken connections are tried again.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from yarl import URL

from tests.compat.localai_controller import LocalAIController
from tests.support.object_storage import ObjectStorage

PIECE = 64 << 10
TRANSIENT = (308, 416)


class StagingFailed(Exception):
    pass


@dataclass
class HttpStager:
    """`asked`: every call, with its status and its offset."""

    url: str
    token: str
    asked: list[tuple[str, str, int]] = field(default_factory=list)
    cut_after: list[int] = field(default_factory=list)  # the next uploads lose their connection after so many bytes
    attempts: int = 8

    async def ensure(self, content: bytes, key: str) -> str:
        """The file is on the worker: its path there."""
        digest = hashlib.sha256(content).hexdigest()
        async with aiohttp.ClientSession() as session:
            status, headers = await self._head(session, key)
            if status == 200 and headers.get("X-Local-Path") and headers.get("X-Content-SHA256") == digest:
                return headers["X-Local-Path"]
            for attempt in range(self.attempts):
                path = await self._try(session, content, key, digest)
                if path is not None:
                    return path
                await asyncio.sleep(0.05 * 2**attempt)  # upstream: 1 s, 2 s, … 30 s
        raise StagingFailed(f"{key} within {self.attempts} attempts: {self.asked}")

    async def _try(self, session: aiohttp.ClientSession, content: bytes, key: str, digest: str) -> str | None:
        status, known = await self._head(session, key)
        have = int(known.get("X-File-Size", 0))
        resumes = status == 200 and 0 < have < len(content) and known.get("X-Target-SHA256", "").lower() == digest
        start = have if resumes else 0
        headers = {"X-Content-SHA256": digest, "Content-Length": str(len(content) - start)}
        if content:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = self.cut_after.pop(0) if self.cut_after else None
        try:
            async with session.put(
                self._where(key),
                data=_pieces(content[start:], cut),
                headers=headers | self._auth,
                allow_redirects=False,
            ) as answer:
                self.asked.append(("PUT", headers.get("Content-Range", ""), answer.status))
                if answer.status == 200:
                    return str((await answer.json())["local_path"])
                if answer.status in TRANSIENT:
                    return None
                raise StagingFailed(f"status {answer.status}: {(await answer.text()).strip()}")
        except (aiohttp.ClientConnectionError, ConnectionError):
            self.asked.append(("PUT", headers.get("Content-Range", ""), 0))
            return None

    async def _head(self, session: aiohttp.ClientSession, key: str) -> tuple[int, Mapping[str, str]]:
        async with session.head(self._where(key), headers=self._auth, allow_redirects=False) as answer:
            self.asked.append(("HEAD", key, answer.status))
            return answer.status, answer.headers.copy()

    async def fetch(self, remote_path: str) -> bytes:
        """By base name: only files directly in the staging folder can be had."""
        return await self.fetch_key(Path(remote_path).name)

    async def fetch_key(self, key: str) -> bytes:
        status, body = await self.call("GET", f"/v1/files/{key}")
        if status != 200:
            raise StagingFailed(f"status {status}: {body!r}")
        return body

    async def call(self, method: str, path: str) -> tuple[int, bytes]:
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                method, URL(self.url + path, encoded=True), headers=self._auth, allow_redirects=False
            ) as answer,
        ):
            return answer.status, await answer.read()

    def _where(self, key: str) -> URL:
        return URL(f"{self.url}/v1/files/{key.replace(' ', '%20')}", encoded=True)  # Go's client encodes that much

    @property
    def _auth(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


async def _pieces(content: bytes, cut: int | None) -> AsyncIterator[bytes]:
    for at in range(0, len(content), PIECE):
        if cut is not None and at >= cut:
            raise ConnectionResetError("the cable was pulled")
        yield content[at : at + PIECE]
        await asyncio.sleep(0)


@dataclass
class StorageStager:
    """The same through a bucket. `node`: the worker's name."""

    controller: LocalAIController
    storage: ObjectStorage
    node: str

    async def ensure(self, content: bytes, key: str) -> str:
        """Uploaded unless the key is in the bucket: upstream looks at nothing else."""
        if key not in await asyncio.to_thread(self.storage.list_keys):
            await asyncio.to_thread(self.storage.put, key, content, created_at="2026-08-22T10:00:00Z")
        reply = await self.controller.ask(self.node, "files.ensure", {"key": key})
        if reply.get("error"):
            raise StagingFailed(reply["error"])
        return str(reply["local_path"])

    async def temp(self) -> str:
        reply: dict[str, Any] = await self.controller.ask(self.node, "files.temp", {})
        return str(reply["local_path"])

    async def fetch(self, remote_path: str) -> bytes:
        key = f"ephemeral/fetch{remote_path}/output"
        reply = await self.controller.ask(self.node, "files.stage", {"local_path": remote_path, "key": key})
        if reply.get("error"):
            raise StagingFailed(reply["error"])
        content = await asyncio.to_thread(self.storage.read, key)
        await asyncio.to_thread(self.storage.call, "DELETE", key)
        return content


def model_key(model: str, name: str) -> str:
    return f"models/{model}/{name}"


def input_key(name: str) -> str:
    return f"ephemeral/inputs/{uuid.uuid4().hex[:8]}/{name}"
