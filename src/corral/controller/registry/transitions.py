"""Statuses of a node and what each event makes of them. Pure; every cell of the table is tested.

A status alone cannot tell a node that fell silent from one that left, or an approved node from one that never was.
So three facts stand beside it: `approved` (a person or a pre-approved token said yes), `drained` (a person asked for
it, and only a person takes it back), `left` (a clean goodbye: only a new registration brings the node back).
Upstream kept none of them, and a pending node could resume itself into service.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from corral.contract.messages.nodes import NodeStatus


class NodeEvent(StrEnum):
    REGISTERED = "registered"  # a start of the worker: new boot, same identity
    APPROVED = "approved"
    DRAIN_REQUESTED = "drain_asked"  # by a person
    RESUME_REQUESTED = "resume_asked"  # by a person
    SELF_DRAINED = "self_drained"  # by the worker, on its way out
    SELF_RESUMED = "self_resumed"
    LEFT = "left"  # clean deregistration
    WENT_SILENT = "went_silent"
    SILENT_BUT_HELD = "silent_but_held"  # too many fell silent at once: the guard holds this one
    CAME_BACK = "came_back"  # a fresh heartbeat
    DID_NOT_ANSWER = "did_not_answer"  # "no responders", twice
    WORKER_MISSING = "worker_missing"  # nothing listens at its port, and no heartbeats come


@dataclass(frozen=True)
class NodeState:
    status: NodeStatus
    approved: bool
    drained: bool = False
    left: bool = False


@dataclass(frozen=True)
class Moved:
    state: NodeState
    reason: str


@dataclass(frozen=True)
class Stays:
    """Nothing changes, and that is all right."""


@dataclass(frozen=True)
class TransitionRefused:
    why: str


def new_node(*, approved: bool) -> NodeState:
    return NodeState(NodeStatus.HEALTHY if approved else NodeStatus.PENDING, approved)


def next_state(state: NodeState, event: NodeEvent) -> Moved | Stays | TransitionRefused:
    if not state.approved:
        return _while_unapproved(state, event)
    match event:
        case NodeEvent.REGISTERED:
            return _moved(state, _at_work(state), "registered", left=False)
        case NodeEvent.APPROVED:
            return TransitionRefused("the node is already approved")
        case NodeEvent.DRAIN_REQUESTED:
            if state.drained:
                return Stays()
            return _moved(state, _unless_offline(state, NodeStatus.DRAINING), "asked by a person", drained=True)
        case NodeEvent.RESUME_REQUESTED:
            return _resume(state)
        case NodeEvent.SELF_DRAINED:
            if state.status in (NodeStatus.DRAINING, NodeStatus.OFFLINE):
                return Stays()
            return _moved(state, NodeStatus.DRAINING, "the worker is about to leave")
        case NodeEvent.SELF_RESUMED:
            if state.drained:
                return TransitionRefused("the node was drained by a person; only a person can resume it")
            if state.status is not NodeStatus.DRAINING:
                return Stays()
            return _moved(state, NodeStatus.HEALTHY, "resumed by the worker")
        case NodeEvent.LEFT:
            return _moved(state, NodeStatus.OFFLINE, "left: the worker said goodbye", left=True)
        case NodeEvent.WENT_SILENT:
            if state.status is NodeStatus.OFFLINE:
                return Stays()
            return _moved(state, NodeStatus.OFFLINE, "no heartbeat")
        case NodeEvent.CAME_BACK:
            return _came_back(state)
        case NodeEvent.SILENT_BUT_HELD:
            if state.status is not NodeStatus.HEALTHY:
                return Stays()
            # Not taken out, yet no place for new work: its replicas answer only where no other can.
            return _moved(state, NodeStatus.UNHEALTHY, "no heartbeat, but too many fell silent at once: held")
        case NodeEvent.DID_NOT_ANSWER:
            if state.status is not NodeStatus.HEALTHY:
                return Stays()
            return _moved(state, NodeStatus.UNHEALTHY, "does not answer on the bus")
        case NodeEvent.WORKER_MISSING:
            if state.status not in (NodeStatus.HEALTHY, NodeStatus.UNHEALTHY):
                return Stays()
            # Of one that does not answer on the bus, this is the better reason.
            return Moved(replace(state, status=NodeStatus.UNHEALTHY), "its worker seems not to be running")


def _while_unapproved(state: NodeState, event: NodeEvent) -> Moved | Stays | TransitionRefused:
    """A node that was not approved stays pending, whatever the event."""
    match event:
        case NodeEvent.APPROVED:
            return _moved(state, NodeStatus.HEALTHY, "approved", approved=True, left=False)
        case NodeEvent.DRAIN_REQUESTED | NodeEvent.RESUME_REQUESTED | NodeEvent.SELF_RESUMED:
            return TransitionRefused("the node waits for approval")
        case NodeEvent.REGISTERED:
            return _moved(state, NodeStatus.PENDING, "waits for approval", left=False)
        case _:
            return Stays()


def _resume(state: NodeState) -> Moved | Stays | TransitionRefused:
    if not state.drained and state.status is not NodeStatus.DRAINING:
        return Stays()
    if state.status is NodeStatus.OFFLINE:
        return Moved(replace(state, drained=False), "resumed; will be healthy when it is back")
    return _moved(state, NodeStatus.HEALTHY, "resumed", drained=False)


def _came_back(state: NodeState) -> Moved | Stays | TransitionRefused:
    if state.left:  # a heartbeat that was still on its way when the worker said goodbye
        return Stays()
    if state.status in (NodeStatus.OFFLINE, NodeStatus.UNHEALTHY):
        return _moved(state, _at_work(state), "heartbeats again")
    return Stays()


def _at_work(state: NodeState) -> NodeStatus:
    return NodeStatus.DRAINING if state.drained else NodeStatus.HEALTHY


def _unless_offline(state: NodeState, status: NodeStatus) -> NodeStatus:
    return NodeStatus.OFFLINE if state.status is NodeStatus.OFFLINE else status


def _moved(
    state: NodeState,
    status: NodeStatus,
    reason: str,
    *,
    approved: bool | None = None,
    drained: bool | None = None,
    left: bool | None = None,
) -> Moved | Stays:
    after = NodeState(
        status,
        state.approved if approved is None else approved,
        state.drained if drained is None else drained,
        state.left if left is None else left,
    )
    return Stays() if after == state else Moved(after, reason)
