"""What became of each request, kept for a moment and sent to the controller in batches
(docs/reference/wire/internal.md#receipts).

Requests on the short way leave a tuple; some hundreds of them are made into receipts at a time. The ring is bounded:
what finds no room until the next batch is counted, not kept.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

import msgspec

from corral.contract.codec import encode
from corral.contract.receipts import Receipt
from corral.gateway.limits import KeyLimiter
from corral.gateway.metrics import RouteCounts
from corral.gateway.replicas import Replica, Route
from corral.gateway.usage import StreamSummary, read_plain_usage
from corral.gateway.view import Client
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log

log = get_log(__name__)

_NO_TOKENS = (0, 0)
_BATCH_BYTES = 512 * 1024  # half of what the controller takes in one body


class Tag:
    """What all requests of one errand have in common: whose they are, and where they go."""

    __slots__ = ("_start", "client", "limiter", "load", "path", "route")

    def __init__(self, client: Client, route: Route, path: bytes, limiter: KeyLimiter | None) -> None:
        self.client = client
        self.route = route
        self.load = route.load
        self.path = path  # the client's own
        self.limiter = limiter
        self._start = b""

    def start(self) -> bytes:
        """Of their receipts: what is the same in all of them."""
        if not self._start:
            told = encode(
                served_by(
                    self.route.replica,
                    id="",
                    key_id=self.client.key_id,
                    model=self.route.asked,
                    path=self.path.decode("latin-1"),
                )
            )
            same = msgspec.json.decode(told, type=dict[str, msgspec.Raw])
            for differs in ("id", "at", "status"):
                del same[differs]
            self._start = encode(same)[:-1]
        return self._start


# A request that went the short way to its end: the tag, its id, status, when it began and ended (monotonic), and the
# ends of the answer, or what was seen of a stream. A bare tuple, because one is made for every request.
Flown: TypeAlias = tuple[Tag, bytes, int, float, float, bytes | StreamSummary]


# Microseconds with an exponent: whole numbers are written in a fraction of the time that decimal places take.
_FORM = b'%b,"id":"%b","at":%de-6,"status":%d,"total_ms":%de-3,"prompt_tokens":%d,"completion_tokens":%d}'
_STREAM_FORM = _FORM[:-1] + b"%b%b%b}"


def receipt_of(flown: Flown, wall_minus_monotonic: float) -> bytes:
    """As it is sent. Written by hand: an object made and encoded takes three times as long. The id needs no escapes:
    the relay takes only plain ones from clients, and makes plain ones."""
    tag, request_id, status, started, ended, tail = flown
    if not isinstance(tail, bytes):
        usage, first_s, streamed = tail
        return _STREAM_FORM % (
            tag.start(),
            request_id,
            int((started + wall_minus_monotonic) * 1e6),
            status,
            int((ended - started) * 1e6),
            usage.prompt,
            usage.completion,
            b',"first_byte_ms":%.3f' % (first_s * 1000) if first_s is not None else b"",
            b',"estimated":true' if usage.estimated else b"",
            b',"streamed":true' if streamed else b"",
        )
    prompt, completion = (read_plain_usage(tail) if status < 400 else None) or _NO_TOKENS
    return _FORM % (
        tag.start(),
        request_id,
        int((started + wall_minus_monotonic) * 1e6),
        status,
        int((ended - started) * 1e6),
        prompt,
        completion,
    )


class ReceiptRing:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.offset_s = time.time() - time.monotonic()  # of the controller's clock; kept by the sender
        self.dropped = 0  # not yet told
        self.lost = 0  # ever
        self._made: list[bytes] = []

    def note(self, receipt: Receipt) -> None:
        if len(self._made) < self.limit:
            self._made.append(encode(receipt))
        else:
            self._drop(1)

    def keep(self, flown: list[Flown]) -> None:
        room = max(0, self.limit - len(self._made))
        if len(flown) > room:
            self._drop(len(flown) - room)
            flown = flown[:room]
        self._made += [receipt_of(each, self.offset_s) for each in flown]

    def take(self) -> list[bytes]:
        taken, self._made = self._made, []
        return taken

    def give_back(self, unsent: list[bytes]) -> None:
        """They could not be sent, and come before those that came meanwhile."""
        kept = (unsent + self._made)[: self.limit]
        self._drop(len(unsent) + len(self._made) - len(kept))
        self._made = kept

    def _drop(self, count: int) -> None:
        self.dropped += count
        self.lost += count


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
    async def send_receipts(self, batch: bytes) -> None:
        """`batch`: a `Receipts`, encoded."""


class ReceiptSender:
    def __init__(
        self,
        ring: ReceiptRing,
        counts: RouteCounts,
        desk: ReceiptDesk,
        clock: Clock,
        server_now: Callable[[], float],
        waiting: Callable[[], dict[str, int]],
        *,
        interval_s: float,
        take_pressure: Callable[[], dict[str, int]] = dict,
    ) -> None:
        """`waiting`: requests that wait, by model; `take_pressure`: prompts that went astray since the last time."""
        self._ring = ring
        self._counts = counts
        self._desk = desk
        self._clock = clock
        self._server_now = server_now
        self._waiting = waiting
        self._take_pressure = take_pressure
        self._interval_s = interval_s
        self._gateway = secrets.token_hex(8)
        self._told_waiting = False
        self._trouble = ""

    async def run(self) -> None:
        while True:
            await self._clock.sleep(self._interval_s)
            await self.send()

    async def send(self) -> None:
        """What there is. What cannot be sent is kept for the next time, as far as there is room."""
        ring = self._ring
        ring.offset_s = self._server_now() - self._clock.monotonic()
        self._counts.catch_up()  # it hands over what has only been noted
        # Pressure that cannot be told is forgotten: as long as there is any, there will be more of it.
        unsent, waiting, pressure = ring.take(), self._waiting(), self._take_pressure()
        try:
            while unsent or ring.dropped or waiting or pressure or self._told_waiting:
                many = _fitting(unsent)
                await self._send_one(unsent[:many], waiting, pressure)
                self._told_waiting, pressure = bool(waiting), {}
                del unsent[:many]
                if not unsent:
                    break
            self._trouble = ""
        except CorralError as error:
            if self._trouble != error.code:  # once, not once a second
                self._trouble = error.code
                log.warning("receipts cannot be sent for now", error=error.message, unsent=len(unsent))
        except Exception:
            log.exception("sending receipts failed")
        finally:
            ring.give_back(unsent)

    async def _send_one(self, receipts: list[bytes], waiting: dict[str, int], pressure: dict[str, int]) -> None:
        dropped = self._ring.dropped
        told = encode({"gateway": self._gateway, "dropped": dropped, "waiting": waiting, "pressure": pressure})
        await self._desk.send_receipts(b'%b,"receipts":[%b]}' % (told[:-1], b",".join(receipts)))
        self._ring.dropped -= dropped


def _fitting(unsent: list[bytes]) -> int:
    """How many go into one batch: at least one, or none would ever go."""
    size = 0
    for many, receipt in enumerate(unsent):
        size += len(receipt) + 1
        if size > _BATCH_BYTES and many:
            return many
    return len(unsent)
