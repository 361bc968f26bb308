"""What must hold of replicas whatever happens (docs/explanation/invariants.md), as functions of what the store says at
one moment, or at two, the earlier first. Pure; each gives one line per breach. The rest is in
`tests/support/invariants.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import combinations

from corral.contract.loads import LoadState
from corral.contract.messages.backends import NodeBackend
from corral.controller.inventory.installed import find_installed
from corral.controller.replicas.lifecycle import HEALTHY
from corral.controller.replicas.load_jobs import NOT_INSTALLED
from corral.store.records import DesiredReplica, LoadJob, ReplicaStage

Key = tuple[str, str, int]  # node, model, replica
EVICTED_FOR = "it was evicted for "  # the reason of a replica that was evicted begins so
UNUSED = "unused for more than "  # how the reason of one begins that was scaled down
ADOPTED = "adopted-"  # how the order id of one begins that was found running


@dataclass(frozen=True)
class Memory:
    """What one node has told of its RAM."""

    total_bytes: int = 0
    available_bytes: int = 0
    spare_bytes: int = 0  # never handed out


@dataclass(frozen=True)
class ReplicaFacts:
    rows: Mapping[Key, DesiredReplica] = field(default_factory=dict)
    revisions: Mapping[str, str] = field(default_factory=dict)  # by model: its own
    answering: Mapping[str, str] = field(default_factory=dict)  # by model: the one gateways are shown
    least: Mapping[str, int] = field(default_factory=dict)  # by model: what a schedule wants at least
    scaled: Collection[str] = ()  # models whose number of replicas is not only that of requests for a cold one
    statuses: Mapping[str, str] = field(default_factory=dict)  # by node
    ready: Collection[Key] = ()  # what nodes list as serving
    allowed: Mapping[str, Collection[str]] = field(default_factory=dict)  # by model: revisions that may answer
    most: Mapping[str, int] = field(default_factory=dict)  # by model: what a schedule wants at most; 0: no bound
    selected: Mapping[str, Collection[str]] = field(default_factory=dict)  # by model with a selector: its nodes
    bus_down: Collection[str] = ()  # nodes that hear no orders
    memory: Mapping[str, Memory] = field(default_factory=dict)  # by node
    jobs: Mapping[str, LoadJob] = field(default_factory=dict)  # by model
    groups: Mapping[str, Collection[str]] = field(default_factory=dict)  # by model: its exclusive groups
    listed: Mapping[str, Collection[str]] = field(default_factory=dict)  # by node: models of which it lists a process
    installed: Mapping[str, Sequence[NodeBackend]] = field(default_factory=dict)  # by node: its backends
    at: datetime | None = None


def broken(before: ReplicaFacts, after: ReplicaFacts) -> list[str]:
    return [
        *ended_too_many(before, after),
        *back_to_an_earlier(before, after),
        *loaded_twice(before, after),
        *loaded_too_early(before, after),
    ]


def broken_lately(lately: Sequence[ReplicaFacts], after: ReplicaFacts) -> list[str]:
    """What was decided at a moment before it was written: it has to fit one of these moments, the last one latest."""
    begun = {row.op_id for row in lately[-1].rows.values()}
    new = [row for row in after.rows.values() if row.op_id not in begun]
    moments = (*lately, after)
    return [
        *(why for row in new if (why := _wrong_revision(row, moments))),
        *(why for row in new if not row.op_id.startswith(ADOPTED) and (why := _misplaced(row, moments))),
        *(why for row in new if not row.op_id.startswith(ADOPTED) for why in _meets_rivals(row, moments)),
        *too_many_begun(new, moments),
    ]


def ended_too_many(before: ReplicaFacts, after: ReplicaFacts) -> list[str]:
    """8: what gives way for another model, or ends because nobody uses it, leaves as many as a schedule wants. Between
    the look and the writing a process may have ended by itself: those that served at either moment count."""
    ended = [
        row.model
        for key, row in after.rows.items()
        if row.stage == ReplicaStage.LEAVING
        and row.reason.startswith((EVICTED_FOR, UNUSED))
        and key in before.rows
        and before.rows[key].stage == ReplicaStage.RUNNING
    ]
    left = Counter(
        row.model
        for key, row in after.rows.items()
        if row.stage == ReplicaStage.RUNNING and any(_serves(facts, key) for facts in (before, after))
    )
    return [
        f"{model} had to end replicas and has {left[model]} left of at least {least}"
        for model in dict.fromkeys(ended)
        if left[model] < (least := min(before.least.get(model, 0), after.least.get(model, 0)))
    ]


def back_to_an_earlier(before: ReplicaFacts, after: ReplicaFacts) -> list[str]:
    """2: once a process of a model's own revision answers, none of an earlier one ever does again."""
    return [
        f"{model} answered as {revision} and now as {after.answering[model]}"
        for model, revision in before.answering.items()
        if before.revisions.get(model) == after.revisions.get(model) == revision
        and after.answering.get(model, revision) != revision
    ]


def loaded_twice(before: ReplicaFacts, after: ReplicaFacts) -> list[str]:
    """No second load of a model begins while one is under way where it may stay, unless a schedule wants several."""
    coming = [
        row
        for row in after.rows.values()
        if row.stage in (ReplicaStage.PLACED, ReplicaStage.ORDERED)
        and row.model not in {*before.scaled, *after.scaled}
        and before.revisions.get(row.model) == after.revisions.get(row.model) == row.revision
        and before.statuses.get(row.node_id) == after.statuses.get(row.node_id) == HEALTHY
    ]
    begun = {row.op_id for row in before.rows.values()}
    counts = Counter(row.model for row in coming)
    twice = {row.model for row in coming if row.op_id not in begun and counts[row.model] > 1}
    return [f"{model} is being loaded {counts[model]} times at once" for model in sorted(twice)]


