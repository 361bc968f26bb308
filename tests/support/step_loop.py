"""An event loop that a test runs turn by turn, with sockets whose other end the test is.

The transports are asyncio's own: only sockets, clock and readiness are simulated, so protocols see exactly the calls
that asyncio makes, in an order that the test decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from asyncio import selector_events
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

MAX_TURNS = 1000  # until nothing is left to do: more than that, and something runs in circles
_set_running_loop = asyncio._set_running_loop


class StepSocket:
    """A connected socket. `arrive`, `finish` and `reset` are what the peer does; `sent` is what it got."""

    family = socket.AF_UNIX  # no options to set
    type = socket.SOCK_STREAM
    proto = 0

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._fd = loop.new_fd()
        self._arrived = b""
        self.has_finished = False
        self._was_reset = False
        self.sent = b""
        self.answers = 0  # given by the peer, for those who count
        self.takes: int | None = None  # how many more bytes the peer takes; None: any number
        self.closed = False
        self.shut_down = False

    # The peer.

    def arrive(self, data: bytes) -> None:
        self._loop.becomes_ready(self)
        self._arrived += data

    def finish(self) -> None:
        self._loop.becomes_ready(self)
        self.has_finished = True

    def reset(self) -> None:
        self._loop.becomes_ready(self)
        self._was_reset, self._arrived = True, b""

    def take(self, size: int | None) -> None:
        """So many bytes from now on; None: any number."""
        self._loop.becomes_ready(self)
        self.takes = size

    # What asyncio's transports call.

    def is_readable(self) -> bool:
        return bool(self._arrived) or self.has_finished or self._was_reset

    def is_writable(self) -> bool:
        return self.takes is None or self.takes > 0 or self._was_reset

    def recv(self, size: int) -> bytes:
        if self._was_reset:
            raise ConnectionResetError("reset by peer")
        if not self._arrived and not self.has_finished:
            raise BlockingIOError
        data, self._arrived = self._arrived[:size], self._arrived[size:]
        return data

    def send(self, data: bytes) -> int:
        if self._was_reset:
            raise BrokenPipeError("reset by peer")
        if not self.is_writable():
            raise BlockingIOError
        taken = len(data) if self.takes is None else min(len(data), self.takes)
        if self.takes is not None:
            self.takes -= taken
        self.sent += bytes(data[:taken])
        return taken

    def shutdown(self, _how: int) -> None:
        self.shut_down = True

    def close(self) -> None:
        self.closed = True

    def fileno(self) -> int:
        return self._fd

    def getsockname(self) -> str:
        return ""

    def getpeername(self) -> str:
        return ""


class Dial:
    """One attempt to connect, until the test decides on it."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self.decided: asyncio.Future[None] = loop.create_future()
        self.socket: StepSocket | None = None

    def is_open(self) -> bool:
        return not self.decided.done()

    def connect(self) -> StepSocket:
        self.socket = StepSocket(self._loop)
        self.decided.set_result(None)
        return self.socket

    def refuse(self, error: OSError) -> None:
        self.decided.set_exception(error)


