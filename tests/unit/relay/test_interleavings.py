"""Every order in which client, upstream and connecting can move ends in the same bytes or in an error with a name, and
leaves nothing behind: no request that hangs, no connection, no timer. Small cases in every order, larger ones by seed.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from itertools import product

import pytest

from tests.support.relay_steps import (
    SETTLED,
    TARGET,
    Impossible,
    Message,
    Steps,
    interleavings,
    parse,
    relay_clock,
)
from tests.support.step_loop import StepLoop

HEAD = b"POST /a HTTP/1.1\r\nHost: h\r\nX-Request-Id: r1\r\n"
REQUESTS = {
    "whole": [HEAD + b"Content-Length: 6\r\n\r\nabcdef"],
    "length": [HEAD + b"Content-Length: 6\r\n\r\n", b"abc", b"def"],
    "chunked": [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"3\r\nabc\r\n3\r\ndef\r\n", b"0\r\n\r\n"],
    "chunked at once": [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"3\r\nabc\r\n3\r\ndef\r\n0\r\n\r\n"],
}
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
ANSWERS = {
    "whole": [OK + b"Content-Length: 5\r\n\r\nhello"],
    "length": [OK + b"Content-Length: 5\r\n\r\n", b"hello"],
    "events": [OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n", b"3\r\nllo\r\n0\r\n\r\n"],
    "until closed": [OK + b"\r\nhello", b""],
    "long events": [OK + b"Transfer-Encoding: chunked\r\n\r\n", b"2\r\nhe\r\n", b"3\r\nl", b"lo\r\n0\r\n\r\n"],
}
PATHS = ("new", "kept", "fast")  # connections to the upstream; `fast`: kept, and on the fast path
GAPS = (0, 1, SETTLED)  # turns of the loop between two events
BROKEN = (("leave",), ("vanish",), ("close",), ("crash",), ("refuse",))
SEEDS = 100  # of each kind of story
SLOW = (("stall", "unstall"), ("choke", "unchoke"))

Order = tuple[str, ...]


@pytest.fixture(scope="module", autouse=True)
def clock() -> Iterator[Callable[[StepLoop], None]]:
    with relay_clock() as follow:
        yield follow


def play(
    follow: Callable[[StepLoop], None],
    request: str,
    answer: str,
    path: str,
    order: Order,
    gaps: Callable[[], int],
    check: Callable[[Steps, Order], None],
    *,
    io_first: bool = False,
) -> bool:
    """False where the order cannot happen."""
    loop = StepLoop(uptime_s=3000.0, io_first=io_first)
    follow(loop)
    with loop.running():
        try:
            steps = Steps(loop, REQUESTS[request], ANSWERS[answer], fast=path == "fast")
            steps.place = f"{request} request, {answer} answer, {path}: {' '.join(order)}"
            loop.settle()
            if path != "new":
                steps.warm_up(REQUESTS["whole"][0], ANSWERS["whole"][0])
            steps.run(order, gaps)
            check(steps, order)
        except Impossible:
            return False
    return True


def check_undisturbed(steps: Steps, order: Order) -> None:
    place = steps.place
    assert steps.server.running == 0, f"the request hangs; {place}"
    assert steps.handler.ended == 1, place
    [answer] = steps.answers()
    assert (answer.status, answer.body, answer.malformed) == (200, b"hello", ""), place
    [request] = steps.requests()
    if "piece" not in after_first_reply(order) and "unchoke" not in after_first_reply(order):
        assert (request.line, request.body, request.complete) == (b"/a", b"abcdef", True), place
        until_closed = answer.header(b"transfer-encoding") == b"chunked" and steps.upstream_finished()
        assert steps.pool.idle_count(TARGET) == len(steps.sockets) - until_closed, f"not kept for reuse; {place}"
        assert not steps.client.shut_down, place
        assert not steps.client.closed, place
        assert answer.header(b"connection") is None, place
    else:
        assert b"abcdef".startswith(request.body), place
    assert answer.complete, place
    steps.finish()


def after_first_reply(order: Order) -> Order:
    return order[order.index("reply") :]


def check_disturbed(steps: Steps, order: Order) -> None:
    """The answer is the right one, an error with a name, or visibly cut short."""
    place = steps.place
    left = "leave" in order or "vanish" in order
    if left:
        assert steps.server.running == 0, f"a request goes on without its client; {place}"
    steps.finish()
    for sent in steps.requests():
        assert b"abcdef".startswith(sent.body), place
    answers = steps.answers()
    if not left and "piece" in order:
        assert answers, place
    for answer in answers[:1]:
        check_answer(steps, answer, place)
    assert len(answers) <= 1 or left, place


def check_answer(steps: Steps, answer: Message, place: str) -> None:
    if answer.status == 200:
        assert b"hello".startswith(answer.body), place
        if answer.complete:
            assert answer.body == b"hello", place
        else:
            assert steps.client.closed, f"half an answer on a connection that stays open; {place}"
    else:
        assert answer.status in (400, 408, 502, 504), place
        assert answer.complete, place
        assert b'"error"' in answer.body, place


def always(gap: int) -> Callable[[], int]:
    return lambda: gap


def chains_for(request: str, answer: str, path: str) -> tuple[Order, Order]:
    pieces = ("piece",) * len(REQUESTS[request])
    replies = ("reply",) * len(ANSWERS[answer])
    # A body that streams never takes a kept connection: it cannot be sent twice.
    connects = path == "new" or request != "whole"
    return pieces, (("connect",) if connects else ()) + replies


# Bodies that stream take a new connection on every path.
LONE = ("chunked", "whole", "fast")
SHAPES = [
    (request, answer, path)
    for request, answer, path in product(REQUESTS, ANSWERS, PATHS)
    if request == "whole" or (answer != "long events" and (path == "new" or (request, answer, path) == LONE))
]


@pytest.mark.parametrize(
    ("request_kind", "answer_kind", "path"), SHAPES, ids=["-".join(template) for template in SHAPES]
)
def test_every_order_ends_in_the_same_bytes(
    clock: Callable[[StepLoop], None], request_kind: str, answer_kind: str, path: str
) -> None:
    played = 0
    for slow in ((), *SLOW):
        orders = interleavings(*chains_for(request_kind, answer_kind, path), slow)
        for order, gap in product(orders, GAPS[bool(slow) :]):
            played += play(clock, request_kind, answer_kind, path, order, always(gap), check_undisturbed)
    assert played


@pytest.mark.parametrize(
    ("request_kind", "answer_kind", "path"), SHAPES, ids=["-".join(template) for template in SHAPES]
)
def test_whatever_breaks_ends_with_a_name_and_leaves_nothing(
    clock: Callable[[StepLoop], None], request_kind: str, answer_kind: str, path: str
) -> None:
    pieces, replies = chains_for(request_kind, answer_kind, path)
    for broken in BROKEN:
        # The chains end early too: whoever breaks does not go on, and the other may be silent by then.
        orders = [
            order for until in range(len(replies) + 1) for order in interleavings(pieces, replies[:until], broken)
        ]
        for order, gap in product(orders, (1, SETTLED)):
            play(clock, request_kind, answer_kind, path, order, always(gap), check_disturbed, io_first=True)


class Tunnel:
    HEAD = b"GET /ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX-Request-Id: r1\r\n\r\n"
    SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"


@pytest.mark.parametrize("io_first", [False, True])
def test_every_order_of_a_tunnel_brings_all_bytes_to_both_ends(
    clock: Callable[[StepLoop], None], io_first: bool
) -> None:
    for slow in ((), *SLOW):
        orders = interleavings(("piece", "connect", "reply"), ("piece", "leave"), slow)
        for order, gap in product(orders, GAPS):
            loop = StepLoop(uptime_s=3000.0, io_first=io_first)
            clock(loop)
            with loop.running():
                steps = Steps(loop, [Tunnel.HEAD, b"ping"], [Tunnel.SWITCH + b"pong"], fast=False)
                steps.place = " ".join(order)
                try:
                    loop.settle()
                    steps.run(order, always(gap))
                    steps.finish()
                    if order.index("leave") > order.index("reply") + 1 and gap == SETTLED:
                        assert steps.sockets[0].sent.endswith(b"\r\n\r\nping"), steps.place
                        assert steps.client.sent.endswith(b"\r\n\r\npong"), steps.place
                except Impossible:
                    continue


def test_a_client_that_stops_reading_while_a_connection_is_made_slows_the_upstream_down(
    clock: Callable[[StepLoop], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the client is too slow for belongs to the answer before: the next one is not read ahead without bounds."""
    monkeypatch.setattr(
        "corral.relay.write_queue._FEW", -1
    )  # bytes are written together, after the next request has begun
    loop = StepLoop(uptime_s=3000.0)
    clock(loop)
    with loop.running():
        second = REQUESTS["chunked"]
        steps = Steps(loop, [REQUESTS["whole"][0] + second[0], *second[1:]], [], fast=False)
        loop.settle()
        steps.run(("piece", "connect", "stall"), always(SETTLED))
        steps.sockets[0].arrive(ANSWERS["whole"][0])
        loop.settle()
        assert steps.connection.paused
        steps.run(("connect", "piece", "piece"), always(SETTLED))
        steps.sockets[1].arrive(OK + b"Content-Length: 3000000\r\n\r\n")
        for _ in range(1000):
            steps.sockets[1].arrive(b"x" * 3000)
            loop.settle()
        assert steps.connection.transport.get_write_buffer_size() < 4096
        steps.unstall()
        loop.settle()
        [first, last] = steps.answers()
        assert (first.body, len(last.body), last.complete) == (b"hello", 3_000_000, True)
        steps.finish()


