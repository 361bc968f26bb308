"""One relay on a loop that is run turn by turn: a client, the relay and an upstream, moved event by event.

`Steps.run` plays a list of events in the order given and lets the loop turn `gap` times between them; the relay's
clock is the loop's, so every deadline can be waited for at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest import mock

import httptools

from corral.contract.http import KnownHead, Patience, PreparedForward, Request, Responder, Target, UpstreamFailed
from corral.relay import Limits, PoolLimits, RelayServer, Timeouts, UpstreamPool
from tests.support.step_loop import Dial, StepLoop, StepSocket

TARGET = Target("upstream", 80)
SPAN_S = 4.0  # every deadline of the relay
SETTLED = 1000  # as `gap`: turns until nothing is left to do
_TICK_S = 1.0
_CLOCKED = ("loop.ticker", "exchange", "response_reader", "upstream", "pool")
_TIMEOUTS = ("head_s", "keep_alive_s", "body_idle_s", "body_grace_s", "write_stall_s", "tunnel_idle_s", "linger_s")


class Impossible(Exception):
    """An event cannot happen at this place: the order of events is not one that exists."""


@dataclass
class Message:
    """What an HTTP parser that is not ours makes of bytes."""

    status: int = 0
    line: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    complete: bool = False
    malformed: str = ""

    def on_url(self, url: bytes) -> None:
        self.line += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def header(self, name: bytes) -> bytes | None:
        return dict(self.headers).get(name)


class _Messages:
    """Several messages in a row."""

    def __init__(self) -> None:
        self.all: list[Message] = []

    def on_message_begin(self) -> None:
        self.all.append(Message())

    def on_url(self, url: bytes) -> None:
        self.all[-1].on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.all[-1].on_header(name, value)

    def on_body(self, piece: bytes) -> None:
        self.all[-1].on_body(piece)

    def on_message_complete(self) -> None:
        self.all[-1].complete = True


def parse(data: bytes, *, requests: bool) -> list[Message]:
    """The last may be incomplete."""
    messages = _Messages()
    parser = httptools.HttpRequestParser(messages) if requests else httptools.HttpResponseParser(messages)
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        if not messages.all:
            messages.all.append(Message())
        messages.all[-1].malformed = str(error)
    if not requests:
        for message, head in zip(messages.all, data.split(b"HTTP/1.1 ")[1:], strict=False):
            message.status = int(head[:3])
    return messages.all


class RelayAll:
    """A handler and fast path that relay every request, and ask a second time where that is certainly safe."""

    def __init__(self, *, patience: Patience | None) -> None:
        self.patience = patience
        self.failures: list[UpstreamFailed] = []
        self.fast = 0  # requests that took the fast path from end to end
        self.begun = 0
        self.ended = 0

    async def handle(self, request: Request, responder: Responder) -> None:
        self.begun += 1
        await self._relay(request, responder)

    async def _relay(self, request: Request, responder: Responder) -> None:
        try:
            for last in (False, True):
                try:
                    await responder.relay(TARGET, patience=self.patience, upgrade=bool(request.upgrade))
                except UpstreamFailed as failure:
                    self.failures.append(failure)
                    if last or not failure.refused or not failure.resendable:
                        raise
                else:
                    return
        finally:
            self.ended += 1

    def decide(self, head: KnownHead, body: bytes, traceparent: bytes) -> PreparedForward | None:
        self.begun += 1
        return head.prepare_forward(TARGET, patience=self.patience)

    def on_response(self, *_report: object) -> None:
        self.fast += 1
        self.ended += 1

    on_stream_end = on_response

    def new_tap(self, _forward: PreparedForward) -> None:
        """Nothing is looked at."""

    async def handle_prepared(
        self, _forward: PreparedForward, request: Request, responder: Responder, _elapsed_s: float
    ) -> None:
        await self._relay(request, responder)


class Steps:
    """The three parties. Events are named by strings, see `EVENTS`."""

    def __init__(self, loop: StepLoop, request: list[bytes], answer: list[bytes], *, fast: bool) -> None:
        self.loop = loop
        self.request = list(request)
        self.answer = list(answer)
        spans: dict[str, float] = dict.fromkeys(_TIMEOUTS, SPAN_S)
        limits = Limits(timeouts=Timeouts(**spans))  # type: ignore[arg-type]
        self.pool = UpstreamPool(
            PoolLimits(connect_s=SPAN_S, send_stall_s=SPAN_S, idle_s=SPAN_S, max_age_s=60, tunnel_idle_s=SPAN_S)
        )
        self.handler = RelayAll(patience=Patience(SPAN_S, SPAN_S))
        self.server = RelayServer(self.handler, limits, pool=self.pool, fast_path=self.handler if fast else None)
        self.pool.counters = self.server.counters
        self.client = StepSocket(loop)
        self.connection = self.server._new_connection()
        loop.accept(self.connection, self.client)
        self.place = ""  # what was played, for messages

    # Connections to the upstream.

    @property
    def sockets(self) -> list[StepSocket]:
        """Those to the upstream, in order."""
        return [dial.socket for dial in self.loop.dials if dial.socket is not None]

    def upstream(self) -> StepSocket:
        """The one that has the request."""
        for sock in reversed(self.sockets):
            if sock.sent and not sock.closed:
                return sock
        raise Impossible

    def _open_dial(self) -> Dial:
        for dial in self.loop.dials:
            if dial.is_open():
                return dial
        raise Impossible

    def warm_up(self, request: bytes, answer: bytes) -> None:
        """Requests that were answered before: their connection is kept, and their heads are known."""
        for _ in range(3):
            self.client.arrive(request)
            self.loop.settle()
            if not self.sockets:
                self._open_dial().connect()
                self.loop.settle()
            self.upstream().arrive(answer)
            self.loop.settle()
        assert len(self.sockets) == 1
        self.sockets[0].sent = self.client.sent = b""
        self.handler.fast = self.handler.begun = self.handler.ended = 0

    # Events.

    def piece(self) -> None:
        self.client.arrive(self.request.pop(0))

    def connect(self) -> None:
        self._open_dial().connect()

    def refuse(self) -> None:
        def refuse(dial: Dial) -> None:
            dial.refuse(ConnectionRefusedError("refused"))

        refuse(self._open_dial())
        self.loop.on_dial = refuse

    def reply(self) -> None:
        sock = self.upstream()
        piece = self.answer.pop(0)
        if piece:
            sock.arrive(piece)
        else:
            sock.finish()

    def leave(self) -> None:
        self.client.finish()

    def vanish(self) -> None:
        self.client.reset()

    def close(self) -> None:
        self._any_upstream().finish()

    def crash(self) -> None:
        self._any_upstream().reset()

    def _any_upstream(self) -> StepSocket:
        """Also one that has just been connected and has no request yet."""
        for sock in reversed(self.sockets):
            if not sock.closed:
                return sock
        raise Impossible

    def stall(self) -> None:
        """The client takes no more of its answer."""
        if self.connection.transport is None:
            raise Impossible
        self.client.take(0)
        self.connection.transport.set_write_buffer_limits(high=8)

    def unstall(self) -> None:
        self.client.take(None)

    def choke(self) -> None:
        """The upstream takes no more of the request."""
        sock = self._any_upstream()
        transport = self.loop._transports.get(sock.fileno())
        if transport is None:
            raise Impossible
        sock.take(0)
        transport.set_write_buffer_limits(high=8)

    def unchoke(self) -> None:
        for sock in self.sockets:
            sock.take(None)

    def run(self, events: tuple[str, ...], gaps: Callable[[], int]) -> None:
        for event in events:
            self._happen(EVENTS[event])
            turns = gaps()
            if turns == SETTLED:
                self.loop.settle()
            else:
                for _ in range(turns):
                    self.loop.turn()
        self.loop.settle()

    def _happen(self, event: Callable[[Steps], None]) -> None:
        for _ in range(8):  # turns that the relay may need before an event has a place to happen
            try:
                event(self)
            except Impossible:
                self.loop.turn()
            else:
                return
        raise Impossible

    # Results.

    def answers(self) -> list[Message]:
        return [each for each in parse(self.client.sent, requests=False) if each.status != 100]

    def upstream_finished(self) -> bool:
        return any(sock.has_finished for sock in self.sockets)

    def requests(self) -> list[Message]:
        """What upstreams got."""
        return [each for sock in self.sockets if sock.sent for each in parse(sock.sent, requests=True)]

    def finish(self) -> None:
        """Every deadline passes; then nothing may be left."""
        left = self.leftovers()
        for _ in range(round(12 * SPAN_S / _TICK_S)):
            if not left:
                break
            self.loop.advance(_TICK_S)
            left = self.leftovers()
        assert not left, f"left behind: {left}; {self.place}"

    def leftovers(self) -> dict[str, object]:
        """What must be gone when every deadline has passed, with its present amount; empty if all is."""
        counters = self.server.counters
        found = {
            "requests": self.server.running,
            "handlers": self.handler.begun - self.handler.ended,
            "client connections": counters.connections_open,
            "upstream connections": counters.upstream_open,
            "open sockets": [sock.fileno() for sock in (self.client, *self.sockets) if not sock.closed],
            "timers": len(self.server.ticker._members) + len(self.pool.ticker._members),
            "tasks": len(self.pool._connecting),
            "errors": self.loop.errors,
        }
        return {name: amount for name, amount in found.items() if amount}


EVENTS: dict[str, Callable[[Steps], None]] = {
    "piece": Steps.piece,  # the client sends more of its request
    "connect": Steps.connect,  # the connection to the upstream is there
    "refuse": Steps.refuse,  # no connection to the upstream, from now on
    "reply": Steps.reply,  # the upstream sends more of its answer
    "leave": Steps.leave,  # the client closes
    "vanish": Steps.vanish,  # the client's machine resets the connection
    "close": Steps.close,  # the upstream closes
    "crash": Steps.crash,  # the upstream's machine resets the connection
    "stall": Steps.stall,
    "unstall": Steps.unstall,
    "choke": Steps.choke,
    "unchoke": Steps.unchoke,
}


@contextlib.contextmanager
def relay_clock() -> Iterator[Callable[[StepLoop], None]]:
    """Lets the relay's modules read the time from a loop that is named for each run."""
    clock = _LoopClock()
    with contextlib.ExitStack() as stack:
        for module in _CLOCKED:
            stack.enter_context(mock.patch(f"corral.relay.{module}.time", clock))
        stack.enter_context(mock.patch("corral.relay.fast_path._monotonic", clock.monotonic))
        yield clock.follow


class _LoopClock:
    """Stands in for the module `time`."""

    _loop: StepLoop

    def follow(self, loop: StepLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.time()


def interleavings(*chains: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every order of the chains' events that keeps the order within each chain."""
    chains = tuple(chain for chain in chains if chain)
    if not chains:
        yield ()
    for at, chain in enumerate(chains):
        for rest in interleavings(*chains[:at], chain[1:], *chains[at + 1 :]):
            yield (chain[0], *rest)
