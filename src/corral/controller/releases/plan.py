"""Which nodes may upgrade Corral now: one per hardware class first, then as many at once as the operation allows. Pure.

The rules are those of any rollout (`controller/rollouts/plan.py`). A node on which the version does not work stops all
others; one that cannot be reached, or has no disk space, does not. With a soak the first node of each class is watched
before the others follow, and what has switched returns if it does not stay healthy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from msgspec.structs import replace

from corral.controller.operations.corral_operations import BAD_VERSION, is_due
from corral.controller.operations.state import SOAKING, after_soak, settle
from corral.controller.rollouts.comparison import Judgement
from corral.controller.rollouts.plan import NodeState, RolloutNode, RolloutStep, plan_rollout
from corral.kit.durations import format_duration
from corral.store.records import ENDED, OperationNode, OperationNodeStatus, Rollout, RolloutClass, RolloutPhase


@dataclass(frozen=True)
class CanaryHealth:
    """What is known of a node whose new version soaks."""

    fault: str = ""  # why it is not healthy now; empty: it is
    boot_id: str = ""  # of its worker; empty: it does not say
    is_known: bool = True  # False: this controller cannot see nodes now, so the soak only waits


@dataclass(frozen=True)
class Turns:
    rollout: Rollout
    begin: tuple[OperationNode, ...] = ()
    held: Mapping[str, str] = field(default_factory=dict)  # by node: why it has to wait for others
    stopped: frozenset[str] = frozenset()  # those among them that wait for a person
    soaking: Mapping[str, OperationNode] = field(default_factory=dict)  # by node: rows that soak, or have soaked

    @property
    def is_reverted(self) -> bool:
        return self.rollout.phase is RolloutPhase.REVERTED


def choose_turns(
    rollout: Rollout,
    rows: Sequence[OperationNode],
    classes: Mapping[str, str],
    absent: frozenset[str],
    now: datetime,
    max_parallel: str,
    *,
    health: Mapping[str, CanaryHealth] | None = None,
    judgements: Mapping[str, Judgement] | None = None,
    unhealthy_s: float = 60.0,
) -> Turns:
    """`classes`: hardware class by node. `absent`: nodes that cannot be ordered anything now. `health` and
    `judgements`: of nodes that soak. `unhealthy_s`: how long one of these may be unhealthy."""
    known = health or {}
    rollout = _revived(rollout)
    states = {each.canary: each for each in rollout.classes if each.canary}
    counted = [row for row in rows if row.status not in _LEFT_OUT]
    has_soak = rollout.settings.has_soak
    nodes = [
        _node(row, classes.get(row.node_id, ""), row.node_id in absent, now, has_soak=has_soak)
        if row.node_id not in known
        else _canary(row, classes.get(row.node_id, ""), known[row.node_id], states.get(row.node_id))
        for row in counted
    ]
    judged = dict(judgements or {})
    for node_id, found in known.items():
        state = states.get(node_id)
        if state is not None and found.is_known and found.fault and state.unsteady_s >= unhealthy_s:
            fault = f"{state.canary_name} was not healthy for {format_duration(round(state.unsteady_s))}: {found.fault}"
            judged[node_id] = dataclasses.replace(judged.get(node_id, Judgement()), fault=fault)
    step = plan_rollout(rollout, nodes, judged, now, max_parallel=max_parallel)
    blind = {node_id for node_id, found in known.items() if not found.is_known}
    seen = (replace(each, unsteady_s=0.0) if each.canary in blind else each for each in step.rollout.classes)
    ready = {node.id for node in nodes if node.state is NodeState.READY}
    return Turns(
        rollout=replace(step.rollout, classes=tuple(seen)),
        begin=tuple(row for row in counted if row.node_id in ready and row.node_id not in step.held),
        held={node_id: held.reason for node_id, held in step.held.items()},
        stopped=frozenset(node_id for node_id, held in step.held.items() if held.stopped),
        soaking={row.node_id: _after_soak(row, step) for row in counted if _soaks(row)},
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


def _revived(rollout: Rollout) -> Rollout:
    """Its operation goes on: rows were added or tried again, or an earlier release took it for one without a rule."""
    if rollout.phase in (RolloutPhase.DONE, RolloutPhase.ENDED):
        return replace(rollout, phase=RolloutPhase.CANARY, ended_at=None)
    return rollout


def _soaks(row: OperationNode) -> bool:
    return row.phase == SOAKING and row.status not in ENDED


def _after_soak(row: OperationNode, step: RolloutStep) -> OperationNode:
    held = step.soaking.get(row.node_id)
    if step.reverts:
        return row
    if held is None:
        return replace(settle(row, OperationNodeStatus.SUCCESS), phase="")
    return after_soak(row, held.reason, waits=held.stopped)


def _canary(row: OperationNode, hardware: str, health: CanaryHealth, state: RolloutClass | None) -> RolloutNode:
    """A node that has switched, and is watched. It is judged also while it is away: the new version may be why."""
    deaths = state.deaths if state is not None else 0
    before = state.processes if state is not None else ()
    has_restarted = bool(before and health.boot_id) and health.boot_id not in before
    return RolloutNode(
        id=row.node_id,
        name=row.node_name,
        hardware=hardware,
        state=NodeState.SWITCHED,
        serves=False,
        steady=not health.fault,
        unsteady=f"{row.node_name}: {health.fault}" if health.fault else "",
        processes=(health.boot_id,) if health.boot_id else (),
        restarts=deaths + has_restarted,
    )


def _node(row: OperationNode, hardware: str, is_absent: bool, now: datetime, *, has_soak: bool) -> RolloutNode:
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
        fatal=is_bad and has_soak,  # whoever asks for a soak wants it taken back without a person
        reason=row.reason if is_bad else "",
    )


def _state(row: OperationNode, is_absent: bool, now: datetime) -> NodeState:
    if _soaks(row):
        return NodeState.SWITCHED
    match row.status:
        case OperationNodeStatus.SUCCESS:
            return NodeState.SWITCHED
        case OperationNodeStatus.DOWNLOADING | OperationNodeStatus.RUNNING_ON_WORKER:
            return NodeState.SWITCHING
        case _:
            return NodeState.READY if is_due(row, now) and not is_absent else NodeState.FETCHING
