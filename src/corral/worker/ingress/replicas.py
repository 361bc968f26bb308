"""`/replicas/<process_id>/…`: relayed to exactly that process, or to the one that replaced it in an upgrade; never to a
process of another identity or revision (docs/explanation/invariants.md#2-one-routable-process-per-replica). A process
that speaks gRPC is reached through `inference/` instead, which translates, and so is `/v1/responses`, whose streams
some engines leave incomplete.

`routes.py` has checked the controller's token of the request. The token is not passed on: the process gets its own
token, which nobody else knows. For a process that is gone, or is being stopped, the response is 410, and the gateway
picks another replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from corral.contract.http import NOT_REACHED, PROCESS_ENDED, Headers, Request, Responder, Strip, Target, UpstreamFailed
from corral.contract.manifest import GRPC
from corral.inference.engine_errors import client_answer, may_be_explained
from corral.inference.responses import ROUTE as RESPONSES
from corral.inference.responses import Responses
from corral.kit.tracing.context import TRACEPARENT, TraceContext
from corral.kit.tracing.tracer import Tracer
from corral.worker.ingress.bridges import Bridges
from corral.worker.ingress.in_flight import InFlight
from corral.worker.ingress.responses import send_error, send_upstream_failed
from corral.worker.ingress.spans import record_request
from corral.worker.supervisor.table import Running

PREFIX = b"/replicas/"
# Marks responses of the ingress itself: no process has seen the request, so a gateway may try another replica.
NOT_REACHED_HEADERS: Headers = ((NOT_REACHED, b"1"),)
_PROCESS_ENDED: Headers = ((PROCESS_ENDED, b"1"),)
OURS = Strip((b"authorization",), (b"x-corral-",))
OURS_AND_PARENT = Strip((*OURS.names, TRACEPARENT), OURS.prefixes)
MAX_SHOWN_ID_LENGTH = 128
# A process that ends closes its connections first; the supervisor notices the end within this time.
_END_NOTICED_S = 0.5
_POLL_S = 0.02

Find = Callable[[str], Running | None]


class ProcessRoute(NamedTuple):
    """The prepared route to one process: a request only looks it up."""

    running: Running
    target: Target
    add: Headers


class ReplicaRelay:
    def __init__(self, find: Find, in_flight: InFlight, bridges: Bridges, tracer: Tracer | None = None) -> None:
        """`find` returns the process with exactly this id, if it serves. `tracer` None: no request is traced."""
        self._tracer = tracer
        self._find = find
        self._in_flight = in_flight
        self._bridges = bridges
        self._responses = Responses()
        self._routes: dict[str, ProcessRoute] = {}
        self._retired: set[str] = set()
        self._successors: dict[str, str] = {}  # process ids, old to new

    async def handle(self, request: Request, responder: Responder) -> int:
        """Send the response and return its status for the metrics."""
        named, slash, rest = request.path[len(PREFIX) :].partition(b"/")
        process_id = named.partition(b"?")[0].decode(errors="replace")
        running = self.serving(process_id)
        if running is None:
            return await self._gone(responder, process_id)
        path = slash + rest or b"/"
        context = None if self._tracer is None else self._tracer.join(request.headers)
        if self._tracer is None or context is None:
            return await self._relay(running, path, request, responder, None)
        with record_request(self._tracer, context, request.method, path, running, request.request_id) as span:
            status = await self._relay(running, path, request, responder, context)
            span.on_status(status)
            return status

    async def _relay(
        self, running: Running, path: bytes, request: Request, responder: Responder, context: TraceContext | None
    ) -> int:
        in_flight = self._in_flight
        in_flight.begin(running.process_id)
        try:
            if running.protocol == GRPC:
                bridge = await self._bridges.of(running, self._find)
                return await bridge.handle(replace(request, path=path), responder)
            if request.method == b"POST" and request.route.endswith(RESPONSES):
                url = f"http://{running.address}"
                return await self._responses.handle(request, responder, url, running.token, running.model)
            route = self.route_to(running)
            add = route.add if context is None else (*route.add, (TRACEPARENT, context.traceparent()))
            result = await responder.relay(
                route.target,
                path=path,
                strip=OURS if context is None else OURS_AND_PARENT,
                add=add,
                upgrade=True,
                unwanted=may_be_explained,
                reads_unwanted=True,
            )
        except UpstreamFailed as failure:
            return await self.send_failure(responder, running, failure)
        finally:
            in_flight.end(running.process_id)
        return result.status

    async def close(self) -> None:
        await self._bridges.close()
        await self._responses.close()

    async def retire(self, process_id: str, timeout_s: float) -> bool:
        """Accept no new requests for a process. Returns whether its requests have ended within this time."""
        self._retired = {each for each in self._retired if self._find(each) is not None} | {process_id}
        return await self._in_flight.wait_idle(process_id, timeout_s)

    def redirect(self, old: str, new: str) -> None:
        """Relay requests for the old process to the new one, which serves the same replica with another version of the
        backend. Gateways learn of it from the controller, and cannot while the database is away."""
        links = {**self._successors, **{each: new for each, to in self._successors.items() if to == old}, old: new}
        self._successors = {each: to for each, to in links.items() if self._find(to) is not None}

    def take_back(self, process_id: str) -> None:
        """Accept requests for a process again."""
        self._retired.discard(process_id)

    def freeze(self, serving: tuple[Running, ...]) -> None:
        """Use this list from now on: the supervisor has released its processes, which run on."""
        self._find = {running.process_id: running for running in serving}.get

    def serving(self, process_id: str) -> Running | None:
        """The process with this id, or the one that replaced it, if it accepts new requests."""
        process_id = self._successors.get(process_id, process_id)
        return None if process_id in self._retired else self._find(process_id)

    def route_to(self, running: Running) -> ProcessRoute:
        route = self._routes.get(running.process_id)
        if route is None or route.running is not running:
            self._routes = {known: each for known, each in self._routes.items() if self._find(known) is not None}
            token = f"Bearer {running.token}".encode()
            route = ProcessRoute(running, Target("127.0.0.1", running.port), ((b"authorization", token),))
            self._routes[running.process_id] = route
        return route

    async def _gone(self, responder: Responder, process_id: str) -> int:
        shown = process_id[:MAX_SHOWN_ID_LENGTH]
        return await send_error(
            responder, 410, f"no process {shown!r} serves here any more; pick another", "gone", NOT_REACHED_HEADERS
        )

    async def _has_ended(self, process_id: str) -> bool:
        """Whether the process that broke the connection has ended."""
        for _ in range(round(_END_NOTICED_S / _POLL_S)):
            if self._find(process_id) is None:
                return True
            await asyncio.sleep(_POLL_S)
        return self._find(process_id) is None

    async def send_failure(self, responder: Responder, running: Running, failure: UpstreamFailed) -> int:
        """Respond with 503 when the process did not get the request, with 504 or 502 when it did and may have acted.
        Errors of the engine itself are passed on, with a better message where we know one."""
        if failure.status:
            status, headers, body = client_answer(running.model, failure.status, failure.answer)
            await responder.send(status, headers, body)
            return status
        process_id = running.process_id
        if failure.refused and self.serving(process_id) is None:
            return await self._gone(responder, process_id)
        status = 503 if failure.refused else 504 if failure.timed_out else 502
        words = (
            "the process cannot be reached"
            if failure.refused
            else "the process broke the connection before it answered"
        )
        more = NOT_REACHED_HEADERS if failure.refused else _PROCESS_ENDED if await self._has_ended(process_id) else ()
        return await send_upstream_failed(responder, status, f"{words}: {failure}", more)
