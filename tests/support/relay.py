"""A relay between a raw client and a scripted upstream, over real sockets. Everything on the wire is literal bytes."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from corral.contract.http import Handler, KnownHead, PreparedForward, RelayResult, Request, Responder, Tap, Target
from corral.relay import Limits, PoolLimits, RelayServer, Timeouts, UpstreamPool
from corral.relay.loop.ticker import Ticker
from tests.support.waiting import until

FAST_PATH_ON = False  # whether rigs have a fast_path: set by the suite's conftest
WAIT_S = 30.0  # far beyond what anything here takes; only a hang reaches it


@dataclass
class Answer:
    """An answer as a client sees it: read by this file's own few lines, not by the code under test."""

    start: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    raw_body: bytes

    @property
    def status(self) -> int:
        return int(self.start.split(b" ")[1])

    def get(self, name: bytes) -> bytes | None:
        found = self.all(name)
        assert len(found) <= 1, found
        return found[0] if found else None

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]


def parse_head(raw: bytes) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    start, *lines = raw[:-4].split(b"\r\n")
    pairs = [line.split(b":", 1) for line in lines]
    return start, [(name.lower(), value.strip()) for name, value in pairs]


class Wire:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def exactly(self, count: int) -> bytes:
        async with asyncio.timeout(WAIT_S):
            return await self.reader.readexactly(count)

    async def line(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            return await self.reader.readuntil(b"\r\n")

    async def rest(self) -> bytes:
        """Everything until the other side closes. A reset counts as the end."""
        parts = []
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(WAIT_S):
                while part := await self.reader.read(65536):
                    parts.append(part)
        return b"".join(parts)

    async def chunked(self) -> tuple[bytes, bytes]:
        """Decoded and raw."""
        decoded: list[bytes] = []
        raw: list[bytes] = []
        while True:
            size_line = await self.line()
            raw.append(size_line)
            size = int(size_line.split(b";")[0], 16)
            if not size:
                while True:
                    trailer = await self.line()
                    raw.append(trailer)
                    if trailer == b"\r\n":
                        return b"".join(decoded), b"".join(raw)
            piece = await self.exactly(size + 2)
            assert piece.endswith(b"\r\n")
            raw.append(piece)
            decoded.append(piece[:-2])

    def close(self) -> None:
        self.writer.close()

    def abort(self) -> None:
        # Where it was closed with bytes still to be sent and they have gone since, asyncio's loop of 3.11 stumbles.
        with contextlib.suppress(AttributeError):
            self.writer.transport.abort()

    async def closed(self) -> None:
        """The other side has closed, and said nothing more."""
        assert await self.rest() == b""


class Client(Wire):
    async def answer(self, method: bytes = b"GET") -> Answer:
        while True:
            start, headers = parse_head(await self.head())
            if not start.startswith(b"HTTP/1.1 1"):
                break
        fields = dict(headers)
        raw = b""
        status = int(start.split(b" ")[1])
        if method == b"HEAD" or status in (204, 304):
            body = b""
        elif b"transfer-encoding" in fields:
            body, raw = await self.chunked()
        elif b"content-length" in fields:
            body = raw = await self.exactly(int(fields[b"content-length"]))
        else:
            body = raw = await self.rest()
        return Answer(start, headers, body, raw)

    async def ask(self, data: bytes) -> Answer:
        await self.send(data)
        return await self.answer(data.split(b" ")[0])


class Served(Wire):
    """A connection accepted by the scripted upstream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        super().__init__(reader, writer)
        self.number = number  # 1 for the first connection, and so on
        self.requests: list[Asked] = []

    async def request(self) -> Asked:
        start, headers = parse_head(await self.head())
        fields = dict(headers)
        body = b""
        if b"transfer-encoding" in fields:
            body, _ = await self.chunked()
        elif b"content-length" in fields:
            body = await self.exactly(int(fields[b"content-length"]))
        asked = Asked(start, headers, body)
        self.requests.append(asked)
        return asked


@dataclass
class Asked:
    start: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]

    def get(self, name: bytes) -> bytes | None:
        found = self.all(name)
        assert len(found) <= 1, found
        return found[0] if found else None


Script = Callable[[Served], Awaitable[Any]]


class Upstream:
    """Runs a script for every connection it accepts."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections: list[Served] = []
        self.ended: list[Served] = []  # the other side has closed
        self.failures: list[BaseException] = []
        self.target = Target()

    async def start(self, *, tls: ssl.SSLContext | None = None, unix_path: str = "", name: str = "") -> None:
        if unix_path:
            self._server = await asyncio.start_unix_server(self._serve, unix_path)
            self.target = Target(unix_path=unix_path)
        else:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
            port = self._server.sockets[0].getsockname()[1]
            self.target = Target(host="127.0.0.1", port=port, tls=tls is not None, server_name=name)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served = Served(reader, writer, len(self.connections) + 1)
        self.connections.append(served)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._script(served)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended.append(served)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self.failures.append(error)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=WAIT_S)
        for served in self.connections:
            served.abort()
        assert not self.failures, self.failures


