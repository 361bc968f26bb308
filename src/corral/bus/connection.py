"""One connection to one NATS server: connect, subscribe, send, retire, close. A connection never reconnects: `nats.py`
opens a new one instead, because nats-py gives up for good when a token expires or is revoked.

Only this module uses nats-py, and it works around these properties of the library:

- PING overtakes commands still in the client's buffer, so one flush is no barrier; two are.
- A PONG for a cancelled flush ends the client's reader silently. So a flush is never cancelled, and a flush that times
  out closes the connection.
- `Subscription.drain` forgets the subscription before the server does: messages in between are lost. `retire` waits.
- With `tls` given, a server that does not ask for TLS gets a plain connection. We check before we send credentials.
- Error texts come in lower case.
- The library swallows cancellation; `_cancellable` raises it again.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import re
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from corral.bus.api import BusCredentials, BusTls
from corral.bus.core import Registration
from corral.bus.handler_queue import Delivery
from corral.bus.jwt import BadKey, sign
from corral.kit.errors import Unavailable
from corral.kit.log import get_log, mask_secrets
from corral.kit.sockets import abort

log = get_log(__name__)

T = TypeVar("T")

_DENIED = re.compile(r'permissions violation for (subscription|publish) to "([^"]*)"')
_ABANDON_S = 0.05  # a connection that never was: after a failed TLS handshake nats-py would wait for ever
_NEVER_S = 86_400  # nats-py's own pings: ours notice a dead connection sooner and also a dead reader


@dataclass(frozen=True)
class ConnectionTimeouts:
    connect_timeout_s: float = 5.0
    ping_interval_s: float = 5.0  # between two pings of an idle connection
    ping_timeout_s: float = 5.0  # for one pong; the sum of both is how long a dead connection goes unnoticed
    close_timeout_s: float = 2.0


class ConnectionDelivery(Delivery):
    __slots__ = ("_connection",)

    def __init__(self, connection: NatsConnection, message: Msg) -> None:
        super().__init__(message.subject, message.data, message.reply, _is_no_responders(message))
        self._connection = connection
        if self.reply:
            connection.count_unanswered(+1)

    async def respond(self, payload: bytes) -> None:
        await self._connection.respond(self.reply, payload)

    def settle(self) -> None:
        if self.reply:
            self._connection.count_unanswered(-1)


class NatsConnection:
    """Made by `open_connection`. `closed` is set once, for any cause; `reason` says which."""

    def __init__(self, client: Client, url: str, times: ConnectionTimeouts) -> None:
        self.url = url
        self.closed = asyncio.Event()
        self.reason = ""
        self.on_publish_denied: Callable[[str], None] = lambda subject: None
        self.successor: Callable[[], NatsConnection | None] = lambda: None
        self._client = client
        self._times = times
        self._subscriptions: dict[Registration, Subscription] = {}
        self._denied: set[str] = set()
        self._retiring = False
        self._unanswered = 0
        self._all_answered = asyncio.Event()
        self._all_answered.set()
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        self._spawn(self._watch())

    def has(self, registration: Registration) -> bool:
        return registration in self._subscriptions

    def attached(self) -> tuple[Registration, ...]:
        return tuple(self._subscriptions)

    def denies(self, registration: Registration) -> bool:
        return registration.pattern.lower() in self._denied

    async def add(self, registration: Registration, group: str) -> None:
        """Subscribe; the subscription is in force after `barrier`. A retiring connection takes no new subscription."""
        if self._is_leaving() or self.has(registration):
            return

        async def receive(message: Msg) -> None:
            registration.sink.offer(ConnectionDelivery(self, message))

        try:
            subscribing = self._client.subscribe(registration.pattern, queue=group, cb=receive)
            subscription = await _cancellable(subscribing)
        except (nats.errors.Error, OSError) as error:
            self._fail(describe(error))
            return
        self._subscriptions[registration] = subscription
        if self._is_leaving():  # since the check above
            await self._stop_receiving([subscription])

    async def remove(self, registration: Registration) -> None:
        subscription = self._subscriptions.pop(registration, None)
        if subscription is None or self.closed.is_set():
            return
        try:
            await _cancellable(subscription.unsubscribe())
        except (nats.errors.Error, OSError) as error:
            self._fail(describe(error))

    async def send(self, subject: str, payload: bytes, reply: str = "") -> None:
        if self.closed.is_set():
            raise Unavailable(f"the bus is not connected: {self.reason}")
        try:
            await _cancellable(self._client.publish(subject, payload, reply))
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"the bus is not connected: {describe(error)}") from error

    async def respond(self, reply: str, payload: bytes) -> None:
        """Reply on this connection while it is open: the server lets a node reply only on the connection that received
        the request. Afterwards the next connection is tried, for users who may publish anyway."""
        connection = self if not self.closed.is_set() else (self.successor() or self)
        await connection.send(reply, payload)

    async def barrier(self) -> None:
        """Returns once the server has acted on everything sent so far, or the connection is closed."""
        if self.closed.is_set():
            return
        # Shielded, because a cancelled flush would kill the client's reader.
        await asyncio.shield(self._spawn(self._flush_twice()))

    def count_unanswered(self, change: int) -> None:
        """Count the requests that arrived on this connection and have no reply yet."""
        self._unanswered += change
        if self._unanswered:
            self._all_answered.clear()
        else:
            self._all_answered.set()

    async def retire(self) -> None:
        """Receive nothing new, deliver all received messages, wait until every reply is sent, then close.

        The wait always ends: the server closes the connection when its token expires.
        """
        await self.stop_receiving()
        if not self.closed.is_set():
            all_answered = asyncio.ensure_future(self._all_answered.wait())
            closed = asyncio.ensure_future(self.closed.wait())
            try:
                await asyncio.wait((all_answered, closed), return_when=asyncio.FIRST_COMPLETED)
            finally:
                all_answered.cancel()
                closed.cancel()
        await self.close()

    async def stop_receiving(self) -> None:
        """Receive no new messages; return when the messages received so far are delivered."""
        self._retiring = True
        await self._stop_receiving(list(self._subscriptions.values()))
        while any(subscription.pending_msgs for subscription in self._subscriptions.values()):
            if self.closed.is_set():
                break
            await asyncio.sleep(0)  # the client's own tasks deliver each message without waiting

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._times.close_timeout_s):
                await self.barrier()  # the last messages must reach the server
        self._fail("closed")
        for task in tuple(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()
        await _dispose(self._client, self._times.close_timeout_s)

    # Called by nats-py.

    async def on_error(self, error: Exception) -> None:
        found = _DENIED.search(str(error))
        if found is None:
            log.debug("bus client reports", error=describe(error))
        elif found.group(1) == "subscription":
            self._denied.add(found.group(2))
        else:
            log.error("the bus server refuses a message of this process", subject=found.group(2))
            self.on_publish_denied(found.group(2))

    async def on_close(self) -> None:
        last = self._client.last_error
        self._fail(describe(last) if last is not None else "the server closed the connection")

    # Private.

    async def _watch(self) -> None:
        """Ping an idle connection, so that a frozen server or a cut cable is noticed."""
        while not self.closed.is_set():
            await asyncio.sleep(self._times.ping_interval_s)
            await self._ping()

    async def _flush_twice(self) -> None:
        await self._ping()
        await self._ping()

    async def _ping(self) -> None:
        if self.closed.is_set():
            return
        try:
            await self._client.rtt(timeout=self._times.ping_timeout_s)  # type: ignore[arg-type]
        except nats.errors.TimeoutError:
            self._fail(f"the server did not answer within {self._times.ping_timeout_s:g} s")
        except (nats.errors.Error, OSError, AssertionError) as error:
            self._fail(describe(error))

    async def _stop_receiving(self, subscriptions: list[Subscription]) -> None:
        # `Subscription.unsubscribe` would discard messages that have arrived and messages that are still in transit.
        for subscription in subscriptions:
            if self.closed.is_set():
                return
            await _cancellable(self._client._send_unsubscribe(subscription._id))
        await self.barrier()

    def _is_leaving(self) -> bool:
        return self._retiring or self.closed.is_set()

    def _fail(self, reason: str) -> None:
        if not self.closed.is_set():
            self.reason = reason
            self.closed.set()

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def open_connection(
    url: str, credentials: BusCredentials, *, tls: BusTls | None, name: str, times: ConnectionTimeouts
) -> NatsConnection:
    """Connect to one server. Raises `Unavailable` with the reason in one line."""
    client = Client()
    connection = NatsConnection(client, redacted_url(url), times)
    address, in_url = split_url(url)
    wants_tls = tls is not None or address.startswith("tls://")
    errors: list[Exception] = []

    async def on_error(error: Exception) -> None:
        errors.append(error)
        await connection.on_error(error)

    try:
        options = _credential_options(client, credentials, in_url, wants_tls)
        if wants_tls:
            options["tls"] = tls_context(tls or BusTls())
        async with asyncio.timeout(times.connect_timeout_s):
            connecting = client.connect(
                servers=[address],
                name=name,
                error_cb=on_error,
                closed_cb=connection.on_close,
                allow_reconnect=False,
                max_reconnect_attempts=1,  # 0 would mean for ever
                reconnect_time_wait=0,
                connect_timeout=math.ceil(times.connect_timeout_s),
                ping_interval=_NEVER_S,
                flush_timeout=times.ping_timeout_s,
                drain_timeout=math.ceil(times.close_timeout_s),
                **options,
            )
            await _cancellable(connecting)
        _check_tls(client, wants_tls)  # without credentials the callbacks have not checked it
    except BaseException as error:
        await _dispose(client, _ABANDON_S)
        if isinstance(error, nats.errors.NoServersError) and errors:
            error = errors[-1]  # "no servers available" hides why
        if isinstance(error, nats.errors.Error | OSError | TimeoutError | ValueError):
            raise Unavailable(f"{connection.url}: {describe(error)}") from error
        raise
    connection.start()
    return connection


async def _cancellable(work: Awaitable[T]) -> T:
    """Raise a cancellation that the library swallowed; `asyncio.wait_for` of Python 3.11 swallows one too when the
    awaited work fails in the same moment."""
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        return await work
    finally:
        if task and task.cancelling() > before:
            raise asyncio.CancelledError


def _check_tls(client: Client, wants_tls: bool) -> None:
    if wants_tls and not client._server_info.get("tls_required"):
        raise nats.errors.Error("nats: the server does not offer TLS, which the settings require")


def _credential_options(
    client: Client, credentials: BusCredentials, in_url: BusCredentials, wants_tls: bool
) -> dict[str, Any]:
    """As callbacks, which nats-py calls after the server's INFO: the last moment to notice that there is no TLS."""

    def shown(text: str) -> str:
        _check_tls(client, wants_tls)
        return text

    def signature(nonce: str) -> bytes:
        _check_tls(client, wants_tls)
        try:
            return base64.b64encode(sign(credentials.seed, nonce.encode()))
        except BadKey as error:
            raise nats.errors.Error(f"nats: {error}") from error

    if credentials.jwt:
        return {"user_jwt_cb": lambda: credentials.jwt.encode(), "signature_cb": signature}
    plain = credentials if credentials.user else in_url
    if plain.user and plain.password:
        return {"user": lambda: shown(plain.user), "password": lambda: shown(plain.password)}
    if plain.user:
        return {"token": lambda: shown(plain.user)}  # a URL with one word before the @
    return {}


