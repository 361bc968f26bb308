"""One replica, from its place to its end: what to do next with it. Pure.

    placed ──▶ ordered ──▶ running ──▶ leaving ──▶ (no row)
      └───────────┴── failed: no row, and whoever wanted it decides again

What runs is what its node lists; an order that was answered proves nothing. An order is sent again under the same
number until it is known what became of it: a worker does the same order once, and tells its outcome as often as asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from msgspec.structs import replace

from corral.contract.messages.replicas import (
    ReplicaProcess,
    ReplicaState,
)
from corral.controller.inventory.records import ProcessActivity
from corral.controller.orders.observations import (
    OrderAccepted,
    OrderEnded,
    OrderNotSent,
    OrderUnconfirmed,
    ReplicaObservation,
    WorkerUnreachable,
)
from corral.store.records import DesiredReplica, ReplicaStage

HEALTHY, DRAINING, OFFLINE = "healthy", "draining", "offline"
STARTED = "the node says that it has started"  # and does not list it yet
AWAY = "its node went offline"  # of one that runs, until it is decided whether it is still wanted there


_RANKS: dict[str, int] = {
    ReplicaState.READY: 3,
    ReplicaState.STARTING: 2,
    ReplicaState.RESTARTING: 2,
    ReplicaState.STOPPING: 1,
}


@dataclass(frozen=True)
class Times:
    """All in one place, so that tests run with short ones."""

    ask_again: timedelta = timedelta(seconds=5)  # nobody said what became of an order
    our_fault: timedelta = timedelta(seconds=2)  # it could not be sent
    believe: timedelta = timedelta(seconds=15)  # said to have started, and does not show
    settle: timedelta = timedelta(seconds=2)  # gateways that have not heard yet may still send one
    stop_again: timedelta = timedelta(seconds=15)
    orphan: timedelta = timedelta(seconds=120)  # a process nobody wants


@dataclass(frozen=True)
class Place:
    """A node as a replica sees it."""

    id: str
    name: str
    status: str = HEALTHY
    bus_down: bool = False
    accepts: bool = True  # a Corral worker: LocalAI workers take no such orders
    boot_id: str = ""
    known: bool = True  # what follows was told by the worker that runs now
    processes: tuple[ReplicaProcess, ...] = ()
    quiet: Mapping[str, ProcessActivity] = field(default_factory=dict)  # by process

    @property
    def reachable(self) -> bool:
        return not self.why_unreachable

    @property
    def why_unreachable(self) -> str:
        """Why no order gets there and nothing new is heard; empty when the node is reachable."""
        if self.status not in (HEALTHY, DRAINING):
            return f"{self.name} is {self.status}"
        return f"{self.name} cannot reach the bus" if self.bus_down else ""

    def process_of(self, row: DesiredReplica) -> ReplicaProcess | None:
        """The one that was ordered, or one under the same key and of the same revision: its worker starts it again when
        it ends, and beside it when its backend is upgraded. Of several the one that is furthest, then the latest."""
        key = (row.model, row.replica, row.revision)
        own = [
            process
            for process in self.processes
            if process.process_id == row.process_id
            # What is left of a try before says nothing of one that is on its way.
            or ((process.model, process.replica, process.revision) == key and (row.ready_at or _rank(process) > 1))
        ]
        return max(reversed(own), key=_rank, default=None)


def _rank(process: ReplicaProcess) -> int:
    return _RANKS.get(process.state, 0)


# What is to be done, or has become of it.


@dataclass(frozen=True)
class Start:
    """`row` as it is once the order is on its way."""

    row: DesiredReplica


@dataclass(frozen=True)
class Stop:
    row: DesiredReplica
    process_id: str


@dataclass(frozen=True)
class Keep:
    """Nothing to send; `row` may have changed."""

    row: DesiredReplica


@dataclass(frozen=True)
class Gone:
    """There is nothing of it any more: the row goes."""

    row: DesiredReplica
    why: str = ""


@dataclass(frozen=True)
class Broke:
    """It did not come up, or broke down for good. The row goes; what is left of it on the node is cleared away."""

    row: DesiredReplica
    error: str
    everywhere: bool = False  # another node would not do any better


Next = Start | Stop | Keep | Gone | Broke


@dataclass(frozen=True)
class Ready:
    """Whether all is there that its process needs."""

    backend: bool = False
    trouble: str = ""  # why it will not be
    everywhere: bool = False  # and neither on any other node


def next_of(row: DesiredReplica, place: Place | None, ready: Ready, now: datetime, epoch: int, times: Times) -> Next:
    if place is None:
        return Gone(row, "its node is gone")
    match row.stage:
        case ReplicaStage.PLACED:
            return _placed(row, place, ready, now, epoch)
        case ReplicaStage.ORDERED:
            return _ordered(row, place, now, epoch, times)
        case ReplicaStage.RUNNING:
            return _running(row, place, now)
        case ReplicaStage.LEAVING:
            return _leaving(row, place, now, times)


def _placed(row: DesiredReplica, place: Place, ready: Ready, now: datetime, epoch: int) -> Next:
    if place.status != HEALTHY or place.bus_down:
        return Broke(row, f"{place.name} is {'cut off' if place.bus_down else place.status}")
    if ready.trouble:
        return Broke(row, ready.trouble, ready.everywhere)
    if not ready.backend or row.files is None or (row.next_try_at is not None and row.next_try_at > now):
        return Keep(row)
    return _start(row, place, now, epoch, attempt=row.attempt + 1)


def _start(row: DesiredReplica, place: Place, now: datetime, epoch: int, *, attempt: int) -> Start:
    again = attempt == row.attempt
    return Start(
        replace(
            row,
            stage=ReplicaStage.ORDERED,
            attempt=attempt,
            process_id=row.process_id if again else f"{row.op_id}-{attempt}",
            epoch=epoch,
            sent_at=now,
            accepted_at=row.accepted_at if again and row.boot_id == place.boot_id else None,
            boot_id=place.boot_id,
            next_try_at=None,
            updated_at=now,
        )
    )


def _ordered(row: DesiredReplica, place: Place, now: datetime, epoch: int, times: Times) -> Next:
    process = place.process_of(row) if place.known else None
    if process is not None:
        match process.state:
            case ReplicaState.READY:
                return Keep(
                    replace(row, stage=ReplicaStage.RUNNING, ready_at=now, error="", next_try_at=None, updated_at=now)
                )
            case ReplicaState.FAILED:
                return Broke(row, process.error or "its process ended")
            case ReplicaState.STOPPING:
                return Broke(row, "it was stopped while it started")
            case _:
                return Keep(row)
    if place.status == OFFLINE:
        return Broke(row, f"{place.name} went offline while it started there")
    if not place.reachable:
        return Keep(row)
    if row.next_try_at is not None:  # somebody said how long to wait
        due = row.next_try_at <= now
    else:
        heard = max(moment for moment in (row.accepted_at, row.sent_at, row.created_at) if moment is not None)
        due = heard + times.ask_again <= now
    restarted = row.boot_id != place.boot_id
    if place.known and (restarted or (row.error == STARTED and due)):
        # An earlier worker was at it, and what it had begun ended with it: the order is spent.
        return _start(replace(row, error=""), place, now, epoch, attempt=row.attempt + 1)
    unsent = row.epoch != epoch and row.accepted_at is None  # whoever was about to may have died before
    return _start(row, place, now, epoch, attempt=row.attempt) if due or unsent else Keep(row)


def _running(row: DesiredReplica, place: Place, now: datetime) -> Next:
    if place.status == OFFLINE and row.error != AWAY:
        return Keep(replace(row, error=AWAY, updated_at=now))
    if not place.known or place.status == OFFLINE:
        return Keep(row)  # silence is not death: what is there will be told
    process = place.process_of(row)
    if process is None:
        return Gone(row, "its process is gone")
    if process.state == ReplicaState.FAILED:
        return Broke(row, process.error or "its process ended, and was started again in vain")
    if process.state == ReplicaState.STOPPING:
        return Keep(
            replace(row, stage=ReplicaStage.LEAVING, leaving_at=now, reason="it is being stopped", updated_at=now)
        )
    return Keep(row)


def _leaving(row: DesiredReplica, place: Place, now: datetime, times: Times) -> Next:
    if not place.known or not place.reachable:
        return Keep(row)
    process = place.process_of(row)
    told = row.stop_attempt > 0
    if process is None and (told or row.attempt == 0):
        return Gone(row, "it has left")
    if row.next_try_at is not None and row.next_try_at > now:
        return Keep(row)
    # Also when it was told before: that may have been another process of the same replica.
    if process is not None and not _may_end(row, process, place, now, times):
        return Keep(row)
    # One that is not listed may be on its way: its files are still being fetched. The order to stop ends that, too.
    process_id = process.process_id if process is not None else row.process_id
    sent = replace(
        row, stop_attempt=row.stop_attempt + 1, sent_at=now, next_try_at=now + times.stop_again, updated_at=now
    )
    return Stop(sent, process_id)


def _may_end(row: DesiredReplica, process: ReplicaProcess, place: Place, now: datetime, times: Times) -> bool:
    if row.force or process.state != ReplicaState.READY:
        return True
    if row.leaving_at is not None and now - row.leaving_at < times.settle:
        return False
    quiet = place.quiet.get(process.process_id, ProcessActivity())
    return quiet.known and quiet.in_flight == 0


def leave(row: DesiredReplica, reason: str, now: datetime, *, force: bool = False) -> DesiredReplica:
    if row.stage is ReplicaStage.LEAVING:
        return replace(row, force=True, next_try_at=None) if force and not row.force else row
    return replace(
        row, stage=ReplicaStage.LEAVING, reason=reason, leaving_at=now, force=force, next_try_at=None, updated_at=now
    )


# What is heard of orders.


def hear(row: DesiredReplica, heard: ReplicaObservation, now: datetime, times: Times) -> DesiredReplica | Broke:
    """About the order that was sent last; anything else says nothing any more."""
    if row.stage is not ReplicaStage.ORDERED or (row.op_id, row.attempt) != (
        heard.order.operation,
        heard.order.attempt,
    ):
        return row
    match heard:
        case OrderAccepted():
            return replace(row, accepted_at=now, next_try_at=None, updated_at=now)
        case OrderUnconfirmed():
            return replace(row, next_try_at=now + times.ask_again, updated_at=now)
        case OrderNotSent():
            return replace(row, next_try_at=now + times.our_fault, updated_at=now)
        case WorkerUnreachable():
            return Broke(row, heard.reason)
        case OrderEnded(success=True):
            if row.error == STARTED:
                return row
            # What counts is what the node lists, and that is on its way.
            return replace(row, error=STARTED, next_try_at=now + times.believe, updated_at=now)
        case OrderEnded(error=error):
            return Broke(row, error or "the node gave no reason")
