"""The ingress's short way: a request for a process that serves is passed on at once (`relay/quick.py`).

It refuses nobody. Whatever is not plainly fine (a token that does not open this door, a process that is gone or speaks
gRPC, `/v1/responses`, another route) is left to `door.py`, which knows the words. What a head says is judged once;
whether its token still counts is asked once a second, and whether its process still serves every time.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from corral.contract.access import Scope
from corral.contract.http import Errand, KnownHead, Request, Responder, Tap, UpstreamFailed
from corral.contract.manifest import GRPC
from corral.inference.engine_errors import is_explained
from corral.inference.responses import ROUTE as RESPONSES
from corral.worker.ingress.inflight import InFlight
from corral.worker.ingress.replicas import OURS, PREFIX, Replicas
from corral.worker.ingress.tokens import TokenCheck
from corral.worker.supervisor.table import Running

_monotonic = time.monotonic
_MOST_CARDS = 1024
_door_log = logging.getLogger("corral.worker.ingress.door")


_LOOK_AGAIN_S = 1.0  # at a token that was fine: a cluster that is not ours any more is noticed within that


class _Card:
    """What one head means. Without a process, it has no business here."""

    __slots__ = ("authorization", "errand", "good_until", "path", "process_id", "running")

    def __init__(self, process_id: str, path: bytes, authorization: bytes) -> None:
        self.process_id = process_id
        self.path = path  # as the process sees it
        self.authorization = authorization
        self.good_until = 0.0  # on the monotonic clock
        self.running: Running | None = None
        self.errand: Errand | None = None


class Shortcut:
    """Implements the relay's `Shortcut`."""

    def __init__(self, replicas: Replicas, tokens: TokenCheck, in_flight: InFlight) -> None:
        self._replicas = replicas
        self._tokens = tokens
        self._in_flight = in_flight
        self.running = 0  # requests under way
        self.ended: Counter[int] = Counter()  # by status; whoever counts them elsewhere takes them out
        self._cards: dict[KnownHead, _Card] = {}

    def decide(self, head: KnownHead, body: bytes) -> Errand | None:
        card = self._cards.get(head) or self._judge(head)
        process_id = card.process_id
        if not process_id:
            return None
        if _monotonic() >= card.good_until and not self._is_good(card):
            return None
        running = self._replicas.serving(process_id)
        if running is None or running.protocol == GRPC:
            return None
        if running is not card.running:
            way = self._replicas.way(running)
            card.running = running
            card.errand = head.errand(way.target, path=card.path, strip=OURS, add=way.add)
            card.errand.tag = running
        self._in_flight.begin(process_id)
        self.running += 1
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
        self._end(errand, status)

    def tap(self, errand: Errand) -> None:
        """Nothing is looked at here."""

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
        self._end(errand, status)

    def _end(self, errand: Errand, status: int) -> None:
        self._in_flight.end(errand.tag.process_id)  # type: ignore[attr-defined]  # ours, from `decide`
        self.running -= 1
        self.ended[status] += 1

    def carry_on(
        self, errand: Errand, request: Request, responder: Responder, waited_s: float
    ) -> Coroutine[Any, Any, None]:
        return self._carry_on(errand, responder)

    async def _carry_on(self, errand: Errand, responder: Responder) -> None:
        running, status = errand.tag, 500
        assert isinstance(running, Running)
        try:
            result = await responder.relay(
                errand.target,
                path=errand.path,
                strip=errand.strip,
                add=errand.add,
                unwanted=is_explained,
                reads_unwanted=True,
            )
            status = result.status
        except UpstreamFailed as failure:
            status = await self._replicas.failed(responder, running, failure)
        finally:
            self._in_flight.end(running.process_id)
            self.running -= 1
            self.ended[status] += 1

    def _is_good(self, card: _Card) -> bool:
        left_s = self._tokens.good_for_s(card.authorization, Scope.REPLICAS)
        card.good_until = _monotonic() + min(left_s, _LOOK_AGAIN_S)
        return left_s > 0

    def _judge(self, head: KnownHead) -> _Card:
        if len(self._cards) >= _MOST_CARDS:
            self._cards.clear()
        card = self._cards[head] = _read(head)
        return card


def _read(head: KnownHead) -> _Card:
    path = head.path
    shown = [value for name, value in head.headers if name == b"authorization"]
    # Where every request is logged, none goes this way.
    if not path.startswith(PREFIX) or len(shown) != 1 or _door_log.isEnabledFor(logging.DEBUG):
        return _Card("", b"", b"")
    named, slash, rest = path[len(PREFIX) :].partition(b"/")
    if not slash or b"?" in named or path.partition(b"?")[0].endswith(RESPONSES):
        return _Card("", b"", b"")
    return _Card(named.decode(errors="replace"), slash + rest, shown[0])
