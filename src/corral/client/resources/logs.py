"""Logs of backends and of workers, read from their nodes through the controller
(docs/reference/wire/files.md#backend-logs)."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from corral.client.connection import ApiConnection, segment
from corral.contract.codec import Message, Undecodable, decode
from corral.kit.errors import Failed


class LogLine(Message, frozen=True):
    timestamp: str = ""  # RFC 3339
    stream: str = ""  # stdout, stderr
    text: str = ""


class Logs:
    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    async def names(self, node: str) -> tuple[str, ...]:
        """Models and backends with logs on the node."""
        return await self._api.call("GET", f"/api/nodes/{segment(node)}/backend-logs", tuple[str, ...])

    async def last(self, node: str, name: str, tail: int) -> tuple[LogLine, ...]:
        """No name: what the worker logs."""
        return await self._api.call("GET", f"{_path(node, name)}?tail={tail}", tuple[LogLine, ...])

    async def follow(self, node: str, name: str, tail: int) -> AsyncGenerator[LogLine, None]:
        """The last lines, then each new line, until the server closes the stream. No name: what the worker logs."""
        async for line in self._api.read_lines(f"{_path(node, name)}?tail={tail}&follow=true"):
            if line.strip():
                try:
                    yield decode(LogLine, line)
                except Undecodable as error:
                    raise Failed(f"{node} sent a line that is not a log record: {error}") from error


def _path(node: str, name: str) -> str:
    """No name: the log of the node's worker itself."""
    return f"/api/nodes/{segment(node)}/" + (f"backend-logs/{segment(name)}" if name else "log")
