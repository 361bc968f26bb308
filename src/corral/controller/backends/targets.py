"""Resolves a target to one build per kind of machine, once, and stores the result (docs/explanation/design.md#rules).

Usually that happens when a request is accepted. Builds that could not be resolved then (a registry was unreachable, or
a kind of machine joined later) are looked up in the background with growing pauses; users see the reason meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType

import msgspec

from corral.controller.backends.catalogue import Catalogue, MachineKind
from corral.controller.backends.outcomes import DEFAULT_RETRY, RetryPolicy
from corral.controller.backends.plan import NoBuild, NotLookedUp
from corral.controller.backends.world import TargetKey
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Invalid, NotFound
from corral.kit.log import get_log
from corral.store.engine.transactions import Store, Transaction
from corral.store.records import BackendRequest, BackendTarget, TargetBuild
from corral.store.tables import backend_targets, revisions

log = get_log(__name__)

_AT_ONCE = 8


@dataclass(frozen=True)
class _Failing:
    reason: str
    failures: int
    until: datetime


class TargetResolver:
    """`async with` it. `on_found` is called after each lookup."""

    def __init__(
        self,
        store: Store,
        catalogue: Catalogue,
        clock: Clock,
        *,
        on_found: Callable[[], None],
        retry: RetryPolicy = DEFAULT_RETRY,
    ) -> None:
        self._store = store
        self._catalogue = catalogue
        self._clock = clock
        self._on_found = on_found
        self._retry = retry
        self._in_progress: set[TargetKey] = set()
        self._failing: dict[TargetKey, _Failing] = {}
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._tasks: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> TargetResolver:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks, self._tasks = self._tasks, None
        for task in self._running:
            task.cancel()
        if tasks is not None:
            await tasks.__aexit__(kind, error, trace)

    def lookup_state(self, key: TargetKey) -> NotLookedUp:
        """The state of the lookup, for users."""
        failing = self._failing.get(key)
        return NotLookedUp() if failing is None else NotLookedUp(failing.reason, failing.until)

    def look_up(self, missing: Mapping[TargetKey, BackendRequest], *, whole: bool) -> None:
        """Start the lookups of these builds, except those in progress and those that failed lately. `whole`: these are
        all missing builds, so the failures of others are forgotten."""
        if whole:
            self._failing = {key: failing for key, failing in self._failing.items() if key in missing}
        for key, request in missing.items():
            failing = self._failing.get(key)
            if key in self._in_progress or (failing is not None and failing.until > self._clock.now()):
                continue
            if self._tasks is not None:
                self._in_progress.add(key)
                task = self._tasks.create_task(self._find(key, request), name=f"look up {request.backend}")
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    def next_try_s(self) -> float | None:
        """How long until a failed lookup is due again."""
        due = [failing.until for failing in self._failing.values()]
        return max(0.0, (min(due) - self._clock.now()).total_seconds()) if due else None

    async def resolve(
        self, request: BackendRequest, kinds: Collection[MachineKind], *, budget_s: float
    ) -> dict[MachineKind, TargetBuild | NoBuild]:
        """The builds that can be resolved within the budget, while a request is accepted. The others are looked up
        later."""
        found: dict[MachineKind, TargetBuild | NoBuild] = {}

        async def one(kind: MachineKind) -> None:
            try:
                found[kind] = await self._resolved(request, kind)
            except CorralError as error:
                log.warning("build not resolved yet", backend=request.backend, kind=kind, error=error.message)

        try:
            async with asyncio.timeout(budget_s), asyncio.TaskGroup() as tasks:
                for kind in sorted(kinds):
                    tasks.create_task(one(kind))
        except TimeoutError:
            log.warning("builds are looked up later", backend=request.backend, missing=len(kinds) - len(found))
        return found

    async def _resolved(self, request: BackendRequest, kind: MachineKind) -> TargetBuild | NoBuild:
        if request.pinned:
            return NoBuild(f"no build of this version is known for {kind.platform or kind.capability}")
        try:
            return await self._catalogue.resolve(request, kind)
        except (NotFound, Invalid) as error:
            return NoBuild(error.message)

    async def _find(self, key: TargetKey, request: BackendRequest) -> None:
        try:
            async with self._turn:
                build = await self._resolved(request, key.kind)
            async with self._store.write() as tx:
                await add_target(tx, key, build)
                await revisions.bump(tx, "rules")
        except CorralError as error:
            self._failed(key, request, error.message)
        except Exception:
            log.exception("looking up a build failed", backend=request.backend)
            self._failed(key, request, "the controller failed; its log has the details")
        else:
            self._failing.pop(key, None)
        finally:
            self._in_progress.discard(key)
        self._on_found()

    def _failed(self, key: TargetKey, request: BackendRequest, reason: str) -> None:
        before = self._failing.get(key)
        failures = before.failures + 1 if before is not None else 1
        wait = self._retry.delay(failures)
        self._failing[key] = _Failing(f"its build could not be resolved: {reason}", failures, self._clock.now() + wait)
        log.warning("build could not be resolved", backend=request.backend, reason=reason, again_in=str(wait))


async def add_target(tx: Transaction, key: TargetKey, build: TargetBuild | NoBuild) -> None:
    """Within a target each variant is one build: a node of another kind that joins later gets the same build."""
    now = await tx.now()
    if isinstance(build, NoBuild):
        row = _target(key, now, reason=build.reason)
    else:
        for known in await backend_targets.list_for(tx, [key.target]):
            machine = (known.platform, known.python) == (key.kind.platform, key.kind.python)
            same = known.build is not None and known.build.variant == build.variant and machine
            if same and known.build is not None:
                build = msgspec.structs.replace(known.build, note=build.note)  # the note differs by kind of machine
        row = _target(key, now, build=build)
    await backend_targets.add(tx, [row])


def _target(key: TargetKey, now: datetime, *, build: TargetBuild | None = None, reason: str = "") -> BackendTarget:
    return BackendTarget(
        id=key.target,
        capability=key.kind.capability,
        platform=key.kind.platform,
        python=key.kind.python,
        resolved_at=now,
        build=build,
        reason=reason,
    )
