"""A seed is a run that can be seen again, event by event; and a controller that is wrong does break it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from msgspec import structs

from corral.contract.messages.nodes import HttpHeartbeat
from corral.controller.backends import outcomes, plan
from corral.controller.health import classify
from corral.controller.operations import progress
from corral.controller.orders.backend_calls import Dispatch
from corral.controller.registry.heartbeats import Heartbeats
from corral.controller.replicas import lifecycle as life
from corral.controller.scheduler import eviction, placement
from corral.controller.scheduler.world import ReplicaState
from corral.store.engine.schema import upsert_whole
from corral.store.records import IntentStage
from corral.store.tables.nodes import Heartbeat
from corral.worker.agent.orders.replicas import ReplicaOrders
from tests.simulation.simulation import Broken, Simulation, simulate
from tests.simulation.trials import Trials
from tests.simulation.trouble import Trouble, chaos
from tests.simulation.virtual_time import VirtualLoop
from tests.simulation.workers import CorralWorker

_SEEDS = range(1000, 1040)
_AGAIN = """
import sys
from pathlib import Path
from tests.simulation.simulation import simulate
from tests.simulation.trouble import chaos
for seed in map(int, sys.argv[2:]):
    print(simulate(seed, Path(sys.argv[1]), chaos=chaos).digest())
"""


@pytest.mark.parametrize("number", [3, 17])
def test_the_same_seed_is_the_same_run(number: int, template: Path) -> None:
    first, second = (simulate(number, template, chaos=chaos) for _ in range(2))
    assert first.trace == second.trace
    assert len(first.trace) > 500


def test_another_seed_is_another_run(template: Path) -> None:
    assert simulate(1, template, chaos=chaos).digest() != simulate(2, template, chaos=chaos).digest()


def test_sets_of_tasks_do_not_depend_on_addresses_in_memory() -> None:
    """asyncio keeps them in sets, and cancels and wakes them in the order of these."""

    def hashes() -> list[int]:
        loop = VirtualLoop()
        tasks = [loop.create_task(asyncio.sleep(0)) for _ in range(3)]
        loop.run_until_complete(asyncio.gather(*tasks))
        loop.close()
        return [hash(task) for task in tasks]

    assert hashes() == hashes() == [0, 1, 2]


@pytest.mark.long
def test_a_run_does_not_depend_on_the_process(template: Path) -> None:
    """Sets are walked in another order in every process unless somebody sorts."""
    # In 19, requests to two workers are cancelled at once; in 627, builds of two backends are looked up for one node at
    # the same moment.
    seeds = [4, 9, 19, 627]
    here = [simulate(seed, template, chaos=chaos).digest() for seed in seeds]
    words = [sys.executable, "-c", _AGAIN, str(template), *map(str, seeds)]
    for salt in ("1", "2"):
        surroundings = {**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": "."}
        there = subprocess.run(words, env=surroundings, capture_output=True, text=True, check=True, timeout=60)
        assert there.stdout.split() == here


@pytest.mark.parametrize("fault", [Trouble._bus_breaks, Trouble._bus_falls_silent, Trouble._database_away])
def test_no_timer_of_a_fault_outlives_the_time_of_trouble(template: Path, fault: Callable[[Trouble], None]) -> None:
    """One reconnected the machine that a trial had made silent, another gave a controller a new grace period: seeds
    245 and 1369 said that a silent node was not offline, and that two of three were."""
    seen: list[tuple[bool, bool]] = []

    async def story(sim: Simulation) -> None:
        sim.add_worker(CorralWorker(sim, "w0", sim.chance("w0")))
        sim.start_controller("c0")
        await asyncio.sleep(30)
        buses, trouble = sim.buses(), Trouble(sim, sim.chance("trouble"))
        for _ in range(10):
            fault(trouble)
        sim.heal()
        since = [bus.connected_since for bus in buses]
        for bus in buses:
            bus.frozen = True
        sim.store_luck.away = True
        await asyncio.sleep(100)
        is_as_healed = [bus.connected_since for bus in buses] == since and all(bus.frozen for bus in buses)
        seen.append((is_as_healed, sim.store_luck.away))

    simulate(0, template, chaos=story)
    assert seen == [(True, True)]


def break_something(template: Path, *patches: Any, said: str = "") -> str:
    """What is said when one of the seeds notices, the first that says `said`; fails when none does."""
    for patch in patches:
        patch.start()
    try:
        for seed in _SEEDS:
            try:
                simulate(seed, template, chaos=chaos)
            except Broken as error:
                if said in str(error).splitlines()[0]:
                    return str(error).splitlines()[0]
    finally:
        for patch in patches:
            patch.stop()
    pytest.fail("nobody noticed")


def test_a_success_by_word_of_mouth_is_noticed(template: Path) -> None:
    """The bug of the system this one replaces: what counts is that the call returned."""
    honest = plan._Backend._in_progress

    def believes(self: Any, want: Any, intent: Any, order: Any) -> Any:
        if intent.accepted_at is not None:
            return plan.Done(self.name, want.operation, want.generation, intent.kind, intent.digest)
        return honest(self, want, intent, order)

    said = break_something(template, mock.patch.object(plan._Backend, "_in_progress", believes))
    assert "is called a success" in said


def test_an_intent_that_is_given_up_is_noticed(template: Path) -> None:
    """Three failures and it is dropped: as good as forgotten."""

    def gives_up(intent: Any, reason: str, now: Any, **known: Any) -> Any:
        failed = honest(intent, reason, now, **known)
        return structs.replace(failed, stage=IntentStage.DONE) if failed.failures >= 2 else failed

    honest = outcomes.failed
    said = break_something(template, mock.patch.object(outcomes, "failed", gives_up))
    assert "success" in said or "not at rest" in said


@pytest.mark.long
def test_orders_lost_with_their_controller_are_noticed(template: Path) -> None:
    """Whoever leads next takes its predecessor's calls for its own."""
    blind = mock.patch.object(plan._Backend, "_is_unsure", new=mock.Mock(return_value=False))
    assert "not at rest" in break_something(template, blind)


