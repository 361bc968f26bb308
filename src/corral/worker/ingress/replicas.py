"""`/replicas/<process_id>/…`: relayed to exactly that process, or refused; never to another
(docs/explanation/invariants.md#2-one-routable-process-per-replica). A process that speaks gRPC is reached through
`inference/` instead, which translates, and so is `/v1/responses`, whose streams some engines leave incomplete.

Whoever comes in has shown a token of the controller's at the door. It ends here: the process sees the token of its own,
which nobody else knows. A process that is gone, or is being replaced, answers 410, and the gateway picks again.
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
from corral.worker.ingress.answers import say_error, say_upstream_failed
from corral.worker.ingress.bridges import Bridges
from corral.worker.ingress.inflight import InFlight
from corral.worker.supervisor.table import Running

PREFIX = b"/replicas/"
# Said of answers that are ours and not a process's: none has seen the request, so a gateway may ask another one.
_NOT_REACHED: Headers = ((NOT_REACHED, b"1"),)
_PROCESS_ENDED: Headers = ((PROCESS_ENDED, b"1"),)
OURS = Strip((b"authorization",), (b"x-corral-",))
_LONGEST_ID = 128
# A process that ends closes its connections first: how long until the supervisor knows, at most, and between looks.
_END_SEEN_S = 0.5
_LOOK_S = 0.02

Find = Callable[[str], Running | None]


class Way(NamedTuple):
    """To one process, prepared: a warm request only looks it up."""

    running: Running
    target: Target
    add: Headers


class Replicas:
    def __init__(self, find: Find, in_flight: InFlight, bridges: Bridges) -> None:
        """`find` gives the process of exactly that id, if it serves."""
        self._find = find
        self._in_flight = in_flight
        self._bridges = bridges
        self._responses = Responses()
        self._ways: dict[str, Way] = {}
        self._retired: set[str] = set()

    async def handle(self, request: Request, responder: Responder) -> int:
        """Answers, and tells the status for the count."""
        named, slash, rest = request.path[len(PREFIX) :].partition(b"/")
        process_id = named.partition(b"?")[0].decode(errors="replace")
        running = self.serving(process_id)
        if running is None:
            return await self._gone(responder, process_id)
        in_flight = self._in_flight
        in_flight.begin(process_id)
        try:
            if running.protocol == GRPC:
                bridge = await self._bridges.of(running, self._find)
                return await bridge.handle(replace(request, path=slash + rest or b"/"), responder)
            if request.method == b"POST" and request.route.endswith(RESPONSES):
                url = f"http://{running.address}"
                return await self._responses.handle(request, responder, url, running.token, running.model)
            way = self.way(running)
            path = slash + rest or b"/"
            result = await responder.relay(
                way.target,
                path=path,
                strip=OURS,
                add=way.add,
                upgrade=True,
                unwanted=may_be_explained,
                reads_unwanted=True,
            )
        except UpstreamFailed as failure:
            return await self.failed(responder, running, failure)
        finally:
            in_flight.end(process_id)
        return result.status

    async def close(self) -> None:
        await self._bridges.close()
        await self._responses.close()

    async def retire(self, process_id: str, timeout_s: float) -> bool:
        """No new requests from now on; those under way may end. Whether they have, within that time."""
        self._retired = {each for each in self._retired if self._find(each) is not None} | {process_id}
        return await self._in_flight.wait_idle(process_id, timeout_s)

    def take_back(self, process_id: str) -> None:
        """It is not to be replaced after all."""
        self._retired.discard(process_id)

    def freeze(self, serving: tuple[Running, ...]) -> None:
        """Go by this list from now on: the supervisor has let go of its processes, which run on."""
        self._find = {running.process_id: running for running in serving}.get

    def serving(self, process_id: str) -> Running | None:
        """The process of that id, if it takes new requests."""
        return None if process_id in self._retired else self._find(process_id)

    def way(self, running: Running) -> Way:
        way = self._ways.get(running.process_id)
        if way is None or way.running is not running:
            self._ways = {known: each for known, each in self._ways.items() if self._find(known) is not None}
            token = f"Bearer {running.token}".encode()
            way = Way(running, Target("127.0.0.1", running.port), ((b"authorization", token),))
            self._ways[running.process_id] = way
        return way

    async def _gone(self, responder: Responder, process_id: str) -> int:
        shown = process_id[:_LONGEST_ID]
        return await say_error(
            responder, 410, f"no process {shown!r} serves here any more; pick another", "gone", _NOT_REACHED
        )

    async def _has_ended(self, process_id: str) -> bool:
        """Whether the process that broke off a request is gone altogether."""
        for _ in range(round(_END_SEEN_S / _LOOK_S)):
            if self._find(process_id) is None:
                return True
            await asyncio.sleep(_LOOK_S)
        return self._find(process_id) is None

    async def failed(self, responder: Responder, running: Running, failure: UpstreamFailed) -> int:
        """503: nothing happened, another may be asked. 504 and 502: it was asked, and may have acted. Errors of the
        engine's own are passed on, in words that help where we know some."""
        if failure.status:
            status, headers, body = client_answer(running.model, failure.status, failure.answer)
            await responder.send(status, headers, body)
            return status
        process_id = running.process_id
        if failure.refused and self.serving(process_id) is None:
            return await self._gone(responder, process_id)
        status = 503 if failure.refused else 504 if failure.timed_out else 502
        words = "the process cannot be reached" if failure.refused else "the process broke off before it answered"
        more = _NOT_REACHED if failure.refused else _PROCESS_ENDED if await self._has_ended(process_id) else ()
        return await say_upstream_failed(responder, status, f"{words}: {failure}", more)
