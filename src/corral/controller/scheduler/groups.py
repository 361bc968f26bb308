"""Concurrency groups: models that exclude each other on one node. Pure.

`concurrency_groups` in a definition names the groups of a model. With the policy `exclusive_groups` (the default) a
node never holds replicas of two models that share a group: loading one waits for the other, or evicts it while it is
idle (`eviction.py`). Without that policy the groups are a preference among nodes, as LocalAI's controller has it.
"""

from __future__ import annotations

from collections.abc import Collection

from corral.controller.scheduler.free_memory import Key
from corral.controller.scheduler.world import Model, Node, Replica, ReplicaState, World


def rivals(world: World, model: Model, node: Node, without: Collection[Key] = ()) -> list[Replica]:
    """The replicas on the node whose models share a group with this one. A replica that is stopping counts as long as
    its process may hold memory, but only where groups are exclusive."""
    if not model.concurrency_groups:
        return []
    exclusive = world.policy.exclusive_groups
    return [
        replica
        for replica in world.on_node.get(node.id, ())
        if replica.key not in without
        and (exclusive or replica.state is not ReplicaState.STOPPING)
        and shared_groups(world, model, replica)
    ]


def shared_groups(world: World, model: Model, replica: Replica) -> tuple[str, ...]:
    other = world.models.get(replica.model)
    if other is None or other.name == model.name:
        return ()
    return tuple(sorted(set(model.concurrency_groups) & set(other.concurrency_groups)))


def why_must_leave(world: World, model: Model, replica: Replica) -> str:
    """Why this replica has to leave its node; empty: no rival there has precedence.

    Placement never makes two members meet. They meet when a group is added to the definition of a running model, or
    when a node lists a process that was believed dead or that nobody has ordered. Both sides make the same comparison,
    so one stays.
    """
    node = world.nodes.get(replica.node_id)
    if node is None or not world.policy.exclusive_groups:
        return ""
    for rival in sorted(rivals(world, model, node), key=lambda rival: (rival.model, rival.index)):
        other = world.models[rival.model]
        if rival.state is not ReplicaState.STOPPING and _precedence(other, rival) < _precedence(model, replica):
            group = shared_groups(world, model, rival)[0]
            return f"{other.name} of the same concurrency group {group!r} has precedence on {node.name}"
    return ""


def _precedence(model: Model, replica: Replica) -> tuple[bool, bool, bool, float, str]:
    """The smaller stays: pinned, then required by a schedule, then in use, then ready for longer."""
    required = model.schedule.spread_all or model.schedule.min_replicas > 0
    ready = replica.ready_at.timestamp() if replica.ready_at is not None else float("inf")
    return (not model.pinned, not required, replica.idle, ready, model.name)
