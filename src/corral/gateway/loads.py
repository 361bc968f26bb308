"""Cold models: the controller is asked to load them, and asked how far it is, once per model however many wait.

A load is the controller's own: whoever asked may leave. When it is done the fleet's view says so; what is heard here
only makes somebody look at the view sooner, tells how far it is, and why it failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol

from corral.contract.loads import LoadState, LoadStatus
from corral.kit.backoff import Backoff
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log

log = get_log(__name__)

_NUDGE_S = 1.0  # between two questions for a load that nobody waits for


class LoadDesk(Protocol):
    async def ask_for_load(self, model: str) -> LoadStatus | None:
        """Start it, or join the one there is; None: there is no such model."""

    async def load_status(self, model: str, since: int, wait_s: float) -> LoadStatus | None:
        """As soon as it is newer than `since`, or as it is after `wait_s`; None: there is no load."""


class Waiters(Protocol):
    """The router, as far as loads need it."""

    def wants(self, model: str) -> bool:
        """Whether anybody waits for this model, and it is still cold."""

    def load_failed(self, model: str, status: LoadStatus | None, *, before: bool) -> None:
        """Tell them. None: the controller does not know the model. `before`: it had failed when they asked for it, and
        is not tried again yet."""


class Loads:
    def __init__(
        self,
        desk: LoadDesk,
        look: Callable[[], None],
        clock: Clock,
        *,
        poll_s: float,
        retry_first_s: float = 0.2,
        retry_cap_s: float = 2.0,
    ) -> None:
        """`look`: have the view read at once."""
        self._desk = desk
        self._look = look
        self._clock = clock
        self._poll_s = poll_s
        self._retry = (retry_first_s, retry_cap_s)
        self._status: dict[str, LoadStatus] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}  # by model
        self._nudges: dict[str, asyncio.Task[None]] = {}  # by model
        self._tasks: set[asyncio.Task[None]] = set()  # both kinds, also those that are ending

    def status(self, model: str) -> LoadStatus | None:
        """What was heard last; None: nothing yet."""
        return self._status.get(model)

    def attend(self, model: str, waiters: Waiters) -> None:
        """See to it, from now until nobody waits any more. Any number of calls are one."""
        watch = self._watches.get(model)
        if watch is None or watch.done() or watch.cancelling():  # one that is ending attends to nobody who comes now
            watch = asyncio.get_running_loop().create_task(self._watch(model, waiters), name=f"load {model}")
            self._watches[model] = watch
            self._tasks.add(watch)
            watch.add_done_callback(partial(self._ended, model))

    async def ask(self, model: str) -> LoadStatus | None:
        """Have it loaded, without waiting for it. Raises `CorralError`."""
        status = await self._desk.ask_for_load(model)
        if status is not None:
            self._status[model] = status
        return status

    def nudge(self, model: str) -> None:
        """`ask`, for whoever does not wait for it: soon, and once in a while however many want it."""
        if model not in self._nudges:
            nudge = asyncio.get_running_loop().create_task(self._nudge(model), name=f"ask for {model}")
            self._nudges[model] = nudge
            self._tasks.add(nudge)
            nudge.add_done_callback(partial(self._nudged, model))

    async def _nudge(self, model: str) -> None:
        try:
            await self.ask(model)
        except CorralError as error:
            log.debug("a load cannot be asked for", model=model, error=error.message)
        except Exception:
            log.exception("asking for a load failed", model=model)
        await self._clock.sleep(_NUDGE_S)

    def _nudged(self, model: str, nudge: asyncio.Task[None]) -> None:
        self._tasks.discard(nudge)
        del self._nudges[model]

    def arrived(self, model: str) -> None:
        """The view has a replica of it."""
        self._status.pop(model, None)
        if (watch := self._watches.get(model)) is not None:
            watch.cancel()

    def keep(self, models: Collection[str]) -> None:
        """Forget what was heard of all others: they are gone."""
        for gone in self._status.keys() - models:
            del self._status[gone]

    async def close(self) -> None:
        watches = list(self._tasks)
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)

    def _ended(self, model: str, watch: asyncio.Task[None]) -> None:
        self._tasks.discard(watch)
        if self._watches.get(model) is watch:
            del self._watches[model]

    async def _watch(self, model: str, waiters: Waiters) -> None:
        backoff = Backoff(*self._retry)
        trouble = ""
        while waiters.wants(model):
            try:
                await self._follow(model, waiters)
                backoff.reset()
                trouble = ""
            except CorralError as error:
                if trouble != error.code:  # once, not at every try
                    trouble = error.code
                    log.warning("a load cannot be asked for; it will be tried again", model=model, error=error.message)
            except Exception:
                log.exception("following a load failed; it will be tried again", model=model)
            if waiters.wants(model):
                await self._clock.sleep(backoff.next_s())

    async def _follow(self, model: str, waiters: Waiters) -> None:
        """One load, to its end or to where it is lost sight of."""
        status = await self.ask(model)
        before = True
        while waiters.wants(model):
            if status is None or status.state == LoadState.FAILED:
                self._status.pop(model, None)
                waiters.load_failed(model, status, before=before)
                return
            before = False
            if status.state == LoadState.LOADED:
                self._look()
                return  # the view has it in a moment; if not, the controller is asked again
            self._status[model] = status
            newer = await self._desk.load_status(model, status.version, self._poll_s)
            if newer is None:  # done, and forgotten already
                self._look()
                return
            status = newer
