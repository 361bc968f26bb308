"""What must hold whatever happens (docs/explanation/invariants.md), as functions of what the store says. Pure.

The simulation asks after every commit, a chaos run as often as it looks. Each function gives one line per breach, empty
when all is well. `Facts` is the store at one moment; what speaks of change compares two moments, the earlier first.

Here are those that can be told from the store: 1 (nothing accepted is forgotten), 2 (one routable process per replica,
of the revision that answers, listed by its node), 3 (success only when the inventory shows it), 8 (automation takes
out no more than its share), 9 (nothing goes backwards, an end is an end). That one controller's death loses nothing (6)
is these same lines, asked while controllers die. What only the machines know, that no busy process ends (5) and that no
outage breaks a warm request (7), the simulation asks of its machines (`tests/simulation/trials.py`, `processes.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from corral.contract.messages.nodes import NodeStatus
from corral.contract.view import ViewReplica
from corral.controller.health.classify import Guard
from corral.controller.inventory.installed import find_installed
from corral.controller.operations.views import KINDS_WITHOUT_RULE
from corral.store.records import (
    ENDED,
    BackendIntent,
    BackendRule,
    OperationNode,
    OperationNodeStatus,
    OrderKind,
    Rollout,
    RolloutPhase,
)
from corral.store.tables.node_backends import Inventory
from corral.store.tables.nodes import NodePulse
from corral.store.tables.operations import Operation


@dataclass(frozen=True)
class Facts:
    operations: Mapping[str, Operation] = field(default_factory=dict)
    rows: Mapping[tuple[str, str], OperationNode] = field(default_factory=dict)  # by operation and node
    rules: Mapping[int, BackendRule] = field(default_factory=dict)  # those that hold, by generation
    inventories: Mapping[str, Inventory] = field(default_factory=dict)  # by node
    nodes: Mapping[str, NodePulse] = field(default_factory=dict)
    intents: Mapping[tuple[str, str], BackendIntent] = field(default_factory=dict)  # by node and backend
    bus_down: Collection[str] = ()  # nodes that hear no orders
    rollouts: Mapping[str, Rollout] = field(default_factory=dict)  # by operation


@dataclass(frozen=True)
class TakenOut:
    """Automation took a node out of service."""

    node_id: str
    at: datetime
    fleet: int  # nodes in service just before, and those that fell in the same window


def broken(before: Facts, after: Facts) -> list[str]:
    """Everything below that two moments tell."""
    return [
        *forgotten(before, after),
        *astray(after),
        *unseen(after),
        *unproven(before, after),
        *backwards(before, after),
        *too_many_on_trial(after),
        *decided_otherwise(before, after),
    ]


def forgotten(before: Facts, after: Facts) -> list[str]:
    """1: what was accepted stays on file, with every node it speaks of, until it has ended."""
    lost = [
        f"operation {id} ({operation.kind} {operation.backend}) vanished before it had ended"
        for id, operation in before.operations.items()
        if id not in after.operations and operation.finished_at is None
    ]
    for (id, node), row in before.rows.items():
        if (id, node) not in after.rows and id in after.operations:
            lost.append(f"operation {id} forgot about node {row.node_name}, which was {row.status}")
    return lost


def astray(facts: Facts) -> list[str]:
    """1: an operation is open for as long as a row of it is, and an open row has a rule that somebody brings about; but
    fetching a model's files has none."""
    wrong = []
    open_rows: dict[str, list[OperationNode]] = {}
    for (id, _), row in facts.rows.items():
        if row.status not in ENDED:
            open_rows.setdefault(id, []).append(row)
    for id, operation in facts.operations.items():
        left = open_rows.get(id, [])
        names = ", ".join(sorted(row.node_name for row in left))
        if left and operation.finished_at is not None:
            wrong.append(f"operation {id} is said to have ended, but not on {names}")
        if left and operation.kind not in KINDS_WITHOUT_RULE and operation.generation not in facts.rules:
            wrong.append(f"no rule asks any more for what operation {id} still has to do on {names}")
        if not left and operation.finished_at is None:
            wrong.append(f"operation {id} has nothing left to do and is not said to have ended")
    return wrong


def unseen(facts: Facts) -> list[str]:
    """1: whoever watches an operation sees every node that works for it."""
    return [
        f"{intent.kind} {intent.backend} is under way on {node}, operation {intent.operation_id} shows no row for it"
        for (node, _), intent in facts.intents.items()
        if intent.stage == "sent"
        and intent.operation_id in facts.operations
        and (intent.operation_id, node) not in facts.rows
    ]


