"""Loads of cold models: requests them from the controller and watches their progress, once per model.

The controller owns a load: it continues when the clients that caused it leave. The view of the fleet shows that a load
is done; the status read here only causes an earlier refresh of the view, and has the progress and the cause of a
failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol

from corral.contract.loads import LoadState, LoadStatus
from corral.gateway.view.controller_link import ControllerLink
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.retry import Backoff

log = get_log(__name__)

_BACKGROUND_INTERVAL_S = 1.0  # between two requests for a load in the background


class LoadWaiters(Protocol):
    """The queues of the router, as far as this module needs them."""

    def is_wanted(self, model: str) -> bool:
        """Whether requests wait for this model, and it is still cold."""

    def on_load_failed(self, model: str, status: LoadStatus | None, *, failed_before: bool) -> None:
        """Refuse the waiting requests. `status` None: the controller does not know the model. `failed_before`: the load
        had failed before it was requested, and the next attempt is not due yet."""


class LoadWatcher:
    def __init__(
        self,
        client: ControllerLink,
        on_hint: Callable[[], None],
        clock: Clock,
        *,
        poll_s: float,
        retry_first_s: float = 0.2,
        retry_cap_s: float = 2.0,
    ) -> None:
        """`on_hint`: refreshes the view soon."""
        self._client = client
        self._on_hint = on_hint
        self._clock = clock
        self._poll_s = poll_s
        self._retry = (retry_first_s, retry_cap_s)
        self._status: dict[str, LoadStatus] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}  # by model
        self._background: dict[str, asyncio.Task[None]] = {}  # by model
        self._tasks: set[asyncio.Task[None]] = set()  # both kinds, also ending ones

    def status(self, model: str) -> LoadStatus | None:
        """The last known status; None: unknown."""
        return self._status.get(model)

    def watch(self, model: str, waiters: LoadWaiters) -> None:
        """Request the load and watch it until no request waits. Repeated calls have no further effect."""
        watch = self._watches.get(model)
        if watch is None or watch.done() or watch.cancelling():  # an ending task does not serve new waiters
            watch = asyncio.get_running_loop().create_task(self._watch(model, waiters), name=f"load {model}")
            self._watches[model] = watch
            self._tasks.add(watch)
            watch.add_done_callback(partial(self._on_watch_ended, model))

    async def request(self, model: str) -> LoadStatus | None:
        """Request the load, without waiting for its end. Raises `CorralError`."""
        status = await self._client.request_load(model)
        if status is not None:
            self._status[model] = status
        return status

    def request_in_background(self, model: str) -> None:
        """`request` in a task, at most once per interval."""
        if model not in self._background:
            task = asyncio.get_running_loop().create_task(self._request_quietly(model), name=f"request {model}")
            self._background[model] = task
            self._tasks.add(task)
            task.add_done_callback(partial(self._on_background_ended, model))

    async def _request_quietly(self, model: str) -> None:
        try:
            await self.request(model)
        except CorralError as error:
            log.debug("cannot request a load", model=model, error=error.message)
        except Exception:
            log.exception("requesting a load failed", model=model)
        await self._clock.sleep(_BACKGROUND_INTERVAL_S)

    def _on_background_ended(self, model: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        del self._background[model]

    def on_ready(self, model: str) -> None:
        """The view has a replica of the model."""
        self._status.pop(model, None)
        if (watch := self._watches.get(model)) is not None:
            watch.cancel()

    def retain(self, models: Collection[str]) -> None:
        """Remove the status of all other models."""
        for gone in self._status.keys() - models:
            del self._status[gone]

    async def close(self) -> None:
        watches = list(self._tasks)
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    def _on_watch_ended(self, model: str, watch: asyncio.Task[None]) -> None:
        self._tasks.discard(watch)
        if self._watches.get(model) is watch:
            del self._watches[model]

    async def _watch(self, model: str, waiters: LoadWaiters) -> None:
        backoff = Backoff(*self._retry)
        last_error = ""
        while waiters.is_wanted(model):
            try:
                await self._follow(model, waiters)
                backoff.reset()
                last_error = ""
            except CorralError as error:
                if last_error != error.code:  # once, not at every attempt
                    last_error = error.code
                    log.warning("cannot request a load; retrying", model=model, error=error.message)
            except Exception:
                log.exception("watching a load failed; retrying", model=model)
            if waiters.is_wanted(model):
                await self._clock.sleep(backoff.next_s())

    async def _follow(self, model: str, waiters: LoadWaiters) -> None:
        """Watch one load to its end, or until its status is unknown."""
        status = await self.request(model)
        failed_before = True
        while waiters.is_wanted(model):
            if status is None or status.state == LoadState.FAILED:
                self._status.pop(model, None)
                waiters.on_load_failed(model, status, failed_before=failed_before)
                return
            failed_before = False
            if status.state == LoadState.LOADED:
                self._on_hint()
                return  # the view shows it soon; otherwise the load is requested again
            self._status[model] = status
            newer = await self._client.load_status(model, status.version, self._poll_s)
            if newer is None:  # done, and its status is gone already
                self._on_hint()
                return
            status = newer
