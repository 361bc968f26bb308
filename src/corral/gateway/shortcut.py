"""The door's short way: a request for a model about which nothing has to be waited for is decided on the spot.

It refuses nobody and waits for nothing. Whatever is not plainly fine (a key that is unknown or may not, a body that
is odd, a model without a ready replica) is left to `door.py` and `v1.py`, which know the words. What a head says
(route, key, rights) is judged once per view of the fleet; what a body says is read every time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, runtime_checkable

from corral.contract.http import Errand, KnownHead, Patience, Request, Responder, Tap
from corral.gateway.admission import FleetSource, admit
from corral.gateway.answers import Answer
from corral.gateway.fields import read_plainly
from corral.gateway.heads import HIDDEN_FROM_REPLICA, for_replica
from corral.gateway.limits import KeyLimiter, Limiters
from corral.gateway.metrics import MOST_RECENT, RouteCounts
from corral.gateway.receipts import Tag
from corral.gateway.replicas import Route
from corral.gateway.usage import NOT_SEEN, TAIL_BYTES, UsageTap, ends_of, read_usage, summarize
from corral.gateway.v1 import INFERENCE, Ask
from corral.gateway.view import Client, Fleet

_MOST_CARDS = 1024
_MOST_ERRANDS = 64  # per head; a fleet with more replicas of one model writes some heads anew

_door_log = logging.getLogger("corral.gateway.door")

CarryOn = Callable[[Errand, Request, Responder, float], Coroutine[Any, Any, None]]


@runtime_checkable
class PromptRouter(Protocol):
    """A `Router` that can often tell at once."""

    def route_now(self, ask: Ask) -> Route | None:
        """The replica, if one can be named without waiting, a slot of it taken; None leaves the request to `route`."""


class _Card:
    """What one head means in the present view of the fleet. Without a client, it has no business here."""

    __slots__ = ("client", "errand", "errands", "expires", "limiter", "route")

    def __init__(self, client: Client | None, limiter: KeyLimiter | None) -> None:
        self.client = client
        self.limiter = limiter
        self.expires = client is not None and client.expires_at != math.inf
        self.errands: dict[Route, Errand] = {}
        self.route: Route | None = None  # the last one, and its errand
        self.errand: Errand | None = None


class Shortcut:
    """Implements the relay's `Shortcut`."""

    def __init__(
        self,
        fleets: FleetSource,
        router: PromptRouter,
        counts: RouteCounts,
        carry_on: CarryOn,
        limiters: Limiters,
        monotonic: Callable[[], float],
        *,
        patience: Patience,
        body_limit_bytes: int,
    ) -> None:
        self._carry_on = carry_on
        self._fleets = fleets
        self._route_now = router.route_now
        self._counts = counts
        self._limiters = limiters
        self._monotonic = monotonic
        self._patience = patience
        self._body_limit_bytes = body_limit_bytes
        self._fleet: Fleet | None = None  # the view for which these hold
        self._cards: dict[KnownHead, _Card] = {}

    def decide(self, head: KnownHead, body: bytes) -> Errand | None:
        fleet = self._fleets.fleet
        if fleet is not self._fleet:
            self._cards.clear()
            self._fleet = fleet
        if fleet is None:
            return None
        card = self._cards.get(head) or self._judge(head, fleet)
        client = card.client
        if client is None or len(body) > self._body_limit_bytes:
            return None
        if card.expires and client.expires_at <= self._fleets.server_now():
            return None
        fields = read_plainly(body)
        if fields is None or (client.models is not None and fields.model not in client.models):
            return None
        limiter = card.limiter
        if limiter is not None and limiter.refuses(self._monotonic()) is not None:
            return None
        route = self._route_now(Ask(head, fleet, client, fields, body))
        if route is None:
            return None
        if limiter is not None and not limiter.begin():
            route.load.end()
            return None
        if route is not card.route:
            card.errand = self._errand(card, client, head, route)
            card.route = route
        self._counts.in_flight += 1
        return card.errand

    def done(
        self,
        errand: Errand,
        request_id: bytes,
        status: int,
        started: float,
        ended: float,
        bytes_sent: int,
        answer: bytes,
    ) -> None:
        tag: Tag = errand.tag  # type: ignore[assignment]  # ours, from `_errand`
        tag.load.end()
        counts = self._counts
        counts.in_flight -= 1
        recent = counts.recent
        if len(answer) > TAIL_BYTES:
            answer = ends_of(answer)
        recent.append((tag, request_id, status, started, ended, answer))
        if len(recent) >= MOST_RECENT:
            counts.catch_up()
        if tag.limiter is not None:
            usage = read_usage(answer)
            tag.limiter.end(0 if usage is None else usage.prompt + usage.completion)

    def tap(self, errand: Errand) -> UsageTap:
        return UsageTap()

    def streamed(
        self,
        errand: Errand,
        request_id: bytes,
        status: int,
        started: float,
        ended: float,
        bytes_sent: int,
        tap: Tap | None,
    ) -> None:
        tag: Tag = errand.tag  # type: ignore[assignment]  # ours, from `_errand`
        tag.load.end()
        counts = self._counts
        counts.in_flight -= 1
        summary = summarize(tap, started) if isinstance(tap, UsageTap) else NOT_SEEN
        if summary.first_s is not None:
            counts.first_byte.observe(summary.first_s)
        counts.recent.append((tag, request_id, status, started, ended, summary))
        if len(counts.recent) >= MOST_RECENT:
            counts.catch_up()
        if tag.limiter is not None:
            tag.limiter.end(summary.usage.prompt + summary.usage.completion)

    def carry_on(
        self, errand: Errand, request: Request, responder: Responder, waited_s: float
    ) -> Coroutine[Any, Any, None]:
        card = self._cards.get(errand.head)
        if card is not None and card.client is not None:
            request.extra["key"] = card.client.key_id  # for the line in the log
        return self._carry_on(errand, request, responder, waited_s)

    def _judge(self, head: KnownHead, fleet: Fleet) -> _Card:
        if len(self._cards) >= _MOST_CARDS:
            self._cards.clear()
        client = self._client_of(head, fleet)
        limiter = None if client is None else self._limiters.of(client.key_id, client.limits, self._monotonic())
        card = self._cards[head] = _Card(client, limiter)
        return card

    def _client_of(self, head: KnownHead, fleet: Fleet) -> Client | None:
        """For exactly the heads that `V1.inference` would let pass; where every request is logged, for none."""
        if head.method != b"POST" or head.path.partition(b"?")[0] not in INFERENCE:
            return None
        kinds = [value for name, value in head.headers if name == b"content-type"]
        if (kinds and kinds[0].lower().startswith(b"multipart/")) or _door_log.isEnabledFor(logging.DEBUG):
            return None
        client = admit(fleet, head.headers, self._fleets.server_now)
        return None if isinstance(client, Answer) or not client.may_infer else client

    def _errand(self, card: _Card, client: Client, head: KnownHead, route: Route) -> Errand:
        errand = card.errands.get(route)
        if errand is None:
            errand = head.errand(
                route.target,
                path=route.path,
                strip=HIDDEN_FROM_REPLICA,
                add=for_replica(route.ingress_token),
                patience=self._patience,
            )
            errand.tag = Tag(client, route, head.path.partition(b"?")[0], card.limiter)
            if len(card.errands) >= _MOST_ERRANDS:
                card.errands.clear()
            card.errands[route] = errand
        return errand