def ordered_in_vain(lately: Sequence[Facts], after: Facts) -> list[str]:
    """An order goes to a healthy node that can hear it. It was decided at one of these moments, the last one latest, or
    as it is written."""
    wrong = []
    for key, intent in after.intents.items():
        before = lately[-1].intents.get(key)
        if intent.stage != "sent" or (before is not None and before.sent_at == intent.sent_at):
            continue
        if not any(_hears_orders(facts, intent.node_id) for facts in (*lately, after)):
            why = "hears none" if intent.node_id in after.bus_down else "is not healthy"
            wrong.append(f"{intent.kind} {intent.backend} is ordered on {intent.node_id}, which {why}")
    return wrong


def _hears_orders(facts: Facts, node_id: str) -> bool:
    node = facts.nodes.get(node_id)
    return node is not None and node.status == NodeStatus.HEALTHY and node_id not in facts.bus_down


def unproven(before: Facts, after: Facts) -> list[str]:
    """3: a row that now says success is one whose node's inventory, as it is on file, shows it."""
    wrong = []
    for key, row in after.rows.items():
        if row.status != OperationNodeStatus.SUCCESS or (
            key in before.rows and before.rows[key].status == OperationNodeStatus.SUCCESS
        ):
            continue
        operation = after.operations.get(key[0])
        if operation is None or is_shown(operation, row, after.inventories.get(row.node_id)):
            continue
        wrong.append(
            f"{operation.kind} {operation.backend} is called a success on {row.node_name}, "
            f"whose inventory does not show {row.digest or 'it'}"
        )
    return wrong


def is_shown(operation: Operation, row: OperationNode, inventory: Inventory | None) -> bool:
    if operation.kind in KINDS_WITHOUT_RULE:
        return True  # no node's inventory has to do with it
    if inventory is None:
        return False
    there = find_installed(inventory.backends, operation.backend, row.variant)
    if operation.kind == "delete":
        return there is None
    # A worker that does not tell digests can show no more than that it is there.
    return there is not None and (not row.digest or not there.digest or there.digest == row.digest)


def backwards(before: Facts, after: Facts) -> list[str]:
    """9: an end is final; an attempt's events and its percentage only rise; attempts only rise."""
    wrong = []
    for key, old in before.rows.items():
        new = after.rows.get(key)
        if new is None or new is old:
            continue
        where = f"operation {key[0]} on {old.node_name}"
        if old.status in ENDED and new != old:
            wrong.append(f"{where} had ended as {old.status} and is now {new.status}")
        elif (new.attempt, new.seq) < (old.attempt, old.seq):
            wrong.append(f"{where} went back from event {old.attempt}.{old.seq} to {new.attempt}.{new.seq}")
        elif new.attempt == old.attempt and new.percentage < old.percentage:
            wrong.append(f"{where} went back from {old.percentage:g} % to {new.percentage:g} %")
    return wrong


def too_many_on_trial(facts: Facts) -> list[str]:
    """A rollout with a soak: until a class has passed, one node of it has begun to switch, and those that left."""
    wrong = []
    for rollout in facts.rollouts.values():
        if rollout.is_over or not rollout.settings.has_soak:
            continue
        for state in rollout.classes:
            if state.passed:
                continue
            for node, before in rollout.nodes.items():
                intent = facts.intents.get((node, rollout.subject))
                row = facts.rows.get((rollout.operation_id, node))
                # An order of a person for this node alone takes it out of the rollout, also while it switches.
                begun = (
                    intent is not None
                    and (row is None or row.status != OperationNodeStatus.SUPERSEDED)
                    and intent.generation == rollout.generation
                    and intent.kind == OrderKind.UPGRADE
                    and intent.stage in ("sent", "done")
                    and intent.digest != before.digest
                )
                if begun and before.hardware == state.name and node not in (state.canary, *state.lost):
                    wrong.append(
                        f"{node} switches to a build of {rollout.subject} that is on trial on {state.canary_name}"
                    )
    return wrong


