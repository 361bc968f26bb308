"""The bounded queue between a connection's reader and a handler. It never makes the reader wait.

A queue runs at most `concurrency` handlers at once, in the order of arrival, and has no task while it is empty. The
caller passes the function that decodes, handles and answers one delivery.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from corral.kit.log import get_log

log = get_log(__name__)

MAX_REFUSALS = 1024  # being sent at once; beyond that a caller runs into its timeout
_YIELD_EVERY = 64  # a handler that never awaits must not block the event loop while it works through a full queue


@dataclass(frozen=True)
class QueueLimits:
    """How many messages and bytes may wait for one subscription's handler."""

    messages: int = 65_536
    payload_bytes: int = 64 * 1024 * 1024


class Delivery:
    """One received message."""

    __slots__ = ("has_no_responders", "payload", "reply", "subject")

    def __init__(self, subject: str, payload: bytes, reply: str = "", has_no_responders: bool = False) -> None:
        self.subject = subject
        self.payload = payload
        self.reply = reply
        self.has_no_responders = (
            has_no_responders  # the server's notice that no process subscribes to the subject of our request
        )

    async def respond(self, payload: bytes) -> None:
        """Reply on the connection that received the message."""
        raise NotImplementedError

    def settle(self) -> None:
        """Called once when the message is done, handled or dropped."""


class Sink(Protocol):
    """Where a connection puts the messages of one subscription."""

    dropped: int

    def offer(self, delivery: Delivery, /) -> None: ...

    def close(self) -> None: ...

    async def stop(self, grace_s: float, /) -> None: ...


class DirectSink:
    """A sink without a queue, for a function that never waits."""

    def __init__(self, process: Callable[[Delivery], None]) -> None:
        self.dropped = 0
        self._process = process

    def offer(self, delivery: Delivery, /) -> None:
        self._process(delivery)
        delivery.settle()

    def close(self) -> None:
        """Nothing waits here."""

    async def stop(self, grace_s: float, /) -> None:
        """Nothing runs here."""


class HandlerQueue:
    def __init__(
        self,
        name: str,
        process: Callable[[Delivery], Awaitable[None]],
        *,
        concurrency: int,
        limits: QueueLimits,
        refuse: Callable[[Delivery], Awaitable[None]] | None = None,
    ) -> None:
        """When the queue is full, `refuse` answers the new message; without `refuse` the oldest message is dropped."""
        self.dropped = 0
        self._name = name
        self._process = process
        self._concurrency = concurrency
        self._limits = limits
        self._refuse = refuse
        self._waiting: deque[Delivery] = deque()
        self._waiting_bytes = 0
        self._runners: set[asyncio.Task[None]] = set()
        self._refusals: set[asyncio.Task[None]] = set()
        self._overflow_logged = False
        self._closed = False

    def offer(self, delivery: Delivery, /) -> None:
        """Take a message. Never blocks, never raises."""
        if self._closed:
            delivery.settle()
            return
        if self._is_full_for(delivery) and not self._drop_or_refuse(delivery):
            return
        self._waiting.append(delivery)
        self._waiting_bytes += len(delivery.payload)
        if len(self._runners) < self._concurrency:
            self._runners.add(asyncio.get_running_loop().create_task(self._run(), name=f"bus {self._name}"))

    def close(self) -> None:
        """Drop the waiting messages and start no handler any more. Running handlers continue."""
        self._closed = True
        while self._waiting:
            self._take().settle()

    async def stop(self, grace_s: float, /) -> None:
        """Take no new message, handle the waiting ones within the grace period, then cancel running handlers."""
        self._closed = True
        running = self._runners | self._refusals
        running.discard(_current_task())  # a handler may close its own bus
        if running:
            _, late = await asyncio.wait(running, timeout=grace_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        self.close()

    def _is_full_for(self, delivery: Delivery) -> bool:
        over = len(self._waiting) >= self._limits.messages
        return over or self._waiting_bytes + len(delivery.payload) > self._limits.payload_bytes

    def _drop_or_refuse(self, delivery: Delivery) -> bool:
        """True if the queue has space for the delivery now."""
        self._log_overflow()
        if self._refuse is None:
            while self._waiting and self._is_full_for(delivery):
                self._take().settle()
                self.dropped += 1
            return True
        self.dropped += 1
        if len(self._refusals) < MAX_REFUSALS:
            task = asyncio.get_running_loop().create_task(self._send_refusal(delivery))
            self._refusals.add(task)
            task.add_done_callback(self._refusals.discard)
        else:
            delivery.settle()
        return False

    async def _send_refusal(self, delivery: Delivery) -> None:
        assert self._refuse is not None
        try:
            await self._refuse(delivery)
        finally:
            delivery.settle()

    def _log_overflow(self) -> None:
        if not self._overflow_logged:
            self._overflow_logged = True
            log.warning("bus handler is too slow; messages are lost", subject=self._name)

    async def _run(self) -> None:
        me = _current_task()
        handled = 0
        try:
            while self._waiting:
                await self._handle(self._take(), me)
                handled += 1
                if handled % _YIELD_EVERY == 0:
                    await asyncio.sleep(0)
        finally:
            # No await since the last check of the queue: a later offer must start a new runner.
            self._runners.discard(me)
        if self._overflow_logged and not self._runners:
            self._overflow_logged = False
            log.warning("bus handler caught up", subject=self._name, lost_so_far=self.dropped)

    async def _handle(self, delivery: Delivery, me: asyncio.Task[None]) -> None:
        try:
            await self._process(delivery)
        except asyncio.CancelledError:
            if me.cancelling():
                raise
            log.warning("bus handler was cancelled from inside", subject=delivery.subject)
        except Exception:
            log.exception("bus handler failed", subject=delivery.subject)
        finally:
            delivery.settle()

    def _take(self) -> Delivery:
        delivery = self._waiting.popleft()
        self._waiting_bytes -= len(delivery.payload)
        return delivery


def _current_task() -> asyncio.Task[None]:
    task: asyncio.Task[None] | None = asyncio.current_task()
    assert task is not None
    return task