class Everything:
    """A handler that relays all it gets, and keeps the results."""

    def __init__(self) -> None:
        self.target = Target()
        self.options: dict[str, Any] = {}
        self.results: list[RelayResult] = []
        self.requests: list[Any] = []
        self.fast_path_requests = 0  # requests that took the fast path from end to end

    async def handle(self, request: Request, responder: Responder) -> None:
        self.requests.append(request)
        self.results.append(await responder.relay(self.target, **self.options))

    def decide(self, head: KnownHead, body: bytes, traceparent: bytes) -> PreparedForward | None:
        if not self.options.keys() <= {"path", "strip", "add", "patience"}:
            return None
        return head.prepare_forward(self.target, **self.options)

    def on_response(
        self,
        forward: PreparedForward,
        request_id: bytes,
        status: int,
        started: float,
        ended: float,
        bytes_sent: int,
        response: bytes,
    ) -> None:
        self.fast_path_requests += 1
        seconds = ended - started
        self.requests.append(forward.head)
        self.results.append(RelayResult(status, True, False, seconds, seconds, bytes_sent))

    def new_tap(self, forward: PreparedForward) -> None:
        """Nothing is looked at."""

    def on_stream_end(
        self,
        forward: PreparedForward,
        request_id: bytes,
        status: int,
        started: float,
        ended: float,
        bytes_sent: int,
        tap: Tap | None,
    ) -> None:
        self.on_response(forward, request_id, status, started, ended, bytes_sent, b"")

    async def handle_prepared(
        self, forward: PreparedForward, request: Request, responder: Responder, elapsed_s: float
    ) -> None:
        assert elapsed_s >= 0
        await self.handle(request, responder)


class Undecided:
    """A fast path that decides nothing."""

    def decide(self, head: KnownHead, body: bytes, traceparent: bytes) -> PreparedForward | None:
        return None

    def on_response(self, *_report: object) -> None:
        raise AssertionError("nothing was decided")

    def new_tap(self, forward: PreparedForward) -> None:
        raise AssertionError("nothing was decided")

    on_stream_end = on_response

    async def handle_prepared(
        self, forward: PreparedForward, request: Request, responder: Responder, elapsed_s: float
    ) -> None:
        raise AssertionError("nothing was decided")


@dataclass
class Rig:
    server: RelayServer
    pool: UpstreamPool
    upstream: Upstream
    handler: Any
    port: int
    clients: list[Client] = field(default_factory=list)

    async def client(self, **options: Any) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port, **options))
        self.clients.append(client)
        return client

    async def until(self, condition: Callable[[], object]) -> None:
        await until(condition)


def answering(*answers: bytes, close: bool = False) -> Script:
    """One answer per request, the last one for ever; or close after the first."""

    async def script(served: Served) -> None:
        count = 0
        while True:
            await served.request()
            await served.send(answers[min(count, len(answers) - 1)])
            count += 1
            if close:
                return

    return script


async def ok(served: Served) -> None:
    """Answers every request with its own start line."""
    while True:
        asked = await served.request()
        await served.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(asked.start), asked.start))


class HeldClock:
    """The time that relays go by, in a test's hands: while it is held it passes only as the test says, and no deadline
    comes for a machine that was slow. Fixture `clock`."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._let_go_at: float | None = None

    def monotonic(self) -> float:
        return self._at if self._let_go_at is None else self._at + time.monotonic() - self._let_go_at

    def hold(self) -> None:
        self._at, self._let_go_at = self.monotonic(), None

    def let_go(self) -> None:
        """From here on it passes by itself."""
        self._at, self._let_go_at = self.monotonic(), time.monotonic()

    def leap(self, seconds: float) -> None:
        """So much later all at once, as for a process that stood still."""
        self._at += seconds

    async def forward(self, seconds: float, ticker: Ticker) -> None:
        """So much later, as those on that ticker have seen."""
        self._at += seconds
        ticker.now = self._at - 0.000_001  # it was awake all the time
        await until(lambda: ticker.now >= self._at, "tick")


def hold_clock(monkeypatch: pytest.MonkeyPatch) -> HeldClock:
    """Held from the start: relays made in the test go by it."""
    clock = HeldClock()
    monkeypatch.setattr("corral.relay.loop.ticker.time", clock)
    monkeypatch.setattr("corral.relay.fast_path._monotonic", clock.monotonic)
    return clock


def quick(**timeouts: float) -> Timeouts:
    """Timeouts that no test reaches by accident, save those given."""
    names = ("head_s", "keep_alive_s", "body_idle_s", "body_grace_s", "write_stall_s", "linger_s")
    return Timeouts(**{**dict.fromkeys(names, 30.0), **timeouts})  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def rig(
    script: Script = ok,
    *,
    handler: Handler | None = None,
    limits: Limits | None = None,
    pool_limits: PoolLimits | None = None,
    server_tls: ssl.SSLContext | None = None,
    client_tls: ssl.SSLContext | None = None,
    upstream_tls: ssl.SSLContext | None = None,
    upstream_path: str = "",
    server_name: str = "",
    fast_path_on: bool | None = None,
) -> AsyncIterator[Rig]:
    """A relay, and behind it an upstream that runs `script`. The default handler relays everything, also on the fast
    path where that is on."""
    upstream = Upstream(script)
    await upstream.start(tls=upstream_tls, unix_path=upstream_path, name=server_name)
    chosen: Any = handler or Everything()
    if isinstance(chosen, Everything):
        chosen.target = upstream.target
    pool = UpstreamPool(pool_limits, tls=client_tls)
    fast_path = chosen if isinstance(chosen, Everything) else Undecided()
    on = FAST_PATH_ON if fast_path_on is None else fast_path_on
    server = RelayServer(
        chosen, limits or Limits(timeouts=quick()), pool=pool, ssl=server_tls, fast_path=fast_path if on else None
    )
    pool.counters = server.counters
    made = Rig(server, pool, upstream, chosen, await server.listen("127.0.0.1", 0))
    try:
        yield made
    finally:
        for client in made.clients:
            client.abort()
        await server.close()
        await pool.close()
        await upstream.stop()
        assert server.running == 0
