"""Two acceptors on one listening socket, as two processes have it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from corral.relay.loop.shared_accept import SharedListener
from tests.support.waiting import until


class Acceptor:
    """Accepts on a copy of the socket, whenever no other has fewer connections."""

    def __init__(self, sock: socket.socket, all_of_them: list[Acceptor]) -> None:
        self.taken: list[socket.socket] = []
        self.all_of_them = all_of_them
        self.is_stuck = False  # it never finds that it is its turn
        self.listener = SharedListener([sock.dup()], self.taken.append, self.is_turn)

    def is_turn(self) -> bool:
        return not self.is_stuck and all(len(self.taken) <= len(other.taken) for other in self.all_of_them)


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=256) as sock:
        yield sock


@contextlib.contextmanager
def acceptors(listening: socket.socket, count: int) -> Iterator[list[Acceptor]]:
    found: list[Acceptor] = []
    found += [Acceptor(listening, found) for _ in range(count)]
    try:
        yield found
    finally:
        for each in found:
            each.listener.close()
            for sock in each.taken:
                sock.close()


@contextlib.contextmanager
def clients(listening: socket.socket, count: int) -> Iterator[None]:
    """All of them connected before anybody accepts."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(listening.getsockname(), timeout=30))
        yield


async def test_a_burst_is_shared_evenly(listening: socket.socket) -> None:
    with acceptors(listening, 3) as found, clients(listening, 60):
        await until(lambda: sum(len(each.taken) for each in found) == 60)
        assert {len(each.taken) for each in found} == {20}


async def test_what_nobody_else_takes_is_taken_after_all(listening: socket.socket) -> None:
    with acceptors(listening, 2) as found, clients(listening, 20):
        found[0].is_stuck = found[1].is_stuck = True
        await until(lambda: sum(len(each.taken) for each in found) == 20)


async def test_one_that_is_closed_leaves_the_socket_to_the_others(listening: socket.socket) -> None:
    with acceptors(listening, 2) as found:
        found[0].listener.close()
        with clients(listening, 5):
            await until(lambda: len(found[1].taken) == 5)
        await asyncio.sleep(0)
        assert found[0].taken == []