def test_a_row_written_after_its_end_is_noticed(template: Path) -> None:
    from corral.store.tables import operation_nodes

    said = break_something(
        template,
        mock.patch.object(operation_nodes, "_PUT", upsert_whole(operation_nodes.table)),
        mock.patch.object(
            progress, "merge_progress", lambda row, event: structs.replace(row, seq=event.seq, phase=event.phase)
        ),
    )
    assert "had ended as" in said or "went back" in said


def test_an_outage_taken_for_the_death_of_all_is_noticed(template: Path) -> None:
    """No guard: a network that is cut takes the whole fleet offline."""

    async def cut(sim: Simulation) -> None:
        sim.start_controller("c0")
        for number in range(5):
            sim.add_worker(CorralWorker(sim, f"w{number}", sim.chance(f"w{number}")))
        await asyncio.sleep(60)
        for worker in sim.workers.values():
            assert worker.bus is not None
            worker.bus.frozen = True
        await asyncio.sleep(200)

    simulate(0, template, chaos=cut)
    careless = mock.patch.object(classify, "_is_mass_outage", new=mock.Mock(return_value=False))
    with careless, pytest.raises(Broken, match="of 5 nodes were taken offline"):
        simulate(0, template, chaos=cut)


def test_results_that_are_not_awaited_are_no_loss(template: Path) -> None:
    """The other way round: events only make things quick. Without any of them all comes to rest too."""

    async def deaf(*_: Any) -> None:
        return None

    with mock.patch.object(Dispatch, "on_result", deaf):
        for seed in range(2000, 2003):
            simulate(seed, template, chaos=chaos)


def test_work_that_nobody_can_watch_is_noticed(template: Path) -> None:
    """A machine that joins later is given its orders, and its operation does not tell."""
    blind = mock.Mock(return_value=[])
    said = break_something(template, mock.patch.object(progress, "_late_rows", new=blind))
    assert "shows no row" in said


def test_a_busy_process_that_is_stopped_is_noticed(template: Path) -> None:
    """Nobody waits for its requests, neither the controller nor the worker."""

    async def at_once(*_: Any) -> None:
        return None

    careless = mock.patch.object(life, "_may_end", new=mock.Mock(return_value=True))
    said = break_something(template, careless, mock.patch.object(ReplicaOrders, "_drain", at_once))
    assert "is stopped with requests under way" in said


@pytest.mark.long
def test_a_schedule_that_is_evicted_below_its_least_is_noticed(template: Path) -> None:
    """Whatever is idle may go."""

    def careless(self: eviction.EvictionRules, replica: Any, _with_them: Any) -> str:
        if replica.state is ReplicaState.STOPPING:
            return "is stopping"
        return "is the model itself" if replica.model == self.model.name else ""

    said = break_something(template, mock.patch.object(eviction.EvictionRules, "_permanent_reason", careless))
    assert "had to end replicas" in said or "not at rest" in said


def test_two_of_an_exclusive_group_on_one_node_are_noticed(template: Path) -> None:
    blind = mock.patch.object(placement, "rivals", new=mock.Mock(return_value=[]))
    break_something(template, blind, said="of the same exclusive group")


@pytest.mark.long
def test_starts_that_nobody_asks_about_again_are_noticed(template: Path) -> None:
    """An order is believed to have arrived, whatever the node lists."""
    honest = life._ordered

    def believes(row: Any, host: Any, now: Any, epoch: int, times: Any) -> Any:
        there = host.known and host.process_of(row) is not None
        return honest(row, host, now, epoch, times) if there else life.Keep(row)

    assert "not at rest" in break_something(template, mock.patch.object(life, "_ordered", believes))


def _ignored(self: Heartbeats, node_id: str, _beat: HttpHeartbeat) -> None:
    self._keep(Heartbeat(node_id=node_id))


def _never(*_: object, **__: object) -> bool:
    return False


@pytest.mark.parametrize(
    ("trial", "fault", "said"),
    [
        ("bus away", mock.patch.object(Heartbeats, "receive_http", _ignored), "said for a minute that its bus is down"),
        ("machines silent", mock.patch.object(classify, "_is_silent", _never), "has been silent for"),
        ("install cancelled", mock.patch.object(plan._Backend, "_is_to_be_stopped", _never), "which was cancelled"),
    ],
)
def test_a_trial_notices_what_it_is_for(template: Path, trial: str, fault: Any, said: str) -> None:
    async def story(sim: Simulation) -> None:
        sim.start_controller("c0")
        sim.add_worker(CorralWorker(sim, "w0", sim.chance("w0")))
        await asyncio.sleep(90)
        await Trials(sim).run(trial)

    simulate(0, template, chaos=story)
    with fault, pytest.raises(Broken, match=said):
        simulate(0, template, chaos=story)
