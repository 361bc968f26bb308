"""Operations followed to their end, whatever happens to the connection.

A stream of events per operation is what makes it quick; for many, the one stream of everything is. What makes it
certain is reading: at the start, when a stream breaks or ends, and now and then in any case. So the end is seen even if
nobody told it. One that has ended is neither listened to nor read any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Protocol

from corral.client.errors import AWAY
from corral.client.events import FleetEvent, Lost, OperationRemoved, OperationSeen, Restarted
from corral.client.resources.operations import Operations, events_of
from corral.contract.admin import OperationView
from corral.kit.backoff import Backoff
from corral.kit.errors import CorralError
from corral.kit.tasks import Wake

_MANY = 8  # streams for one command, at most
_EVERYTHING = "/api/events"


class Source(Protocol):
    """What of the client is used here."""

    operations: Operations

    def follow(self, path: str, *, first_s: float, cap_s: float, reached: bool) -> AsyncGenerator[FleetEvent, None]: ...


class Watcher(Protocol):
    """Who is told. `lost` may come many times before `found`."""

    def see(self, view: OperationView) -> None: ...

    def lost(self, reason: str) -> None: ...

    def found(self) -> None: ...


class Following:
    """`await Following(client, [id], watcher).run()` → the operations as they were when each was over.

    The fleet must have answered before: from then on it may go away and come back as often as it likes."""

    def __init__(
        self,
        source: Source,
        operation_ids: Iterable[str],
        watcher: Watcher,
        *,
        over: Callable[[OperationView], bool] = lambda view: view.settled,
        read_every_s: float = 10.0,
        retry_first_s: float = 0.5,
        retry_cap_s: float = 5.0,
    ) -> None:
        self._source = source
        self._ids = tuple(dict.fromkeys(operation_ids))
        self._watcher = watcher
        self._over = over
        self._read_every_s = read_every_s
        self._backoff = Backoff(retry_first_s, retry_cap_s)
        self._retry_s = (retry_first_s, retry_cap_s)
        self._views: dict[str, OperationView] = {}
        # By path of the stream: what it is listened to for.
        self._streams = {events_of(each): frozenset({each}) for each in self._ids}
        if len(self._ids) > _MANY:
            self._streams = {_EVERYTHING: frozenset(self._ids)}
        self._deaf = set(self._streams)  # those that are needed and not open
        self._away = False
        self._wake = Wake()

    async def run(self) -> list[OperationView]:
        trouble: CorralError | None = None
        async with asyncio.TaskGroup() as tasks:
            listening = [tasks.create_task(self._listen(path), name=f"following {path}") for path in self._streams]
            try:
                await self._read_until_over()
            except CorralError as error:  # out of the group as itself, not as a group of one
                trouble = error
            finally:
                for each in listening:
                    each.cancel()
        if trouble is not None:
            raise trouble
        return [self._views[each] for each in self._ids]

    async def _listen(self, path: str) -> None:
        first_s, cap_s = self._retry_s
        stream = self._source.follow(path, first_s=first_s, cap_s=cap_s, reached=True)
        try:
            async with aclosing(stream) as events:
                async for event in events:
                    self._hear(path, event)
                    if all(self._has_ended(each) for each in self._streams[path]):
                        self._deaf.discard(path)
                        return
        except CorralError:
            # Too many followers, say. Reading goes on without the stream, and is told what is wrong if it still is.
            self._hear(path, Lost(""))

    def _hear(self, path: str, event: FleetEvent) -> None:
        match event:
            case Restarted():
                self._deaf.discard(path)
            case OperationSeen(operation=view) if view.job_id in self._streams[path]:
                self._take(view)
            case OperationRemoved(id=gone) if gone in self._streams[path]:
                self._wake.set()
            case Lost():
                self._deaf.add(path)
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
        """Returns how long to wait for the next reading."""
        try:
            for each in self._ids:
                if self._has_ended(each):
                    continue
                before = self._views.get(each)
                view = await self._source.operations.get(each)
                if self._views.get(each) is before:  # else the stream told of it meanwhile, and that is newer
                    self._take(view)
        except AWAY as error:
            self._away = True
            self._watcher.lost(error.message)
            return self._backoff.next_s()
        self._backoff.reset()
        return self._retry_s[0] if self._deaf else self._read_every_s

    def _take(self, view: OperationView) -> None:
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
        """At one moment: one that rests may go on while another is still at work."""
        return len(self._views) == len(self._ids) and all(self._over(view) for view in self._views.values())
