"""What `nats.py` and `local.py` share: encoding, calls with an inbox, handlers, error replies, connection state.

A transport (`nats.py`, `local.py`) moves bytes between subjects: it attaches registrations, sends, and reports whether
it is connected. Everything a caller can observe about messages is implemented here, once.
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
from corral.bus.handler_queue import Delivery, DirectSink, HandlerQueue, QueueLimits, Sink
from corral.bus.permissions import INBOX
from corral.contract.codec import Message, Undecodable, decode, encode
from corral.contract.subjects import Call, Event
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Failed, Invalid, OutcomeUnknown, Unavailable, Unreachable
from corral.kit.log import get_log

log = get_log(__name__)

RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)
EventT = TypeVar("EventT", bound=Message)

_SUBJECT = re.compile(r"[^.\s\x00-\x1f\x7f]+(\.[^.\s\x00-\x1f\x7f]+)*")
MARSHAL_ERROR = b'{"error":"internal marshal error"}'  # the contract's literal


@dataclass(eq=False)
class Registration:
    """One subscription of a caller; it outlives any connection."""

    pattern: str
    queue: str
    sink: Sink
    allows_duplicates: bool = False  # only replies may arrive on two connections at once


class ConnectionState:
    """Whether the bus is connected, since when, and the callbacks to notify."""

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


class _RegisteredSubscription:
    """The `Subscription` that a caller receives for its registration."""

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

    def __init__(self, clock: Clock, *, inbox: str, limits: QueueLimits) -> None:
        """`inbox` is a subject that no other participant subscribes to. It must stay the same across reconnects, so
        that a reply still arrives on the next connection."""
        self._state = ConnectionState(clock)
        self._inbox = inbox
        self._limits = limits
        self._registrations: list[Registration] = []
        self._inbox_ready: asyncio.Task[None] | None = None
        self._call_count = 0
        self._waiting: dict[str, tuple[str, asyncio.Future[bytes]]] = {}

    # A transport implements these.

    @abstractmethod
    async def _attach(self, registration: Registration) -> None:
        """Make a registration effective now if connected, and after every reconnect. May raise `Denied`."""

    @abstractmethod
    async def _detach(self, registration: Registration) -> None: ...

    @abstractmethod
    async def _send(self, subject: str, payload: bytes, reply: str = "") -> None:
        """Send on the connection, or raise `Unavailable`. Never keeps anything for later."""

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
        self, call: Call[RequestT, ReplyT], request: RequestT, /, *, timeout_s: float, **tokens: str
    ) -> ReplyT:
        subject = _checked(call.subject.fill(**tokens))
        payload = _encode_checked(request, subject)
        self._require_connected()
        await self._open_inbox()
        reply = await self._request(subject, payload, timeout_s)
        try:
            return decode(call.reply_type, reply)
        except Undecodable as error:
            raise Failed(f"the reply on {subject} cannot be read: {error}") from error

    async def publish(self, event: Event[EventT], message: EventT, /, **tokens: str) -> None:
        subject = _checked(event.subject.fill(**tokens))
        payload = _encode_checked(message, subject)
        self._require_connected()
        await self._send(subject, payload)

    async def subscribe(
        self, event: Event[EventT], handler: EventHandler[EventT], /, *, queue: str = "", **tokens: str
    ) -> Subscription:
        async def process(delivery: Delivery) -> None:
            try:
                message = decode(event.message_type, delivery.payload)
            except Undecodable as error:
                log.warning("bus event cannot be read", subject=delivery.subject, error=str(error))
                return
            await handler(message, event.subject.read(delivery.subject))

        return await self._register(event.subject.match_all(**tokens), queue, process)

    async def subscribe_bytes(
        self, event: Event[EventT], handler: BytesHandler, /, *, queue: str = "", **tokens: str
    ) -> Subscription:
        async def process(delivery: Delivery) -> None:
            await handler(delivery.payload, event.subject.read(delivery.subject))

        return await self._register(event.subject.match_all(**tokens), queue, process)

    async def serve(
        self,
        call: Call[RequestT, ReplyT],
        handler: CallHandler[RequestT, ReplyT],
        /,
        *,
        concurrency: int = 1,
        queue: str = "",
        **tokens: str,
    ) -> Subscription:
        async def process(delivery: Delivery) -> None:
            await _respond(delivery, await _answer(call, handler, delivery))

        async def refuse(delivery: Delivery) -> None:
            await _respond(delivery, error_reply(call.reply_type, "busy: too many requests are waiting"))

        pattern = call.subject.match_all(**tokens)
        return await self._register(pattern, queue, process, concurrency=concurrency, refuse=refuse)

    # Private.

    def _require_connected(self) -> None:
        if self._state.since is None:
            raise Unavailable(f"the bus is not connected: {self._state.reason}")

    async def _register(
        self,
        pattern: str,
        queue: str,
        process: Callable[[Delivery], Any],
        *,
        concurrency: int = 1,
        refuse: Callable[[Delivery], Any] | None = None,
    ) -> Subscription:
        handler_queue = HandlerQueue(
            _checked(pattern), process, concurrency=concurrency, limits=self._limits, refuse=refuse
        )
        registration = Registration(pattern, queue, handler_queue)
        await self._add(registration)
        return _RegisteredSubscription(self, registration)

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
        """Once, at the first call: a participant that never calls needs no inbox, nor the permission for one."""
        if self._inbox_ready is None or (self._inbox_ready.done() and _has_failed(self._inbox_ready)):
            registration = Registration(f"{self._inbox}.*", "", DirectSink(self._take_answer), allows_duplicates=True)
            self._inbox_ready = asyncio.get_running_loop().create_task(self._add(registration))
        # Shielded: the first caller may be cancelled while others wait for the same inbox.
        await asyncio.shield(self._inbox_ready)

    async def _request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        self._call_count += 1
        reply = f"{self._inbox}.{self._call_count}"
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[reply] = (subject, answer)
        try:
            await self._send(subject, payload, reply)
            return await self._wait(answer, timeout_s)
        except TimeoutError as error:
            raise OutcomeUnknown(f"no reply on {subject} within {timeout_s:g} s") from error
        finally:
            del self._waiting[reply]
            if answer.done() and not answer.cancelled():
                answer.exception()  # retrieved: it may have been set while sending failed

    def _take_answer(self, delivery: Delivery) -> None:
        _, answer = self._waiting.get(delivery.subject, ("", None))
        if answer is None or answer.done():
            return  # late, or a duplicate: its caller has left
        if delivery.has_no_responders:
            subject = self._waiting[delivery.subject][0]
            answer.set_exception(Unreachable(f"no process subscribes to {subject}"))
        else:
            answer.set_result(delivery.payload)

    def _fail_calls(self, wanted: Callable[[str], bool], error: Callable[[str], CorralError]) -> None:
        """Fail the waiting calls that cannot get a reply any more."""
        for subject, answer in tuple(self._waiting.values()):
            if wanted(subject) and not answer.done():
                answer.set_exception(error(subject))

    async def _stop_queues(self, grace_s: float) -> None:
        await asyncio.gather(*(registration.sink.stop(grace_s) for registration in self._registrations))
        if self._inbox_ready is not None and not self._inbox_ready.done():
            self._inbox_ready.cancel()
        self._fail_calls(
            lambda _: True, lambda subject: OutcomeUnknown(f"the bus was closed before a reply on {subject}")
        )


def error_reply(answered: type[Message], text: str) -> bytes | None:
    """The error as a reply, or None where the reply type has no `error` field: then no reply is sent, since a reply of
    zero values could read as success."""
    if "error" not in {field.name for field in msgspec.structs.fields(answered)}:
        return None
    return encode(answered(error=text))


async def _answer(
    call: Call[RequestT, ReplyT], handler: CallHandler[RequestT, ReplyT], delivery: Delivery
) -> bytes | None:
    try:
        request = decode(call.request_type, delivery.payload)
    except Undecodable as error:
        return error_reply(call.reply_type, f"invalid request: {error}")
    try:
        reply = await handler(request, call.subject.read(delivery.subject))
    except CorralError as error:
        return error_reply(call.reply_type, error.message)
    except Exception:
        log.exception("bus handler failed", subject=delivery.subject)
        return error_reply(call.reply_type, "internal error")
    try:
        payload = encode(reply)
    except (TypeError, ValueError, msgspec.MsgspecError):
        log.exception("bus reply cannot be encoded", subject=delivery.subject)
        return MARSHAL_ERROR
    if len(payload) > MAX_PAYLOAD_BYTES:
        log.error("bus reply is too large", subject=delivery.subject, reply_bytes=len(payload))
        return error_reply(call.reply_type, f"the reply of {len(payload)} bytes is over {MAX_PAYLOAD_BYTES}")
    return payload


async def _respond(delivery: Delivery, payload: bytes | None) -> None:
    # The caller chooses the reply subject: a reply outside an inbox would let a node publish with our permissions.
    if payload is None or not delivery.reply.startswith(INBOX):
        return
    try:
        await delivery.respond(payload)
    except CorralError as error:
        log.warning("bus reply was not sent", subject=delivery.subject, error=error.message)


def _checked(subject: str) -> str:
    """Sanitising leaves some characters for which the server would close the connection of all callers."""
    if not _SUBJECT.fullmatch(subject):
        raise Invalid(f"{subject!r} is not a subject: a token is empty, or has a blank or a control character")
    return subject


def _encode_checked(message: Message, subject: str) -> bytes:
    payload = encode(message)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise Invalid(f"the message for {subject} has {len(payload)} bytes, over the limit of {MAX_PAYLOAD_BYTES}")
    return payload


def _has_failed(task: asyncio.Task[None]) -> bool:
    return task.cancelled() or task.exception() is not None
