"""Decides whose turn it is in an upgrade of Corral, from what is stored and what nodes say, and stores the decision."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from msgspec.structs import replace

from corral.controller.access.release_keys import COUNTER, ReleaseKeys
from corral.controller.operations.corral_operations import is_due, new_rollout, waiting
from corral.controller.operations.progress import NODE_GONE, write_rows
from corral.controller.operations.state import SOAKING, settle
from corral.controller.releases.calls import ReleaseCalls
from corral.controller.releases.plan import CanaryHealth, Turns, choose_turns
from corral.controller.releases.returns import revert_upgrade
from corral.controller.releases.soak import CanaryWatch, compare_requests, read_faults
from corral.controller.rollouts.comparison import Judgement
from corral.controller.rollouts.hardware_class import hardware_of
from corral.controller.runtime.change_feed import RULES, ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.store.engine.transactions import Store, Transaction
from corral.store.records import ENDED, OperationNode, OperationNodeStatus, Rollout, RolloutPhase
from corral.store.tables import operation_nodes, operations, releases, revisions, rollouts
from corral.store.tables.nodes import NodeOutline
from corral.store.tables.operations import Operation
from corral.store.tables.releases import Release


@dataclass(frozen=True)
class _Seen:
    """What one pass knows of an operation, beside its rows."""

    release: Release
    rollout: Rollout
    now: datetime
    judgements: Mapping[str, Judgement]
    faults: Mapping[str, str]  # of nodes that soak
    health: dict[str, CanaryHealth] = field(default_factory=dict)  # of the same


class UpgradeTurns:
    def __init__(
        self,
        store: Store,
        keys: ReleaseKeys,
        calls: ReleaseCalls,
        leadership: Leadership,
        feed: ChangeFeed,
        *,
        lease: str,
        unhealthy_s: float,
    ) -> None:
        """`unhealthy_s`: how long a canary may be unhealthy, without a gap, before it is returned."""
        self._store = store
        self._keys = keys
        self._watch = CanaryWatch(calls)
        self._leadership = leadership
        self._feed = feed
        self._lease = lease
        self._unhealthy_s = unhealthy_s

    async def decide(
        self, operation: Operation, rows: Sequence[OperationNode], outlines: Mapping[str, NodeOutline]
    ) -> Sequence[OperationNode]:
        """The rows whose next attempt may begin now."""
        async with self._store.read() as tx:
            seen = await self._read(tx, operation, rows, outlines)
        if soaking := [row for row in rows if row.phase == SOAKING and row.status not in ENDED]:
            seen.health.update(await self._watch.ask(seen.release, soaking, outlines, seen.faults))
        turns, changed = self._plan(seen, operation, rows, outlines)
        if not changed and turns.rollout == seen.rollout:
            return turns.begin
        stored = await self._store_turns(operation, seen, outlines)
        return stored.begin if stored is not None and not stored.is_reverted else ()

    async def end_all_but(self, operation_ids: Collection[str]) -> None:
        """End rollouts whose operation is over: it was cancelled, or every node has ended otherwise."""
        if self._leadership.epoch(self._lease) == 0:
            return
        async with self._store.read() as tx:
            active = await rollouts.list_of_corral(tx)
        for rollout in active:
            if rollout.operation_id not in operation_ids:
                await self._end_rollout(rollout.operation_id)

    async def _read(
        self,
        tx: Transaction,
        operation: Operation,
        rows: Sequence[OperationNode],
        outlines: Mapping[str, NodeOutline],
    ) -> _Seen:
        release = await releases.get(tx, operation.request.release)
        rollout = await rollouts.find(tx, operation.id) or new_rollout(operation, release.version)
        return _Seen(
            release,
            rollout,
            await tx.now(),
            await compare_requests(tx, rollout),
            await read_faults(tx, [row for row in rows if row.phase == SOAKING], outlines),
        )

    def _plan(
        self,
        seen: _Seen,
        operation: Operation,
        rows: Sequence[OperationNode],
        outlines: Mapping[str, NodeOutline],
    ) -> tuple[Turns, list[OperationNode]]:
        """Whose turn it is, and the rows that change."""
        away = {row.node_id: _why_away(outlines.get(row.node_id)) for row in rows}
        turns = choose_turns(
            seen.rollout,
            rows,
            {node_id: hardware_of(outline) for node_id, outline in outlines.items()},
            frozenset(node_id for node_id, why in away.items() if why),
            seen.now,
            operation.request.max_parallel,
            health=seen.health,
            judgements=seen.judgements,
            unhealthy_s=self._unhealthy_s,
        )
        after = [
            turns.soaking.get(row.node_id)
            if row.node_id in turns.soaking and away[row.node_id] != NODE_GONE
            else _hold(row, seen.now, away[row.node_id], turns.held, turns.stopped)
            for row in rows
            if row.status not in ENDED
        ]
        before = {row.node_id: row for row in rows}
        return turns, [row for row in after if row is not None and row != before[row.node_id]]

    async def _store_turns(
        self, operation: Operation, seen: _Seen, outlines: Mapping[str, NodeOutline]
    ) -> Turns | None:
        """Plan again from what is stored by now, since a person may have steered meanwhile, and store that. None: the
        operation has ended."""
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)
            await self._leadership.require(tx, self._lease)
            current = await operations.find(tx, operation.id)
            if current is None or current.finished_at is not None:
                return None
            rows = await operation_nodes.list_(tx, operation.id)
            rollout = await rollouts.find(tx, operation.id) or new_rollout(operation, seen.release.version)
            turns, changed = self._plan(dataclasses.replace(seen, rollout=rollout), current, rows, outlines)
            after = turns.rollout
            if turns.is_reverted:
                after = await revert_upgrade(tx, self._keys, current, after, rows)
            elif changed:
                await write_rows(tx, current, changed)
            await rollouts.put(tx, after)
            await revisions.bump(tx, "operations")
        self._feed.notify("operations", operation.id)
        if turns.is_reverted:
            self._feed.notify(COUNTER)
        return turns

    async def _end_rollout(self, operation_id: str) -> None:
        """Its operation was cancelled, or every node has ended."""
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)
            await self._leadership.require(tx, self._lease)
            operation, rollout = await operations.find(tx, operation_id), await rollouts.find(tx, operation_id)
            if rollout is None or rollout.is_over or (operation is not None and operation.finished_at is None):
                return
            ended = replace(rollout, phase=RolloutPhase.ENDED, ended_at=await tx.now())
            await rollouts.put(tx, ended)


def _why_away(outline: NodeOutline | None) -> str:
    if outline is None:
        return NODE_GONE
    if outline.status not in ("healthy", "draining"):
        return f"node {outline.status}, will be upgraded when it is healthy"
    return "the node cannot reach the bus, will be upgraded when it can" if outline.bus_down else ""


def _hold(
    row: OperationNode, now: datetime, away: str, held: Mapping[str, str], stopped: frozenset[str]
) -> OperationNode:
    """A row that has not begun, with the reason for which it waits."""
    if away == NODE_GONE:
        return settle(row, OperationNodeStatus.WITHDRAWN, NODE_GONE)
    if row.status is OperationNodeStatus.DOWNLOADING or not is_due(row, now):
        return row
    if away:
        return waiting(row, away, stuck=True)
    if row.node_id in held:
        return waiting(row, held[row.node_id], stuck=row.node_id in stopped)
    return row
