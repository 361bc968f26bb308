"""The lifecycle of one replica: decides its next step. Pure.

    placed ──▶ ordered ──▶ running ──▶ leaving ──▶ (no row)
      └───────────┴── failed: no row, and the model's plan decides again

Only a process that its node lists counts as running; the reply to an order proves nothing. An order is sent again under
the same number until its outcome is known: a worker carries out the same order once and reports its outcome as often as
it receives the order.
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
from corral.controller.inventory.activity import ProcessActivity
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
REPORTED_STARTED = "the node reported that it has started"  # but does not list it yet
NODE_OFFLINE = "its node went offline"  # of a running replica, until the plan keeps or retires it


_RANKS: dict[str, int] = {
    ReplicaState.READY: 3,
    ReplicaState.STARTING: 2,
    ReplicaState.RESTARTING: 2,
    ReplicaState.STOPPING: 1,
}


@dataclass(frozen=True)
class LifecycleTimes:
    resend_after: timedelta = timedelta(seconds=5)  # an order without a known outcome is sent again
    send_retry: timedelta = timedelta(seconds=2)  # an order that could not be sent
    listing_grace: timedelta = timedelta(seconds=15)  # between the report of a start and the process in the node's list
    drain_grace: timedelta = timedelta(seconds=2)  # gateways with an old view may still send a request
    stop_retry: timedelta = timedelta(seconds=15)
    orphan_after: timedelta = timedelta(seconds=120)  # an idle process without a row is stopped


@dataclass(frozen=True)
class ReplicaHost:
    """A node on which replicas run: its status, processes and their activity."""

    id: str
    name: str
    status: str = HEALTHY
    bus_down: bool = False
    accepts: bool = True  # orders of this controller; not of a LocalAI worker that is not served from here
    boot_id: str = ""
    known: bool = True  # the worker that runs now has reported its processes
    processes: tuple[ReplicaProcess, ...] = ()
    activity: Mapping[str, ProcessActivity] = field(default_factory=dict)  # by process
    switching: frozenset[str] = frozenset()  # models whose processes end for a switch, and start again

    @property
    def reachable(self) -> bool:
        return not self.why_unreachable

    @property
    def why_unreachable(self) -> str:
        """Why no order arrives there and no report comes back; empty when the node is reachable."""
        if self.status not in (HEALTHY, DRAINING):
            return f"{self.name} is {self.status}"
        return f"{self.name} cannot reach the bus" if self.bus_down else ""

    def process_of(self, row: DesiredReplica) -> ReplicaProcess | None:
        """Of several processes the one that is furthest, then the latest."""
        return max(reversed(self.processes_of(row)), key=_rank, default=None)

    def processes_of(self, row: DesiredReplica) -> list[ReplicaProcess]:
        """The process that was ordered, and those with the same key and revision: the worker starts it again when it
        ends, and beside it when its backend is upgraded."""
        key = (row.model, row.replica, row.revision)
        return [
            process
            for process in self.processes
            if process.process_id == row.process_id
            # A leftover of an earlier attempt says nothing about one that is starting.
            or ((process.model, process.replica, process.revision) == key and (row.ready_at or _rank(process) > 1))
        ]


def _rank(process: ReplicaProcess) -> int:
    return _RANKS.get(process.state, 0)


@dataclass(frozen=True)
class Start:
    """Send the order to start; `row` as it is stored before."""

    row: DesiredReplica


@dataclass(frozen=True)
class Stop:
    """Send the order to stop; `row` as it is stored before."""

    row: DesiredReplica
    process_id: str


@dataclass(frozen=True)
class Keep:
    """Nothing to send; `row` may have changed."""

    row: DesiredReplica


@dataclass(frozen=True)
class ReplicaGone:
    """No process is left: the row is deleted."""

    row: DesiredReplica
    why: str = ""


@dataclass(frozen=True)
class ReplicaFailed:
    """It did not start, or failed for good. The row is deleted and a leftover process is stopped."""

    row: DesiredReplica
    error: str
    on_every_node: bool = False  # it would fail on any other node, too


NextStep = Start | Stop | Keep | ReplicaGone | ReplicaFailed


@dataclass(frozen=True)
class Prerequisites:
    """Whether the node has what the process needs."""

    backend: bool = False  # it is installed
    error: str = ""  # why the node will not have it
    on_every_node: bool = False  # nor any other node


def next_step(
    row: DesiredReplica,
    host: ReplicaHost | None,
    ready: Prerequisites,
    now: datetime,
    epoch: int,
    times: LifecycleTimes,
) -> NextStep:
    if host is None:
        return ReplicaGone(row, "its node is gone")
    match row.stage:
        case ReplicaStage.PLACED:
            return _placed(row, host, ready, now, epoch)
        case ReplicaStage.ORDERED:
            return _ordered(row, host, now, epoch, times)
        case ReplicaStage.RUNNING:
            return _running(row, host, now)
        case ReplicaStage.LEAVING:
            return _leaving(row, host, now, times)


def _placed(row: DesiredReplica, host: ReplicaHost, ready: Prerequisites, now: datetime, epoch: int) -> NextStep:
    if host.status != HEALTHY or host.bus_down:
        return ReplicaFailed(row, f"{host.name} is {'cut off' if host.bus_down else host.status}")
    if ready.error:
        return ReplicaFailed(row, ready.error, ready.on_every_node)
    if not ready.backend or row.files is None or (row.next_try_at is not None and row.next_try_at > now):
        return Keep(row)
    return _start(row, host, now, epoch, attempt=row.attempt + 1)


def _start(row: DesiredReplica, host: ReplicaHost, now: datetime, epoch: int, *, attempt: int) -> Start:
    again = attempt == row.attempt
    return Start(
        replace(
            row,
            stage=ReplicaStage.ORDERED,
            attempt=attempt,
            process_id=row.process_id if again else f"{row.op_id}-{attempt}",
            epoch=epoch,
            sent_at=now,
            accepted_at=row.accepted_at if again and row.boot_id == host.boot_id else None,
            boot_id=host.boot_id,
            next_try_at=None,
            updated_at=now,
        )
    )


def _ordered(row: DesiredReplica, host: ReplicaHost, now: datetime, epoch: int, times: LifecycleTimes) -> NextStep:
    process = host.process_of(row) if host.known else None
    if process is not None:
        match process.state:
            case ReplicaState.READY:
                return Keep(
                    replace(row, stage=ReplicaStage.RUNNING, ready_at=now, error="", next_try_at=None, updated_at=now)
                )
            case ReplicaState.FAILED:
                return ReplicaFailed(row, process.error or "its process ended")
            case ReplicaState.STOPPING:
                return ReplicaFailed(row, "it was stopped while it started")
            case _:
                return Keep(row)
    if host.status == OFFLINE:
        return ReplicaFailed(row, f"{host.name} went offline while it started there")
    if not host.reachable:
        return Keep(row)
    if row.next_try_at is not None:
        due = row.next_try_at <= now
    else:
        last_sign_at = max(moment for moment in (row.accepted_at, row.sent_at, row.created_at) if moment is not None)
        due = last_sign_at + times.resend_after <= now
    restarted = row.boot_id != host.boot_id
    if host.known and (restarted or (row.error == REPORTED_STARTED and due)):
        # An earlier worker process carried out the order, and its start ended with it: a new attempt is needed.
        return _start(replace(row, error=""), host, now, epoch, attempt=row.attempt + 1)
    unsent = row.epoch != epoch and row.accepted_at is None  # the earlier leader may have died before it sent the order
    return _start(row, host, now, epoch, attempt=row.attempt) if due or unsent else Keep(row)


def _running(row: DesiredReplica, host: ReplicaHost, now: datetime) -> NextStep:
    if host.status == OFFLINE and row.error != NODE_OFFLINE:
        return Keep(replace(row, error=NODE_OFFLINE, updated_at=now))
    if not host.known or host.status == OFFLINE:
        return Keep(row)  # no report does not mean that the process ended
    process = host.process_of(row)
    if row.model in host.switching and (process is None or process.state == ReplicaState.STOPPING):
        return Keep(row)  # its successor comes: the replica must not end it
    if process is None:
        return ReplicaGone(row, "its process is gone")
    if process.state == ReplicaState.FAILED:
        return ReplicaFailed(row, process.error or "its process ended, and restarts failed")
    if process.state == ReplicaState.STOPPING:
        return Keep(
            replace(row, stage=ReplicaStage.LEAVING, leaving_at=now, reason="it is being stopped", updated_at=now)
        )
    return Keep(row)


def _leaving(row: DesiredReplica, host: ReplicaHost, now: datetime, times: LifecycleTimes) -> NextStep:
    if not host.known or not host.reachable:
        return Keep(row)
    process = host.process_of(row)
    stop_sent = row.stop_attempt > 0
    if process is None and (stop_sent or row.attempt == 0):
        return ReplicaGone(row, "replica stopped")
    if row.next_try_at is not None and row.next_try_at > now:
        return Keep(row)
    # Also when an order was sent before: that may have been for another process of the same replica.
    if process is not None and not _may_end(row, process, host, now, times):
        return Keep(row)
    # A process that is not listed may still be starting: its node fetches files. The order to stop ends that, too.
    process_id = process.process_id if process is not None else row.process_id
    sent = replace(
        row, stop_attempt=row.stop_attempt + 1, sent_at=now, next_try_at=now + times.stop_retry, updated_at=now
    )
    return Stop(sent, process_id)


def _may_end(
    row: DesiredReplica, process: ReplicaProcess, host: ReplicaHost, now: datetime, times: LifecycleTimes
) -> bool:
    if row.force or process.state != ReplicaState.READY:
        return True
    if row.leaving_at is not None and now - row.leaving_at < times.drain_grace:
        return False
    activity = host.activity.get(process.process_id, ProcessActivity())
    return activity.known and activity.in_flight == 0


def mark_leaving(row: DesiredReplica, reason: str, now: datetime, *, force: bool = False) -> DesiredReplica:
    if row.stage is ReplicaStage.LEAVING:
        return replace(row, force=True, next_try_at=None) if force and not row.force else row
    return replace(
        row, stage=ReplicaStage.LEAVING, reason=reason, leaving_at=now, force=force, next_try_at=None, updated_at=now
    )


def apply_observation(
    row: DesiredReplica, observation: ReplicaObservation, now: datetime, times: LifecycleTimes
) -> DesiredReplica | ReplicaFailed:
    """Apply what became of an order; an observation about an earlier order changes nothing."""
    if row.stage is not ReplicaStage.ORDERED or (row.op_id, row.attempt) != (
        observation.order.operation,
        observation.order.attempt,
    ):
        return row
    match observation:
        case OrderAccepted():
            return replace(row, accepted_at=now, next_try_at=None, updated_at=now)
        case OrderUnconfirmed():
            return replace(row, next_try_at=now + times.resend_after, updated_at=now)
        case OrderNotSent():
            return replace(row, next_try_at=now + times.send_retry, updated_at=now)
        case WorkerUnreachable():
            return ReplicaFailed(row, observation.reason)
        case OrderEnded(success=True):
            if row.error == REPORTED_STARTED:
                return row
            # Only the node's list counts, and that report is still to come.
            return replace(row, error=REPORTED_STARTED, next_try_at=now + times.listing_grace, updated_at=now)
        case OrderEnded(error=error):
            return ReplicaFailed(row, error or "the node gave no reason")
