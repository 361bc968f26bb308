"""The queue of relayed bytes: what waits, for how long, and in which order it is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from corral.relay.server import RelayServer
from corral.relay.write_queue import MAX_TURNS, WriteQueue


class Transport:
    def __init__(self, name: str, written: list[tuple[str, bytes]]) -> None:
        self.name = name
        self.closing = False
        self._written = written

    def write(self, data: bytes) -> None:
        self._written.append((self.name, data))

    def is_closing(self) -> bool:
        return self.closing


class Turns:
    """An event loop that runs one turn when the test says so."""

    def __init__(self) -> None:
        self.ready: list[Callable[[], None]] = []

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
