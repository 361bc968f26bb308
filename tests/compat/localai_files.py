"""The HTTP server of a scripted LocalAI worker, exact to docs/reference/wire/files.md, weaknesses included.

Written from the contract, not from our code. What it was asked is kept in `asked`.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from aiohttp import web

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)\Z")


class LocalAIFiles:
    def __init__(self, root: Path, token: str) -> None:
        self.models, self.data, self.staging = root / "models", root / "data", root / "staging"
        self.models.mkdir(parents=True, exist_ok=True)
        self.staging.mkdir(exist_ok=True)
        self.token = token
        self.port = 0
        self.asked: list[tuple[str, str, int]] = []  # method, path, status
        self.cut_after: int | None = None  # the next upload loses its connection after so many bytes
        self.logs: Callable[[], Mapping[str, list[dict[str, str]]]] = dict  # by process key
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=50 << 30)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def uploads(self) -> list[str]:
        return [path for method, path, status in self.asked if method == "PUT" and status == 200]

    def left(self) -> list[str]:
        """Every file that is there, sidecars apart."""
        found = [path for path in self.models.parent.rglob("*") if path.is_file()]
        return sorted(str(path.relative_to(self.models.parent)) for path in found if ".sha256" not in path.name)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        answer = await self._answer(request)
        self.asked.append((request.method, request.path, answer.status))
        return answer

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path in ("/healthz", "/readyz"):
            return web.Response(text="ok")
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401, text="unauthorized")
        if path == "/v1/backend-logs":
            return web.json_response(sorted({key.rpartition("#")[0] for key in self.logs()}))
        if path.startswith("/v1/backend-logs/"):
            asked, known = path.removeprefix("/v1/backend-logs/"), self.logs()
            lines = [line for key in known if asked in (key, key.rpartition("#")[0]) for line in known[key]]
            return web.json_response(sorted(lines, key=lambda line: line["timestamp"]))
        if path.startswith("/v1/files-list/"):
            return self._list(path.removeprefix("/v1/files-list/"))
        if not path.startswith("/v1/files/"):
            return web.Response(status=404)
        key = path.removeprefix("/v1/files/")
        if request.method == "POST":
            return self._temp() if key == "temp" else web.Response(status=404)
        target = self._target(key)
        if target is None:
            return web.Response(status=400, text="outside allowed directory")
        match request.method:
            case "HEAD":
                return self._head(target)
            case "GET":
                return web.FileResponse(target) if target.is_file() else web.Response(status=404)
            case "PUT":
                return await self._put(request, target)
        return web.Response(status=405)

    def _target(self, key: str) -> Path | None:
        for prefix, folder in (("models/", self.models), ("data/", self.data), ("", self.staging)):
            if key.startswith(prefix):
                target = (folder / key.removeprefix(prefix)).resolve()
                return target if target.is_relative_to(folder.resolve()) else None
        raise AssertionError(key)

    def _head(self, target: Path) -> web.Response:
        if target.is_dir():
            return web.Response(status=400)
        if not target.exists():
            return web.Response(status=404)
        size = str(target.stat().st_size)
        headers = {"X-File-Size": size, "X-Local-Path": str(target), "Accept-Ranges": "bytes"}
        declared = _beside(target, ".sha256.target")
        if declared.exists():
            headers["X-Target-SHA256"] = declared.read_text()
        else:
            headers["X-Content-SHA256"] = hashlib.sha256(target.read_bytes()).hexdigest()
        return web.Response(headers=headers)

    async def _put(self, request: web.Request, target: Path) -> web.Response:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        declared = request.headers.get("X-Content-SHA256", "")
        if "Content-Range" in request.headers:
            return await self._put_range(request, target, declared)
        _replace(target, await request.read())
        return _finished(target, declared)

    async def _put_range(self, request: web.Request, target: Path, declared: str) -> web.Response:
        said = _RANGE.match(request.headers["Content-Range"])
        if said is None:
            return web.Response(status=400)
        start, end, total = (int(number) for number in said.groups())
        if (refused := _begin(target, declared, start, total)) is not None:
            return refused
        got = 0
        with target.open("ab") as out:
            async for piece in request.content.iter_chunked(64 * 1024):
                if self.cut_after is not None and got + len(piece) > self.cut_after:
                    out.write(piece[: self.cut_after - got])
                    self.cut_after = None
                    assert request.transport is not None
                    request.transport.abort()
                    return web.Response(status=500)
                out.write(piece)
                got += len(piece)
        if got < end - start + 1:
            return web.Response(status=400, text=f"short body: got {got} expected {end - start + 1}")
        if (size := _size(target)) < total:
            return web.Response(status=308, headers={"Range": f"bytes=0-{size - 1}", "X-File-Size": str(size)})
        _beside(target, ".sha256.target").unlink()
        return _finished(target, declared)

    def _temp(self) -> web.Response:
        path = self.staging / f"localai-output-{secrets.token_hex(4)}.tmp"
        path.touch()
        return web.json_response({"local_path": str(path)})

    def _list(self, key: str) -> web.Response:
        folder = self._target(key)
        if folder is None or not folder.is_dir():
            return web.Response(status=404)
        files = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
        return web.json_response({"files": files or None})


def _beside(target: Path, ending: str) -> Path:
    return target.with_name(target.name + ending)


def _size(target: Path) -> int:
    return target.stat().st_size if target.exists() else 0


def _replace(target: Path, body: bytes) -> None:
    target.write_bytes(body)
    _beside(target, ".sha256.target").unlink(missing_ok=True)


def _begin(target: Path, declared: str, start: int, total: int) -> web.Response | None:
    """Rows 2 to 4 of the contract's table."""
    aside, done = _beside(target, ".sha256.target"), _beside(target, ".sha256")
    known = aside if aside.exists() else done
    same = known.exists() and known.read_text() == declared
    if start == 0 and _size(target) and not same:
        for path in (target, aside, done):
            path.unlink(missing_ok=True)
    if start > 0 and aside.exists() and not same:
        for path in (target, aside, done):
            path.unlink(missing_ok=True)
        return web.Response(status=409)
    if start != (size := _size(target)):
        return web.Response(status=416, headers={"Content-Range": f"bytes */{total}", "X-File-Size": str(size)})
    aside.write_text(declared)
    return None


def _finished(target: Path, declared: str) -> web.Response:
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    if declared and declared.lower() != digest:
        target.unlink()
        return web.Response(status=400, text=f"sha256 mismatch: expected {declared} got {digest}")
    _beside(target, ".sha256").write_text(digest)
    return web.Response(text=json.dumps({"local_path": str(target)}), content_type="application/json")
