"""Applies rollouts to the upgrades of backends: turns the intents and steps of the nodes under one rule into the
states that `controller/rollouts/plan.py` decides about, and its decisions into holds. Pure
(docs/explanation/design.md#upgrades).

All nodes download the build at once. Then one node per hardware class switches first; when it has passed its soak, the
others follow, as many at once as the rule allows. A failed switch stops the rest until a retry there succeeds, and the
second one reverts what has switched. A failed download stops no other node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from corral.contract.messages.replicas import ReplicaProcess, ReplicaState
from corral.controller.backends.plan import Hold, HoldCause
from corral.controller.orders.order import Send
from corral.controller.rollouts.comparison import Judgement
from corral.controller.rollouts.plan import NodeState, RolloutNode, RolloutStep, plan_rollout
from corral.store.records import NO_SOAK, BackendIntent, IntentStage, OrderKind, Rollout, RolloutPhase

# Processes of the new build that started again by themselves; one that is not started again counts as well.
_GONE = frozenset({ReplicaState.FAILED})


@dataclass(frozen=True)
class Peer:
    """A node under the rule of a rollout, with what decides about its turn."""

    node_id: str
    node_name: str
    hardware: str
    intent: BackendIntent | None = None  # None: no order was sent yet
    status: str = "healthy"
    processes: tuple[ReplicaProcess, ...] = ()  # of the backend


@dataclass(frozen=True)
class Gated:
    held: dict[str, Hold] = field(default_factory=dict)  # by node: the sends that have to wait
    step: RolloutStep | None = None


def advance(
    rollout: Rollout | None,
    sends: Mapping[str, Send],
    done: Iterable[str],
    peers: Iterable[Peer],
    judgements: Mapping[str, Judgement],
    now: datetime,
    max_parallel: str,
) -> Gated:
    """One step of the rollout of one rule. `sends` by node id; `done`: the nodes that this pass found switched. Without
    a stored rollout (`None`) nothing is reverted: the rule is older than rollouts, or installs."""
    switched = set(done)
    nodes = [_node(peer, sends.get(peer.node_id), switched=peer.node_id in switched) for peer in peers]
    step = plan_rollout(rollout or _unstored(now), nodes, judgements, now, max_parallel=max_parallel)
    held = {}
    for node_id, waits in step.held.items():
        send = sends[node_id]
        cause = HoldCause.STOPPED if waits.stopped else HoldCause.TURN
        held[node_id] = Hold(send.backend, send.operation, send.kind, cause, waits.reason)
    return Gated(held, step if rollout is not None else None)


def _unstored(now: datetime) -> Rollout:
    return Rollout("", 0, "", RolloutPhase.FETCHING, NO_SOAK, now)


def _node(peer: Peer, send: Send | None, *, switched: bool) -> RolloutNode:
    intent = peer.intent
    new = _new_processes(peer)
    failed = intent is not None and intent.switch_failed and intent.stage is not IntentStage.DONE
    return RolloutNode(
        id=peer.node_id,
        name=peer.node_name,
        hardware=peer.hardware,
        state=NodeState.SWITCHED if switched else _state(intent, send),
        serves=bool(peer.processes),
        present=peer.status in ("healthy", "unhealthy"),
        steady=peer.status == "healthy",
        switch_failures=max(1, intent.failures) if failed and intent is not None else 0,
        fatal=failed and intent is not None and intent.stage is IntentStage.PARKED,
        reason=intent.reason if intent is not None and intent.failures else "",
        processes=tuple(process.process_id for process in new),
        restarts=sum(process.restarts + (process.state in _GONE) for process in new),
    )


def _state(intent: BackendIntent | None, send: Send | None) -> NodeState:
    if send is not None and not send.again:
        # The previous order of a node that gets a new one has ended: the node must not wait for itself.
        return NodeState.READY if _is_switch(send) else NodeState.FETCHING
    if intent is None:
        return NodeState.FETCHING
    if intent.stage is IntentStage.DONE:
        return NodeState.SWITCHED
    if intent.stage is IntentStage.SENT and intent.kind is not OrderKind.FETCH:
        return NodeState.SWITCHING
    return NodeState.FETCHING


def _is_switch(send: Send) -> bool:
    return send.kind is OrderKind.UPGRADE and send.build is not None and bool(send.max_parallel)


def _new_processes(peer: Peer) -> list[ReplicaProcess]:
    if peer.intent is None or not peer.intent.digest:
        return []
    return [process for process in peer.processes if process.digest == peer.intent.digest]
