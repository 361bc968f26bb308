"""The client: one connection pool, one method that calls, and a small class per noun on top of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
from yarl import URL

from corral.client.endpoint import Endpoint
from corral.client.errors import error_of, unreachable
from corral.client.events import EventParser, FleetEvent, Lost, Restarted, read_event
from corral.client.resources.access import Keys, Tokens
from corral.client.resources.backends import Backends
from corral.client.resources.fleet import FleetFiles, Requests, Why
from corral.client.resources.loads import Loads
from corral.client.resources.logs import Logs
from corral.client.resources.models import GALLERIES_S, Models
from corral.client.resources.nodes import Nodes
from corral.client.resources.operations import Operations
from corral.client.trust import trust_of
from corral.contract.admin import Cluster, GalleryView
from corral.contract.codec import Message, Undecodable, always, decode, encode
from corral.kit.backoff import Backoff
from corral.kit.clock import Clock, SystemClock
from corral.kit.errors import Failed, NotFound, Unavailable, Unreachable

T = TypeVar("T")
EVERYTHING = "/api/events"
_BROKEN = (aiohttp.ClientError, OSError, TimeoutError)
_LOOK_AGAIN_S = 0.2


class Me(Message, frozen=True):
    key_id: str = always(str)
    name: str = always(str)
    role: str = always(str)


class Client:
    """`async with Client(endpoint) as client: await client.nodes.list()`.

    `idle_s` bounds the silence of an event stream: the controller pings well within it, so a longer silence means that
    the other side is gone without a word. `is_minded` says whether somebody is there who starts the fleet's processes
    again: calls then wait up to `restart_s` for a gateway that is just being started.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timeout_s: float = 30.0,
        idle_s: float = 60.0,
        restart_s: float = 10.0,
        is_minded: Callable[[], bool] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.nodes = Nodes(self)
        self.tokens = Tokens(self)
        self.keys = Keys(self)
        self.backends = Backends(self)
        self.models = Models(self)
        self.fleet = FleetFiles(self)
        self.loads = Loads(self)
        self.logs = Logs(self)
        self.why = Why(self)
        self.operations = Operations(self)
        self.requests = Requests(self)
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._restart_s = restart_s
        self._is_minded = is_minded
        self._clock = clock or SystemClock()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        place = self.endpoint
        trust = await trust_of(place.url, place.ca, timeout_s=self._timeout_s, any_name=place.any_name)
        self._session = aiohttp.ClientSession(
            # True = aiohttp's own default, which is what plain http gets.
            connector=aiohttp.TCPConnector(ssl=trust if trust is not None else True),
            headers={"Authorization": f"Bearer {self.endpoint.key}", "Accept": "application/json"},
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def me(self) -> Me:
        """Whose key this is."""
        return await self.call("GET", "/api/me", Me)

    async def cluster(self) -> Cluster:
        return await self.call("GET", "/api/cluster", Cluster)

    async def galleries(self) -> tuple[GalleryView, ...]:
        """Which galleries there are and which cannot be read. Empty from a controller that does not tell yet."""
        try:
            return await self.call("GET", "/api/galleries", tuple[GalleryView, ...], timeout_s=GALLERIES_S)
        except NotFound:
            return ()

    async def server_time(self) -> datetime | None:
        """The controller's clock, to the second, as its answers carry it."""
        _, _, date = await self._get("/api/me")
        try:
            return parsedate_to_datetime(date)
        except ValueError:
            return None

    async def call(
        self, method: str, path: str, kind: type[T], body: object = None, *, timeout_s: float | None = None
    ) -> T:
        """One call of the API, its answer decoded. Raises an error of the house."""
        payload = await self.call_raw(method, path, body, timeout_s=timeout_s)
        try:
            return decode(kind, payload)
        except Undecodable as error:
            raise Failed(f"{self.endpoint.url}{path} answered with something that is not Corral's: {error}") from error

    async def call_raw(self, method: str, path: str, body: object = None, *, timeout_s: float | None = None) -> bytes:
        """`timeout_s`: for what is known to take its time."""
        data = None if body is None else encode(body)
        patience = aiohttp.ClientTimeout(total=timeout_s or self._timeout_s)
        headers = {"Content-Type": "application/json"} if data is not None else {}
        try:
            async with await self._ask(method, path, data=data, headers=headers, timeout=patience) as answer:
                payload = await answer.read()
        except _BROKEN as error:
            raise unreachable(self.endpoint.url, error, may_have_happened=method != "GET") from error
        if 200 <= answer.status < 300:
            return payload
        raise error_of(answer.status, payload, retry_after=answer.headers.get("Retry-After"))

    async def stream(
        self, path: str, body: object, *, head: list[tuple[str, str]] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The answer to a POST as it comes: it may begin late and take its time. `head` is filled with its headers."""
        patience = aiohttp.ClientTimeout(total=None, connect=self._timeout_s)
        try:
            async with await self._ask(
                "POST",
                path,
                data=encode(body),
                headers={"Content-Type": "application/json", "Accept": "*/*"},
                timeout=patience,
            ) as answer:
                if answer.status != 200:
                    raise error_of(answer.status, await answer.read(), retry_after=answer.headers.get("Retry-After"))
                if head is not None:
                    head.extend(answer.headers.items())
                async for chunk in answer.content.iter_any():
                    yield chunk
        except _BROKEN as error:
            raise unreachable(self.endpoint.url, error, may_have_happened=False) from error

    async def _ask(self, method: str, path: str, **how: Any) -> aiohttp.ClientResponse:
        """Where nobody took the connection, nobody was asked anything: that may be tried again, whatever it is."""
        until = self._clock.monotonic() + self._restart_s
        while True:
            try:
                # A redirect is never followed: the key must not travel to a place nobody chose.
                return await self._open.request(method, self._url(path), allow_redirects=False, **how)
            except aiohttp.ClientSSLError:
                raise  # somebody is there
            except aiohttp.ClientConnectorError as error:
                if self._is_minded is None or not self._is_minded():
                    raise
                if self._clock.monotonic() >= until:
                    url = self.endpoint.url
                    raise Unreachable(
                        f"nothing answers at {url}, though `corral up` runs: see `corral doctor`"
                    ) from error
            await self._clock.sleep(_LOOK_AGAIN_S)

    async def read_lines(self, path: str) -> AsyncGenerator[bytes, None]:
        """A GET's answer line by line, for as long as it goes on; the other side says something within `idle_s`."""
        quiet = aiohttp.ClientTimeout(total=None, connect=self._timeout_s, sock_read=self._idle_s)
        try:
            async with self._open.get(self._url(path), timeout=quiet, allow_redirects=False) as answer:
                if answer.status != 200:
                    raise error_of(answer.status, await answer.read())
                waiting = b""
                async for chunk in answer.content.iter_any():
                    *lines, waiting = (waiting + chunk).split(b"\n")
                    for line in lines:
                        yield line
        except _BROKEN as error:
            raise unreachable(self.endpoint.url, error, may_have_happened=False) from error

    async def status_of(self, path: str) -> tuple[int, bytes]:
        """A probe (`/readyz`): whatever the status, that is the answer."""
        status, body, _ = await self._get(path)
        return status, body

    async def _get(self, path: str) -> tuple[int, bytes, str]:
        try:
            async with self._open.get(self._url(path), allow_redirects=False) as answer:
                return answer.status, await answer.read(), answer.headers.get("Date", "")
        except _BROKEN as error:
            raise unreachable(self.endpoint.url, error, may_have_happened=False) from error

    async def events(self, path: str = EVERYTHING) -> AsyncGenerator[FleetEvent, None]:
        """One stream, until it ends. Ends with `Unreachable`, also when the other side closes it in order."""
        quiet = aiohttp.ClientTimeout(total=None, connect=self._timeout_s, sock_read=self._idle_s)
        parser = EventParser()
        try:
            async with self._open.get(
                self._url(path),
                timeout=quiet,
                headers={"Accept": "text/event-stream"},
                allow_redirects=False,
            ) as answer:
                if answer.status != 200:
                    raise error_of(answer.status, await answer.read())
                yield Restarted()
                async for chunk in answer.content.iter_any():
                    for raw in parser.feed(chunk):
                        if (event := read_event(raw)) is not None:
                            yield event
        except _BROKEN as error:
            raise unreachable(self.endpoint.url, error, may_have_happened=False) from error
        except Undecodable as error:
            raise Failed(f"{self.endpoint.url}{path} sent something that is not Corral's: {error}") from error
        raise Unreachable(f"{self.endpoint.url} ended the stream of events")

    async def follow(
        self, path: str = EVERYTHING, *, first_s: float = 0.5, cap_s: float = 10.0, reached: bool = False
    ) -> AsyncGenerator[FleetEvent, None]:
        """Events for ever: a broken stream is `Lost`, opened again, and begins with `Restarted` and everything there
        is. What waiting cannot cure (a wrong key, say) is raised. So is a fleet that was never reached at all; whoever
        has reached it by another call says so."""
        backoff = Backoff(first_s=first_s, cap_s=cap_s)
        while True:
            try:
                async with aclosing(self.events(path)) as stream:
                    async for event in stream:
                        reached = True
                        backoff.reset()
                        yield event
            except (Unreachable, Unavailable) as error:
                if not reached:
                    raise
                yield Lost(error.message)
            await self._clock.sleep(backoff.next_s())

    def _url(self, path: str) -> URL:
        # Already encoded: a second pass would undo what keeps a name with a slash or dots one segment.
        return URL(self.endpoint.url + path, encoded=True)

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use the client in `async with`")
        return self._session
