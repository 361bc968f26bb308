"""The routes of the worker's one port (docs/reference/wire/files.md#the-workers-http-port).

`/healthz` and `/readyz` are open and say nothing secret. Everything else needs a token of the controller's, and what
is behind a door is not even said to exist to those without one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from corral.contract.access import Scope
from corral.contract.codec import encode
from corral.contract.http import Request, Responder
from corral.inference.request_files import RequestFiles
from corral.kit.log import get_log
from corral.worker.agent.standing import Standing
from corral.worker.ingress import logs, replicas
from corral.worker.ingress.answers import JSON, READING, TEXT, say_error, say_wrong_method
from corral.worker.ingress.bridges import Bridges
from corral.worker.ingress.fast_path import IngressFastPath
from corral.worker.ingress.inflight import InFlight
from corral.worker.ingress.tokens import NotWelcome, TokenCheck
from corral.worker.metrics import CONTENT_TYPE, WorkerMetrics
from corral.worker.supervisor.logs import LogBook
from corral.worker.supervisor.table import Running

log = get_log(__name__)
_REPLICAS = "/replicas"
_FILES = (b"/v1/files/", b"/v1/files-list/")
NO_FILES = (
    "this Corral worker has no file server for LocalAI controllers yet: models whose files LocalAI sends "
    "cannot be loaded on it"
)
Serve = Callable[[Request, Responder], Awaitable[int]]  # answers, and tells the status for the count


class Processes(Protocol):
    """The part of the supervisor that the ingress needs."""

    @property
    def logs(self) -> LogBook: ...

    def find(self, process_id: str) -> Running | None: ...


class Door:
    """A `Handler` of the relay."""

    def __init__(
        self,
        standing: Standing,
        tokens: TokenCheck,
        metrics: WorkerMetrics,
        processes: Processes,
        files: RequestFiles,
    ) -> None:
        """`files`: of requests, where backends can read and write them."""
        self._standing = standing
        self._tokens = tokens
        self._metrics = metrics
        self.inflight = InFlight()
        self.replicas = replicas.Replicas(processes.find, self.inflight, Bridges(files))
        self.fast_path = IngressFastPath(self.replicas, tokens, self.inflight)
        self._open_requests = 0
        metrics.in_flight.set_function(lambda: self._open_requests + self.fast_path.running)
        self._logs = logs.LogDoor(processes.logs)
        self._open: dict[bytes, Serve] = {b"/healthz": self._healthz, b"/readyz": self._readyz}
        self._guarded: dict[bytes, tuple[Scope, Serve]] = {
            b"/corral/hello": (Scope.PROBE, self._hello),
            b"/metrics": (Scope.LOGS, self._show_metrics),
        }

    async def close(self) -> None:
        await self._logs.close()
        await self.replicas.close()

    async def handle(self, request: Request, responder: Responder) -> None:
        if (serve := self._open.get(request.route)) is not None:
            await serve(request, responder)
            return
        label, scope, serve = self._find(request.route)
        refused = self._tokens.check(request.header(b"authorization"), scope)
        if refused is not None:
            log.info(
                "ingress refused", route=label, why=refused.why, peer=_peer(request), request_id=request.request_id
            )
            status = await _refuse(request, responder, refused)
        else:
            status = await self._serve_counted(serve, request, responder)
        self._metrics.requests.labels(route=label, status=status).inc()
        log.debug("ingress request", route=label, status=status, request_id=request.request_id)

    def _find(self, route: bytes) -> tuple[str, Scope | None, Serve]:
        """The route's label for the count, the scope it needs (None: any), and who serves it."""
        exact = self._guarded.get(route)
        if exact is not None:
            scope, serve = exact
            return route.decode(), scope, serve
        if route.startswith(replicas.PREFIX):
            return _REPLICAS, Scope.REPLICAS, self.replicas.handle
        if route == logs.PREFIX or route.startswith(logs.PREFIX + b"/"):
            return "/v1/backend-logs", Scope.LOGS, self._logs.handle
        if route.startswith(_FILES):
            return "/v1/files", Scope.FILES, self._no_files
        return "other", None, self._unknown

    async def _serve_counted(self, serve: Serve, request: Request, responder: Responder) -> int:
        self._open_requests += 1
        try:
            return await serve(request, responder)
        finally:
            self._open_requests -= 1

    async def _healthz(self, request: Request, responder: Responder) -> int:
        if request.method not in READING:
            return await say_wrong_method(responder)
        await responder.send(200, TEXT, b"ok")
        return 200

    async def _readyz(self, request: Request, responder: Responder) -> int:
        if request.method not in READING:
            return await say_wrong_method(responder)
        why = self._standing.not_ready()
        status, text = (200, b"ok") if why is None else (503, f"not ready: {why}".encode())
        await responder.send(status, TEXT, text)
        return status

    async def _hello(self, request: Request, responder: Responder) -> int:
        if request.method not in READING:
            return await say_wrong_method(responder)
        who = self._standing
        body = encode({"node_id": who.node_id, "name": who.name, "boot_id": who.boot_id})
        await responder.send(200, JSON, body)
        return 200

    async def _show_metrics(self, request: Request, responder: Responder) -> int:
        if request.method not in READING:
            return await say_wrong_method(responder)
        for status, count in self.fast_path.ended.items():
            self._metrics.requests.labels(route=_REPLICAS, status=status).inc(count)
        self.fast_path.ended.clear()
        await responder.send(200, ((b"content-type", CONTENT_TYPE),), self._metrics.render())
        return 200

    async def _no_files(self, request: Request, responder: Responder) -> int:
        log.warning("file request not served", why=NO_FILES, peer=_peer(request), request_id=request.request_id)
        return await logs.say(responder, 501, NO_FILES)

    async def _unknown(self, _request: Request, responder: Responder) -> int:
        return await say_error(responder, 404, "there is no such route here", "not_found")


def _peer(request: Request) -> str:
    return request.peer[0] if request.peer is not None else "local"


async def _refuse(request: Request, responder: Responder, refused: NotWelcome) -> int:
    if not request.route.startswith(b"/v1/"):
        return await say_error(responder, refused.status, refused.why, "denied")
    if refused.status == 403:
        return await logs.say(responder, 403, refused.why)
    return await logs.say(responder, 401, "unauthorized")  # the contract's word, whatever the reason
