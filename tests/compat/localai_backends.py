"""Backends of a scripted LocalAI worker, exact to docs/reference/wire/backends.md, docs/reference/wire/processes.md and
docs/reference/wire/gallery.md#installation.

Written from the contract, not from our code. Nothing is really downloaded: a build is a row with a date. A process is a
key with a port, and nothing more unless there is something to `run` it. What it was asked is kept in `asked`, in the
words in which it came.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nats.aio.client import Client
from nats.aio.msg import Msg

from tests.compat.localai_processes import LocalAIProcesses
from tests.support.processes import free_port

FIRST_PORT = 50051
_days = itertools.count()


@dataclass
class Build:
    """A folder with its metadata.json."""

    name: str
    alias: str = ""
    meta_for: str = ""
    system: bool = False
    installed_at: str = ""
    version: str = ""
    uri: str = ""
    gallery_url: str = ""
    digest: str = ""

    def row(self) -> dict[str, Any]:
        told = {"installed_at": self.installed_at, "gallery_url": self.gallery_url}
        told |= {"version": self.version, "uri": self.uri, "digest": self.digest}
        kept = {key: value for key, value in told.items() if value}
        return {"name": self.name, "is_system": self.system, "is_meta": bool(self.meta_for)} | kept


@dataclass
class Ways:
    """How this worker goes about it; a test changes it while it runs."""

    upgrades: bool = True  # else it is from before 2026-05-08
    digests: bool = True  # the lookup of a digest works
    versions: bool = True  # it is new enough to report the version of an entry
    caches_indexes: bool = False  # it keeps an index for an hour, as LocalAI does; else every install reads it anew
    unreadable: set[str] = field(default_factory=set)  # galleries, by name, whose index it cannot read
    ticks: int = 2  # progress events of one download
    gate: asyncio.Event | None = None  # a download ends only when it is set
    refuses: dict[str, str] = field(default_factory=dict)  # by kind of order: what it says instead of doing it


class LocalAIBackends:
    def __init__(self, host: str, capability: str) -> None:
        self.host = host
        self.capability = capability
        self.ways = Ways()
        self.folders: dict[str, Build] = {}
        self.processes: dict[str, tuple[str, int]] = {}  # key → backend, port
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.node_id = ""
        self._nats: Client | None = None
        self._locks: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ports = itertools.count(FIRST_PORT)
        self.run: LocalAIProcesses | None = None  # else nothing really runs
        self.models: Path | None = None  # the models folder, where there is one
        self.files: Mapping[str, Callable[[dict[str, Any]], Awaitable[Any]]] = {}  # with an object storage
        self._stopping: set[str] = set()
        self._indexes: dict[tuple[str, str], list[dict[str, Any]]] = {}  # by name and url, as they were first read

    def orders(self, kind: str) -> list[dict[str, Any]]:
        return [body for subject, body in self.asked if subject == f"backend.{kind}"]

    async def listen(self, client: Client, node_id: str) -> None:
        self._nats, self.node_id = client, node_id
        serial: dict[str, Callable[[dict[str, Any]], Awaitable[Any]]] = {
            "backend.list": self._list,
            "backend.delete": self._delete,
            "backend.stop": self._stop,
            "model.unload": self._unload,
            "model.stop": self._stop_model,
            "model.delete": self._delete_model,
            "models.running": self._running,
            **self.files,
        }
        for subject, work in serial.items():
            await client.subscribe(f"nodes.{node_id}.{subject}", cb=self._handler(subject, work))
        await client.subscribe(f"nodes.{node_id}.backend.install", cb=self._task("backend.install", self._install))
        if self.ways.upgrades:
            await client.subscribe(f"nodes.{node_id}.backend.upgrade", cb=self._task("backend.upgrade", self._upgrade))
        await client.flush()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.run is not None:
            self.run.close()

    # One handler per subject. Installs and upgrades get a task each, all others are served one after the other.

    def _handler(
        self, subject: str, work: Callable[[dict[str, Any]], Awaitable[Any]]
    ) -> Callable[[Msg], Awaitable[None]]:
        async def handle(message: Msg) -> None:
            asked = json.loads(message.data or b"null") or {}
            self.asked.append((subject, asked))
            answer = await work(asked)
            if answer is not None and message.reply:
                with contextlib.suppress(Exception):  # the connection may be gone
                    await message.respond(json.dumps(answer).encode())

        return handle

    def _task(self, subject: str, work: Callable[[dict[str, Any]], Awaitable[Any]]) -> Callable[[Msg], Awaitable[None]]:
        handle = self._handler(subject, work)

        async def start(message: Msg) -> None:
            task = asyncio.ensure_future(handle(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return start

    async def _install(self, asked: dict[str, Any]) -> dict[str, Any]:
        name, replica = asked["backend"], asked.get("replica_index", 0)
        async with self._locks.setdefault(name, asyncio.Lock()):
            if "install" in self.ways.refuses:
                return {"success": False, "error": self.ways.refuses["install"]}
            key = f"{asked.get('model_id') or name}#{replica}"
            if asked.get("force"):
                await self._kill([used for used in self.processes if self._uses(used, name)] + [key], free=False)
            elif key in self.processes and self._lives(key):
                return {"success": True, "address": f"{self.host}:{self.processes[key][1]}"}
            if asked.get("force") or self._find(name) is None:
                try:
                    await self._fetch(asked)
                except LookupError as error:
                    return {"success": False, "error": f"installing backend from gallery: {error.args[0]}"}
            port = next(self._ports) if self.run is None else free_port()
            if self.run is not None and (failed := await self.run.start(key, port)):
                return {"success": False, "error": failed}
            self.processes[key] = (name, port)
            return {"success": True, "address": f"{self.host}:{self.processes[key][1]}"}

    async def _upgrade(self, asked: dict[str, Any]) -> dict[str, Any]:
        name = asked["backend"]
        async with self._locks.setdefault(name, asyncio.Lock()):
            stopped = [key for key in self.processes if self._uses(key, name)]
            await self._kill(stopped, free=False)
            told = {"reports_stopped_processes": True} | ({"stopped_process_keys": stopped} if stopped else {})
            if "upgrade" in self.ways.refuses:
                return {"success": False, "error": self.ways.refuses["upgrade"]} | told
            try:
                await self._fetch(asked)
            except LookupError as error:
                return {"success": False, "error": f"installing backend from gallery: {error.args[0]}"} | told
            return {"success": True} | told

    async def _delete(self, asked: dict[str, Any]) -> dict[str, Any]:
        name = asked["backend"]
        found = self._find(name)
        if found is None:
            return {"success": False, "error": f"backend not found: {name}"}
        if found.system:
            return {"success": False, "error": f"system backend {name} cannot be deleted"}
        stopped = [key for key in self.processes if self._uses(key, name)]
        await self._kill(stopped)
        told = {"reports_stopped_processes": True} | ({"stopped_process_keys": stopped} if stopped else {})
        if "delete" in self.ways.refuses:
            return {"success": False, "error": self.ways.refuses["delete"]} | told
        for gone in (name, found.name, found.meta_for):
            self.folders.pop(gone, None)
        return {"success": True} | told

    async def _list(self, _asked: dict[str, Any]) -> dict[str, Any]:
        """An alias is a row of its own, added last, and overwrites one of its name; then rows whose key is not the name
        in their metadata are left out. So a meta whose builds share its name is not listed, only its build is."""
        listing = dict(self.folders)
        for build in self.folders.values():
            if build.alias:
                listing[build.alias] = build
        rows = [build.row() for key, build in listing.items() if key == build.name]
        return {"backends": rows or None}

    async def _stop(self, asked: dict[str, Any]) -> None:
        name = asked.get("backend", "")
        named = [
            key
            for key in self.processes
            if not name or self._uses(key, name) or key == name or key.rpartition("#")[0] == name
        ]
        await self._kill(named, free=not asked.get("force"))

    async def _unload(self, _asked: dict[str, Any]) -> dict[str, Any]:
        return {"success": True}

    async def _stop_model(self, asked: dict[str, Any]) -> dict[str, Any]:
        key = asked["process_key"]
        reply = {"matched": key in self.processes, "freed": False, "terminated": True, "process_key": key}
        if key not in self.processes:
            return reply
        address = f"127.0.0.1:{self.processes[key][1]}"
        if asked["expected_address"] != address:
            return reply | {"terminated": False, "address": address, "error": "address mismatch"}
        if key in self._stopping:
            return reply | {"terminated": False, "error": f"{key} is already stopping"}
        return reply | {"freed": await self._kill([key], free=not asked.get("force"))}

    async def _delete_model(self, asked: dict[str, Any]) -> dict[str, Any]:
        name = asked.get("model_name", "")
        folder = self.models or Path("nowhere")
        target = (folder / name).resolve()
        if not name or folder.resolve() not in target.parents:
            return {"success": False, "error": "invalid model name"}
        if target.is_dir():
            shutil.rmtree(target)
        else:
            for path in (target, *target.parent.glob(f"{target.name}.*")):
                path.unlink(missing_ok=True)
        return {"success": True}

    async def _running(self, _asked: dict[str, Any]) -> dict[str, Any]:
        alive = {key: port for key, (_, port) in self.processes.items() if self._lives(key)}
        parts = [(key.rpartition("#"), port) for key, port in alive.items()]
        models = [{"model_id": m, "replica_index": int(n), "address": f"127.0.0.1:{p}"} for (m, _, n), p in parts]
        return {"models": models}

    # What they come to.

    def _find(self, name: str) -> Build | None:
        return self.folders.get(name) or next((each for each in self.folders.values() if each.alias == name), None)

    def _uses(self, key: str, backend: str) -> bool:
        """Its recorded backend is in the identity set of the name: name, metadata name, alias; and what a meta is."""
        found = self._find(backend)
        known = {backend} | ({found.name, found.alias, found.meta_for} if found is not None else set())
        return self.processes[key][0] in known - {""}

    def _lives(self, key: str) -> bool:
        return key not in self._stopping and (self.run is None or self.run.lives(key))

    async def _kill(self, keys: list[str], *, free: bool = True) -> bool:
        """Whether the last of them released its memory first. A key stays until its process is gone."""
        freed = False
        for key in keys:
            if key not in self.processes or key in self._stopping:
                continue
            self._stopping.add(key)
            if self.run is not None:
                freed = await self.run.stop(key, self.processes[key][1], free=free)
            del self.processes[key]
            self._stopping.discard(key)
        return freed

    async def _fetch(self, asked: dict[str, Any]) -> None:
        name = asked["backend"]
        entry, gallery_url = self._entry(asked)
        await self._tick(asked, entry["name"], 0)
        if self.ways.gate is not None:
            await self.ways.gate.wait()
        for count in range(1, self.ways.ticks + 1):
            await self._tick(asked, entry["name"], count / self.ways.ticks)
        # A clock with whole seconds; no two installs of ours in the same one, as in life.
        at = datetime(2026, 8, 22, tzinfo=UTC) + timedelta(days=next(_days))
        known: dict[str, Any] = {"installed_at": at.isoformat().replace("+00:00", "Z"), "gallery_url": gallery_url}
        version = str(entry.get("version", ""))
        content = hashlib.sha256(f"{entry['uri']} {version}".encode()).hexdigest()
        version = version if self.ways.versions else ""
        digest = f"sha256:{content}" if self.ways.digests else ""
        self.folders[entry["name"]] = Build(
            entry["name"], entry.get("alias", ""), uri=entry["uri"], version=version, digest=digest, **known
        )
        if name != entry["name"]:
            self.folders[name] = Build(name, meta_for=entry["name"], version=version, **known)

    def _entry(self, asked: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The concrete entry, and the gallery it is in. The galleries of the request take the place of our own, and all
        of them are read before anything is looked up: one that cannot be read fails the install."""
        if asked.get("uri"):
            if not asked.get("name"):
                raise LookupError("a name is required for an OCI image")
            return {"name": asked["name"], "alias": asked.get("alias", ""), "uri": asked["uri"]}, ""
        galleries = json.loads(asked.get("backend_galleries") or "[]")
        indexes = [(gallery, self._index(gallery)) for gallery in galleries]
        for gallery, index in indexes:
            entries = {each["name"]: each for each in index}
            found = entries.get(asked["backend"])
            if found is not None and not found.get("uri"):
                choices = found.get("capabilities", {})
                found = entries.get(choices.get(self.capability) or choices.get("default", ""))
            if found is not None:
                return found, gallery["url"]
        raise LookupError(f"no backend found with name {asked['backend']!r}")

    def _index(self, gallery: dict[str, Any]) -> list[dict[str, Any]]:
        if gallery["name"] in self.ways.unreadable:
            raise LookupError(f"failed to get gallery {gallery['name']}: {gallery['url']} is not allowed")
        key = (gallery["name"], gallery["url"])
        if not self.ways.caches_indexes or key not in self._indexes:
            self._indexes[key] = json.loads(Path(urlsplit(gallery["url"]).path).read_text())
        return self._indexes[key]

    async def _tick(self, asked: dict[str, Any], file_name: str, share: float) -> None:
        op = asked.get("op_id", "")
        if not op or not self.ways.ticks or self._nats is None:
            return
        event = {
            "op_id": op,
            "node_id": self.node_id,
            "backend": asked["backend"],
            "file_name": file_name,
            "current": f"{share * 2.1:.1f} GiB",
            "total": "2.1 GiB",
            "percentage": share * 100,
            "phase": "downloading",
        }
        await self._nats.publish(f"nodes.{self.node_id}.backend.install.{op}.progress", json.dumps(event).encode())
