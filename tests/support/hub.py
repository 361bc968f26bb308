"""A hub of models on this machine: the interfaces of Hugging Face and of ModelScope, as far as repositories and their
files go.

async with FakeHub() as hub:
    hub.repositories["org/name"] = Repository({"config.json": b"{}", "model.safetensors": b"..."})
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

LARGE = 1000  # bytes; from there on a file is kept apart, and its digest is told


@dataclass
class Repository:
    files: dict[str, bytes]
    commit: str = "c0ffee" + "0" * 34
    token: str = ""  # what opens it
    branches: dict[str, str] = field(default_factory=dict)  # names of commits besides main


@dataclass
class FakeHub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    shown: list[tuple[str, str]] = field(default_factory=list)  # path, and the Authorization that came with it
    busy: int = 0  # so many answers are 503
    limited: int = 0  # so many answers are 429, with Retry-After
    retry_after: str = "0"
    tags: list[str] = field(default_factory=list)  # ETags of the next answers of the store of large files
    knows_ranges: bool = True
    answer: str = ""  # of ModelScope's list, instead of a true one
    url: str = ""
    _runner: web.AppRunner | None = None

    async def __aenter__(self) -> FakeHub:
        app = web.Application(middlewares=[self._noted])
        app.router.add_get("/api/models/{owner}/{name}/revision/{revision}", self._info)
        app.router.add_get("/{owner}/{name}/resolve/{revision}/{path:.+}", self._resolve)
        app.router.add_get("/cdn/{owner}/{name}/{path:.+}", self._cdn)
        app.router.add_get("/api/v1/models/{owner}/{name}/repo/files", self._modelscope_files)
        app.router.add_get("/api/v1/models/{owner}/{name}/repo", self._modelscope_file)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    @web.middleware
    async def _noted(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.asked.append(request.path_qs)
        self.shown.append((request.path, request.headers.get("Authorization", "")))
        if self.busy:
            self.busy -= 1
            return web.Response(status=503)
        if self.limited:
            self.limited -= 1
            return web.Response(status=429, headers={"Retry-After": self.retry_after})
        answered: web.StreamResponse = await handler(request)
        return answered

    def _find(self, request: web.Request) -> Repository:
        found = self.repositories.get(f"{request.match_info['owner']}/{request.match_info['name']}")
        if found is None or (found.token and request.headers.get("Authorization") != f"Bearer {found.token}"):
            raise web.HTTPUnauthorized(text='{"error":"Repository not found"}')  # so the real one says of both
        known = {"main": found.commit, found.commit: found.commit} | found.branches
        if request.match_info.get("revision", "main") not in known:
            raise web.HTTPNotFound(text='{"error":"Invalid rev id"}')
        return found

    async def _info(self, request: web.Request) -> web.Response:
        repository = self._find(request)
        siblings = [_sibling(path, content) for path, content in repository.files.items()]
        if request.query.get("blobs") != "true":
            siblings = [{"rfilename": each["rfilename"]} for each in siblings]
        name = f"{request.match_info['owner']}/{request.match_info['name']}"
        told = {"_id": "6", "id": name, "modelId": name, "sha": repository.commit, "private": False, "gated": False}
        return web.json_response(told | {"siblings": siblings, "usedStorage": 1})

    async def _resolve(self, request: web.Request) -> web.Response:
        repository, path = self._find(request), request.match_info["path"]
        if path not in repository.files:
            raise web.HTTPNotFound(text="Entry not found")
        content = repository.files[path]
        headers = {"X-Repo-Commit": repository.commit}
        if len(content) < LARGE:
            return web.Response(body=content, headers=headers | {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'})
        digest = hashlib.sha256(content).hexdigest()
        where = f"/cdn/{request.match_info['owner']}/{request.match_info['name']}/{path}"
        linked = {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{digest}"', "Location": where}
        return web.Response(status=302, headers=headers | linked)

    def _find_modelscope(self, request: web.Request) -> Repository:
        found = self.repositories.get(f"{request.match_info['owner']}/{request.match_info['name']}")
        if found is None:
            raise web.HTTPNotFound(text=_modelscope_answer(10010205001, "record not found"))
        if found.token and request.cookies.get("m_session_id") != found.token:
            raise web.HTTPForbidden(text=_modelscope_answer(10010205002, "no permission"))
        if request.query["Revision"] not in {"master", *found.branches}:
            raise web.HTTPNotFound(text=_modelscope_answer(10010205003, "revision not found"))
        return found

    async def _modelscope_files(self, request: web.Request) -> web.Response:
        if self.answer:
            return web.Response(text=self.answer)
        files = self._find_modelscope(request).files
        folders = {path.rpartition("/")[0] for path in files if "/" in path}
        listed = [{"Name": path, "Path": path, "Type": "tree", "Size": 0, "Sha256": ""} for path in sorted(folders)]
        listed += [_modelscope_entry(path, content) for path, content in files.items()]
        answer = _modelscope_answer(200, "", {"Files": listed, "IsVisual": 1})
        return web.Response(text=answer, content_type="application/json")

    async def _modelscope_file(self, request: web.Request) -> web.Response:
        files, path = self._find_modelscope(request).files, request.query["FilePath"]
        if path not in files:
            raise web.HTTPNotFound(text=_modelscope_answer(10010205004, "file not found"))
        digest = hashlib.sha256(files[path]).hexdigest()
        where = f"/cdn/{request.match_info['owner']}/{request.match_info['name']}/{path}"
        return web.Response(status=302, headers={"Location": where, "X-Linked-ETag": f'"{digest}"'})

    async def _cdn(self, request: web.Request) -> web.Response:
        name = f"{request.match_info['owner']}/{request.match_info['name']}"
        content = self.repositories[name].files[request.match_info["path"]]
        tag = self.tags.pop(0) if self.tags else f'"{hashlib.sha256(content).hexdigest()}"'
        wanted = request.http_range
        if wanted.start is None or not self.knows_ranges or request.headers.get("If-Range", tag) != tag:
            return web.Response(body=content, headers={"ETag": tag})
        part = content[wanted]
        span = f"bytes {wanted.start}-{wanted.start + len(part) - 1}/{len(content)}"
        return web.Response(status=206, body=part, headers={"ETag": tag, "Content-Range": span})


def _modelscope_answer(code: int, message: str, data: object = None) -> str:
    ok = code == 200
    return json.dumps({"Code": code, "Data": data, "Message": message, "RequestId": "1", "Success": ok})


def _modelscope_entry(path: str, content: bytes) -> dict[str, Any]:
    return {
        "CommittedDate": 1726665606,
        "IsLFS": len(content) >= LARGE,
        "Mode": "33188",
        "Name": path.rpartition("/")[2],
        "Path": path,
        "Revision": hashlib.sha1(content).hexdigest(),
        "Sha256": hashlib.sha256(content).hexdigest(),
        "Size": len(content),
        "Type": "blob",
    }


def _sibling(path: str, content: bytes) -> dict[str, Any]:
    blob_id = hashlib.sha1(content).hexdigest()
    told: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": blob_id}
    if len(content) >= LARGE:
        digest = hashlib.sha256(content).hexdigest()
        told["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
    return told