def test_what_a_client_asked_for_ahead_is_not_begun_after_it_left(clock: Callable[[StepLoop], None]) -> None:
    loop = StepLoop(uptime_s=3000.0)
    clock(loop)
    with loop.running():
        steps = Steps(loop, [REQUESTS["whole"][0] * 2], [], fast=False)
        loop.settle()
        steps.run(("piece", "connect", "leave"), always(SETTLED))
        assert steps.handler.begun == 1
        steps.finish()


def test_what_a_client_sends_while_it_reads_nothing_is_bounded(clock: Callable[[StepLoop], None]) -> None:
    loop = StepLoop(uptime_s=3000.0)
    clock(loop)
    with loop.running():
        steps = Steps(loop, [REQUESTS["whole"][0]], [ANSWERS["whole"][0]], fast=False)
        loop.settle()
        steps.run(("piece", "connect", "stall", "reply"), always(SETTLED))
        for _ in range(1000):
            steps.client.arrive(REQUESTS["whole"][0] * 20)
            loop.settle()
        assert len(steps.connection._buffer) < 512 * 1024


def test_an_upstream_that_closes_before_it_took_the_request_is_given_up_at_once(
    clock: Callable[[StepLoop], None],
) -> None:
    """Not only after it took the rest, which may be never."""
    loop = StepLoop(uptime_s=3000.0)
    clock(loop)
    with loop.running():
        steps = Steps(loop, REQUESTS["length"], [], fast=False)
        loop.settle()
        steps.run(("piece", "connect", "choke", "piece", "close"), always(SETTLED))
        [answer] = steps.answers()
        assert (answer.status, steps.server.running) == (502, 0)
        steps.finish()


