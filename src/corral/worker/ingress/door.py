"""The routes of the worker's one port (contract: http.md §4; DESIGN §2.2, §4).

`/healthz` and `/readyz` are open and say nothing secret. Everything else needs a token of the controller's, and what
is behind a door is not even said to exist to those without one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from corral.contract.access import Scope
from corral.contract.codec import encode
from corral.contract.http import Headers, Request, Responder
from corral.kit.log import get_log
from corral.worker.agent.standing import Standing
from corral.worker.ingress.tokens import TokenCheck
from corral.worker.metrics import CONTENT_TYPE, WorkerMetrics

log = get_log(__name__)
_TEXT: Headers = ((b"content-type", b"text/plain; charset=utf-8"),)
_JSON: Headers = ((b"content-type", b"application/json"),)
_CHALLENGE: Headers = (*_JSON, (b"www-authenticate", b"Bearer"))
_READING = (b"GET", b"HEAD")

Serve = Callable[[Request, Responder], Awaitable[int]]  # answers, and tells the status for the count


class Door:
    """A `Handler` of the relay."""

    def __init__(self, standing: Standing, tokens: TokenCheck, metrics: WorkerMetrics) -> None:
        self._standing = standing
        self._tokens = tokens
        self._metrics = metrics
        self.in_flight = 0
        self._open: dict[bytes, Serve] = {b"/healthz": self._healthz, b"/readyz": self._readyz}
        self._guarded: dict[bytes, tuple[Scope, Serve]] = {
            b"/corral/hello": (Scope.PROBE, self._hello),
            b"/metrics": (Scope.LOGS, self._show_metrics),
        }

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
            status = await _error(responder, refused.status, refused.why, "denied")
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
        if route.startswith(b"/replicas/"):
            return "/replicas", Scope.REPLICAS, self._replica
        return "other", None, self._unknown

    async def _serve_counted(self, serve: Serve, request: Request, responder: Responder) -> int:
        self.in_flight += 1
        self._metrics.in_flight.set(self.in_flight)
        try:
            return await serve(request, responder)
        finally:
            self.in_flight -= 1
            self._metrics.in_flight.set(self.in_flight)

    async def _healthz(self, request: Request, responder: Responder) -> int:
        if request.method not in _READING:
            return await _wrong_method(responder)
        await responder.send(200, _TEXT, b"ok")
        return 200

    async def _readyz(self, request: Request, responder: Responder) -> int:
        if request.method not in _READING:
            return await _wrong_method(responder)
        why = self._standing.not_ready()
        status, text = (200, b"ok") if why is None else (503, f"not ready: {why}".encode())
        await responder.send(status, _TEXT, text)
        return status

    async def _hello(self, request: Request, responder: Responder) -> int:
        if request.method not in _READING:
            return await _wrong_method(responder)
        who = self._standing
        body = encode({"node_id": who.node_id, "name": who.name, "boot_id": who.boot_id})
        await responder.send(200, _JSON, body)
        return 200

    async def _show_metrics(self, request: Request, responder: Responder) -> int:
        if request.method not in _READING:
            return await _wrong_method(responder)
        await responder.send(200, ((b"content-type", CONTENT_TYPE),), self._metrics.render())
        return 200

    async def _replica(self, request: Request, responder: Responder) -> int:
        process_id = request.route.removeprefix(b"/replicas/").partition(b"/")[0].decode(errors="replace")[:128]
        return await _error(responder, 410, f"no process {process_id!r} runs here any more; pick another", "gone")

    async def _unknown(self, _request: Request, responder: Responder) -> int:
        return await _error(responder, 404, "there is no such route here", "not_found")


async def _wrong_method(responder: Responder) -> int:
    body = encode({"error": {"code": 405, "message": "only GET and HEAD are served here", "type": "invalid"}})
    await responder.send(405, (*_JSON, (b"allow", b"GET, HEAD")), body)
    return 405


async def _error(responder: Responder, status: int, message: str, kind: str) -> int:
    body = encode({"error": {"code": status, "message": message, "type": kind}})
    await responder.send(status, _CHALLENGE if status == 401 else _JSON, body)
    return status


def _peer(request: Request) -> str:
    return request.peer[0] if request.peer is not None else "local"
