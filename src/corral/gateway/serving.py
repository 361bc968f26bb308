"""One request for a model, from its admission to its receipt: routed, relayed, tried elsewhere where that is safe.

Trying again is safe as long as nobody has begun to work on the request: the ingress refused the connection, or said
that the process is not there (any more). Once per request it is also tried again where nothing can come of the first
try any more: the ingress stopped responding altogether (`ingress_monitor.py`), or says that the process ended. Whatever
breaks otherwise is told, never repeated, and how long an answer takes is never a reason.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from corral.contract.http import (
    NOT_REACHED,
    PROCESS_ENDED,
    ClientGone,
    Errand,
    Headers,
    Patience,
    RelayResult,
    Request,
    Responder,
    UpstreamFailed,
)
from corral.contract.models import LONGEST_NAME
from corral.gateway import answers
from corral.gateway.admission import FleetSource
from corral.gateway.answers import Answer
from corral.gateway.bodies import NoRoom
from corral.gateway.cors import Cors
from corral.gateway.fields import FieldReader
from corral.gateway.heads import HIDDEN_FROM_REPLICA, for_replica
from corral.gateway.inflight import Ejection
from corral.gateway.limits import KeyLimiter
from corral.gateway.metrics import CLIENT_GONE, RouteCounts
from corral.gateway.receipts import ReceiptRing, Tag, served_by
from corral.gateway.relaying import send, settle, status_of
from corral.gateway.replicas import Replica, Route
from corral.gateway.usage import NONE, Usage, UsageTap
from corral.gateway.v1 import Ask, Router, Waited
from corral.gateway.view import Client
from corral.kit.clock import Clock
from corral.kit.log import get_log

log = get_log(__name__)

# Answers of an ingress that are not for the client, by status: the header that makes them so.
_NOT_FOR_CLIENTS = {410: NOT_REACHED, 503: NOT_REACHED, 502: PROCESS_ENDED}
_ENDED = 502
_LARGE = 256 * 1024  # bytes of a body from which two writes cost less than one and a copy
_WORDS = {
    503: "No replica of the model could be reached. Try again shortly.",
    504: "The replica did not begin to answer in time.",
    502: "The replica broke off before it answered.",
}


@dataclass(frozen=True, slots=True)
class ServingOptions:
    patience: Patience
    retry_after_s: float = 2.0
    tries: int = 4
    expose_node: bool = False


@dataclass(slots=True)
class _Trip:
    """One request on its way, as its receipt will tell it."""

    client: Client
    model: str
    started: float
    waited: Waited
    limiter: KeyLimiter | None
    tap: UsageTap
    tries: int = 0
    repeated: bool = False  # it was sent again although the first one to get it may have begun
    status: int = 500
    replica: Replica | None = None
    result: RelayResult | None = None
    ending: str = ""

    def first_s(self) -> float | None:
        """Until the first event with something generated; None where there was none, or the answer is no stream."""
        return None if self.tap.first_at is None else max(0.0, self.tap.first_at - self.started)


class Serving:
    def __init__(
        self,
        fleets: FleetSource,
        router: Router,
        counts: RouteCounts,
        ring: ReceiptRing,
        ejection: Ejection,
        clock: Clock,
        cors: Cors,
        options: ServingOptions,
    ) -> None:
        self._fleets = fleets
        self._router = router
        self._counts = counts
        self._ring = ring
        self._ejection = ejection
        self._clock = clock
        self._cors = cors
        self._options = options
        self._reader = FieldReader()
        self.retries = 0

    async def serve(self, request: Request, responder: Responder, ask: Ask) -> int:
        now = self._clock.monotonic()
        trip = _Trip(ask.client, ask.fields.model, now, ask.waited or Waited(), ask.limiter, UsageTap())
        return await self._travel(request, responder, trip, ask, None)

    async def carry_on(self, errand: Errand, request: Request, responder: Responder, waited_s: float) -> int:
        """`serve` for a request that was decided on the short way: its slot is taken, its limits are counted."""
        tag = errand.tag
        assert isinstance(tag, Tag)
        started = self._clock.monotonic() - waited_s
        tap = request.extra.get("tap")  # of an answer that has begun
        trip = _Trip(
            tag.client,
            tag.route.asked,
            started,
            Waited(),
            tag.limiter,
            tap if isinstance(tap, UsageTap) else UsageTap(),
        )
        return await self._travel(request, responder, trip, None, tag.route)

    async def _travel(
        self, request: Request, responder: Responder, trip: _Trip, ask: Ask | None, route: Route | None
    ) -> int:
        request.extra["model"] = trip.model  # for the line in the log
        try:
            trip.status = await self._try(request, responder, trip, ask, route)
            return trip.status
        except (asyncio.CancelledError, ClientGone):  # how the relay stops a handler whose client has left
            trip.status, trip.ending = CLIENT_GONE, "client_left"
            raise
        finally:
            usage = trip.tap.usage() if trip.result is not None else NONE
            if trip.limiter is not None:
                trip.limiter.end(usage.prompt + usage.completion)
            self._note(request, trip, usage)

    async def _try(
        self, request: Request, responder: Responder, trip: _Trip, ask: Ask | None, route: Route | None
    ) -> int:
        while True:
            if route is None:
                ask = ask or await self._ask_again(request, trip)
                routed = await self._router.route(ask)
                if isinstance(routed, Answer):
                    trip.replica = None
                    return await self._send(request, responder, routed)
                route = routed
            trip.tries += 1
            trip.replica = route.replica
            if route.replica is not None:
                request.extra["node"] = route.replica.node_name  # for the line in the log
            try:
                trip.result = await self._relay(request, responder, trip, ask, route)
            except (NoRoom, OSError) as error:
                log.error("a body could not be kept on disk", reason=str(error))
                return await self._send(request, responder, answers.no_room("on its disk", self._options.retry_after_s))
            except UpstreamFailed as failure:
                if not self._again(route, failure, trip):
                    request.extra["error"] = str(failure)  # for the line in the log; the client gets a general sentence
                    return await self._send(request, responder, self._failed(failure))
                self.retries += 1
            else:
                return self._settled(trip, route, trip.result)
            finally:
                route.load.end()
            route = None

    async def _relay(
        self, request: Request, responder: Responder, trip: _Trip, ask: Ask | None, route: Route
    ) -> RelayResult:
        return await responder.relay(
            route.target,
            path=route.path,
            strip=HIDDEN_FROM_REPLICA,
            add=for_replica(route.ingress_token),
            body=None if ask is None else await _body_for(route, ask),
            tap=trip.tap,
            response_headers=(*self._cors.headers(request), *self._named(route)),
            upgrade=bool(request.upgrade),
            patience=self._options.patience,
            unwanted=_is_unwanted,
        )

    def _again(self, route: Route, failure: UpstreamFailed, trip: _Trip) -> bool:
        """Whether another one may be asked. Those that could not be reached are left alone for a while."""
        if not (failure.refused or failure.unresponsive) or route.replica is None:
            return False
        seen = route.replica.seen
        if failure.status:
            self._ejection.process(seen.process_id)
        else:
            self._ejection.node(seen.node_id)
        if failure.unresponsive or failure.status == _ENDED:  # a request that ends processes must not end them all
            if trip.repeated:
                return False
            trip.repeated = True
        return failure.resendable and trip.tries < self._options.tries

    def _settled(self, trip: _Trip, route: Route, result: RelayResult) -> int:
        if route.replica is not None:
            self._ejection.reached(route.load)
        if result.client_gone:
            trip.ending = "client_left"
        elif not result.complete:
            trip.ending = "upstream_broke"
        return settle(self._counts, result, trip.first_s())

    async def _ask_again(self, request: Request, trip: _Trip) -> Ask:
        """For a request of the short way, which was never asked at length."""
        fleet = self._fleets.fleet
        assert fleet is not None  # it was decided by one, and views do not go away
        body = await request.body.read(2**62)  # it is here: bounds were checked when it came
        return Ask(request, fleet, trip.client, self._reader.read(body), body, trip.waited)

    def _named(self, route: Route) -> Headers:
        named: list[tuple[bytes, bytes]] = []
        if route.replica is not None:
            if self._options.expose_node:
                node = route.replica.node_name.encode("latin-1", "replace")
                named += [(b"x-corral-node", node), (b"x-localai-node", node)]
            if route.stand_in:
                named.append((b"x-corral-model", route.replica.seen.model.encode("ascii", "backslashreplace")))
        return named

    def _failed(self, failure: UpstreamFailed) -> Answer:
        status = _ENDED if failure.status == _ENDED else status_of(failure)
        headers = (answers.retry_after(self._options.retry_after_s),) if status == 503 else ()
        return answers.openai_error(
            status, _WORDS[status], kind=answers.SERVER, code="upstream_failed", headers=headers
        )

    def _note(self, request: Request, trip: _Trip, usage: Usage) -> None:
        waited, total_s = trip.waited, self._clock.monotonic() - trip.started
        self._ring.note(
            served_by(
                trip.replica,
                id=request.request_id,
                at=self._fleets.server_now() - total_s,
                key_id=trip.client.key_id,
                model=trip.model[:LONGEST_NAME],  # as long as one can be: many of them have to fit into one batch
                path=request.route[:200].decode("latin-1"),
                status=trip.status,
                queue_ms=_ms(waited.queue_s),
                load_ms=_ms(waited.load_s),
                first_byte_ms=_ms(trip.first_s() or 0.0),
                total_ms=_ms(total_s),
                prompt_tokens=usage.prompt,
                completion_tokens=usage.completion,
                estimated=usage.estimated,
                streamed=trip.tap.streamed,
                ending=trip.ending,
                tries=max(1, trip.tries),
            )
        )

    async def _send(self, request: Request, responder: Responder, answer: Answer) -> int:
        return await send(responder, answer, self._cors.headers(request))


def _is_unwanted(status: int, headers: Headers) -> bool:
    reason = _NOT_FOR_CLIENTS.get(status)
    return reason is not None and any(name == reason for name, _ in headers)


async def _body_for(route: Route, ask: Ask) -> bytes | memoryview | None:
    """None: as it came. Engines know a model by its own name: a body that names an alias, or the model for which
    another stands in, is the one thing that is changed on its way."""
    model = ask.fields.model if route.replica is None else route.replica.seen.model
    if ask.spooled is not None:
        return await ask.spooled.view_for(model)
    if not ask.body:
        return None
    if model == ask.fields.model:
        # Written as it is: a large one is not copied again for every try.
        return ask.body if len(ask.body) < _LARGE else memoryview(ask.body)
    fields = msgspec.json.decode(ask.body, type=dict[str, msgspec.Raw])
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 3)