@pytest.mark.parametrize("gap", GAPS)
def test_a_stream_takes_the_fast_path_from_end_to_end(clock: Callable[[StepLoop], None], gap: int) -> None:
    """And leaves it in the middle when the client is slow, which is the general path's to handle."""
    for events, fast in (((), 1), (("stall", "unstall"), 0)):
        loop = StepLoop(uptime_s=3000.0)
        clock(loop)
        with loop.running():
            steps = Steps(loop, REQUESTS["whole"], ANSWERS["long events"], fast=True)
            loop.settle()
            steps.warm_up(REQUESTS["whole"][0], ANSWERS["whole"][0])
            steps.run(("piece", "reply", *events[:1], "reply", "reply", *events[1:], "reply"), always(gap))
            [answer] = steps.answers()
            assert (answer.body, answer.complete) == (b"hello", True)
            assert steps.handler.fast == fast or gap == 0  # all at once, nothing is left to wait for
            assert (steps.pool.idle_count(TARGET), steps.client.closed) == (1, False)
            steps.finish()


# Larger cases, by seed: several requests on one connection.

DISTURBANCES = ("leave", "vanish", "crash", "close", "stall", "unstall", "choke", "unchoke")


class Story:
    """Requests of random kinds, pipelined or not, and whatever comes between."""

    def __init__(self, seed: int, follow: Callable[[StepLoop], None], *, disturbed: bool) -> None:
        self.random = random.Random(seed)
        self.disturbed = disturbed
        self.loop = StepLoop(uptime_s=self.random.uniform(0, 1e8), io_first=self.random.random() < 0.5)
        follow(self.loop)
        self.kinds = [(self.choose(REQUESTS), self.choose(ANSWERS)) for _ in range(5)]
        self.place = f"seed {seed}: {self.kinds}"
        self.replies: dict[int, list[bytes]] = {}  # by socket: what is left of the answer under way
        self.answered = 0

    def begin(self) -> Steps:
        pieces = [piece for request, _ in self.kinds for piece in REQUESTS[request]]
        self.steps = Steps(self.loop, pieces, [], fast=self.random.random() < 0.5)
        self.steps.place = self.place
        return self.steps

    def choose(self, kinds: dict[str, list[bytes]]) -> str:
        return self.random.choice(list(kinds))

    def play(self) -> None:
        for _ in range(400):
            actions = [self.turn, self.turn, *self._possible()]
            if self.disturbed and self.random.random() < 0.1:
                actions = [self.disturb]
            self.random.choice(actions)()
        self.loop.settle()

    def turn(self) -> None:
        if self.random.random() < 0.3:
            self.loop.settle()
        else:
            self.loop.turn()

    def disturb(self) -> None:
        with contextlib.suppress(Impossible):
            self.steps.run((self.random.choice(DISTURBANCES),), always(0))

    def _possible(self) -> list[Callable[[], None]]:
        actions: list[Callable[[], None]] = []
        if self.steps.request:
            actions.append(self.steps.piece)
        if any(dial.is_open() for dial in self.loop.dials):
            actions.append(self.steps.connect)
        if self._serving() is not None:
            actions.append(self.reply)
        return actions

    def _serving(self) -> int | None:
        """The socket whose request is next to be answered."""
        for at, sock in enumerate(self.steps.sockets):
            if not sock.closed and sock.sent and (self.replies.get(at) or self._unanswered(at) > 0):
                return at
        return None

    def _unanswered(self, at: int) -> int:
        sock = self.steps.sockets[at]
        return len(parse(sock.sent, requests=True)) - sock.answers

    def reply(self) -> None:
        at = self._serving()
        assert at is not None
        sock = self.steps.sockets[at]
        if not self.replies.get(at):
            if self.answered == len(self.kinds):
                return
            self.replies[at] = list(ANSWERS[self.kinds[self.answered][1]])
            self.answered += 1
            sock.answers += 1
        piece = self.replies[at].pop(0)
        if piece:
            sock.arrive(piece)
        else:
            sock.finish()


