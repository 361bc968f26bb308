"""The bus on NATS, with a connection that is re-established for ever.

One loop owns the connection. It gets current credentials, connects, subscribes every registration, and only then
reports that it is connected. When the connection ends, for any reason, the loop starts again, with backoff and without
limit. Before the credentials expire it opens the next connection first and retires the old one afterwards: every
registration has a queue group of its own, so while both connections are open each message still arrives once, and no
call is lost.

`connection.py` works around nats-py; `core.py` encodes messages and matches replies to calls.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from corral.bus.api import BusCredentials, BusTls, CredentialSource
from corral.bus.connection import ConnectionTimeouts, NatsConnection, open_connection
from corral.bus.core import BusCore, Registration
from corral.bus.handler_queue import QueueLimits
from corral.bus.permissions import INBOX
from corral.kit.clock import Clock, SystemClock
from corral.kit.errors import CorralError, Denied, Invalid, Unavailable
from corral.kit.log import get_log
from corral.kit.retry import Backoff

log = get_log(__name__)


@dataclass(frozen=True)
class NatsSettings:
    connection: ConnectionTimeouts = field(default_factory=ConnectionTimeouts)
    queues: QueueLimits = field(default_factory=QueueLimits)
    credentials_timeout_s: float = 30.0
    renew_at: float = 0.75  # share of the credentials' lifetime
    min_renewal_s: float = 0.5  # shortest wait before a renewal, however little of the lifetime is left
    retry_first_s: float = 0.1
    retry_cap_s: float = 5.0
    close_grace_s: float = 5.0  # for handlers that still run when the bus is closed


class NatsBus(BusCore):
    """`async with NatsBus(...) as bus`: returns at once, connects in the background."""

    def __init__(
        self,
        urls: Sequence[str],
        credentials: CredentialSource,
        *,
        tls: BusTls | None = None,
        inbox_prefix: str = INBOX,
        name: str = "corral",
        settings: NatsSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not urls:
            raise Invalid("the bus needs at least one URL")
        self._settings = settings or NatsSettings()
        self._session = secrets.token_hex(8)
        clock = clock or SystemClock()
        super().__init__(clock, inbox=f"{inbox_prefix}.{self._session}", limits=self._settings.queues)
        self._clock = clock
        self._urls = list(urls)
        self._source = credentials
        self._tls = tls
        self._name = name
        self._connection: NatsConnection | None = None
        self._groups: dict[Registration, str] = {}
        self._grouped = 0
        self._connection_task: asyncio.Task[None] | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._logged_reasons: set[str] = set()

    async def __aenter__(self) -> NatsBus:
        self._connection_task = asyncio.get_running_loop().create_task(self._keep_connected(), name="bus connection")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Receive nothing new, let handlers finish within the grace period, send their replies, disconnect."""
        if self._connection_task is not None:
            await _end(self._connection_task)
        if self._connection is not None:
            await self._connection.stop_receiving()
        await self._stop_queues(self._settings.close_grace_s)
        for task in tuple(self._retiring):
            await _end(task)
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
        self._state.set(False, "closed")

    async def wait_connected(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._state.wait()
        except TimeoutError as error:
            raise Unavailable(f"the bus is not connected: {self._state.reason}") from error

    # The transport methods of `BusCore`.

    async def _attach(self, registration: Registration) -> None:
        self._groups[registration] = self._group_of(registration)
        connection = self._connection
        if connection is None:
            return  # the next connection starts with every registration
        await connection.add(registration, self._groups[registration])
        await connection.barrier()
        if connection.denies(registration):
            raise Denied(f"this process has no permission to subscribe to {registration.pattern}")

    def _group_of(self, registration: Registration) -> str:
        if registration.allows_duplicates:
            return ""  # the server reports "no responders" only on a subscription without a group
        self._grouped += 1
        return registration.queue or f"only-{self._session}-{self._grouped}"

    async def _detach(self, registration: Registration) -> None:
        self._groups.pop(registration, None)
        if self._connection is not None:
            await self._connection.remove(registration)

    async def _send(self, subject: str, payload: bytes, reply: str = "") -> None:
        if self._connection is None:
            raise Unavailable(f"the bus is not connected: {self._state.reason}")
        await self._connection.send(subject, payload, reply)

    async def _wait(self, answer: asyncio.Future[bytes], timeout_s: float) -> bytes:
        async with asyncio.timeout(timeout_s):
            return await answer

    # The loop that owns the connection.

    async def _keep_connected(self) -> None:
        backoff = Backoff(self._settings.retry_first_s, self._settings.retry_cap_s)
        while True:
            try:
                credentials = await self._ask_for_credentials()
                got_at = self._clock.monotonic()
                connection = await self._connect_and_subscribe(credentials)
                self._switch_to(connection)
                await self._hold(connection, credentials, got_at)
                if self._clock.monotonic() - got_at > self._settings.retry_cap_s:
                    backoff.reset()  # a connection that is closed right after it was opened counts as a failure
            except CorralError as error:
                self._log_once(error.message)
            except Exception as error:
                log.exception("bus connection failed; retrying")
                self._on_lost(type(error).__name__)
            await self._clock.sleep(backoff.next_s())

    async def _hold(self, connection: NatsConnection, credentials: BusCredentials, got_at: float) -> None:
        """Return when the connection is lost. Renew credentials in time, each time with a new connection."""
        backoff = Backoff(self._settings.retry_first_s, self._settings.retry_cap_s)
        while True:
            wait_s = self._until_renewal(credentials, got_at)
            if await _closes_within(connection, wait_s):
                break
            try:
                renewed = await self._ask_for_credentials()
                renewed_at = self._clock.monotonic()
                if not _is_same(renewed, credentials):
                    successor = await self._connect_and_subscribe(renewed)
                    self._switch_to(successor)
                    self._retire(connection)
                    connection = successor
                credentials, got_at = renewed, renewed_at
                backoff.reset()
            except CorralError as error:
                log.warning("bus credentials could not be renewed; retrying", reason=error.message)
                if await _closes_within(connection, backoff.next_s()):
                    break
        log.warning("bus connection lost", url=connection.url, reason=connection.reason)
        self._on_lost(connection.reason)

    def _on_lost(self, reason: str) -> None:
        connection, self._connection = self._connection, None
        self._state.set(False, reason)
        if connection is not None:
            self._retire(connection)

    def _until_renewal(self, credentials: BusCredentials, got_at: float) -> float | None:
        if credentials.expires_in_s is None:
            return None
        due = got_at + self._settings.renew_at * credentials.expires_in_s
        return max(self._settings.min_renewal_s, due - self._clock.monotonic())

    async def _ask_for_credentials(self) -> BusCredentials:
        try:
            async with asyncio.timeout(self._settings.credentials_timeout_s):
                return await self._source.current()
        except CorralError:
            raise
        except TimeoutError as error:
            raise Unavailable("no bus credentials were received in time") from error
        except Exception as error:
            log.exception("the source of bus credentials failed")
            raise Unavailable(f"no bus credentials were received: {type(error).__name__}") from error

    async def _connect_and_subscribe(self, credentials: BusCredentials) -> NatsConnection:
        """A connection with every registration, to the first server that accepts it."""
        failures: list[str] = []
        for url in tuple(self._urls):
            try:
                connection = await open_connection(
                    url, credentials, tls=self._tls, name=self._name, times=self._settings.connection
                )
            except Unavailable as error:
                failures.append(error.message)
                self._urls.append(self._urls.pop(0))  # start with the next URL at the next attempt
                continue
            connection.on_publish_denied = self._on_publish_denied
            connection.successor = lambda: self._connection
            try:
                await self._subscribe_all(connection)
            except BaseException:
                await connection.close()
                raise
            return connection
        raise Unavailable("; ".join(failures))

    async def _subscribe_all(self, connection: NatsConnection) -> None:
        """Subscribe every registration. Registrations may change meanwhile, so repeat until none is missing."""
        while True:
            wanted = tuple(self._registrations)
            for gone in set(connection.attached()) - set(wanted):
                await connection.remove(gone)
            missing = [each for each in wanted if not connection.has(each)]
            if not missing:
                return
            for registration in missing:
                group = self._groups.get(registration)
                if group is not None:
                    await connection.add(registration, group)
            await connection.barrier()
            if connection.closed.is_set():
                raise Unavailable(f"{connection.url}: {connection.reason}")
            for registration in missing:
                if connection.denies(registration):
                    log.error(
                        "the bus server denies a subscription of this process",
                        subject=registration.pattern,
                        url=connection.url,
                    )

    def _switch_to(self, connection: NatsConnection) -> None:
        if self._connection is not None and self._connection.closed.is_set():
            self._state.set(False, self._connection.reason)  # it ended before its successor was ready: a gap
        self._connection = connection
        if not self.connected:
            log.info("bus connected", url=connection.url)
        self._logged_reasons.clear()
        self._state.set(True, "connected")

    def _retire(self, connection: NatsConnection) -> None:
        task = asyncio.get_running_loop().create_task(_retire_or_close(connection), name="retire bus connection")
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def _on_publish_denied(self, subject: str) -> None:
        self._fail_calls(
            lambda called: called.lower() == subject,
            lambda called: Denied(f"this process has no permission to call {called}"),
        )

    def _log_once(self, reason: str) -> None:
        """Log each reason once per outage, not at every attempt."""
        self._state.set(False, reason)
        if reason not in self._logged_reasons:
            self._logged_reasons.add(reason)
            log.warning("bus cannot be reached; retrying", reason=reason)


async def _closes_within(connection: NatsConnection, wait_s: float | None) -> bool:
    try:
        async with asyncio.timeout(wait_s):
            await connection.closed.wait()
    except TimeoutError:
        return False
    return True


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel until the task has ended: a credential source may swallow its cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=1.0)


async def _retire_or_close(connection: NatsConnection) -> None:
    try:
        await connection.retire()
    finally:
        await connection.close()


def _is_same(one: BusCredentials, other: BusCredentials) -> bool:
    return (one.jwt, one.user, one.password) == (other.jwt, other.user, other.password)
