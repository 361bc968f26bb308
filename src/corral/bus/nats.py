"""The bus on NATS, kept alive for ever.

One loop owns the connection. It asks for current credentials, makes a link, puts every registration on it, and only
then calls itself connected. When the link ends, for whatever reason, it begins again, with back-off, without limit.
Before the credentials end it makes the next link first and retires the old one after: every registration is a queue
group of its own, so while both links are up each message still comes once, and no call is lost.

A connection's own quirks are `link.py`'s; what messages mean is `core.py`'s.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from corral.bus.api import BusCredentials, BusTls, CredentialSource
from corral.bus.core import BusCore, Registration
from corral.bus.lanes import LaneLimits
from corral.bus.link import Link, LinkTimes, open_link
from corral.bus.permissions import INBOX
from corral.kit.backoff import Backoff
from corral.kit.clock import Clock, SystemClock
from corral.kit.errors import CorralError, Denied, Invalid, Unavailable
from corral.kit.log import get_log

log = get_log(__name__)


@dataclass(frozen=True)
class NatsSettings:
    link: LinkTimes = field(default_factory=LinkTimes)
    lanes: LaneLimits = field(default_factory=LaneLimits)
    credentials_timeout_s: float = 30.0
    renew_at: float = 0.75  # share of the credentials' lifetime
    shortest_renewal_s: float = 0.5  # however little is left of it
    retry_first_s: float = 0.1
    retry_cap_s: float = 5.0
    close_grace_s: float = 5.0  # for handlers that still run when we leave


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
        super().__init__(clock, inbox=f"{inbox_prefix}.{self._session}", limits=self._settings.lanes)
        self._clock = clock
        self._urls = list(urls)
        self._source = credentials
        self._tls = tls
        self._name = name
        self._link: Link | None = None
        self._groups: dict[Registration, str] = {}
        self._grouped = 0
        self._keeper: asyncio.Task[None] | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._told: set[str] = set()

    async def __aenter__(self) -> NatsBus:
        self._keeper = asyncio.get_running_loop().create_task(self._keep_connected(), name="bus connection")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Leave in order: hear nothing new, let handlers finish within the grace, send what they answered."""
        if self._keeper is not None:
            await _end(self._keeper)
        if self._link is not None:
            await self._link.stop_hearing()
        await self._stop_lanes(self._settings.close_grace_s)
        for task in tuple(self._retiring):
            await _end(task)
        if self._link is not None:
            await self._link.close()
            self._link = None
        self._state.set(False, "closed")

    async def wait_connected(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._state.wait()
        except TimeoutError as error:
            raise Unavailable(f"the bus is away: {self._state.reason}") from error

    # What the core asks of a transport.

    async def _attach(self, registration: Registration) -> None:
        self._groups[registration] = self._group_of(registration)
        link = self._link
        if link is None:
            return  # the next link begins with every registration there is
        await link.add(registration, self._groups[registration])
        await link.barrier()
        if link.denies(registration):
            raise Denied(f"the bus does not let us hear {registration.pattern}")

    def _group_of(self, registration: Registration) -> str:
        if registration.twice_is_fine:
            return ""  # and must be: the server tells of "no responders" only on a plain subscription
        self._grouped += 1
        return registration.queue or f"only-{self._session}-{self._grouped}"

    async def _detach(self, registration: Registration) -> None:
        self._groups.pop(registration, None)
        if self._link is not None:
            await self._link.remove(registration)

    async def _send(self, subject: str, payload: bytes, reply: str = "") -> None:
        if self._link is None:
            raise Unavailable(f"the bus is away: {self._state.reason}")
        await self._link.send(subject, payload, reply)

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
                link = await self._make_link(credentials)
                self._take_over(link)
                await self._stay(link, credentials, got_at)
                if self._clock.monotonic() - got_at > self._settings.retry_cap_s:
                    backoff.reset()  # a connection that is cut as soon as it is made is a failure too
            except CorralError as error:
                self._tell_once(error.message)
            except Exception as error:
                log.exception("bus connection failed and will be tried again")
                self._lose(type(error).__name__)
            await self._clock.sleep(backoff.next_s())

    async def _stay(self, link: Link, credentials: BusCredentials, got_at: float) -> None:
        """Until the connection is lost. Renews credentials on the way, each time with a new link."""
        backoff = Backoff(self._settings.retry_first_s, self._settings.retry_cap_s)
        while True:
            wait_s = self._until_renewal(credentials, got_at)
            if await _closes_within(link, wait_s):
                break
            try:
                renewed = await self._ask_for_credentials()
                renewed_at = self._clock.monotonic()
                if not _is_same(renewed, credentials):
                    successor = await self._make_link(renewed)
                    self._take_over(successor)
                    self._retire(link)
                    link = successor
                credentials, got_at = renewed, renewed_at
                backoff.reset()
            except CorralError as error:
                log.warning("bus credentials are not renewed yet", reason=error.message)
                if await _closes_within(link, backoff.next_s()):
                    break
        log.warning("bus connection lost", url=link.url, reason=link.reason)
        self._lose(link.reason)

    def _lose(self, reason: str) -> None:
        link, self._link = self._link, None
        self._state.set(False, reason)
        if link is not None:
            self._retire(link)

    def _until_renewal(self, credentials: BusCredentials, got_at: float) -> float | None:
        if credentials.expires_in_s is None:
            return None
        due = got_at + self._settings.renew_at * credentials.expires_in_s
        return max(self._settings.shortest_renewal_s, due - self._clock.monotonic())

    async def _ask_for_credentials(self) -> BusCredentials:
        try:
            async with asyncio.timeout(self._settings.credentials_timeout_s):
                return await self._source.current()
        except CorralError:
            raise
        except TimeoutError as error:
            raise Unavailable("bus credentials were not given in time") from error
        except Exception as error:
            log.exception("the source of bus credentials failed")
            raise Unavailable(f"bus credentials were not given: {type(error).__name__}") from error

    async def _make_link(self, credentials: BusCredentials) -> Link:
        """A link with everything registered on it, from the first server that takes us."""
        failures: list[str] = []
        for url in tuple(self._urls):
            try:
                link = await open_link(url, credentials, tls=self._tls, name=self._name, times=self._settings.link)
            except Unavailable as error:
                failures.append(error.message)
                self._urls.append(self._urls.pop(0))  # begin with another one next time
                continue
            link.on_publish_denied = self._publish_denied
            link.successor = lambda: self._link
            try:
                await self._equip(link)
            except BaseException:
                await link.close()
                raise
            return link
        raise Unavailable("; ".join(failures))

    async def _equip(self, link: Link) -> None:
        """Put every registration on a new link. They may change meanwhile, so look until nothing is left to do."""
        while True:
            wanted = tuple(self._registrations)
            for gone in set(link.attached()) - set(wanted):
                await link.remove(gone)
            missing = [each for each in wanted if not link.has(each)]
            if not missing:
                return
            for registration in missing:
                group = self._groups.get(registration)
                if group is not None:
                    await link.add(registration, group)
            await link.barrier()
            if link.closed.is_set():
                raise Unavailable(f"{link.url}: {link.reason}")
            for registration in missing:
                if link.denies(registration):
                    log.error("the bus does not let us hear", subject=registration.pattern, url=link.url)

    def _take_over(self, link: Link) -> None:
        if self._link is not None and self._link.closed.is_set():
            self._state.set(False, self._link.reason)  # it died while its successor was made: that was a gap
        self._link = link
        if not self.connected:
            log.info("bus connected", url=link.url)
        self._told.clear()
        self._state.set(True, "connected")

    def _retire(self, link: Link) -> None:
        task = asyncio.get_running_loop().create_task(_retire_or_close(link), name="bus link retiring")
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def _publish_denied(self, subject: str) -> None:
        self._fail_calls(
            lambda asked: asked.lower() == subject,
            lambda asked: Denied(f"the bus does not let us ask on {asked}"),
        )

    def _tell_once(self, reason: str) -> None:
        """One line per reason and outage, not one per try."""
        self._state.set(False, reason)
        if reason not in self._told:
            self._told.add(reason)
            log.warning("bus cannot be reached, trying on", reason=reason)


async def _closes_within(link: Link, wait_s: float | None) -> bool:
    try:
        async with asyncio.timeout(wait_s):
            await link.closed.wait()
    except TimeoutError:
        return False
    return True


async def _end(task: asyncio.Task[None]) -> None:
    """Insist: a credential source is somebody else's code and may swallow its cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=1.0)


async def _retire_or_close(link: Link) -> None:
    try:
        await link.retire()
    finally:
        await link.close()


def _is_same(one: BusCredentials, other: BusCredentials) -> bool:
    return (one.jwt, one.user, one.password) == (other.jwt, other.user, other.password)