@pytest.mark.parametrize("written", ["at once", "together", "held"])
@pytest.mark.parametrize("disturbed", [False, True], ids=["undisturbed", "disturbed"])
def test_random_stories_of_one_connection(
    clock: Callable[[StepLoop], None], monkeypatch: pytest.MonkeyPatch, disturbed: bool, written: str
) -> None:
    if written != "at once":
        monkeypatch.setattr("corral.relay.write_queue._FEW", -1)
    if written == "held":  # every stream counts as a quick one
        monkeypatch.setattr("corral.relay.fast_path.QUICK_S", float("inf"))
        monkeypatch.setattr("corral.relay.fast_path.MIN_QUICK_PIECES", 0)
    for seed in range(SEEDS):
        story = Story(seed, clock, disturbed=disturbed)
        with story.loop.running():
            steps = story.begin()
            story.play()
            answers = steps.answers()
            if not disturbed:
                assert all(answer.body == b"hello" and answer.complete for answer in answers), steps.place
                closed = answers and answers[-1].header(b"connection") == b"close"
                assert closed or len(answers) == len(story.kinds), steps.place
            steps.finish()
            for answer in steps.answers()[:-1]:
                assert answer.complete, steps.place
            for answer in steps.answers():
                check_answer(steps, answer, steps.place)
