"""What is to be done with one replica, stage by stage."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from corral.contract.messages.replicas import ReplicaProcess
from corral.controller.inventory.activity import ProcessActivity
from corral.controller.orders.observations import (
    OrderAccepted,
    OrderEnded,
    OrderNotSent,
    OrderUnconfirmed,
    ReplicaObservation,
    WorkerUnreachable,
)
from corral.controller.orders.order import OrderId
from corral.controller.replicas.lifecycle import (
    REPORTED_STARTED,
    Keep,
    LifecycleTimes,
    Prerequisites,
    ReplicaFailed,
    ReplicaGone,
    ReplicaHost,
    Start,
    Stop,
    apply_observation,
    mark_leaving,
    next_step,
)
from corral.controller.replicas.scheduler_replicas import scheduler_replicas
from corral.store.records import DesiredReplica, ReplicaStage

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
TIMES = LifecycleTimes()
ALL_THERE = Prerequisites(backend=True)


def a_row(stage: str = "placed", **known: Any) -> DesiredReplica:
    usual: dict[str, Any] = {"created_at": NOON, "updated_at": NOON, "files": (), "op_id": "op", "process_id": ""}
    if stage != "placed":
        usual |= {"attempt": 1, "process_id": "op-1", "sent_at": NOON, "epoch": 7, "boot_id": "boot-1"}
    usual |= {"node_id": "n", "model": "m", "replica": 0, "revision": "r", "backend": "b", "stage": ReplicaStage(stage)}
    return DesiredReplica(**(usual | known))


def a_process(state: str = "ready", process_id: str = "op-1", **known: Any) -> ReplicaProcess:
    usual: dict[str, Any] = {"model": "m", "replica": 0, "backend": "b", "protocol": "openai", "revision": "r"}
    return ReplicaProcess(process_id=process_id, state=state, **(usual | known))


def a_host(*processes: ReplicaProcess, **known: Any) -> ReplicaHost:
    activity = known.pop("activity", {each.process_id: ProcessActivity(0, True) for each in processes})
    return ReplicaHost("n", "barn", **({"boot_id": "boot-1", "processes": processes, "activity": activity} | known))


def step(
    row: DesiredReplica,
    host: ReplicaHost | None,
    ready: Prerequisites = ALL_THERE,
    after_s: float = 0.0,
    epoch: int = 7,
) -> Any:
    return next_step(row, host, ready, NOON + timedelta(seconds=after_s), epoch, TIMES)


def test_it_is_ordered_once_backend_and_files_are_there() -> None:
    for row, ready in ((a_row(files=None), ALL_THERE), (a_row(), Prerequisites())):
        assert isinstance(step(row, a_host(), ready), Keep)
    started = step(a_row(), a_host())
    assert isinstance(started, Start)
    assert (started.row.stage, started.row.attempt, started.row.process_id) == ("ordered", 1, "op-1")


@pytest.mark.parametrize("status", ["draining", "offline", "unhealthy", "pending"])
def test_what_is_only_placed_does_not_stay_where_nothing_may_start(status: str) -> None:
    assert isinstance(step(a_row(), a_host(status=status)), ReplicaFailed)


def test_trouble_with_backend_or_files_ends_it_with_the_reason() -> None:
    assert step(a_row(), a_host(), Prerequisites(error="no disk")).error == "no disk"
    assert step(a_row(), None) == ReplicaGone(a_row(), "its node is gone")


@pytest.mark.parametrize(
    ("state", "stage"),
    [("ready", "running"), ("starting", "ordered"), ("restarting", "ordered"), ("failed", "failure")],
)
def test_what_the_node_lists_is_what_has_become_of_the_order(state: str, stage: str) -> None:
    found = step(a_row("ordered"), a_host(a_process(state, error="exit 1")))
    assert (found.error if isinstance(found, ReplicaFailed) else found.row.stage) == (
        "exit 1" if stage == "failure" else stage
    )


def test_an_order_is_sent_again_under_the_same_number_until_something_is_known() -> None:
    assert isinstance(step(a_row("ordered"), a_host(), after_s=1), Keep)
    again = step(a_row("ordered"), a_host(), after_s=6)
    assert isinstance(again, Start)
    assert (again.row.attempt, again.row.process_id) == (1, "op-1")
    assert isinstance(step(a_row("ordered"), a_host(), after_s=1, epoch=8), Start), "its sender may have died"
    accepted = a_row("ordered", accepted_at=NOON)
    assert isinstance(step(accepted, a_host(), after_s=1, epoch=8), Keep)


def test_after_a_restart_of_the_worker_it_is_a_new_order() -> None:
    again = step(a_row("ordered", accepted_at=NOON), a_host(boot_id="boot-2"), after_s=1)
    assert isinstance(again, Start)
    assert (again.row.attempt, again.row.process_id, again.row.boot_id) == (2, "op-2", "boot-2")
    assert again.row.accepted_at is None
    assert isinstance(step(a_row("ordered"), a_host(boot_id="boot-2", known=False), after_s=1), Keep)


def test_said_to_have_started_and_never_seen_is_ordered_anew() -> None:
    row = apply_observation(a_row("ordered"), OrderEnded(OrderId("n", "op", 1), True), NOON, TIMES)
    assert isinstance(row, DesiredReplica)
    assert row.error == REPORTED_STARTED
    assert isinstance(step(row, a_host(), after_s=10), Keep)
    again = step(row, a_host(), after_s=16)
    assert isinstance(again, Start)
    assert (again.row.attempt, again.row.error) == (2, "")


@pytest.mark.parametrize(
    ("observations", "wait_s"),
    [
        (OrderAccepted(OrderId("n", "op", 1)), None),
        (OrderUnconfirmed(OrderId("n", "op", 1)), 5.0),
        (OrderNotSent(OrderId("n", "op", 1)), 2.0),
    ],
)
def test_what_answers_mean(observations: ReplicaObservation, wait_s: float | None) -> None:
    row = apply_observation(a_row("ordered"), observations, NOON, TIMES)
    assert isinstance(row, DesiredReplica)
    assert (row.accepted_at is not None) == (wait_s is None)
    assert row.next_try_at == (NOON + timedelta(seconds=wait_s) if wait_s is not None else None)


def test_failures_end_it_and_words_about_other_orders_say_nothing() -> None:
    assert apply_observation(
        a_row("ordered"), OrderEnded(OrderId("n", "op", 1), False, "oom"), NOON, TIMES
    ) == ReplicaFailed(a_row("ordered"), "oom")
    assert isinstance(
        apply_observation(a_row("ordered"), WorkerUnreachable(OrderId("n", "op", 1)), NOON, TIMES), ReplicaFailed
    )
    for row in (a_row("ordered", attempt=2), a_row("running"), a_row("leaving")):
        assert apply_observation(row, OrderEnded(OrderId("n", "op", 1), False, "oom"), NOON, TIMES) == row


def test_a_running_one_ends_only_when_its_node_says_so() -> None:
    row = a_row("running", ready_at=NOON)
    for host in (a_host(known=False), a_host(a_process("restarting"))):
        assert step(row, host) == Keep(row)
    away = msgspec.structs.replace(row, error="its node went offline")
    for before in (row, away):
        assert step(before, a_host(status="offline")) == Keep(away), "noted, and nothing else"
    assert isinstance(step(row, a_host()), ReplicaGone)
    assert isinstance(step(row, a_host(a_process("failed"))), ReplicaFailed)
    assert isinstance(step(row, a_host(a_process(process_id="again"))), Keep), "its worker started it again"
    assert isinstance(step(row, a_host(a_process(process_id="again", revision="other"))), ReplicaGone)


def test_one_that_leaves_finishes_its_work_first() -> None:
    row = mark_leaving(a_row("running"), "it is of no use", NOON)
    busy = a_host(a_process(), activity={"op-1": ProcessActivity(1, True)})
    unknown = a_host(a_process(), activity={"op-1": ProcessActivity(0, False)})
    for host, after_s in ((busy, 3600), (unknown, 3600), (a_host(a_process()), 1)):
        assert isinstance(step(row, host, after_s=after_s), Keep)
    stopped = step(row, a_host(a_process()), after_s=3)
    assert isinstance(stopped, Stop)
    assert stopped.process_id == "op-1"
    assert isinstance(step(stopped.row, a_host(), after_s=4), ReplicaGone)
    again = step(stopped.row, a_host(a_process("stopping")), after_s=30)
    assert isinstance(again, Stop)
    assert again.row.stop_attempt == 2


def test_each_process_of_one_that_leaves_finishes_its_work_first() -> None:
    """Two of the same replica were there; the idle one was told to end, and after it the busy one at once."""
    row = mark_leaving(a_row("running", ready_at=NOON), "it is of no use", NOON)
    both = a_host(
        a_process("ready", "busy"),
        a_process("ready", "idle"),
        activity={"busy": ProcessActivity(1, True), "idle": ProcessActivity(0, True)},
    )
    stopped = step(row, both, after_s=3)
    assert isinstance(stopped, Stop)
    assert stopped.process_id == "idle"
    left = a_host(a_process("ready", "busy"), activity={"busy": ProcessActivity(1, True)})
    assert isinstance(step(stopped.row, left, after_s=60), Keep)
    then = step(stopped.row, a_host(a_process("ready", "busy")), after_s=90)
    assert isinstance(then, Stop)
    assert then.process_id == "busy"


def test_by_force_it_ends_whatever_it_does_and_so_does_one_that_never_served() -> None:
    busy = a_host(a_process(), activity={"op-1": ProcessActivity(1, True)})
    assert isinstance(step(mark_leaving(a_row("running"), "", NOON, force=True), busy), Stop)
    assert isinstance(step(mark_leaving(mark_leaving(a_row("running"), "", NOON), "", NOON, force=True), busy), Stop)
    starting = a_host(a_process("starting"), activity={})
    assert isinstance(step(mark_leaving(a_row("ordered"), "", NOON), starting), Stop)
    fetching = step(mark_leaving(a_row("ordered"), "", NOON), a_host())
    assert isinstance(fetching, Stop)
    assert fetching.process_id == "op-1", "it may be on its way, though it is not listed"


def test_where_nobody_can_be_told_nothing_is_decided() -> None:
    row = replace(mark_leaving(a_row("running"), "", NOON), force=True)
    for host in (a_host(status="offline"), a_host(bus_down=True), a_host(known=False)):
        assert step(row, host) == Keep(row)


def test_which_of_several_processes_is_its_own() -> None:
    running, ordered = a_row("running", ready_at=NOON), a_row("ordered", attempt=2, process_id="op-2")

    def own(row: DesiredReplica, *states: tuple[str, str]) -> str | None:
        found = a_host(*(a_process(state, name) for name, state in states)).process_of(row)
        return found.process_id if found is not None else None

    assert own(running, ("op-1", "ready"), ("next", "starting")) == "op-1"
    assert own(running, ("op-1", "ready"), ("next", "ready")) == "next"
    assert own(running, ("op-1", "stopping"), ("next", "ready")) == "next", "its backend was upgraded"
    assert own(running, ("again", "failed")) == "again"
    assert own(ordered, ("op-1", "failed")) is None, "that was the try before"
    assert own(ordered, ("op-1", "failed"), ("op-2", "starting")) == "op-2"
    assert own(ordered, ("op-2", "failed")) == "op-2"
    assert own(ordered, ("again", "ready")) == "again"
    upgraded = step(running, a_host(a_process("stopping"), a_process("ready", "next")))
    assert upgraded == Keep(running)


@pytest.mark.parametrize("listed", [(), (a_process("stopping"),)], ids=["it is gone", "it stops"])
def test_one_whose_process_ends_for_a_switch_stays_for_its_successor(
    listed: tuple[ReplicaProcess, ...],
) -> None:
    row = a_row("running", ready_at=NOON)
    assert step(row, a_host(*listed, switching=frozenset({"m"}))) == Keep(row)
    assert step(row, a_host(*listed, switching=frozenset({"other"}))) != Keep(row)
    successor = a_process("ready", "op-2")
    assert step(row, a_host(*listed, successor)) == Keep(row)


@pytest.mark.parametrize(
    ("busy", "known", "in_flight", "activity_known"),
    [("op-1", ("op-1", "left"), 3, True), ("left", ("op-1", "left"), 3, True), ("left", ("left",), 3, False)],
)
def test_the_scheduler_counts_the_requests_of_all_processes_of_a_replica(
    busy: str, known: tuple[str, ...], in_flight: int, activity_known: bool
) -> None:
    """All of them end with it: one is replaced beside the other, or was left behind."""
    row = a_row("running", ready_at=NOON)
    activity = {id: ProcessActivity(3 if id == busy else 0, id in known) for id in ("op-1", "left")}
    host = a_host(a_process(), a_process(process_id="left"), activity=activity)
    (found,) = scheduler_replicas([row], {"n": host})
    assert (found.in_flight, found.activity_known, found.idle) == (in_flight, activity_known, False)
