"""The bus without a server: participants of one process exchange messages through a hub. For tests and the simulation.

It behaves as NATS does (order per connection, queue groups, no responders, permissions) and can misbehave on request:
lost, duplicated and delayed messages, participants disconnected with or without notice. Time comes from the given
clock, randomness from the seed: the same seed and the same steps give the same run.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from corral.bus.core import BusCore, Registration
from corral.bus.handler_queue import Delivery, QueueLimits
from corral.bus.permissions import Permissions, inbox_prefix, matches
from corral.kit.clock import Clock
from corral.kit.errors import Conflict, Denied, Unavailable
from corral.kit.log import get_log

log = get_log(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Faults:
    """Chances per delivery, from 0 to 1; a delivery is one message on its way to one receiver."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay_s: tuple[float, float] = (0.0, 0.0)  # from, to


class LocalHub:
    """Stands for the NATS server."""

    def __init__(self, clock: Clock, *, seed: int = 0, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self._clock = clock
        self._chance = random.Random(seed)
        self._members: dict[str, LocalBus] = {}
        self._joined = 0
        self.dropped = 0  # deliveries that `faults` swallowed, and that it made twice
        self.duplicated = 0

    def join(self, name: str, *, permissions: Permissions | None = None, limits: QueueLimits | None = None) -> LocalBus:
        """A participant under a name of its own. Without permissions it may do everything."""
        if name in self._members:
            raise Conflict(f"{name} is on the bus already")
        self._joined += 1
        inbox = f"{inbox_prefix(name)}.{self._joined}"
        bus = LocalBus(self, self._clock, name, inbox, permissions, limits or QueueLimits())
        self._members[name] = bus
        return bus

    def leave(self, bus: LocalBus) -> None:
        if self._members.get(bus.name) is bus:
            del self._members[bus.name]

    def cut(self, name: str) -> None:
        """Close the participant's connection; it notices."""
        self._members[name].lose_connection("cut off")

    def freeze(self, name: str) -> None:
        """The participant neither sends nor receives, and does not notice."""
        self._members[name].frozen = True

    def heal(self, name: str) -> None:
        self._members[name].restore_connection()

    def route(self, sender: LocalBus, subject: str, payload: bytes, reply: str) -> None:
        if sender.frozen:
            return
        receivers = self._receivers(subject)
        if not receivers and reply:
            for bus, registration in self._receivers(reply):
                bus.receive(self._clock.monotonic(), registration, reply, b"", "", has_no_responders=True)
        for bus, registration in receivers:
            self._deliver(bus, registration, subject, payload, reply)

    def _receivers(self, subject: str) -> list[tuple[LocalBus, Registration]]:
        plain: list[tuple[LocalBus, Registration]] = []
        groups: dict[str, list[tuple[LocalBus, Registration]]] = {}
        for bus in self._members.values():
            for registration in bus.active_registrations():
                if matches(registration.pattern, subject) and bus.may_receive(subject):
                    place = groups.setdefault(registration.queue, []) if registration.queue else plain
                    place.append((bus, registration))
        return plain + [self._chance.choice(members) for members in groups.values()]

    def _deliver(self, bus: LocalBus, registration: Registration, subject: str, payload: bytes, reply: str) -> None:
        faults = self.faults
        copies = 0 if self._happens(faults.drop) else 2 if self._happens(faults.duplicate) else 1
        self.dropped += copies == 0
        self.duplicated += copies == 2
        for _ in range(copies):
            low, high = faults.delay_s
            delay_s = self._chance.uniform(low, high) if high > 0 else 0.0
            bus.receive(self._clock.monotonic() + delay_s, registration, subject, payload, reply)

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self._chance.random() < chance


class LocalDelivery(Delivery):
    __slots__ = ("_bus",)

    def __init__(
        self, bus: LocalBus, subject: str, payload: bytes, reply: str, *, has_no_responders: bool = False
    ) -> None:
        super().__init__(subject, payload, reply, has_no_responders)
        self._bus = bus

    async def respond(self, payload: bytes) -> None:
        self._bus.answer(self.reply, payload)


class LocalBus(BusCore):
    """Made by `LocalHub.join`, connected from the start. `async with` it, or `close` it."""

    def __init__(
        self,
        hub: LocalHub,
        clock: Clock,
        name: str,
        inbox: str,
        permissions: Permissions | None,
        limits: QueueLimits,
    ) -> None:
        super().__init__(clock, inbox=inbox, limits=limits)
        self.name = name
        self.frozen = False
        self._hub = hub
        self._clock = clock
        self._permissions = permissions
        self._arriving: deque[tuple[float, Registration, LocalDelivery]] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._state.set(True, "connected")

    async def __aenter__(self) -> LocalBus:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close without a grace period: a simulated clock that jumps would skip it anyway."""
        self._hub.leave(self)
        self.lose_connection("closed")
        await self._stop_queues(0)

    async def wait_connected(self, timeout_s: float) -> None:
        try:
            await self._within(self._state.wait(), timeout_s)
        except TimeoutError as error:
            raise Unavailable(f"the bus is not connected: {self._state.reason}") from error

    # Called by the hub.

    def active_registrations(self) -> list[Registration]:
        return self._registrations if self.connected else []

    def may_receive(self, subject: str) -> bool:
        return self._permissions is None or self._permissions.may_receive(subject)

    def receive(
        self,
        due: float,
        registration: Registration,
        subject: str,
        payload: bytes,
        reply: str,
        *,
        has_no_responders: bool = False,
    ) -> None:
        if self.frozen:
            return
        if self._arriving:
            due = max(due, self._arriving[-1][0])  # one connection keeps its order, also when messages are late
        delivery = LocalDelivery(self, subject, payload, reply, has_no_responders=has_no_responders)
        self._arriving.append((due, registration, delivery))
        if self._pump is None:
            self._pump = asyncio.get_running_loop().create_task(self._deliver_due(), name=f"bus {self.name}")

    def lose_connection(self, reason: str) -> None:
        self._arriving.clear()
        if self._pump is not None:
            self._pump.cancel()
            self._pump = None
        self._state.set(False, reason)

    def restore_connection(self) -> None:
        self.frozen = False
        self._state.set(True, "connected")

    def answer(self, reply: str, payload: bytes) -> None:
        """A received request may be answered without any other permission."""
        self._require_connected()
        self._hub.route(self, reply, payload, "")

    # The transport methods of `BusCore`.

    async def _attach(self, registration: Registration) -> None:
        own_inbox = registration.pattern.startswith(f"{self._inbox}.")
        if self._permissions is None or own_inbox:
            return
        if not self._permissions.may_subscribe(registration.pattern):
            raise Denied(f"this process has no permission to subscribe to {registration.pattern}")

    async def _detach(self, registration: Registration) -> None:
        """The hub looks at the registrations themselves."""

    async def _send(self, subject: str, payload: bytes, reply: str = "") -> None:
        self._require_connected()
        if self._permissions is None or self._permissions.may_publish(subject):
            self._hub.route(self, subject, payload, reply)
        elif reply:
            raise Denied(f"this process has no permission to call {subject}")
        else:
            log.error("the bus server refuses a message of this process", subject=subject)

    async def _wait(self, answer: asyncio.Future[bytes], timeout_s: float) -> bytes:
        return await self._within(answer, timeout_s)

    async def _deliver_due(self) -> None:
        while self._arriving:
            due, registration, delivery = self._arriving[0]
            wait_s = due - self._clock.monotonic()
            if wait_s > 0:
                await self._clock.sleep(wait_s)
            self._arriving.popleft()
            registration.sink.offer(delivery)
        self._pump = None

    async def _within(self, work: Awaitable[T], timeout_s: float) -> T:
        """Like `asyncio.timeout`, by this bus's own clock instead of the event loop's."""
        wanted = asyncio.ensure_future(work)
        timer = asyncio.ensure_future(self._clock.sleep(timeout_s))
        try:
            await asyncio.wait((wanted, timer), return_when=asyncio.FIRST_COMPLETED)
            if not wanted.done():
                raise TimeoutError
            return wanted.result()
        finally:
            timer.cancel()
            wanted.cancel()