def decided_otherwise(before: Facts, after: Facts) -> list[str]:
    """A rollout that is over stays as it is, a class that has passed has passed, and a revert names its operations: no
    build that was found bad is left to itself."""
    wrong = []
    for id, old in before.rollouts.items():
        new = after.rollouts.get(id)
        if new is None or new is old:
            continue
        if old.is_over and new != old:
            wrong.append(f"the rollout {id} was {old.phase}, and changed")
        passed = {each.name: each.passed for each in new.classes if each.passed}
        for each in old.classes:
            if each.passed and any(now.name == each.name for now in new.classes) and each.name not in passed:
                wrong.append(f"{each.name} had passed in the rollout {id}, and has not any more")
    for id, rollout in after.rollouts.items():
        if rollout.phase != RolloutPhase.REVERTED or before.rollouts.get(id) is rollout:
            continue
        if rollout.generation in after.rules:
            wrong.append(f"the rollout {id} is reverted, and its rule holds")
        for name in rollout.reverted_by:
            if name not in after.operations:
                wrong.append(f"the rollout {id} is reverted by the operation {name}, which does not exist")
    return wrong


def taken_out(before: Facts, after: Facts, at: datetime, window: timedelta) -> list[TakenOut]:
    """Nodes that automation has declared offline between two moments. A worker that said goodbye left by itself."""
    in_service = {
        id for id, node in before.nodes.items() if node.status not in (NodeStatus.OFFLINE, NodeStatus.PENDING)
    }
    fallen = [
        id
        for id, node in after.nodes.items()
        if id in in_service and node.status == NodeStatus.OFFLINE and not node.left
    ]
    recent = sum(
        1
        for node in before.nodes.values()
        if node.status == NodeStatus.OFFLINE and not node.left and at - node.status_changed_at < window
    )
    return [TakenOut(id, at, len(in_service) + recent) for id in fallen]


def still_out(history: Sequence[TakenOut], facts: Facts) -> list[TakenOut]:
    """Without those that are back."""
    return [
        one for one in history if one.node_id in facts.nodes and facts.nodes[one.node_id].status == NodeStatus.OFFLINE
    ]


def too_many_taken_out(history: Sequence[TakenOut], guard: Guard, window: timedelta) -> list[str]:
    """8: no more than a share of the fleet within one window; fewer than the floor are no mass outage."""
    wrong = []
    for index, last in enumerate(history):
        within = {one.node_id for one in history[: index + 1] if last.at - one.at < window}
        if len(within) >= guard.floor and len(within) * 100 > guard.share_percent * last.fleet:
            wrong.append(f"{len(within)} of {last.fleet} nodes were taken offline within {window}")
    return wrong


def unlike(wanted: Iterable[tuple[str, str, str | None]], there: Mapping[tuple[str, str], str]) -> list[str]:
    """At rest: the world is as the rules say. `wanted`: node, backend, and the digest it should have (None: not be
    there; empty: any). `there`: by node and backend, the digest found."""
    wrong = []
    for node, backend, digest in wanted:
        found = there.get((node, backend))
        if digest is None and found is not None:
            wrong.append(f"{backend} should not be on {node}, and is ({found})")
        elif digest is not None and found is None:
            wrong.append(f"{backend} should be on {node}, and is not")
        elif digest and found != digest:
            wrong.append(f"{backend} on {node} should be {digest}, and is {found}")
    return wrong


def misrouted(
    shown: Iterable[ViewReplica], allowed: Mapping[str, Sequence[str]], listed: Mapping[str, Inventory]
) -> list[str]:
    """2: what gateways are told. `allowed`: by model, the revisions that may answer, its own first. `listed`: by node,
    what it last told."""
    wrong = []
    replicas = list(shown)
    revisions: dict[str, set[str]] = {}
    taken: dict[tuple[str, str, int], str] = {}
    for replica in replicas:
        what = f"{replica.process_id} of {replica.model} on {replica.node_id}"
        key = (replica.node_id, replica.model, replica.replica)
        if key in taken:
            wrong.append(f"{what} and {taken[key]} are routed to as one replica")
        taken[key] = replica.process_id
        revisions.setdefault(replica.model, set()).add(replica.revision)
        if replica.revision not in allowed.get(replica.model, ()):
            wrong.append(f"{what} is of a revision that may not answer")
        told = listed[replica.node_id].processes if replica.node_id in listed else ()
        if not any(each.process_id == replica.process_id and each.state == "ready" for each in told):
            wrong.append(f"{what} is routed to, and its node does not list it as ready")
    wrong += [f"two revisions of {model} answer at once" for model, found in revisions.items() if len(found) > 1]
    return wrong
