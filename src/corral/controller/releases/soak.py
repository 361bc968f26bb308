"""Watches nodes on which a new version of Corral soaks: what the worker says of itself, what the controllers know of
it, and the requests that ended there (docs/adr/0054-canaries-of-corral-are-judged-by-their-health.md)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection, Mapping, Sequence

from corral.contract.messages.releases import UpgradeState, UpgradeWorker, UpgradeWorkerReply
from corral.controller.releases.calls import ReleaseCalls
from corral.controller.releases.plan import CanaryHealth
from corral.controller.rollouts.comparison import ERRORS, Judgement, compare_builds
from corral.controller.rollouts.evidence import LOOK_BACK, MIN_WINDOW_S, samples_of
from corral.controller.rollouts.options import MAX_SAMPLES
from corral.kit.errors import CorralError, Unavailable
from corral.store.engine.transactions import Transaction
from corral.store.records import OperationNode, Rollout, RolloutClass
from corral.store.tables import nodes, receipts
from corral.store.tables.nodes import NodeOutline
from corral.store.tables.releases import Release

_WINDOWS_OF_A_SOAK = 30
_SERVING = ("healthy", "draining")  # a person drains a node; that says nothing about its version


class CanaryWatch:
    def __init__(self, calls: ReleaseCalls) -> None:
        self._calls = calls

    async def ask(
        self,
        release: Release,
        rows: Sequence[OperationNode],
        outlines: Mapping[str, NodeOutline],
        faults: Mapping[str, str],
    ) -> dict[str, CanaryHealth]:
        """The health of the nodes of these rows, by id. `faults`: of `read_faults`."""
        if _is_outage(outlines, {row.node_id for row in rows}):
            return {row.node_id: CanaryHealth("no other node is there either", is_known=False) for row in rows}
        replies = await asyncio.gather(*(self._ask(row, release) for row in rows))
        return {row.node_id: _health(reply, faults[row.node_id]) for row, reply in zip(rows, replies, strict=True)}

    async def _ask(self, row: OperationNode, release: Release) -> UpgradeWorkerReply | CorralError:
        # Only a question: a worker that a person took back to another version is left there.
        order = UpgradeWorker(op_id=row.operation_id, attempt=row.attempt, signed=release.signed, plan=True)
        try:
            return await self._calls.upgrade(row.node_id, order)
        except CorralError as error:
            return error


async def read_faults(
    tx: Transaction, rows: Sequence[OperationNode], outlines: Mapping[str, NodeOutline]
) -> dict[str, str]:
    """What the controllers know of the nodes of these rows; empty: nothing is wrong."""
    return {row.node_id: await _fault_in_store(tx, outlines.get(row.node_id)) for row in rows}


async def _fault_in_store(tx: Transaction, outline: NodeOutline | None) -> str:
    if outline is None:
        return "the node was deleted"
    if outline.status not in _SERVING:
        return f"it is {outline.status}"
    if outline.bus_down:
        return "it cannot reach the bus"
    node = await nodes.find(tx, outline.id)
    if node is not None and node.ingress_ok is False:
        return f"its ingress cannot be reached: {node.ingress_error or 'no reason was reported'}"
    return ""


def _health(reply: UpgradeWorkerReply | CorralError, stored: str) -> CanaryHealth:
    if isinstance(reply, Unavailable):
        return CanaryHealth(f"this controller has no bus: {reply.message}", is_known=False)
    if isinstance(reply, CorralError):
        return CanaryHealth(stored or f"it does not answer: {reply.message}")
    if reply.state == UpgradeState.RUNNING:
        return CanaryHealth("it does not run the new version any more")
    return CanaryHealth(stored or reply.not_ready, reply.boot_id)


def _is_outage(outlines: Mapping[str, NodeOutline], watched: Collection[str]) -> bool:
    """Whether nodes that have nothing to do with the soak are away too: then the fleet is, or the bus, or this
    controller, and not the version."""
    others = [outline for outline in outlines.values() if outline.id not in watched and outline.approved]
    away = [outline for outline in others if outline.status not in _SERVING or outline.bus_down]
    return bool(others) and len(away) == len(others)


async def compare_requests(tx: Transaction, rollout: Rollout) -> dict[str, Judgement]:
    """By canary: the share of failed requests since its soak began, against that before it, and against that of the
    nodes of its class that have not switched. Times are not compared: backends run on across an upgrade of Corral."""
    return {each.canary: await _compare_class(tx, rollout, each) for each in rollout.classes if each.soaking}


async def _compare_class(tx: Transaction, rollout: Rollout, state: RolloutClass) -> Judgement:
    since = state.since or rollout.started_at
    window_s = max(MIN_WINDOW_S, rollout.settings.soak_s / _WINDOWS_OF_A_SOAK)
    own = [node_id for node_id, before in rollout.nodes.items() if before.hardware == state.name] or [state.canary]
    served = await receipts.list_served_by_nodes(
        tx, sorted({*own, state.canary}), since=rollout.started_at - LOOK_BACK, limit=2 * MAX_SAMPLES
    )
    new = [each for each in served if each.node_id == state.canary and each.at >= since]
    old = [each for each in served if each.node_id != state.canary or each.at < since]
    found = compare_builds(samples_of(new), samples_of(old), rollout.settings, window_s=window_s)
    return dataclasses.replace(found, figures=tuple(each for each in found.figures if each.name == ERRORS))
