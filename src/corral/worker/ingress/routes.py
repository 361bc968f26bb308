"""The routes of the worker's one port (docs/reference/wire/files.md#the-workers-http-port).

`/healthz` and `/readyz` are open and reveal nothing secret. Every other route needs a token of the controller: without
one the response does not even say whether the route exists.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from corral.contract.access import Scope
from corral.contract.codec import encode
from corral.contract.http import Request, Responder
from corral.inference.request_files import RequestFiles
from corral.kit.log import get_log
from corral.kit.tracing.tracer import Tracer
from corral.worker.ingress import logs, replicas
from corral.worker.ingress.blobs import ROUTE, BlobRoutes
from corral.worker.ingress.bridges import Bridges
from corral.worker.ingress.fast_path import IngressFastPath
from corral.worker.ingress.in_flight import InFlight
from corral.worker.ingress.responses import JSON, READING, TEXT, send_error, send_wrong_method
from corral.worker.ingress.tokens import TokenRejected, TokenVerifier
from corral.worker.metrics import CONTENT_TYPE, WorkerMetrics
from corral.worker.status import WorkerStatus
from corral.worker.supervisor.logs import LogBook

log = get_log(__name__)
_stdlib = logging.getLogger(__name__)
_REPLICAS = "/replicas"
_FILES = (b"/v1/files/", b"/v1/files-list/")
NO_FILES = "this Corral worker has no file server"
Serve = Callable[[Request, Responder], Awaitable[int]]  # answers, and tells the status for the count


class IngressRoutes:
    """A `Handler` of the relay."""

    def __init__(
        self,
        status: WorkerStatus,
        tokens: TokenVerifier,
        metrics: WorkerMetrics,
        find: replicas.Find,
        book: LogBook,
        files: RequestFiles,
        blobs: BlobRoutes | None = None,
        tracer: Tracer | None = None,
        own_log: LogBook | None = None,
    ) -> None:
        """`find` returns the process with an id, if it serves; `book` has the logs of processes; `files` keeps files of
        requests where backends can read and write them. `blobs` None: no blob is served. `tracer`
        None: no request is traced. `own_log` has what the worker logs itself."""
        self._status = status
        self._tokens = tokens
        self._metrics = metrics
        self.in_flight = InFlight()
        self.replicas = replicas.ReplicaRelay(find, self.in_flight, Bridges(files), tracer)
        self.fast_path = IngressFastPath(self.replicas, tokens, self.in_flight, tracer)
        self._open_requests = 0
        metrics.in_flight.set_function(lambda: self._open_requests + self.fast_path.running)
        self._logs = logs.LogRoutes(book, own_log or LogBook())
        self._blobs = blobs
        self.serve_files: Serve = self._no_files  # `main` sets another one, where LocalAI is supported
        self._open: dict[bytes, Serve] = {b"/healthz": self._healthz, b"/readyz": self._readyz}
        self._guarded: dict[bytes, tuple[Scope, Serve]] = {
            b"/corral/hello": (Scope.PROBE, self._hello),
            b"/corral/log": (Scope.LOGS, self._logs.handle_own),
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
        if _stdlib.isEnabledFor(logging.DEBUG):  # otherwise nothing is built for it
            log.debug("ingress request", route=label, status=status, request_id=request.request_id)

    def _find(self, route: bytes) -> tuple[str, Scope | None, Serve]:
        """The route's label for metrics, the scope it needs (None: any), and its handler."""
        exact = self._guarded.get(route)
        if exact is not None:
            scope, serve = exact
            return route.decode(), scope, serve
        if route.startswith(replicas.PREFIX):
            return _REPLICAS, Scope.REPLICAS, self.replicas.handle
        if route == logs.PREFIX or route.startswith(logs.PREFIX + b"/"):
            return "/v1/backend-logs", Scope.LOGS, self._logs.handle
        if self._blobs is not None and route.startswith(ROUTE):
            return "/blobs", Scope.BLOBS, self._blobs.handle
        if route.startswith(_FILES):
            return "/v1/files", Scope.FILES, self.serve_files
        return "other", None, self._unknown

    async def _serve_counted(self, serve: Serve, request: Request, responder: Responder) -> int:
        self._open_requests += 1
        try:
            return await serve(request, responder)
        finally:
            self._open_requests -= 1

    async def _healthz(self, request: Request, responder: Responder) -> int:
        if request.method not in READING:
            return await send_wrong_method(responder)
        await responder.send(200, TEXT, b"ok")
        return 200

    async def _readyz(self, request: Request, responder: Responder) -> int:
        if request.method not in READING:
            return await send_wrong_method(responder)
        why = self._status.not_ready_reason()
        status, text = (200, b"ok") if why is None else (503, f"not ready: {why}".encode())
        await responder.send(status, TEXT, text)
        return status

    async def _hello(self, request: Request, responder: Responder) -> int:
        if request.method not in READING:
            return await send_wrong_method(responder)
        who = self._status
        body = encode({"node_id": who.node_id, "name": who.name, "boot_id": who.boot_id})
        await responder.send(200, JSON, body)
        return 200

    async def _show_metrics(self, request: Request, responder: Responder) -> int:
        if request.method not in READING:
            return await send_wrong_method(responder)
        for status, count in self.fast_path.ended.items():
            self._metrics.requests.labels(route=_REPLICAS, status=status).inc(count)
        self.fast_path.ended.clear()
        await responder.send(200, ((b"content-type", CONTENT_TYPE),), self._metrics.render())
        return 200

    async def _no_files(self, request: Request, responder: Responder) -> int:
        log.warning("file request not served", why=NO_FILES, peer=_peer(request), request_id=request.request_id)
        return await logs.send_text(responder, 501, NO_FILES)

    async def _unknown(self, _request: Request, responder: Responder) -> int:
        return await send_error(responder, 404, "there is no such route here", "not_found")


def _peer(request: Request) -> str:
    return request.peer[0] if request.peer is not None else "local"


async def _refuse(request: Request, responder: Responder, refused: TokenRejected) -> int:
    if request.route.startswith(replicas.PREFIX):
        # The token is the gateway's, not the client's: clocks that differ must not look like a wrong API key.
        return await send_error(responder, refused.status, refused.why, "denied", replicas.NOT_REACHED_HEADERS)
    if not request.route.startswith(b"/v1/"):
        return await send_error(responder, refused.status, refused.why, "denied")
    if refused.status == 403:
        return await logs.send_text(responder, 403, refused.why)
    return await logs.send_text(responder, 401, "unauthorized")  # the contract's word, whatever the reason
