"""Runs the operations that upgrade Corral on nodes.

The controller that loads models does this too, under the same lease. An order is a question as well: it is repeated
until the worker, or the one that took over from it, says how the upgrade has ended. So nothing is lost when a reply, a
worker or the leader is.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Protocol

from corral.blobs.digests import PREFIX
from corral.blobs.store import BlobStore
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.contract.messages.releases import ReleasePackage, UpgradeState, UpgradeWorker, UpgradeWorkerReply
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.sources import Wheel
from corral.controller.access.release_keys import ReleaseKeys
from corral.controller.distribution.own_wheel import OwnWheel
from corral.controller.operations.corral_operations import (
    advanced,
    begun,
    ended,
    failed,
    is_due,
    retry_at,
    waiting,
)
from corral.controller.operations.node_tasks import NodeTasks
from corral.controller.operations.state import SOAKING, after_soak, settle
from corral.controller.operations.views import CORRAL_UPGRADE
from corral.controller.releases.calls import ReleaseCalls
from corral.controller.releases.turns import UpgradeTurns
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.controller.settings.backends import BackendSettings
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Failed, NotFound, Unreachable
from corral.kit.log import get_log
from corral.kit.tasks import KeyedTasks, Wake, run_every
from corral.store.engine.transactions import Store
from corral.store.records import OperationNode, OperationNodeStatus
from corral.store.tables import release_wheels, releases
from corral.store.tables.nodes import NodeOutline
from corral.store.tables.operations import Operation
from corral.store.tables.releases import Release

log = get_log(__name__)

PREPARING = "waits for the packages on the controller"
NO_WORKER = (
    "no worker there takes such orders: it is away, or its version cannot upgrade itself yet; "
    "upgrade it on its machine, with a join line of this fleet"
)
MAX_SILENT_TRIES = 2  # of a worker that is healthy and has never replied to such an order


class Packages(Protocol):
    """The part of `controller/distribution` that this needs."""

    async def fetch_all(self, release: OwnWheel, platform: str, python: str) -> tuple[Wheel, ...]: ...


class Sources(Protocol):
    """The part of `controller/files` that this needs."""

    def sources_for(self, node_id: str, files: Sequence[ReplicaFile] = ()) -> tuple[tuple[str, ...], str]: ...


@dataclass(frozen=True)
class UpgradePace:
    interval_s: float = 2.0
    poll_s: float = 1.0  # between two questions to a worker
    silent_s: float = (
        120.0  # without a reply of a worker that has an order; a take-over and a return take a minute each
    )
    unhealthy_s: float = 60.0  # of a canary, without a gap, before it is returned


@dataclass
class _Prepared:
    """What the workers of one operation are sent, for each kind of machine that was seen."""

    release: Release
    packages: dict[str, tuple[ReleasePackage, ...]] = field(default_factory=dict)


class CorralUpgrades:
    name = "upgrades of corral"

    def __init__(
        self,
        store: Store,
        keys: ReleaseKeys,
        calls: ReleaseCalls,
        packages: Packages,
        blobs: BlobStore,
        sources: Sources,
        leadership: Leadership,
        feed: ChangeFeed,
        clock: Clock,
        settings: BackendSettings,
        *,
        lease: str,
        pace: UpgradePace | None = None,
    ) -> None:
        """`blobs`: those that workers fetch from this controller."""
        self._store = store
        self._calls = calls
        self._packages = packages
        self._blobs = blobs
        self._sources = sources
        self._feed = feed
        self._clock = clock
        self._settings = settings
        self._pace = pace or UpgradePace()
        self._turns = UpgradeTurns(
            store, keys, calls, leadership, feed, lease=lease, unhealthy_s=self._pace.unhealthy_s
        )
        self._tasks = NodeTasks(store, leadership, feed, kind=CORRAL_UPGRADE, lease=lease, cancel=self._cancel)
        self._preparing: KeyedTasks[tuple[str, str]] = KeyedTasks()  # an operation, and a platform with Python
        self._prepared: dict[str, _Prepared] = {}
        self._wake = Wake()

    async def run(self) -> None:
        for counter in ("operations", "nodes"):
            self._feed.on(counter, self._wake.set)
        async with self._preparing, self._tasks:
            await run_every(self.name, self._pace.interval_s, self.run_once, clock=self._clock, wake=self._wake)

    async def run_once(self) -> None:
        """Order what may begin or go on now, and cancel all else."""
        opened = await self._tasks.read_open()
        self._prepared = opened.keep_open(self._prepared)
        await self._turns.end_all_but(opened.ids)
        for operation in opened.operations:
            await self._advance(operation, opened.rows.get(operation.id, []), opened.outlines)

    def _cancel(self, operation_id: str, node_id: str) -> Coroutine[Any, Any, None]:
        return self._calls.cancel(node_id, operation_id)

    async def _advance(
        self, operation: Operation, rows: Sequence[OperationNode], outlines: Mapping[str, NodeOutline]
    ) -> None:
        begin = await self._turns.decide(operation, rows, outlines)
        running = [row for row in rows if row.status is OperationNodeStatus.DOWNLOADING and row.phase != SOAKING]
        for row in (*running, *begin):
            outline = outlines.get(row.node_id)
            if outline is None or self._tasks.is_running(operation.id, row.node_id):
                continue
            packages = await self._packages_for(operation, outline)
            if packages is None and row.status is OperationNodeStatus.DOWNLOADING:
                continue  # an earlier leader has begun it
            if packages is None:
                wait = partial(waiting, reason=PREPARING, stuck=False)
                await self._tasks.change_rows(operation.id, wait, {row.node_id})
                continue
            work = partial(self._run, operation, row, self._prepared[operation.id].release, packages)
            self._tasks.start(operation.id, row.node_id, work, name=f"upgrade corral on {row.node_name}")

    # Wheels

    async def _packages_for(self, operation: Operation, outline: NodeOutline) -> tuple[ReleasePackage, ...] | None:
        """None: they are being fetched. Empty: this controller cannot provide them, and the worker asks the index."""
        known = self._prepared.get(operation.id)
        if known is None:
            async with self._store.read() as tx:
                release = await releases.get(tx, operation.request.release)
            known = self._prepared[operation.id] = _Prepared(release)
        kind = f"{outline.platform} {outline.python}"
        if kind not in known.packages:
            work = partial(self._fetch_packages, known, kind, outline.platform, outline.python)
            self._preparing.start((operation.id, kind), work, name=f"packages of corral for {kind}")
            return None
        return known.packages[kind]

    async def _fetch_packages(self, known: _Prepared, kind: str, platform: str, python: str) -> None:
        try:
            wheel = await self._read_wheel(known.release)
            name = f"corral-{known.release.version}-py3-none-any.whl"
            own = OwnWheel(name, known.release.version, wheel, known.release.sha256)
            found = await self._packages.fetch_all(own, platform, python)
            known.packages[kind] = tuple(ReleasePackage(each.name, each.sha256, each.size) for each in found)
        except CorralError as error:
            log.warning("the workers fetch the packages of corral themselves", machines=kind, reason=error.message)
            known.packages[kind] = ()
        except Exception:
            log.exception("the packages of corral cannot be fetched", machines=kind)
            known.packages[kind] = ()
        self._wake.set()

    def _forget_missing_packages(self, operation: Operation) -> None:
        """The next attempt tries again to get them."""
        if (known := self._prepared.get(operation.id)) is not None:
            known.packages = {kind: found for kind, found in known.packages.items() if found}

    async def _read_wheel(self, release: Release) -> bytes:
        async with self._store.read() as tx:
            content = await release_wheels.find(tx, release.sha256)
        if content is None:
            raise NotFound(f"the wheel of {release.version} is not kept any more: give it again with --wheel")
        return content

    async def _offer_wheel(self, release: Release) -> None:
        """Make the wheel one of the blobs that workers fetch here."""
        digest = PREFIX + release.sha256
        if self._blobs.find(digest) is None:
            content = await self._read_wheel(release)
            wanted = ExpectedBlob(digest, release.size_bytes)
            await self._blobs.write(digest, lambda: iter([content]), wanted, f"corral {release.version}")

    # One node

    async def _run(
        self, operation: Operation, row: OperationNode, release: Release, packages: tuple[ReleasePackage, ...]
    ) -> None:
        try:
            await self._upgrade(operation, row, release, packages)
        except CorralError as error:
            await self._fail(operation, row.node_id, error)
            self._forget_missing_packages(operation)
        except Exception:
            log.exception("upgrade of corral failed", operation=operation.id, node=row.node_name)
            await self._fail(operation, row.node_id, Failed("an internal error; see the controller's log"))
        self._wake.set()

    async def _upgrade(
        self, operation: Operation, row: OperationNode, release: Release, packages: tuple[ReleasePackage, ...]
    ) -> None:
        """Repeat the order until its outcome is known. Raises Unreachable after a long silence."""
        current = await self._begin(operation, row.node_id)
        if current is None:
            return  # cancelled, or tried meanwhile
        row = current
        last_reply_s = self._clock.monotonic()
        while True:
            await self._offer_wheel(release)
            sources, token = self._sources.sources_for(row.node_id)
            order = UpgradeWorker(
                op_id=operation.id,
                attempt=row.attempt,
                signed=release.signed,
                packages=packages,
                sources=sources,
                source_token=token,
            )
            try:
                reply = await self._calls.upgrade(row.node_id, order)
            except CorralError as error:  # nobody listens while one worker takes over from the other
                if self._clock.monotonic() - last_reply_s > self._silent_s(row):
                    raise Unreachable(NO_WORKER) from error
            else:
                last_reply_s = self._clock.monotonic()
                if reply.state != UpgradeState.RUNNING:
                    self._forget_missing_packages(operation)
                    await self._end(operation, row, reply)
                    return
                if advanced(row, reply) != row:
                    advance = partial(advanced, reply=reply)
                    changed = await self._tasks.change_rows(operation.id, advance, {row.node_id})
                    row = changed[0] if changed else row
            await self._clock.sleep(self._pace.poll_s)

    async def _begin(self, operation: Operation, node_id: str) -> OperationNode | None:
        """The row of the attempt: of a new one, or of one that an earlier leader began. None: it is not due any more,
        for the pass read it before another attempt had ended."""
        async with self._store.read() as tx:
            now = await tx.now()
        found: list[OperationNode] = []

        def begin(row: OperationNode) -> OperationNode:
            if not is_due(row, now) or row.phase == SOAKING:
                return row
            found.append(row if row.status is OperationNodeStatus.DOWNLOADING else begun(row))
            return found[0]

        await self._tasks.change_rows(operation.id, begin, {node_id})
        return found[0] if found else None

    def _silent_s(self, row: OperationNode) -> float:
        """A worker that has not replied yet may be one that knows no such order."""
        return self._pace.silent_s if row.phase != "ordered" else min(15.0, self._pace.silent_s)

    async def _end(self, operation: Operation, row: OperationNode, reply: UpgradeWorkerReply) -> None:
        soak = operation.request.rollout.has_soak and reply.state == UpgradeState.DONE

        def end(each: OperationNode, again: datetime) -> OperationNode:
            return after_soak(each, "", waits=False) if soak else ended(each, reply, again)

        if not await self._change_with_retry(operation, row.node_id, end):
            return
        how = log.info if reply.state == UpgradeState.DONE else log.warning
        how("upgrade of corral ended", node=row.node_name, state=reply.state, reason=reply.reason)

    async def _fail(self, operation: Operation, node_id: str, error: CorralError) -> None:
        def fail(row: OperationNode, again: datetime) -> OperationNode:
            if row.phase == "ordered" and isinstance(error, Unreachable) and row.failures >= MAX_SILENT_TRIES:
                return settle(row, OperationNodeStatus.SKIPPED, error.message)
            return failed(row, error.message, again)

        try:
            await self._change_with_retry(operation, node_id, fail)
        except CorralError as problem:  # of the store: a later pass does it again
            log.warning("upgrade of corral postponed", operation=operation.id, error=problem.message)

    async def _change_with_retry(
        self, operation: Operation, node_id: str, change: Callable[[OperationNode, datetime], OperationNode]
    ) -> bool:
        async with self._store.read() as tx:
            now = await tx.now()
        first_s, cap_s = self._settings.retry_first_s, self._settings.retry_cap_s

        def change_row(row: OperationNode) -> OperationNode:
            return change(row, retry_at(row, now, first_s=first_s, cap_s=cap_s))

        return bool(await self._tasks.change_rows(operation.id, change_row, {node_id}))
