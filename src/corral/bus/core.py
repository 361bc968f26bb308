"""What both twins share: encoding, calls by inbox, handlers, error answers, connection state.

A transport below (`nats.py`, `local.py`) moves bytes between subjects: it attaches registrations, sends, and says
when it is connected. Everything a caller can observe about messages is decided here, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from corral.bus.api import (
    MAX_PAYLOAD_BYTES,
    BytesHandler,
    CallHandler,
    EventHandler,
    Subscription,
)
from corral.bus.lanes import Delivery, Direct, Lane, LaneLimits, Sink
from corral.bus.permissions import INBOX
from corral.contract.codec import Message, Undecodable, decode, encode
from corral.contract.subjects import Call, Event
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Failed, Invalid, OutcomeUnknown, Unavailable, Unreachable
from corral.kit.log import get_log

log = get_log(__name__)

Asked = TypeVar("Asked", bound=Message)
Answered = TypeVar("Answered", bound=Message)
Told = TypeVar("Told", bound=Message)

_SUBJECT = re.compile(r"[^.\s\x00-\x1f\x7f]+(\.[^.\s\x00-\x1f\x7f]+)*")
MARSHAL_ERROR = b'{"error":"internal marshal error"}'  # the contract's literal


@dataclass(eq=False)
class Registration:
    """One subscription as the caller asked for it; it outlives any connection."""

    pattern: str
    queue: str
    sink: Sink
    twice_is_fine: bool = False  # an answer may come on two connections at once; nothing else may


class ConnectionState:
    """Whether we are connected, since when, and who wants to know."""

    def __init__(self, clock: Clock) -> None:
        self.since: float | None = None
        self.reason = "not connected yet"
        self._clock = clock
        self._connected = asyncio.Event()
        self._callbacks: list[Callable[[bool], None]] = []

    def set(self, connected: bool, reason: str = "") -> None:
        self.reason = reason or self.reason
        if connected == self._connected.is_set():
            return
        if connected:
            self.since = self._clock.monotonic()
            self._connected.set()
        else:
            self.since = None
            self._connected.clear()
        for callback in tuple(self._callbacks):
            try:
                callback(connected)
            except Exception:
                log.exception("bus connection callback failed")

    def watch(self, callback: Callable[[bool], None]) -> Callable[[], None]:
        self._callbacks.append(callback)

        def forget() -> None:
            with contextlib.suppress(ValueError):
                self._callbacks.remove(callback)

        return forget

    async def wait(self) -> None:
        await self._connected.wait()


class _Subscribed:
    """What a caller holds of a registration."""

    def __init__(self, bus: BusCore, registration: Registration) -> None:
        self._bus = bus
        self._registration = registration

    @property
    def dropped(self) -> int:
        return self._registration.sink.dropped

    async def unsubscribe(self) -> None:
        await self._bus.forget(self._registration)


class BusCore(ABC):
    """`Bus` on top of a transport."""

    def __init__(self, clock: Clock, *, inbox: str, limits: LaneLimits) -> None:
        """`inbox` is a subject no other participant listens on; it must stay the same through reconnects, so that an
        answer still finds us on the next connection."""
        self._state = ConnectionState(clock)
        self._inbox = inbox
        self._limits = limits
        self._registrations: list[Registration] = []
        self._inbox_ready: asyncio.Task[None] | None = None
        self._asked = 0
        self._waiting: dict[str, tuple[str, asyncio.Future[bytes]]] = {}

    # What a transport provides.

    @abstractmethod
    async def _attach(self, registration: Registration) -> None:
        """Make a registration effective now if connected, and after every reconnect. May raise `Denied`."""

    @abstractmethod
    async def _detach(self, registration: Registration) -> None: ...

    @abstractmethod
    async def _send(self, subject: str, payload: bytes, reply: str = "") -> None:
        """Hand over to the connection, or raise `Unavailable`. Never keeps anything for later."""

    @abstractmethod
    async def _wait(self, answer: asyncio.Future[bytes], timeout_s: float) -> bytes:
        """Raise TimeoutError when it takes longer, by the transport's own clock."""

    # Bus.

    @property
    def connected(self) -> bool:
        return self._state.since is not None

    @property
    def connected_since(self) -> float | None:
        return self._state.since

    def on_change(self, callback: Callable[[bool], None], /) -> Callable[[], None]:
        return self._state.watch(callback)

    async def call(
        self, call: Call[Asked, Answered], request: Asked, /, *, timeout_s: float, **tokens: str
    ) -> Answered:
        subject = _checked(call.subject.fill(**tokens))
        payload = _encode_checked(request, subject)
        self._require_connected()
        await self._open_inbox()
        reply = await self._ask(subject, payload, timeout_s)
        try:
            return decode(call.answered, reply)
        except Undecodable as error:
            raise Failed(f"the answer on {subject} cannot be read: {error}") from error

    async def publish(self, event: Event[Told], message: Told, /, **tokens: str) -> None:
        subject = _checked(event.subject.fill(**tokens))
        payload = _encode_checked(message, subject)
        self._require_connected()
        await self._send(subject, payload)

    async def subscribe(
        self, event: Event[Told], handler: EventHandler[Told], /, *, queue: str = "", **tokens: str
    ) -> Subscription:
        async def process(delivery: Delivery) -> None:
            try:
                message = decode(event.told, delivery.payload)
            except Undecodable as error:
                log.warning("bus event cannot be read", subject=delivery.subject, error=str(error))
                return
            await handler(message, event.subject.read(delivery.subject))

        return await self._register(event.subject.match_all(**tokens), queue, process)

    async def subscribe_bytes(
        self, event: Event[Told], handler: BytesHandler, /, *, queue: str = "", **tokens: str
    ) -> Subscription:
        async def process(delivery: Delivery) -> None:
            await handler(delivery.payload, event.subject.read(delivery.subject))

        return await self._register(event.subject.match_all(**tokens), queue, process)

    async def serve(
        self,
        call: Call[Asked, Answered],
        handler: CallHandler[Asked, Answered],
        /,
        *,
        concurrency: int = 1,
        queue: str = "",
        **tokens: str,
    ) -> Subscription:
        async def process(delivery: Delivery) -> None:
            await _respond(delivery, await _answer(call, handler, delivery))

        async def refuse(delivery: Delivery) -> None:
            await _respond(delivery, error_reply(call.answered, "busy: too many requests are waiting"))

        pattern = call.subject.match_all(**tokens)
        return await self._register(pattern, queue, process, concurrency=concurrency, refuse=refuse)

    # Shared machinery.

    def _require_connected(self) -> None:
        if self._state.since is None:
            raise Unavailable(f"the bus is away: {self._state.reason}")

    async def _register(
        self,
        pattern: str,
        queue: str,
        process: Callable[[Delivery], Any],
        *,
        concurrency: int = 1,
        refuse: Callable[[Delivery], Any] | None = None,
    ) -> Subscription:
        lane = Lane(_checked(pattern), process, concurrency=concurrency, limits=self._limits, refuse=refuse)
        registration = Registration(pattern, queue, lane)
        await self._add(registration)
        return _Subscribed(self, registration)

    async def _add(self, registration: Registration) -> None:
        self._registrations.append(registration)
        try:
            await self._attach(registration)
        except BaseException:
            await self.forget(registration)
            raise

    async def forget(self, registration: Registration) -> None:
        registration.sink.close()
        if registration in self._registrations:
            self._registrations.remove(registration)
            await self._detach(registration)

    async def _open_inbox(self) -> None:
        """Once, at the first call: a participant that never asks needs no inbox, nor the right to one."""
        if self._inbox_ready is None or (self._inbox_ready.done() and _has_failed(self._inbox_ready)):
            registration = Registration(f"{self._inbox}.*", "", Direct(self._take_answer), twice_is_fine=True)
            self._inbox_ready = asyncio.get_running_loop().create_task(self._add(registration))
        # Shielded: the first caller may be cancelled while others wait for the same inbox.
        await asyncio.shield(self._inbox_ready)

    async def _ask(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        self._asked += 1
        reply = f"{self._inbox}.{self._asked}"
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[reply] = (subject, answer)
        try:
            await self._send(subject, payload, reply)
            return await self._wait(answer, timeout_s)
        except TimeoutError as error:
            raise OutcomeUnknown(f"no answer on {subject} within {timeout_s:g} s") from error
        finally:
            del self._waiting[reply]
            if answer.done() and not answer.cancelled():
                answer.exception()  # seen: it may have come while sending failed

    def _take_answer(self, delivery: Delivery) -> None:
        _, answer = self._waiting.get(delivery.subject, ("", None))
        if answer is None or answer.done():
            return  # late, or a second one: its caller has left
        if delivery.unanswerable:
            subject = self._waiting[delivery.subject][0]
            answer.set_exception(Unreachable(f"nobody listens on {subject}"))
        else:
            answer.set_result(delivery.payload)

    def _fail_calls(self, wanted: Callable[[str], bool], error: Callable[[str], CorralError]) -> None:
        """Tell waiting callers that no answer can come."""
        for subject, answer in tuple(self._waiting.values()):
            if wanted(subject) and not answer.done():
                answer.set_exception(error(subject))

    async def _stop_lanes(self, grace_s: float) -> None:
        await asyncio.gather(*(registration.sink.stop(grace_s) for registration in self._registrations))
        if self._inbox_ready is not None and not self._inbox_ready.done():
            self._inbox_ready.cancel()
        self._fail_calls(lambda _: True, lambda subject: OutcomeUnknown(f"left before {subject} answered"))


def error_reply(answered: type[Message], text: str) -> bytes | None:
    """The refusal a reply type can carry, or None where it has no `error`: silence is then the honest answer, since
    zero values could read as success."""
    if "error" not in {field.name for field in msgspec.structs.fields(answered)}:
        return None
    return encode(answered(error=text))


async def _answer(
    call: Call[Asked, Answered], handler: CallHandler[Asked, Answered], delivery: Delivery
) -> bytes | None:
    try:
        request = decode(call.asked, delivery.payload)
    except Undecodable as error:
        return error_reply(call.answered, f"invalid request: {error}")
    try:
        reply = await handler(request, call.subject.read(delivery.subject))
    except CorralError as error:
        return error_reply(call.answered, error.message)
    except Exception:
        log.exception("bus handler failed", subject=delivery.subject)
        return error_reply(call.answered, "internal error")
    try:
        payload = encode(reply)
    except (TypeError, ValueError, msgspec.MsgspecError):
        log.exception("bus reply cannot be encoded", subject=delivery.subject)
        return MARSHAL_ERROR
    if len(payload) > MAX_PAYLOAD_BYTES:
        log.error("bus reply is too large", subject=delivery.subject, reply_bytes=len(payload))
        return error_reply(call.answered, f"the reply of {len(payload)} bytes is over {MAX_PAYLOAD_BYTES}")
    return payload


async def _respond(delivery: Delivery, payload: bytes | None) -> None:
    # Whoever asks chooses the reply subject: answering anywhere but in an inbox would let a node speak with our rights.
    if payload is None or not delivery.reply.startswith(INBOX):
        return
    try:
        await delivery.respond(payload)
    except CorralError as error:
        log.warning("bus reply was not sent", subject=delivery.subject, error=error.message)


def _checked(subject: str) -> str:
    """Sanitising leaves some characters that the server would choke on, and with it everybody on this connection."""
    if not _SUBJECT.fullmatch(subject):
        raise Invalid(f"{subject!r} is no subject: a part of it is empty, or has a blank or a control character")
    return subject


def _encode_checked(message: Message, subject: str) -> bytes:
    payload = encode(message)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise Invalid(f"the message for {subject} has {len(payload)} bytes, over the limit of {MAX_PAYLOAD_BYTES}")
    return payload


def _has_failed(task: asyncio.Task[None]) -> bool:
    return task.cancelled() or task.exception() is not None
