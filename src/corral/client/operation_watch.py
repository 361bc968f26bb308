"""Watches operations to their end, even if connections break.

One event stream per operation makes it fast; for many operations, the stream of all events. Reading makes it reliable:
at the start, when a stream breaks or ends, and periodically. So the end is seen even if its event was lost. An
operation that has ended is neither followed nor read any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import Protocol

from corral.client.client import Client
from corral.client.connection import ALL_EVENTS
from corral.client.errors import NO_ANSWER
from corral.client.events import FleetEvent, Lost, OperationRemoved, OperationSeen, Restarted
from corral.client.resources.operations import events_of
from corral.contract.admin import OperationView
from corral.kit.errors import CorralError
from corral.kit.retry import Backoff
from corral.kit.tasks import Wake

_MAX_STREAMS = 8  # for one command


class Watcher(Protocol):
    """Receives what happens. `lost` may be called many times before `found`."""

    def see(self, view: OperationView) -> None: ...

    def lost(self, reason: str) -> None: ...

    def found(self) -> None: ...


class OperationWatch:
    """`await OperationWatch(client, [id], watcher).run()` → the final state of each operation.

    The fleet must have answered before: from then on the connection may be lost and restored any number of times."""

    def __init__(
        self,
        client: Client,
        operation_ids: Iterable[str],
        watcher: Watcher,
        *,
        over: Callable[[OperationView], bool] = lambda view: view.settled,
        read_every_s: float = 10.0,
        retry_first_s: float = 0.5,
        retry_cap_s: float = 5.0,
    ) -> None:
        self._client = client
        self._ids = tuple(dict.fromkeys(operation_ids))
        self._watcher = watcher
        self._over = over
        self._read_every_s = read_every_s
        self._backoff = Backoff(retry_first_s, retry_cap_s)
        self._retry_s = (retry_first_s, retry_cap_s)
        self._views: dict[str, OperationView] = {}
        # Path of a stream → the operations it is followed for.
        self._streams = {events_of(each): frozenset({each}) for each in self._ids}
        if len(self._ids) > _MAX_STREAMS:
            self._streams = {ALL_EVENTS: frozenset(self._ids)}
        self._closed_streams = set(self._streams)  # needed, but not open
        self._away = False
        self._wake = Wake()

    async def run(self) -> list[OperationView]:
        failure: CorralError | None = None
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(self._follow_stream(path), name=f"following {path}") for path in self._streams]
            try:
                await self._read_until_over()
            except CorralError as error:  # raised below: a TaskGroup would wrap it
                failure = error
            finally:
                for each in streams:
                    each.cancel()
        if failure is not None:
            raise failure
        return [self._views[each] for each in self._ids]

    async def _follow_stream(self, path: str) -> None:
        first_s, cap_s = self._retry_s
        stream = self._client.follow(path, first_s=first_s, cap_s=cap_s, reached=True)
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    self._on_event(path, event)
                    if all(self._has_ended(each) for each in self._streams[path]):
                        self._closed_streams.discard(path)
                        return
        except CorralError:
            # For example too many streams. Reading goes on without the stream, and raises if the error persists.
            self._on_event(path, Lost(""))

    def _on_event(self, path: str, event: FleetEvent) -> None:
        match event:
            case Restarted():
                self._closed_streams.discard(path)
            case OperationSeen(operation=view) if view.job_id in self._streams[path]:
                self._on_view(view)
            case OperationRemoved(id=gone) if gone in self._streams[path]:
                self._wake.set()
            case Lost():
                self._closed_streams.add(path)
                self._wake.set()

    async def _read_until_over(self) -> None:
        while True:
            wait_s = await self._read()
            if self._all_over():
                return
            await self._wake.wait(wait_s)
            if self._all_over():
                return

    async def _read(self) -> float:
        """Read all active operations. Returns how long to wait before the next time."""
        try:
            for each in self._ids:
                if self._has_ended(each):
                    continue
                before = self._views.get(each)
                view = await self._client.operations.get(each)
                if self._views.get(each) is before:  # otherwise the stream has delivered a newer view
                    self._on_view(view)
        except NO_ANSWER as error:
            self._away = True
            self._watcher.lost(error.message)
            return self._backoff.next_s()
        self._backoff.reset()
        return self._retry_s[0] if self._closed_streams else self._read_every_s

    def _on_view(self, view: OperationView) -> None:
        if self._away:
            self._away = False
            self._watcher.found()
        self._views[view.job_id] = view
        self._watcher.see(view)
        if self._all_over():
            self._wake.set()

    def _has_ended(self, operation_id: str) -> bool:
        view = self._views.get(operation_id)
        return view is not None and bool(view.finished_at) and self._over(view)

    def _all_over(self) -> bool:
        """Checked for all at one moment: a settled operation may continue while another is still active."""
        return len(self._views) == len(self._ids) and all(self._over(view) for view in self._views.values())
