"""Files of a scripted LocalAI worker that has an object storage, exact to docs/reference/wire/files.md#object-store.

Written from the contract, not from our code, weaknesses included: a file in the cache is used without any check, and
nothing in the cache is ever removed.
"""

from __future__ import annotations

import asyncio
import urllib.error
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.support.object_storage import ObjectStorage


class LocalAIObjects:
    def __init__(self, models: Path, storage: ObjectStorage) -> None:
        self.models = models
        self.cache = models.parent / "cache"
        self.storage = storage
        self.refuses = ""  # what it answers instead

    @property
    def handlers(self) -> dict[str, Callable[[dict[str, Any]], Awaitable[Any]]]:
        return {"files.ensure": self._ensure, "files.stage": self._stage, "files.listdir": self._list}

    def cached(self) -> list[str]:
        return sorted(str(path.relative_to(self.cache)) for path in self.cache.rglob("*") if path.is_file())

    async def _ensure(self, asked: dict[str, Any]) -> dict[str, Any]:
        if self.refuses:
            return {"error": self.refuses}
        path = self.cache / asked["key"]
        if not path.exists():
            try:
                content = await asyncio.to_thread(self.storage.read, asked["key"])
            except urllib.error.URLError as error:
                return {"error": f"downloading {asked['key']}: {error}"}
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(path.name + ".tmp")
            partial.write_bytes(content)
            partial.rename(path)
        return {"local_path": str(path)}

    async def _stage(self, asked: dict[str, Any]) -> dict[str, Any]:
        return await asyncio.to_thread(self._upload, Path(asked["local_path"]), asked["key"])

    def _upload(self, path: Path, key: str) -> dict[str, Any]:
        path = path.resolve()
        if not any(path.is_relative_to(folder.resolve()) for folder in (self.cache, self.models)):
            return {"error": "path outside allowed directories"}
        if not path.is_file():
            return {"error": f"open {path}: no such file or directory"}
        self.storage.put(key, path.read_bytes())
        return {"key": key}

    async def _list(self, asked: dict[str, Any]) -> dict[str, Any]:
        folder = self.cache / asked["key_prefix"]
        files = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
        return {"files": files or None}