def split_url(url: str) -> tuple[str, BusCredentials]:
    """The address without credentials, and the credentials that stood before its `@`."""
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    return address, BusCredentials(user=unquote(parts.username or ""), password=unquote(parts.password or ""))


def tls_context(tls: BusTls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=None if tls.ca is None else str(tls.ca), cadata=tls.ca_pem or None)
    if tls.certificate is not None:
        context.load_cert_chain(str(tls.certificate), None if tls.key is None else str(tls.key))
    return context


def redacted_url(url: str) -> str:
    """The URL for a log line: the address without credentials."""
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else (parts.hostname or "?")
    return f"{parts.scheme}://{host}:{parts.port or 4222}"


def describe(error: BaseException) -> str:
    """The error in one line for people."""
    text = str(error).removeprefix("nats: ").strip().strip("'")
    lowered = text.lower()
    if "authorization violation" in lowered or isinstance(error, nats.errors.AuthorizationError):
        return "the server refuses our credentials"
    if "authentication expired" in lowered:
        return "our credentials have expired"
    if "authentication revoked" in lowered:
        return "our credentials were revoked"
    if "unexpected eof" in lowered:
        return "the server closed the connection"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {getattr(error, 'verify_message', text)}"
    if isinstance(error, TimeoutError) or not text:
        return "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
    return mask_secrets(text)


def _is_no_responders(message: Msg) -> bool:
    return not message.data and (message.headers or {}).get("Status") == "503"


async def _dispose(client: Client, timeout_s: float) -> None:
    """Close the client in any state, within `timeout_s`: its own close waits for a server that may be frozen."""
    try:
        async with asyncio.timeout(timeout_s):
            await _cancellable(client.close())
    except (TimeoutError, nats.errors.Error, OSError, AssertionError, AttributeError) as error:
        log.debug("bus client did not close in order", error=describe(error))
    finally:
        writer = getattr(client._transport, "_io_writer", None)
        if writer is not None:
            abort(writer.transport)  # no-op when it closed in order
