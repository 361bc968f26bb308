"""The queue of relayed bytes: what waits, for how long, and in which order it is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from corral.relay.server import RelayServer
from corral.relay.write_queue import HOLD_S, MAX_HELD, MAX_TURNS, WriteQueue


class Transport:
    def __init__(self, name: str, written: list[tuple[str, bytes]]) -> None:
        self.name = name
        self.closing = False
        self._written = written

    def write(self, data: bytes) -> None:
        self._written.append((self.name, data))

    def is_closing(self) -> bool:
        return self.closing


class Timer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Turns:
    """An event loop that runs one turn, or its timers, when the test says so."""

    def __init__(self) -> None:
        self.ready: list[Callable[[], None]] = []
        self.timers: list[Timer] = []

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        assert delay_s == HOLD_S
        self.timers.append(Timer(callback))
        return self.timers[-1]

    def run_timers(self) -> int:
        due, self.timers = [timer for timer in self.timers if not timer.cancelled], []
        for timer in due:
            timer.callback()
        return len(due)

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.ready.append(callback)

    def turn(self) -> None:
        ready, self.ready = self.ready, []
        for callback in ready:
            callback()


class World:
    def __init__(self, running: int) -> None:
        self.running = running
        self.loop = Turns()
        self.written: list[tuple[str, bytes]] = []
        self.queue = WriteQueue(cast(RelayServer, self), cast(asyncio.AbstractEventLoop, self.loop))
        self.transports: dict[str, Transport] = {}

    def write(self, name: str, data: bytes = b"x") -> None:
        transport: Any = self.transports.setdefault(name, Transport(name, self.written))
        self.queue.write(transport, data)

    def hold(self, name: str, data: bytes) -> None:
        transport: Any = self.transports.setdefault(name, Transport(name, self.written))
        self.queue.hold(transport, data)

    def turns(self) -> None:
        for _ in range(MAX_TURNS + 2):
            self.loop.turn()
        assert not self.loop.ready


def test_with_few_requests_bytes_are_written_at_once() -> None:
    world = World(running=16)
    world.write("a", b"1")
    assert world.written == [("a", b"1")]
    assert not world.loop.ready


def test_bytes_wait_while_every_turn_brings_more() -> None:
    world = World(running=17)
    world.write("t0")
    for turn in range(MAX_TURNS):
        world.loop.turn()
        assert not world.written
        world.write(f"t{turn + 1}")
    world.loop.turn()
    assert [name for name, _ in world.written] == [f"t{number}" for number in range(MAX_TURNS + 1)]


def test_a_quiet_turn_ends_the_wait() -> None:
    world = World(running=17)
    world.write("a")
    world.loop.turn()
    world.loop.turn()
    assert world.written == [("a", b"x")]
    assert not world.loop.ready, "nothing runs while nothing waits"


@pytest.mark.parametrize("count", [16, 40, 256])
def test_enough_of_them_go_out_while_input_is_still_read(count: int) -> None:
    world = World(running=count + 1)
    for number in range(count):
        world.write(f"t{number}")
        assert len(world.written) == (number + 1) // 16 * 16
    assert len(world.loop.ready) <= 1, "one callback for all of them"
    for _ in range(MAX_TURNS + 2):
        world.loop.turn()
    assert [name for name, _ in world.written] == [f"t{number}" for number in range(count)]
    assert not world.loop.ready


def test_the_bytes_of_one_transport_are_joined_in_order() -> None:
    world = World(running=17)
    for number in range(5):
        world.write("a", b"a%d" % number)
        world.write("b", b"b%d" % number)
    world.queue.flush()
    assert world.written == [("a", b"a0a1a2a3a4"), ("b", b"b0b1b2b3b4")]


def test_nothing_is_written_to_a_transport_that_closes() -> None:
    world = World(running=17)
    world.write("a")
    world.write("b")
    world.transports["a"].closing = True
    world.queue.flush()
    assert world.written == [("b", b"x")]


def test_what_is_written_while_others_are_written_is_kept() -> None:
    """A protocol that is told to pause may write itself."""
    world = World(running=17)
    world.write("a")

    def write_too(data: bytes) -> None:
        world.written.append(("a", data))
        world.write("b", b"later")

    world.transports["a"].write = write_too  # type: ignore[method-assign]
    world.queue.flush()
    assert world.written == [("a", b"x")]
    for _ in range(MAX_TURNS + 2):
        world.loop.turn()
    assert world.written == [("a", b"x"), ("b", b"later")]


def test_with_few_requests_nothing_is_held() -> None:
    world = World(running=16)
    world.hold("a", b"1")
    assert world.written == [("a", b"1")]
    assert not world.loop.timers


def test_held_bytes_are_written_together_when_their_time_is_over() -> None:
    world = World(running=17)
    for number in range(3):
        world.hold("a", b"a%d" % number)
        world.hold("b", b"b%d" % number)
        world.turns()
    assert not world.written
    assert world.loop.run_timers() == 1, "one timer for all of them"
    assert world.written == [("a", b"a0a1a2"), ("b", b"b0b1b2")]
    assert not world.loop.timers, "no timer while nothing is held"


def test_the_end_of_a_stream_takes_its_held_bytes_along() -> None:
    world = World(running=17)
    world.write("a", b"1")
    world.hold("a", b"2")
    world.hold("a", b"3")
    world.hold("b", b"1")
    world.write("a", b"4")
    world.turns()
    assert world.written == [("a", b"1234")]
    assert world.loop.run_timers() == 1
    assert world.written == [("a", b"1234"), ("b", b"1")]


def test_a_stream_that_has_taken_its_held_bytes_along_leaves_no_timer() -> None:
    world = World(running=17)
    world.hold("a", b"1")
    world.write("a", b"2")
    world.turns()
    assert world.written == [("a", b"12")]
    assert world.loop.run_timers() == 0


def test_a_flush_writes_held_bytes_behind_those_that_waited() -> None:
    world = World(running=17)
    world.write("a", b"1")
    world.hold("a", b"2")
    world.queue.flush()
    assert world.written == [("a", b"12")]
    assert world.loop.run_timers() == 0


def test_enough_bytes_of_other_transports_leave_held_ones_where_they_are() -> None:
    world = World(running=100)
    world.hold("a", b"1")
    for number in range(16):
        world.write(f"t{number}")
    assert [name for name, _ in world.written] == [f"t{number}" for number in range(16)]
    assert world.loop.run_timers() == 1
    assert world.written[-1] == ("a", b"1")


def test_only_so_many_pieces_of_one_transport_are_held() -> None:
    world = World(running=17)
    for _ in range(MAX_HELD + 1):
        world.hold("a", b"x")
    world.turns()
    assert world.written == [("a", b"x" * (MAX_HELD + 1))]


def test_a_large_piece_is_not_held_and_follows_what_is() -> None:
    world = World(running=17)
    world.hold("a", b"1")
    world.hold("a", b"2" * 4096)
    world.turns()
    assert world.written == [("a", b"1" + b"2" * 4096)]


def test_held_bytes_for_a_transport_that_closes_are_dropped() -> None:
    world = World(running=17)
    world.hold("a", b"1")
    world.hold("b", b"1")
    world.transports["a"].closing = True
    world.loop.run_timers()
    assert world.written == [("b", b"1")]
