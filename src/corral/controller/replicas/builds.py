"""Whether there is a build of a backend for a kind of machine: asked of the galleries in the background, and kept.

Placing must not wait for the network, and must not choose a node on which the backend cannot run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from corral.controller.desired.catalogue import Catalogue, MachineKind
from corral.controller.desired.plan import NoBuild
from corral.controller.scheduler.world import Build, BuildState
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Invalid, NotFound
from corral.kit.log import get_log
from corral.store.backend_rules import Asked

log = get_log(__name__)

_AT_ONCE = 8


@dataclass(frozen=True)
class _Found:
    build: Build
    until: float


class Builds:
    """`async with` it. `found` is called when something was found out."""

    def __init__(
        self,
        catalogue: Catalogue,
        clock: Clock,
        *,
        found: Callable[[], None],
        fresh_s: float = 300.0,
        again_s: float = 5.0,
    ) -> None:
        self._catalogue = catalogue
        self._clock = clock
        self._found = found
        self._fresh_s = fresh_s
        self._again_s = again_s
        self._known: dict[tuple[str, MachineKind], _Found] = {}
        self._under_way: dict[tuple[str, MachineKind], asyncio.Task[None]] = {}
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._tasks: asyncio.TaskGroup | None = None

    async def __aenter__(self) -> Builds:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks, self._tasks = self._tasks, None
        for task in list(self._under_way.values()):
            task.cancel()
        if tasks is not None:
            await tasks.__aexit__(kind, error, trace)

    def of(self, backend: str, machine: MachineKind) -> Build:
        """What is known; what is not, or no longer certain, is being looked up when this returns."""
        key = (backend, machine)
        known = self._known.get(key)
        if (known is None or known.until <= self._clock.monotonic()) and key not in self._under_way and self._tasks:
            task = self._tasks.create_task(self._look_up(backend, machine), name=f"build of {backend}")
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        return known.build if known is not None else Build(BuildState.UNKNOWN, "it is being looked up")

    def is_looking(self, backend: str) -> bool:
        """For the first time: what is only refreshed is known."""
        return any(key[0] == backend and key not in self._known for key in self._under_way)

    async def _look_up(self, backend: str, machine: MachineKind) -> None:
        fresh_s = self._fresh_s
        try:
            async with self._turn:
                build = await self._ask(backend, machine)
        except CorralError as error:
            build, fresh_s = Build(BuildState.UNKNOWN, f"its build could not be found out: {error.message}"), 0.0
        except Exception:
            log.exception("looking up a build failed", backend=backend)
            build, fresh_s = Build(BuildState.UNKNOWN, "its build could not be found out; the log says why"), 0.0
        self._known[(backend, machine)] = _Found(build, self._clock.monotonic() + (fresh_s or self._again_s))
        self._found()

    async def _ask(self, backend: str, machine: MachineKind) -> Build:
        try:
            listed = await self._catalogue.look_up(Asked(backend))
            found = await self._catalogue.resolve(listed.asked or Asked(listed.name), machine)
        except (NotFound, Invalid) as error:
            return Build(BuildState.MISSING, error.message)
        if isinstance(found, NoBuild):
            return Build(BuildState.MISSING, found.reason)
        devices = found.manifest.devices if found.manifest is not None else ""
        return Build(BuildState.INSTALLABLE, devices=devices, size_bytes=found.size_bytes)