def loaded_too_early(before: ReplicaFacts, after: ReplicaFacts) -> list[str]:
    """A load that failed is not tried again before its time, unless its model was changed, or a backend is there that
    could not be installed."""
    return [
        f"{model} is loaded again before {old.retry_at:%H:%M:%S}"
        for model, old in before.jobs.items()
        if old.state == LoadState.FAILED
        and old.retry_at is not None
        and after.at is not None
        and after.at < old.retry_at
        and (new := after.jobs.get(model)) is not None
        and new.state != LoadState.FAILED
        and new.revision == old.revision
        and not has_its_backend(old, after)
    ]


def has_its_backend(failed: LoadJob, facts: ReplicaFacts) -> bool:
    errors = [(node_id, error.partition(NOT_INSTALLED)) for node_id, error in failed.failed_on.items()]
    return any(
        lacked and find_installed(facts.installed.get(node_id, ()), backend) is not None
        for node_id, (backend, lacked, _) in errors
    )


def too_many_begun(new: Sequence[DesiredReplica], moments: Sequence[ReplicaFacts]) -> list[str]:
    """No replica begins beyond what a schedule wants at most. Counted are those nobody has to replace."""
    wrong = []
    after = moments[-1]
    for model in dict.fromkeys(row.model for row in new if not row.op_id.startswith(ADOPTED)):
        bounds = [facts.most.get(model, 0) for facts in moments]
        counted = [
            row
            for row in after.rows.values()
            if row.model == model
            and row.stage in (ReplicaStage.PLACED, ReplicaStage.ORDERED, ReplicaStage.RUNNING)
            and all(_counts(row, facts) for facts in moments)
        ]
        if all(bounds) and len(counted) > max(bounds):
            wrong.append(f"{model} gets {len(counted)} replicas, and at most {max(bounds)} are wanted")
    return wrong


def _counts(row: DesiredReplica, facts: ReplicaFacts) -> bool:
    return (
        facts.revisions.get(row.model) == row.revision
        and facts.statuses.get(row.node_id) == HEALTHY
        and (row.model not in facts.selected or row.node_id in facts.selected[row.model])
    )


def _wrong_revision(row: DesiredReplica, moments: Sequence[ReplicaFacts]) -> str:
    """2: whatever begins, or is taken in, is of a revision that may answer."""
    if any(row.revision in facts.allowed.get(row.model, ()) for facts in moments):
        return ""
    return f"{row.model} on {row.node_id} begins as {row.revision}, which may not answer"


def _misplaced(row: DesiredReplica, moments: Sequence[ReplicaFacts]) -> str:
    """New work goes where it may, and where there is memory for it."""
    placed = f"{row.model} is placed on {row.node_id}"
    if not any(facts.statuses.get(row.node_id) == HEALTHY for facts in moments):
        return f"{placed}, which is {moments[-1].statuses.get(row.node_id, 'gone')}"
    if all(row.node_id in facts.bus_down for facts in moments):
        return f"{placed}, which hears no orders"
    if all(row.model in facts.selected and row.node_id not in facts.selected[row.model] for facts in moments):
        return f"{placed}, which its schedule does not select"
    there = [each for each in moments[-1].rows.values() if each.node_id == row.node_id and not each.devices]
    if row.devices or any(_holds(there, facts.memory.get(row.node_id, Memory())) for facts in moments):
        return ""
    return f"{placed}, whose memory does not hold it: {moments[-1].memory.get(row.node_id)}"


def _meets_rivals(row: DesiredReplica, moments: Sequence[ReplicaFacts]) -> list[str]:
    """An exclusive group never has two members on one node: no replica begins beside another model's, not even beside
    one that is about to end. Rows are what they were when it was decided; of processes and definitions nobody is sure
    of more than what held at all these moments. Two still meet where a process is found running, or where a group is
    added to a definition: then one of them leaves (`members_together`)."""
    there = {each.model for each in moments[-1].rows.values() if each.node_id == row.node_id}
    there |= set.intersection(*(set(facts.listed.get(row.node_id, ())) for facts in moments))
    rivals = sorted(
        other
        for other in there - {row.model}
        if all(set(facts.groups.get(row.model, ())) & set(facts.groups.get(other, ())) for facts in moments)
    )
    return [f"{row.model} is placed on {row.node_id} beside {other} of the same exclusive group" for other in rivals]


def members_together(
    there: Mapping[str, Collection[str]], groups: Mapping[str, Collection[str]]
) -> list[tuple[str, str, str]]:
    """Node and both models of each two that share an exclusive group. `there`: by node, the models that run."""
    return [
        (node, one, other)
        for node, found in sorted(there.items())
        for one, other in combinations(sorted(found), 2)
        if set(groups.get(one, ())) & set(groups.get(other, ()))
    ]


def _holds(rows: Sequence[DesiredReplica], memory: Memory) -> bool:
    """What is about to start does not show yet in what the node measures."""
    reserved = sum(row.memory_bytes for row in rows)
    starting = sum(row.memory_bytes for row in rows if row.stage in (ReplicaStage.PLACED, ReplicaStage.ORDERED))
    if not memory.total_bytes:
        return True  # the node does not say what it has
    measured = memory.available_bytes or memory.total_bytes
    return max(reserved - memory.total_bytes, starting - measured) <= -memory.spare_bytes


def _serves(facts: ReplicaFacts, key: Key) -> bool:
    return key in facts.ready and facts.statuses.get(key[0]) == HEALTHY