class StepLoop(asyncio.BaseEventLoop):
    """`io_first`: what sockets have to say comes before callbacks that are ready already, as with uvloop; else after
    them, as with asyncio."""

    _ready: deque[asyncio.Handle]  # asyncio's own
    _run_once: Callable[[], None]

    def __init__(self, *, uptime_s: float = 0.0, io_first: bool = False) -> None:
        super().__init__()
        self._io_first = io_first
        self._now = uptime_s
        self._selector = self
        self._transports: dict[int, Any] = {}
        self._readers: dict[int, asyncio.Handle] = {}
        self._writers: dict[int, asyncio.Handle] = {}
        self._sockets: dict[int, StepSocket] = {}
        self._order: list[StepSocket] = []  # sockets, the one that became ready first at the front
        self._last_fd = 0
        self.dials: list[Dial] = []
        self.on_dial: Callable[[Dial], None] | None = None
        self.errors: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _loop, context: self.errors.append(context))

    # Time and turns.

    def time(self) -> float:
        return self._now

    def turn(self) -> None:
        """What is ready now, in the order in which it became so."""
        self._run_once()

    def settle(self) -> None:
        """Turns until nothing is ready."""
        for _ in range(MAX_TURNS):
            if not self._ready and not self._ready_handles():
                return
            self._run_once()
        raise AssertionError("the loop does not come to rest")

    def advance(self, seconds: float) -> None:
        """So much later, and all that follows from it."""
        self._now += seconds
        self._run_once()
        self.settle()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """As the running loop; at the end all is cut and the loop closed."""
        _set_running_loop(self)
        try:
            yield
        finally:
            self._dismantle()
            _set_running_loop(None)

    # Readiness.

    def new_fd(self) -> int:
        self._last_fd += 1
        return self._last_fd

    def becomes_ready(self, sock: StepSocket) -> None:
        """Called before it does: a socket that is ready already keeps its place."""
        if sock not in self._order:
            self._order.append(sock)
        elif not sock.is_readable():
            self._order.remove(sock)
            self._order.append(sock)

    def _ready_handles(self) -> list[asyncio.Handle]:
        handles = []
        for sock in self._order:
            fd = sock.fileno()
            if fd in self._readers and sock.is_readable():
                handles.append(self._readers[fd])
            if fd in self._writers and sock.is_writable():
                handles.append(self._writers[fd])
        return handles

    def select(self, _timeout: float | None) -> list[asyncio.Handle]:
        self._order = [sock for sock in self._order if not sock.closed]
        return self._ready_handles()

    def get_key(self, fd: int) -> object:
        raise KeyError(fd)  # asked for when a transport is printed

    def _process_events(self, handles: list[asyncio.Handle]) -> None:
        if self._io_first:
            self._ready.extendleft(reversed(handles))
        else:
            self._ready.extend(handles)

    def _write_to_self(self) -> None:
        """There are no threads to wake the loop for."""

    def _add_reader(self, fd: int, callback: Callable[..., object], *args: object) -> None:
        self._readers[fd] = asyncio.Handle(callback, args, self)

    def _remove_reader(self, fd: int) -> bool:
        return _cancel(self._readers.pop(fd, None))

    def _add_writer(self, fd: int, callback: Callable[..., object], *args: object) -> None:
        self._writers[fd] = asyncio.Handle(callback, args, self)

    def _remove_writer(self, fd: int) -> bool:
        return _cancel(self._writers.pop(fd, None))

    # Connections.

    def _dismantle(self) -> None:
        for dial in self.dials:
            dial.decided.cancel()
        self.settle()
        for transport in list(self._transports.values()):
            if transport._sock is not None:
                transport.abort()
        self.settle()
        self.close()

    def accept(self, protocol: asyncio.Protocol, sock: StepSocket) -> None:
        self._make_transport(protocol, sock, None)

    def _make_transport(self, protocol: Any, sock: StepSocket, waiter: asyncio.Future[None] | None) -> Any:
        self.becomes_ready(sock)
        return selector_events._SelectorSocketTransport(self, sock, protocol, waiter)  # type: ignore[attr-defined]

    async def create_connection(self, factory: Any, *_where: object, **_options: object) -> Any:  # type: ignore[override]
        """The steps of asyncio's own."""
        dial = Dial(self)
        self.dials.append(dial)
        if self.on_dial is not None:
            self.on_dial(dial)
        try:
            await dial.decided
        except BaseException:
            if dial.socket is not None:
                dial.socket.close()
            raise
        assert dial.socket is not None
        protocol = factory()
        waiter = self.create_future()
        transport = self._make_transport(protocol, dial.socket, waiter)
        try:
            await waiter
        except BaseException:
            transport.close()
            raise
        return transport, protocol


def _cancel(handle: asyncio.Handle | None) -> bool:
    if handle is None:
        return False
    handle.cancel()
    return True
