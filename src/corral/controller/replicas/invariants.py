"""What must hold of replicas whatever happens (DESIGN §9), as functions of what the store says at one moment, or at
two, the earlier first. Pure; each gives one line per breach. The rest is in `controller/invariants.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from corral.controller.replicas.life import HEALTHY, Stage
from corral.store.replicas import Replica

Key = tuple[str, str, int]  # node, model, replica
ROOM = "it makes room for "  # how the reason of one begins that was evicted


@dataclass(frozen=True)
class ReplicaFacts:
    rows: Mapping[Key, Replica] = field(default_factory=dict)
    revisions: Mapping[str, str] = field(default_factory=dict)  # by model: its own
    answering: Mapping[str, str] = field(default_factory=dict)  # by model: the one gateways are shown
    least: Mapping[str, int] = field(default_factory=dict)  # by model: what a schedule wants at least
    scaled: Collection[str] = ()  # models whose number of replicas is not only that of requests for a cold one
    statuses: Mapping[str, str] = field(default_factory=dict)  # by node
    ready: Collection[Key] = ()  # what nodes list as serving


def broken(before: ReplicaFacts, after: ReplicaFacts) -> list[str]:
    return [*evicted_too_many(before, after), *back_to_an_earlier(before, after), *loaded_twice(before, after)]


def evicted_too_many(before: ReplicaFacts, after: ReplicaFacts) -> list[str]:
    """8: what gives way for another model leaves as many as a schedule wants. Between the look and the writing a
    process may have ended by itself: those that served at either moment count."""
    evicted = [
        row.model
        for key, row in after.rows.items()
        if row.stage == Stage.LEAVING
        and row.reason.startswith(ROOM)
        and key in before.rows
        and before.rows[key].stage == Stage.RUNNING
    ]
    left = Counter(
        row.model
        for key, row in after.rows.items()
        if row.stage == Stage.RUNNING and any(_serves(facts, key) for facts in (before, after))
    )
    return [
        f"{model} had to make room and has {left[model]} replicas left of at least {least}"
        for model in dict.fromkeys(evicted)
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
        if row.stage in (Stage.PLACED, Stage.ORDERED)
        and row.model not in {*before.scaled, *after.scaled}
        and before.revisions.get(row.model) == after.revisions.get(row.model) == row.revision
        and before.statuses.get(row.node_id) == after.statuses.get(row.node_id) == HEALTHY
    ]
    begun = {row.op_id for row in before.rows.values()}
    counts = Counter(row.model for row in coming)
    twice = {row.model for row in coming if row.op_id not in begun and counts[row.model] > 1}
    return [f"{model} is being loaded {counts[model]} times at once" for model in sorted(twice)]


def _serves(facts: ReplicaFacts, key: Key) -> bool:
    return key in facts.ready and facts.statuses.get(key[0]) == HEALTHY
