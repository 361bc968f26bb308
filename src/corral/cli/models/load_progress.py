"""Shows the progress of a load on stderr: one line that is updated on a terminal, one line per state elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from corral.cli.common.output import console, print_note, printable
from corral.contract.loads import LoadState, LoadStatus
from corral.kit.durations import format_duration
from corral.kit.errors import CorralError
from corral.kit.humanize import format_bytes

if TYPE_CHECKING:
    from rich.status import Status

    from corral.client import Client

_POLL_S = 0.3

_WORDS = {
    LoadState.PENDING: "waiting for placement",
    LoadState.INSTALLING: "installing the backend",
    LoadState.STAGING: "fetching files",
    LoadState.LOADING: "loading",
    LoadState.FAILED: "failed",
    LoadState.LOADED: "ready",
}


_NUMBER = re.compile(r"\d+(?:\.\d+)?(?: [KMGT]?i?B\b)?")


def words_of(status: LoadStatus) -> str:
    """`smollm2-135m: fetching files on barn, 62% (61.0 MiB of 98.4 MiB), about 3s left`. The message of the controller,
    if there is one, replaces the name of the state."""
    known = status.state in set(LoadState)
    what = _WORDS[LoadState(status.state)] if known else status.state
    what += f" on {status.node}" if status.node else ""
    line = f"{status.model}: {status.message or what}"
    if status.total_bytes and status.state in (LoadState.STAGING, LoadState.INSTALLING):
        line += f", {status.progress:.0f}% ({format_bytes(status.bytes_sent)} of {format_bytes(status.total_bytes)})"
        if status.eta_seconds:
            line += f", about {format_duration(max(1, round(status.eta_seconds)))} left"
    return printable(line)


class LoadProgress:
    """A context manager that shows load statuses. Prints nothing for a model that is already loaded."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._status: Status | None = None
        self._last = ""

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def show(self, status: LoadStatus) -> None:
        if status.state in (LoadState.LOADED, LoadState.FAILED):
            return
        if sys.stderr.isatty():
            self._update_status(words_of(status))
        else:
            self._print_state(status)

    def _update_status(self, line: str) -> None:
        if self._status is None:
            self._status = self._stack.enter_context(console(sys.stderr).status(line))
        else:
            self._status.update(line)

    def _print_state(self, status: LoadStatus) -> None:
        """Print one line per state, so that a log is not filled with percentages."""
        # Without the byte counts: the line is printed once, with the counts of the first status.
        line = words_of(msgspec.structs.replace(status, total_bytes=0))
        # A load that waits for memory says the same again with each measurement of it.
        words = _NUMBER.sub("", line)
        if words != self._last:
            self._last = words
            print_note(line)


class LoadWatcher:
    """An asynchronous context manager that shows the load that a request has caused, until `stop` is called."""

    def __init__(self, client: Client, model: str) -> None:
        self._client = client
        self._model = model
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LoadWatcher:
        self._task = asyncio.create_task(self._poll())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _poll(self) -> None:
        # An error here is not shown: the answer to the request reports it.
        with contextlib.suppress(CorralError), LoadProgress() as progress:
            while True:
                status = await self._client.loads.find(self._model)
                if status is not None:
                    async for each in self._client.loads.follow(status):
                        progress.show(each)
                await asyncio.sleep(_POLL_S)
