"""From what should be and what is to what to do next, per node and backend. Pure (DESIGN §5).

`plan` looks at one node's world and says one step per backend that is not as it should be. It never counts on having
been called before: an intent in the world tells what was already tried, the inventory tells what came of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from corral.controller.desired.rules import Unwanted, Wanted

FIRST_RETRY = timedelta(seconds=30)
LAST_RETRY = timedelta(minutes=15)


class Kind(StrEnum):
    INSTALL = "install"
    UPGRADE = "upgrade"
    DELETE = "delete"


@dataclass(frozen=True)
class Build:
    """The build of a backend that fits one node."""

    variant: str
    digest: str


@dataclass(frozen=True)
class NoBuild:
    """Time does not cure this: only another gallery, node or rule does."""

    reason: str


@dataclass(frozen=True)
class Installed:
    digest: str = ""  # empty: the worker does not report digests
    installed_at: str = ""


class Stage(StrEnum):
    WAITING = "waiting"  # not sent, or failed and waiting for its next try
    SENT = "sent"  # accepted by the worker, or no answer came: it may be at it
    PARKED = "parked"  # a refusal that time does not cure


@dataclass(frozen=True)
class Intent:
    """What one node still has to do for one backend, as it is stored."""

    kind: Kind
    generation: int
    operation: str = ""
    digest: str = ""
    stage: Stage = Stage.WAITING
    attempt: int = 0  # of the last order
    failures: int = 0
    next_try_at: datetime | None = None
    boot_id: str = ""  # of the worker that accepted it
    before: str = ""  # `installed_at` when it was sent, for workers that report no digest
    reason: str = ""


@dataclass(frozen=True)
class NodeWorld:
    id: str
    name: str
    status: str
    boot_id: str = ""
    known: bool = True  # False: its inventory has never been read
    installed: Mapping[str, Installed] = field(default_factory=dict)
    orders: frozenset[str] = frozenset()  # operation ids the worker says it is at, or has just ended
    intents: Mapping[str, Intent] = field(default_factory=dict)


@dataclass(frozen=True)
class Send:
    backend: str
    kind: Kind
    build: Build | None  # None for a delete
    generation: int
    operation: str
    attempt: int


@dataclass(frozen=True)
class Done:
    """The inventory shows it: the only proof there is."""

    backend: str
    operation: str


@dataclass(frozen=True)
class Skip:
    backend: str
    operation: str
    reason: str


@dataclass(frozen=True)
class Hold:
    """It will be done, not now; `until` is None when that depends on the node and not on the clock."""

    backend: str
    operation: str
    kind: Kind
    reason: str
    until: datetime | None = None


@dataclass(frozen=True)
class Drop:
    """An intent nobody wants any more."""

    backend: str


Step = Send | Done | Skip | Hold | Drop


def retry_delay(failures: int) -> timedelta:
    """30 s, doubling to 15 min, for ever."""
    return min(LAST_RETRY, FIRST_RETRY * (1 << min(max(failures, 1) - 1, 10)))


def plan(
    node: NodeWorld, wanted: Mapping[str, Wanted | Unwanted], builds: Mapping[str, Build | NoBuild], now: datetime
) -> list[Step]:
    """`wanted`: the folded rules. `builds`: for each wanted backend, the build that fits this node."""
    steps: list[Step] = []
    for backend, want in sorted(wanted.items()):
        intent = node.intents.get(backend)
        if intent is not None and intent.generation != want.generation:
            intent = _superseded(node, intent)
        step = _unwanted(node, backend, want, intent, now) if isinstance(want, Unwanted) else None
        if isinstance(want, Wanted):
            step = _wanted(node, backend, want, builds.get(backend), intent, now)
        if step is not None:
            steps.append(step)
    steps.extend(Drop(backend) for backend in sorted(node.intents.keys() - wanted.keys()))
    return steps


def _wanted(
    node: NodeWorld, backend: str, want: Wanted, build: Build | NoBuild | None, intent: Intent | None, now: datetime
) -> Step | None:
    if build is None:
        return Hold(backend, want.operation, Kind.INSTALL, "its build has not been found out yet")
    if isinstance(build, NoBuild):
        return Skip(backend, want.operation, build.reason)
    there = node.installed.get(backend)
    if node.known and there is not None and _is_it(there, build, want, intent):
        return Done(backend, want.operation)
    kind = Kind.INSTALL if there is None else Kind.UPGRADE
    return _send_or_hold(
        node, backend, want, Send(backend, kind, build, want.generation, want.operation, 0), intent, now
    )


def _unwanted(node: NodeWorld, backend: str, want: Unwanted, intent: Intent | None, now: datetime) -> Step | None:
    if node.known and backend not in node.installed:
        return Done(backend, want.operation)
    order = Send(backend, Kind.DELETE, None, want.generation, want.operation, 0)
    return _send_or_hold(node, backend, want, order, intent, now)


def _is_it(there: Installed, build: Build, want: Wanted, intent: Intent | None) -> bool:
    sent = intent is not None and intent.generation == want.generation and intent.stage is Stage.SENT
    if want.force and not (sent and intent is not None and there.installed_at != intent.before):
        return False  # forced: it must have been fetched again since we asked
    if there.digest:
        return there.digest == build.digest
    # A worker that reports no digest: for an install presence is all there is, for an upgrade a newer date.
    if sent and intent is not None and intent.kind is Kind.UPGRADE:
        return there.installed_at > intent.before
    return not sent or intent is None or intent.kind is Kind.INSTALL


def _send_or_hold(
    node: NodeWorld, backend: str, want: Wanted | Unwanted, order: Send, intent: Intent | None, now: datetime
) -> Step | None:
    if node.status != "healthy":
        reason = f"node {node.status}, will retry when healthy"
        return Hold(backend, want.operation, order.kind, reason)
    if not node.known:
        return Hold(backend, want.operation, order.kind, "waiting for the node's inventory")
    if intent is None:
        return _attempt(order, 1)
    match intent.stage:
        case Stage.PARKED:
            return Hold(backend, want.operation, order.kind, intent.reason)
        case Stage.SENT:
            if intent.generation == want.generation and _was_lost(node, intent):
                return _attempt(order, intent.attempt)  # the same attempt: whoever did it after all says so again
            return None
        case Stage.WAITING:
            if intent.next_try_at is not None and intent.next_try_at > now:
                return Hold(backend, want.operation, order.kind, intent.reason, intent.next_try_at)
            return _attempt(order, intent.attempt + 1)


def _was_lost(node: NodeWorld, intent: Intent) -> bool:
    """Accepted by a worker that has restarted since and does not know of it."""
    return bool(intent.boot_id) and node.boot_id != intent.boot_id and intent.operation not in node.orders


def _attempt(order: Send, attempt: int) -> Send:
    return Send(order.backend, order.kind, order.build, order.generation, order.operation, attempt)


def _superseded(node: NodeWorld, intent: Intent) -> Intent | None:
    """An intent of an older rule. One that is under way is let finish first: orders for one backend are serial.
    One that was lost with its worker is nobody's any more."""
    return intent if intent.stage is Stage.SENT and not _was_lost(node, intent) else None
