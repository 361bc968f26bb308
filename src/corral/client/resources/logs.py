"""What backends wrote, read through the controller from the nodes they run on
(docs/reference/wire/files.md#backend-logs)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from corral.client.caller import Caller, segment
from corral.contract.codec import Message, Undecodable, decode
from corral.kit.errors import Failed


class LogLine(Message, frozen=True):
    timestamp: str = ""  # RFC 3339
    stream: str = ""  # stdout, stderr
    text: str = ""


class Reader(Caller, Protocol):
    def read_lines(self, path: str) -> AsyncGenerator[bytes, None]:
        """A GET's answer line by line, for as long as it goes on."""


class Logs:
    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    async def names(self, node: str) -> tuple[str, ...]:
        """Models and backends that wrote something there."""
        return await self._reader.call("GET", f"/api/nodes/{segment(node)}/backend-logs", tuple[str, ...])

    async def last(self, node: str, name: str, tail: int) -> tuple[LogLine, ...]:
        return await self._reader.call("GET", f"{_door(node, name)}?tail={tail}", tuple[LogLine, ...])

    async def follow(self, node: str, name: str, tail: int) -> AsyncGenerator[LogLine, None]:
        """The last lines, then each new one. Ends when the other side does."""
        async for line in self._reader.read_lines(f"{_door(node, name)}?tail={tail}&follow=true"):
            if line.strip():
                try:
                    yield decode(LogLine, line)
                except Undecodable as error:
                    raise Failed(f"{node} sent something that is not a log: {error}") from error


def _door(node: str, name: str) -> str:
    return f"/api/nodes/{segment(node)}/backend-logs/{segment(name)}"
