"""A load while somebody waits for it, shown on stderr: one line that moves on a terminal, lines elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from corral.cli.output import console, plain, remark, size
from corral.contract.loads import LoadState, LoadStatus
from corral.kit.durations import format_duration
from corral.kit.errors import CorralError

if TYPE_CHECKING:
    from rich.status import Status

    from corral.client import Client

_LOOK_AGAIN_S = 0.3

_WORDS = {
    LoadState.PENDING: "looking for a place",
    LoadState.INSTALLING: "installing its backend",
    LoadState.STAGING: "fetching its files",
    LoadState.LOADING: "loading",
    LoadState.FAILED: "failed",
    LoadState.LOADED: "ready",
}


def words_of(status: LoadStatus) -> str:
    """`smollm2-135m: fetching its files on barn, 62% (61.0 MiB of 98.4 MiB), about 3s left`; the controller's own
    words, where it has some."""
    known = status.state in set(LoadState)
    what = _WORDS[LoadState(status.state)] if known else status.state
    what += f" on {status.node}" if status.node else ""
    line = f"{status.model}: {status.message or what}"
    if status.total_bytes and status.state in (LoadState.STAGING, LoadState.INSTALLING):
        line += f", {status.progress:.0f}% ({size(status.bytes_sent)} of {size(status.total_bytes)})"
        if status.eta_seconds:
            line += f", about {format_duration(max(1, round(status.eta_seconds)))} left"
    return plain(line)


class LoadProgress:
    """`with`: shows what it is told. A model that was ready all along leaves no trace."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._status: Status | None = None
        self._last = ""

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def see(self, status: LoadStatus) -> None:
        if status.state in (LoadState.LOADED, LoadState.FAILED):
            return
        if sys.stderr.isatty():
            self._move(words_of(status))
        else:
            self._say(status)

    def _move(self, line: str) -> None:
        if self._status is None:
            self._status = self._stack.enter_context(console(sys.stderr).status(line))
        else:
            self._status.update(line)

    def _say(self, status: LoadStatus) -> None:
        """A line per state: nobody wants a log full of percents."""
        # Without the numbers of this moment, which would be those of the first.
        line = words_of(msgspec.structs.replace(status, total_bytes=0))
        if line != self._last:
            self._last = line
            remark(line)


class WhileWaiting:
    """`async with`: shows the load that a question has caused, until `over` is called. Nothing, where there is none."""

    def __init__(self, client: Client, model: str) -> None:
        self._client = client
        self._model = model
        self._looking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> WhileWaiting:
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.over()

    async def over(self) -> None:
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def _look(self) -> None:
        # Whatever cannot be found out here, the answer will tell.
        with contextlib.suppress(CorralError), LoadProgress() as progress:
            while True:
                status = await self._client.loads.find(self._model)
                if status is not None:
                    async for told in self._client.loads.follow(status):
                        progress.see(told)
                await asyncio.sleep(_LOOK_AGAIN_S)
