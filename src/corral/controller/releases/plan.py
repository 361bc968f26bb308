"""Which nodes may upgrade Corral now: one per hardware class first, then as many at once as the operation allows. Pure.

A node on which the version does not work stops all others (`controller/rollouts/plan.py`); one that cannot be reached,
or has no disk space, does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from corral.controller.operations.corral_operations import BAD_VERSION, is_due
from corral.controller.rollouts.plan import NodeState, RolloutNode, plan_rollout
from corral.store.records import NO_SOAK, OperationNode, OperationNodeStatus, Rollout, RolloutPhase


@dataclass(frozen=True)
class Turns:
    begin: tuple[OperationNode, ...] = ()
    held: Mapping[str, str] = field(default_factory=dict)  # by node: why it has to wait for others
    stopped: frozenset[str] = frozenset()  # those among them that wait for a person


def choose_turns(
    rows: Sequence[OperationNode], classes: Mapping[str, str], absent: frozenset[str], now: datetime, max_parallel: str
) -> Turns:
    """`classes`: hardware class by node. `absent`: nodes that cannot be ordered anything now."""
    counted = [row for row in rows if row.status not in _LEFT_OUT]
    nodes = [_node(row, classes.get(row.node_id, ""), row.node_id in absent, now) for row in counted]
    step = plan_rollout(
        Rollout("", 0, "corral", RolloutPhase.CANARY, NO_SOAK, now), nodes, {}, now, max_parallel=max_parallel
    )
    ready = {node.id for node in nodes if node.state is NodeState.READY}
    return Turns(
        begin=tuple(row for row in counted if row.node_id in ready and row.node_id not in step.held),
        held={node_id: held.reason for node_id, held in step.held.items()},
        stopped=frozenset(node_id for node_id, held in step.held.items() if held.stopped),
    )


def first_of_each_class(nodes: Sequence[tuple[str, str]]) -> frozenset[str]:
    """Of pairs of name and class: the names that a new operation begins with."""
    first: dict[str, str] = {}
    for name, own in sorted(nodes):
        first.setdefault(own, name)
    return frozenset(first.values())


_LEFT_OUT = frozenset(
    {
        OperationNodeStatus.SKIPPED,
        OperationNodeStatus.SUPERSEDED,
        OperationNodeStatus.WITHDRAWN,
        OperationNodeStatus.CANCELLED,
    }
)


def _node(row: OperationNode, hardware: str, is_absent: bool, now: datetime) -> RolloutNode:
    is_bad = row.status is OperationNodeStatus.ERROR and row.phase == BAD_VERSION
    state = _state(row, is_absent, now)
    return RolloutNode(
        id=row.node_id,
        name=row.node_name,
        hardware=hardware,
        state=state,
        serves=False,  # the first in name order begins
        # A worker that takes over is away for a moment: its class waits for it, and tries no second node.
        present=not is_absent or state is NodeState.SWITCHING,
        switch_failures=1 if is_bad else 0,
        reason=row.reason if is_bad else "",
    )


def _state(row: OperationNode, is_absent: bool, now: datetime) -> NodeState:
    match row.status:
        case OperationNodeStatus.SUCCESS:
            return NodeState.SWITCHED
        case OperationNodeStatus.DOWNLOADING | OperationNodeStatus.RUNNING_ON_WORKER:
            return NodeState.SWITCHING
        case _:
            return NodeState.READY if is_due(row, now) and not is_absent else NodeState.FETCHING
