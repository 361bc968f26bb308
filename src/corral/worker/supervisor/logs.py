"""The latest log lines of backends, in memory (docs/reference/wire/files.md#backend-logs).

Lines are kept for each process key, across restarts: the lines before a crash are the most interesting ones. The files
on the disk have more lines. The ingress serves them over HTTP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable
from heapq import merge
from types import TracebackType

from corral.worker.supervisor.keys import parse_key
from corral.worker.supervisor.tail import LogLine

MAX_KEYS = 256  # the oldest keys are dropped


class LogBook:
    def __init__(self, *, lines: int = 1000) -> None:
        self._lines = lines
        self._kept: dict[str, deque[LogLine]] = {}  # the key written last is the last
        self._followers: set[Follower] = set()

    def append(self, key: str, lines: Iterable[LogLine]) -> None:
        kept = self._kept.pop(key, None)
        if kept is None:
            kept = deque(maxlen=self._lines)
            while len(self._kept) >= MAX_KEYS:
                del self._kept[next(iter(self._kept))]
        self._kept[key] = kept
        followers = [follower for follower in self._followers if matches(follower.name, key)]
        for line in lines:
            kept.append(line)
            for follower in followers:
                follower.offer(line)

    def names(self) -> list[str]:
        """Models (or backends) that wrote something, without their replica numbers."""
        return sorted({slot.name if (slot := parse_key(key)) else key for key in self._kept})

    def read(self, name: str) -> list[LogLine]:
        """`model#N` is one replica, `model` all of them merged by time. Unknown names wrote nothing."""
        if name in self._kept:
            return list(self._kept[name])
        found = [kept for key, kept in self._kept.items() if matches(name, key)]
        return list(merge(*found, key=lambda line: line.timestamp))[-self._lines :]

    def follow(self, name: str, *, buffer: int = 100) -> Follower:
        """`async with book.follow("model") as lines: lines.initial; async for line in lines`. Lines of a replica that
        starts later are included. A slow reader misses lines (`lines.dropped`); it never blocks a backend."""
        return Follower(self, name, buffer)


class Follower:
    def __init__(self, book: LogBook, name: str, buffer: int) -> None:
        self.name = name
        self.initial: list[LogLine] = []
        self.dropped = 0
        self._book = book
        self._waiting: deque[LogLine] = deque()
        self._buffer = buffer
        self._more = asyncio.Event()

    async def __aenter__(self) -> Follower:
        self.initial = self._book.read(self.name)  # in one step with the next line: nothing is missed or doubled
        self._book._followers.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._book._followers.discard(self)

    def offer(self, line: LogLine) -> None:
        if len(self._waiting) >= self._buffer:
            self.dropped += 1
            return
        self._waiting.append(line)
        self._more.set()

    def __aiter__(self) -> AsyncIterator[LogLine]:
        return self

    async def __anext__(self) -> LogLine:
        while not self._waiting:
            self._more.clear()
            await self._more.wait()
        return self._waiting.popleft()


def matches(name: str, key: str) -> bool:
    slot = parse_key(key)
    return name == key or (slot is not None and slot.name == name)
