"""What became of each request, kept for a moment and sent to the controller in batches (DESIGN §7).

Requests on the short way leave a tuple; it is made into a receipt when a batch is, a few at a time, so that no client
waits for it. The ring is bounded: what finds no room is counted, not kept.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import NamedTuple, Protocol

from corral.contract.receipts import Receipt, Receipts
from corral.gateway.limits import KeyLimiter
from corral.gateway.replicas import Replica, Route
from corral.gateway.usage import TAIL_BYTES, Usage, read_usage
from corral.gateway.view import Client
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log

log = get_log(__name__)

_AT_ONCE = 256  # receipts made in one go: about a millisecond's worth
_PER_BATCH = 2000  # well below what the controller takes in one body
_NONE = Usage()


class Tag:
    """What all requests of one errand have in common: whose they are, and where they go."""

    __slots__ = ("client", "limiter", "load", "path", "route")

    def __init__(self, client: Client, route: Route, path: bytes, limiter: KeyLimiter | None) -> None:
        self.client = client
        self.route = route
        self.load = route.load
        self.path = path  # the client's own
        self.limiter = limiter


class Flown(NamedTuple):
    """A request that went the short way to its end."""

    tag: Tag
    request_id: bytes
    status: int
    started: float  # monotonic
    ended: float
    tail: bytes  # the last bytes of the answer


class ReceiptRing:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.dropped = 0  # not yet told
        self.lost = 0  # ever
        self._flown: list[tuple[Tag, bytes, int, float, float, bytes]] = []
        self._made: list[Receipt] = []

    def flew(self, tag: Tag, request_id: bytes, status: int, started: float, ended: float, answer: bytes) -> None:
        """Kept as short as can be: every warm request passes here."""
        flown = self._flown
        if len(flown) < self.limit:
            flown.append((tag, request_id, status, started, ended, answer[-TAIL_BYTES:]))
        else:
            self._drop()

    def note(self, receipt: Receipt) -> None:
        if len(self._made) < self.limit:
            self._made.append(receipt)
        else:
            self._drop()

    def _drop(self) -> None:
        self.dropped += 1
        self.lost += 1

    def take_flown(self) -> list[tuple[Tag, bytes, int, float, float, bytes]]:
        taken, self._flown = self._flown, []
        return taken

    def take_made(self) -> list[Receipt]:
        taken, self._made = self._made, []
        return taken


def receipt_of(flown: Flown, wall_minus_monotonic: float) -> Receipt:
    tag = flown.tag
    usage = (read_usage(flown.tail) or _NONE) if flown.status < 400 else _NONE
    took_ms = round((flown.ended - flown.started) * 1000, 3)
    return served_by(
        tag.route.replica,
        id=flown.request_id.decode("latin-1"),
        at=flown.started + wall_minus_monotonic,
        key_id=tag.client.key_id,
        model=tag.route.asked,
        path=tag.path.decode("latin-1"),
        status=flown.status,
        first_byte_ms=took_ms,
        total_ms=took_ms,
        prompt_tokens=usage.prompt,
        completion_tokens=usage.completion,
    )


def served_by(replica: Replica | None, **told: object) -> Receipt:
    """A receipt with what is known of who answered."""
    if replica is None:
        return Receipt(**told)  # type: ignore[arg-type]  # names and types are the caller's, from the same page
    seen = replica.seen
    return Receipt(
        **told,  # type: ignore[arg-type]
        served_by="" if seen.model == told["model"] else seen.model,
        node_id=seen.node_id,
        process_id=seen.process_id,
        replica=seen.replica,
        revision=seen.revision,
        digest=seen.digest,
    )


class ReceiptDesk(Protocol):
    async def send_receipts(self, batch: Receipts) -> None: ...


class ReceiptSender:
    def __init__(
        self,
        ring: ReceiptRing,
        desk: ReceiptDesk,
        clock: Clock,
        server_now: Callable[[], float],
        waiting: Callable[[], dict[str, int]],
        *,
        interval_s: float,
    ) -> None:
        """`waiting`: requests that wait, by model."""
        self._ring = ring
        self._desk = desk
        self._clock = clock
        self._server_now = server_now
        self._waiting = waiting
        self._interval_s = interval_s
        self._gateway = secrets.token_hex(8)
        self._unsent: list[Receipt] = []
        self._told_waiting = False
        self._trouble = ""

    async def run(self) -> None:
        while True:
            await self._clock.sleep(self._interval_s)
            await self.send()

    async def send(self) -> None:
        """What there is. What cannot be sent is kept for the next time, as far as there is room."""
        await self._make()
        try:
            waiting = self._waiting()
            while self._unsent or self._ring.dropped or waiting or self._told_waiting:
                batch, dropped = tuple(self._unsent[:_PER_BATCH]), self._ring.dropped
                await self._desk.send_receipts(Receipts(self._gateway, batch, dropped, waiting))
                del self._unsent[: len(batch)]
                self._ring.dropped -= dropped
                self._told_waiting = bool(waiting)
                if not self._unsent:
                    break
            self._trouble = ""
        except CorralError as error:
            if self._trouble != error.code:  # once, not once a second
                self._trouble = error.code
                log.warning("receipts cannot be sent for now", error=error.message, kept=len(self._unsent))
        except Exception:
            log.exception("sending receipts failed")

    async def _make(self) -> None:
        offset = self._server_now() - self._clock.monotonic()
        room = self._ring.limit - len(self._unsent)
        made, flown = self._ring.take_made(), self._ring.take_flown()
        over = max(0, len(made) + len(flown) - room)
        self._ring.dropped += over
        self._ring.lost += over
        self._unsent += made[:room]
        flown = flown[: max(0, room - len(made))]
        for start in range(0, len(flown), _AT_ONCE):
            self._unsent += [receipt_of(Flown(*each), offset) for each in flown[start : start + _AT_ONCE]]
            await asyncio.sleep(0)
