"""The bus as other packages see it: calls, events, subscriptions, credentials. Nothing here depends on NATS.

Handlers receive decoded messages only. An exception in a handler is logged and never ends its subscription. Queues are
bounded: a full event queue drops its oldest message (the newest is more useful), a full call queue answers the new
caller with "busy". A lost event costs latency, never state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from corral.contract.codec import Message
from corral.contract.subjects import Call, Event

RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)
EventT = TypeVar("EventT", bound=Message)
T = TypeVar("T")

Tokens = Mapping[str, str]  # the named parts of a subject, e.g. {"node": "…"}
EventHandler = Callable[[EventT, Tokens], Awaitable[None]]
CallHandler = Callable[[RequestT, Tokens], Awaitable[ReplyT]]
BytesHandler = Callable[[bytes, Tokens], Awaitable[None]]

MAX_PAYLOAD_BYTES = 512 * 1024  # the server's own limit is 1 MiB and closes the connection


class Subscription(Protocol):
    @property
    def dropped(self) -> int:
        """How many messages were not handled because the handler was too slow."""

    async def unsubscribe(self) -> None:
        """No handler starts after this; running handlers finish. A second call does nothing."""


class Bus(Protocol):
    async def call(
        self, call: Call[RequestT, ReplyT], request: RequestT, /, *, timeout_s: float, **tokens: str
    ) -> ReplyT:
        """Send a request and wait for the reply.

        Raises `Unavailable` (not connected, nothing was sent), `Unreachable` (no process subscribes to it, nothing
        happened), `OutcomeUnknown` (no reply in time), `Failed` (the reply cannot be read), `Denied` (no permission) or
        `Invalid` (the request is too large). A reply that reports a refusal is a reply: read its fields.
        """

    async def publish(self, event: Event[EventT], message: EventT, /, **tokens: str) -> None:
        """Send to all subscribers. Raises `Unavailable` when not connected: nothing is kept for later."""

    async def subscribe(
        self, event: Event[EventT], handler: EventHandler[EventT], /, *, queue: str = "", **tokens: str
    ) -> Subscription:
        """Receive an event, one message at a time, in order. Tokens not given match anything.

        Once this returns, messages published from then on arrive. While the bus is not connected it returns at once and
        takes effect after the reconnect. Raises `Denied` without the permission. Among subscribers with the same
        `queue`, one receives each message. A payload that cannot be read is logged and reaches no handler.
        """

    async def subscribe_bytes(
        self, event: Event[EventT], handler: BytesHandler, /, *, queue: str = "", **tokens: str
    ) -> Subscription:
        """The same for a handler that needs every payload as bytes, readable or not."""

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
        """Answer calls. At most `concurrency` handlers run at once; further requests wait.

        A request that cannot be read is answered `invalid request: …`; a handler's `CorralError` by its message, any
        other exception by `internal error`, all in the reply's `error` field.
        """

    @property
    def connected(self) -> bool:
        """Whether the bus is connected, with every subscription in place."""

    @property
    def connected_since(self) -> float | None:
        """The monotonic time since when `connected` is true without a gap. A renewal of credentials is no gap."""

    async def wait_connected(self, timeout_s: float) -> None:
        """Raises `Unavailable`, with the reason of the last failure, after `timeout_s`."""

    def on_change(self, callback: Callable[[bool], None], /) -> Callable[[], None]:
        """Call `callback` when `connected` changes. Returns a function that removes the callback."""


@dataclass(frozen=True)
class BusCredentials:
    """Credentials for the server: a token with its seed, or a user with a password, or nothing."""

    jwt: str = field(default="", repr=False)
    seed: str = field(default="", repr=False)
    expires_in_s: float | None = None  # from the moment they were received; None = they do not expire
    user: str = ""
    password: str = field(default="", repr=False)


class CredentialSource(Protocol):
    async def current(self) -> BusCredentials:
        """The current credentials. Called at every connect and before the last ones expire, so a source that fetches
        credentials does it here. May raise `CorralError`: the bus calls it again later."""


@dataclass(frozen=True)
class FixedCredentials:
    """A source whose credentials never change."""

    credentials: BusCredentials = BusCredentials()

    async def current(self) -> BusCredentials:
        return self.credentials


@dataclass(frozen=True)
class BusTls:
    """TLS settings of the connection. With any `BusTls` the connection is encrypted or fails."""

    ca: Path | None = None
    ca_pem: str = ""  # the same as text, as a controller sends it; with neither, the system's roots
    certificate: Path | None = None
    key: Path | None = None
