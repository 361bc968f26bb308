"""One connection to the HTTP API: calls, streams and events, with the errors of `errors.py`.

Calls go through `http_exchange.py`, streams and uploads through `streams.py`, which is imported at its first use.
`Client` adds a class per resource. Redirects are never followed: the key must not be sent to another host. Over https
the client trusts the system's CAs, a CA file, or a pinned CA (`kit/ca_pin.py`).
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar
from urllib.parse import quote

from corral.client.endpoint import Endpoint
from corral.client.errors import BROKEN, ConnectFailed, error_of, unreachable
from corral.client.http_exchange import Answer, HttpExchange
from corral.contract.codec import Undecodable, decode, encode
from corral.kit.clock import Clock, SystemClock
from corral.kit.errors import Failed, Invalid, NotFound, Unavailable, Unreachable

if TYPE_CHECKING:
    from datetime import datetime

    from corral.client.events import FleetEvent
    from corral.client.streams import Streams

T = TypeVar("T")
ALL_EVENTS = "/api/events"
_RETRY_S = 0.2


def segment(text: str) -> str:
    """A name or id as one segment of a path. An empty one would make another path with another meaning."""
    if not text.strip():
        raise Invalid("the name is empty: give a name or an id")
    # `.` and `..` would be taken for folders by every proxy; `quote` does not escape them.
    return quote(text, safe="") if text not in (".", "..") else "%2E" * len(text)


class ApiConnection:
    """`idle_s` limits the silence of an event stream: the controller pings more often, so a longer silence means that
    the server is gone. `is_supervised` tells whether a supervisor restarts the fleet's processes: calls then wait up to
    `restart_s` for a gateway that is being started."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timeout_s: float = 30.0,
        idle_s: float = 60.0,
        restart_s: float = 10.0,
        is_supervised: Callable[[], bool] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._restart_s = restart_s
        self._is_supervised = is_supervised
        self._clock = clock or SystemClock()
        self._trust: ssl.SSLContext | None = None
        self._calls: HttpExchange | None = None
        self._streams: Streams | None = None

    async def __aenter__(self) -> Self:
        place = self.endpoint
        self._trust = await trust_of(place.url, place.ca, timeout_s=self._timeout_s, any_name=place.any_name)
        self._calls = HttpExchange(place.url, self._trust, self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._calls is not None:
            await self._calls.close()
        if self._streams is not None:
            await self._streams.close()

    async def server_time(self) -> datetime | None:
        """The controller's clock, to the second, from the Date header."""
        from email.utils import parsedate_to_datetime

        answer = await self._get("/api/me")
        try:
            return parsedate_to_datetime(answer.headers.get("date", ""))
        except ValueError:
            return None

    async def call(
        self, method: str, path: str, kind: type[T], body: object = None, *, timeout_s: float | None = None
    ) -> T:
        """One call of the API; returns the decoded answer. Raises a CorralError."""
        payload = await self.call_raw(method, path, body, timeout_s=timeout_s)
        try:
            return decode(kind, payload)
        except Undecodable as error:
            raise Failed(f"{self.endpoint.url}{path} did not answer like Corral: {error}") from error

    async def call_raw(self, method: str, path: str, body: object = None, *, timeout_s: float | None = None) -> bytes:
        """`timeout_s`: for calls that take longer."""
        data = None if body is None else encode(body)
        headers = {"Content-Type": "application/json"} if data is not None else {}
        limit_s = timeout_s or self._timeout_s
        try:
            answer = await self._through_restart(
                lambda: self._open.request(method, path, headers=headers, body=data, timeout_s=limit_s)
            )
        except BROKEN as error:
            raise unreachable(self.endpoint.url, error, may_have_happened=method != "GET") from error
        if 200 <= answer.status < 300:
            return answer.body
        raise error_of(answer.status, answer.body, retry_after=answer.headers.get("retry-after"))

    async def put_bytes(self, path: str, kind: type[T], data: bytes, *, timeout_s: float) -> T:
        """PUT plain bytes; returns the decoded answer. Raises a CorralError."""
        headers = {"Content-Type": "application/octet-stream"}
        try:
            async with await self._through_restart(
                lambda: self._streaming().send("PUT", path, headers=headers, body=data, total_s=timeout_s)
            ) as answer:
                payload = await answer.read()
        except BROKEN as error:
            raise unreachable(self.endpoint.url, error, may_have_happened=True) from error
        if not 200 <= answer.status < 300:
            raise error_of(answer.status, payload, retry_after=answer.headers.get("Retry-After"))
        try:
            return decode(kind, payload)
        except Undecodable as error:
            raise Failed(f"{self.endpoint.url}{path} did not answer like Corral: {error}") from error

    async def stream(
        self, path: str, body: object, *, head: list[tuple[str, str]] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The streamed answer to a POST, without a total timeout. `head` is filled with the response headers."""
        headers = {"Content-Type": "application/json", "Accept": "*/*"}
        data = encode(body)
        try:
            async with await self._through_restart(
                lambda: self._streaming().send("POST", path, headers=headers, body=data, connect_s=self._timeout_s)
            ) as answer:
                if answer.status != 200:
                    raise error_of(answer.status, await answer.read(), retry_after=answer.headers.get("Retry-After"))
                if head is not None:
                    head.extend(answer.headers.items())
                async for piece in answer.pieces():
                    yield piece
        except BROKEN as error:
            raise unreachable(self.endpoint.url, error, may_have_happened=False) from error

    async def _through_restart(self, send: Callable[[], Awaitable[T]]) -> T:
        """Send a request. A refused connection is retried, whatever the method: the request was not sent."""
        until = self._clock.monotonic() + self._restart_s
        while True:
            try:
                return await send()
            except ConnectFailed as error:
                if self._is_supervised is None or not self._is_supervised():
                    raise
                if self._clock.monotonic() >= until:
                    url = self.endpoint.url
                    raise Unreachable(
                        f"nothing answers at {url}, though `corral up` runs: see `corral doctor`"
                    ) from error
            await self._clock.sleep(_RETRY_S)

    async def read_lines(self, path: str) -> AsyncGenerator[bytes, None]:
        """The answer to a GET line by line, until it ends; the server must send something within `idle_s`."""
        try:
            async with await self._streaming().send(
                "GET", path, connect_s=self._timeout_s, silence_s=self._idle_s
            ) as answer:
                if answer.status != 200:
                    raise error_of(answer.status, await answer.read())
                waiting = b""
                async for chunk in answer.pieces():
                    *lines, waiting = (waiting + chunk).split(b"\n")
                    for line in lines:
                        yield line
        except BROKEN as error:
            raise unreachable(self.endpoint.url, error, may_have_happened=False) from error

    async def read_bytes(self, path: str) -> AsyncGenerator[bytes, None]:
        """The answer to a GET in pieces, until it ends; the server must send something within `idle_s`."""
        try:
            async with await self._streaming().send(
                "GET", path, connect_s=self._timeout_s, silence_s=self._idle_s
            ) as answer:
                if answer.status != 200:
                    raise error_of(answer.status, await answer.read(), retry_after=answer.headers.get("Retry-After"))
                async for chunk in answer.pieces():
                    yield chunk
        except BROKEN as error:
            raise unreachable(self.endpoint.url, error, may_have_happened=False) from error

    async def status_of(self, path: str) -> tuple[int, bytes]:
        """A probe (`/readyz`): returns any status instead of raising."""
        answer = await self._get(path)
        return answer.status, answer.body

    async def _get(self, path: str) -> Answer:
        try:
            return await self._open.request("GET", path, body=None, timeout_s=self._timeout_s)
        except BROKEN as error:
            raise unreachable(self.endpoint.url, error, may_have_happened=False) from error

    async def events(self, path: str = ALL_EVENTS) -> AsyncGenerator[FleetEvent, None]:
        """One event stream, until it ends. Always ends with `Unreachable`, even if the server closes it regularly."""
        from corral.client.events import EventParser, Restarted, read_event

        parser = EventParser()
        headers = {"Accept": "text/event-stream"}
        try:
            async with await self._streaming().send(
                "GET", path, headers=headers, connect_s=self._timeout_s, silence_s=self._idle_s
            ) as answer:
                if answer.status != 200:
                    raise error_of(answer.status, await answer.read())
                yield Restarted()
                async for chunk in answer.pieces():
                    for raw in parser.feed(chunk):
                        if (event := read_event(raw)) is not None:
                            yield event
        except BROKEN as error:
            raise unreachable(self.endpoint.url, error, may_have_happened=False) from error
        except Undecodable as error:
            raise Failed(f"{self.endpoint.url}{path} sent an event that is not Corral's: {error}") from error
        raise Unreachable(f"{self.endpoint.url} ended the stream of events")

    async def follow(
        self, path: str = ALL_EVENTS, *, first_s: float = 0.5, cap_s: float = 10.0, reached: bool = False
    ) -> AsyncGenerator[FleetEvent, None]:
        """Events for ever: a broken stream gives `Lost`, is opened again, and begins with `Restarted` and the whole
        state. Errors that a retry cannot fix (a wrong key) are raised. So is Unreachable before the first event, unless
        `reached` tells that another call has reached the fleet."""
        from corral.client.events import Lost
        from corral.kit.retry import Backoff

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

    @property
    def _open(self) -> HttpExchange:
        if self._calls is None:
            raise RuntimeError("use the client with `async with`")
        return self._calls

    def _streaming(self) -> Streams:
        if self._streams is None:
            from corral.client.streams import Streams

            self._streams = Streams(self._open.url, self._trust, self._headers)
        return self._streams

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.endpoint.key}", "Accept": "application/json"}


async def trust_of(url: str, ca: str, *, timeout_s: float, any_name: bool = False) -> ssl.SSLContext | None:
    """The TLS context; None for plain http. `any_name`: do not check the host name."""
    if not url.startswith("https://"):
        return None
    if not ca:
        return ssl.create_default_context()
    from corral.kit.ca_pin import is_pin

    if is_pin(ca):
        context = _context_from(await _fetch_pinned(url, ca, timeout_s=timeout_s), source=ca)
    else:
        context = _context_from_file(Path(ca))
    context.check_hostname = not any_name
    return context


def _context_from_file(file: Path) -> ssl.SSLContext:
    path = file.expanduser()
    try:
        return _context_from(path.read_text(), source=str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise Invalid(f"the CA in {path} cannot be read ({reason}): give another with --ca or CORRAL_CA") from error


def _context_from(pem: str, *, source: str) -> ssl.SSLContext:
    from corral.kit.ca_pin import trust_context

    try:
        return trust_context(pem)
    except ssl.SSLError as error:
        raise Invalid(f"{source} is not a CA certificate in PEM form") from error


async def _fetch_pinned(url: str, pin: str, *, timeout_s: float) -> str:
    from corral.kit.ca_pin import fetch_pinned_ca

    try:
        return await fetch_pinned_ca(url, pin, timeout_s=timeout_s)
    except ValueError as error:
        raise Invalid(str(error)) from error
    except NotFound as error:
        raise Unreachable(error.message) from error
