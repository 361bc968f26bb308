"""What the rest of the house may count on when it speaks on the bus. No NATS in here.

Handlers get decoded messages only. An exception in a handler is logged and never ends its subscription. Queues are
bounded: when an event's queue is full the oldest waiting message goes (the newest says more), when a call's queue is
full the new caller is told "busy". Losing an event costs latency, never state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from corral.contract.codec import Message
from corral.contract.subjects import Call, Event

Asked = TypeVar("Asked", bound=Message)
Answered = TypeVar("Answered", bound=Message)
Told = TypeVar("Told", bound=Message)

Tokens = Mapping[str, str]  # the named parts of a subject, e.g. {"node": "…"}
EventHandler = Callable[[Told, Tokens], Awaitable[None]]
CallHandler = Callable[[Asked, Tokens], Awaitable[Answered]]
BytesHandler = Callable[[bytes, Tokens], Awaitable[None]]

MAX_PAYLOAD_BYTES = 512 * 1024  # the server's own limit is 1 MiB and closes the connection


class Subscription(Protocol):
    @property
    def dropped(self) -> int:
        """Messages that were not handled because the handler was too slow."""

    async def unsubscribe(self) -> None:
        """No handler starts after this; those that run go on to their end. Twice is fine."""


class Bus(Protocol):
    async def call(
        self, call: Call[Asked, Answered], request: Asked, /, *, timeout_s: float, **tokens: str
    ) -> Answered:
        """Ask and wait for the answer.

        `Unavailable`: we are not connected, nothing was sent. `Unreachable`: nobody listens there, nothing happened.
        `OutcomeUnknown`: no answer in time. `Failed`: an answer that cannot be read. `Denied`: the bus does not let
        us ask. `Invalid`: the request is too large. An answer that says no is an answer: read its fields.
        """

    async def publish(self, event: Event[Told], message: Told, /, **tokens: str) -> None:
        """Tell whoever listens. `Unavailable` when not connected: nothing is kept for later."""

    async def subscribe(
        self, event: Event[Told], handler: EventHandler[Told], /, *, queue: str = "", **tokens: str
    ) -> Subscription:
        """Hear an event, one message at a time, in order. Tokens not given match anything.

        Once this returns, messages published from then on arrive. With the bus away it returns at once and takes
        effect when the bus is back. `Denied`: the bus does not let us hear this. Among subscribers with the same
        `queue`, one hears each message. A payload that cannot be read is logged and reaches no handler.
        """

    async def subscribe_bytes(
        self, event: Event[Told], handler: BytesHandler, /, *, queue: str = "", **tokens: str
    ) -> Subscription:
        """The same for a handler that must see every payload as it came, readable or not."""

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
        """Answer calls. `concurrency=1` answers one after the other; more runs that many at once, the rest waits.

        A request that cannot be read is answered `invalid request: …`; a handler's `CorralError` by its message, any
        other exception by `internal error`, all in the reply's `error` field.
        """

    @property
    def connected(self) -> bool:
        """Connected, with every subscription in place."""

    @property
    def connected_since(self) -> float | None:
        """The monotonic second since when that has held without a gap. Renewing credentials is no gap."""

    async def wait_connected(self, timeout_s: float) -> None:
        """`Unavailable`, with the reason of the last failure, when it takes longer."""

    def on_change(self, callback: Callable[[bool], None], /) -> Callable[[], None]:
        """Be told when `connected` changes. Returns the function that ends it."""


@dataclass(frozen=True)
class BusCredentials:
    """What to show the server: a token with its seed, or a plain user with a password, or nothing at all."""

    jwt: str = field(default="", repr=False)
    seed: str = field(default="", repr=False)
    expires_in_s: float | None = None  # from the moment they were handed over; None = for ever
    user: str = ""
    password: str = field(default="", repr=False)


class CredentialSource(Protocol):
    async def current(self) -> BusCredentials:
        """The best credentials there are now. Asked at every connect and when the last ones near their end, so a
        source that fetches does it here. May raise `CorralError`: it is asked again later."""


@dataclass(frozen=True)
class FixedCredentials:
    """A source that always gives the same."""

    credentials: BusCredentials = BusCredentials()

    async def current(self) -> BusCredentials:
        return self.credentials


@dataclass(frozen=True)
class BusTls:
    """What TLS goes by. With one of these given the connection is encrypted or does not come about."""

    ca: Path | None = None
    ca_pem: str = ""  # the same as text, as a controller hands it out; with neither, the system's roots
    certificate: Path | None = None
    key: Path | None = None
