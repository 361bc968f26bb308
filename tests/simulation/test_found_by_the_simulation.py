"""What seeds have found, each as the shortest story that shows it. The seeds themselves mean something else as soon as
the simulation changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from corral.contract.messages.backends import BackendList, ListBackends
from corral.controller.operations.requests import OperationKind, parse_request
from corral.store.records import BackendRequest, Scope, ScopeKind
from corral.store.tables import models
from tests.simulation.leftovers import add_leftover
from tests.simulation.model_traffic import Clients, ModelPeople
from tests.simulation.real_orders import WorkerWithRealOrders
from tests.simulation.simulation import Plan, Simulation, simulate
from tests.simulation.workers import CorralWorker, LocalAIWorker, Worker

Story = Callable[[Simulation], Coroutine[Any, Any, None]]


def told(template: Path, story: Story) -> Simulation:
    """And then all comes to rest, as ever."""
    return simulate(0, template, chaos=story, plan=Plan(rest_s=1200))


async def begin(sim: Simulation, *kinds: type[Worker]) -> list[Worker]:
    sim.store_luck.waits = 0.0
    sim.start_controller("c0")
    workers = [kind(sim, f"w{number}", sim.chance(f"w{number}")) for number, kind in enumerate(kinds)]
    for worker in workers:
        sim.add_worker(worker)
    await asyncio.sleep(30)
    return workers


async def ask(sim: Simulation, kind: str, **more: Any) -> str:
    controller = sim.some_controller()
    assert controller is not None
    request = parse_request(OperationKind(kind), BackendRequest("vllm"), scope=Scope(ScopeKind.ALL), **more)
    accepted = await controller.backends.operations.accept(request)
    sim.accepted[accepted.operation_id] = kind
    return accepted.operation_id


async def define(sim: Simulation, name: str, **more: Any) -> models.StoredModel:
    controller = sim.some_controller()
    assert controller is not None
    people = ModelPeople(sim, sim.chance("people"))
    await people.put(controller, {"name": name, "backend": "vllm", "memory": "4GiB", **more})
    async with sim.store.read() as tx:
        return (await models.list_(tx, [name]))[0]


@pytest.mark.parametrize("kind", [CorralWorker, LocalAIWorker])
def test_claims_whose_commit_is_in_doubt_are_sent(template: Path, kind: type[Worker]) -> None:
    """They stood there as sent under our own epoch, and nobody ever sent them (seed 50)."""
    ended: list[bool] = []

    async def story(sim: Simulation) -> None:
        (worker,) = await begin(sim, kind)
        await ask(sim, "install")
        sim.store_luck.doubt = "backend_intents"
        await asyncio.sleep(150)
        ended.append("vllm" in worker.disk.installed)

    told(template, story)
    assert ended == [True]


def test_a_rule_that_decides_again_can_be_retried_though_its_row_has_ended(template: Path) -> None:
    """It was parked where nobody could see it, and a retry said that nothing of it was failing (seed 16)."""

    async def story(sim: Simulation) -> None:
        (worker,) = await begin(sim, CorralWorker)
        await ask(sim, "install")
        await asyncio.sleep(60)
        assert "vllm" in worker.disk.installed
        sim.luck.fails = sim.luck.permanently = 1.0
        await ask(sim, "delete")
        await asyncio.sleep(60)
        sim.catalogue.publish("vllm")
        newer = await ask(sim, "install")  # the delete is superseded
        await asyncio.sleep(60)
        controller = sim.some_controller()
        assert controller is not None
        await controller.backends.operations.cancel(newer)  # and decides again, and fails again
        await asyncio.sleep(60)

    told(template, story)


def test_an_order_nobody_heard_is_sent_again_though_the_database_was_away(template: Path) -> None:
    """The node could not be marked as unreachable, so nobody said what became of the order (seed 180)."""
    ended: list[bool] = []

    async def story(sim: Simulation) -> None:
        (worker,) = await begin(sim, CorralWorker)
        assert worker.bus is not None
        worker.bus.lose_connection("cut off")
        await ask(sim, "install")
        await asyncio.sleep(0.2)  # the order is on its way, for the first time of two
        sim.store_luck.away = True
        await asyncio.sleep(10)
        sim.store_luck.away = False
        worker.bus.restore_connection()
        await asyncio.sleep(400)
        ended.append("vllm" in worker.disk.installed)

    told(template, story)
    assert ended == [True]


def test_an_inventory_from_before_an_unheard_delete_proves_nothing(template: Path) -> None:
    """The delete was done, its sender had died, and the next install was called a success at once (seed 2002)."""

    async def story(sim: Simulation) -> None:
        (worker,) = await begin(sim, CorralWorker)
        await ask(sim, "install")
        await asyncio.sleep(60)
        sim.luck.takes_s = (0.2, 0.3)
        await ask(sim, "delete")
        deleted = asyncio.Event()
        worker.on_change = deleted.set
        await deleted.wait()
        assert worker.bus is not None
        worker.bus.lose_connection("cut off")  # before it could tell
        sim.kill_controller("c0")
        sim.start_controller("c1")
        await asyncio.sleep(70)  # it is heard of, over HTTP: that it lives, and nothing else
        await ask(sim, "install")
        worker.bus.restore_connection()
        await asyncio.sleep(5)

    told(template, story)


class LongToTell(LocalAIWorker):
    """BackendRequest what it has, it answers just in time."""

    asked: asyncio.Event | None = None

    async def list_backends(self, asked: ListBackends, tokens: object) -> BackendList:
        if self.asked is not None:
            self.asked.set()
            await asyncio.sleep(9.0)
        return await super().list_backends(asked, tokens)


def test_an_answer_that_waited_for_others_does_not_undo_what_was_found_since(template: Path) -> None:
    """All are asked at once what they have. What one said before an install was written after it, as soon as the
    slowest had answered; the delete that came next found nothing to do (seed 207)."""
    there: list[bool] = []

    async def story(sim: Simulation) -> None:
        quick, slow = await begin(sim, LocalAIWorker, LongToTell)
        assert isinstance(slow, LongToTell)
        sim.luck.takes_s = (0.2, 0.3)
        slow.asked = asyncio.Event()
        await slow.asked.wait()
        await asyncio.sleep(0.5)
        await ask(sim, "install")
        await asyncio.sleep(6)
        there.append("vllm" in quick.disk.installed)
        await asyncio.sleep(4)  # by now the slow one has answered
        await ask(sim, "delete")
        await asyncio.sleep(10)
        there.append("vllm" in quick.disk.installed)
        slow.asked = None

    told(template, story)
    assert there == [True, False]


def test_no_such_order_is_no_proof_either(template: Path) -> None:
    """Told to stop a delete that was done already, a worker has no such order; what was on file was from before it."""

    async def story(sim: Simulation) -> None:
        (worker,) = await begin(sim, CorralWorker)
        await ask(sim, "install")
        await asyncio.sleep(60)
        deleted = asyncio.Event()
        worker.on_change = deleted.set
        await ask(sim, "delete")
        await deleted.wait()
        controller = sim.controllers["c0"]
        assert controller is not None
        controller.bus.frozen = True  # nobody hears how it ended
        await asyncio.sleep(2)
        controller.bus.frozen = False
        await ask(sim, "install")
        await asyncio.sleep(3)

    told(template, story)


def test_a_node_of_a_rollout_does_not_wait_for_itself(template: Path) -> None:
    """A LocalAI worker died over an upgrade; asked anew, it had to wait for its own last try (seed 6)."""

    async def story(sim: Simulation) -> None:
        first, _ = await begin(sim, LocalAIWorker, LocalAIWorker)
        await ask(sim, "install")
        await asyncio.sleep(90)
        sim.luck.takes_s = (20.0, 21.0)
        await ask(sim, "upgrade", max_parallel="1")
        await asyncio.sleep(12)
        sim.kill_controller("c0")
        sim.kill_worker(first.name, 1.0)
        sim.start_controller("c1")
        sim.luck.takes_s = (0.2, 0.3)

    told(template, story)


def test_a_load_whose_node_turns_out_to_have_a_rival_ends_before_another_begins(template: Path) -> None:
    """The files were still on their way when a process of the same exclusive group was found running there. The load
    went on, and a second one of the same model began elsewhere (seeds 0 and 450)."""
    rivals: list[set[str]] = []

    async def story(sim: Simulation) -> None:
        workers = await begin(sim, WorkerWithRealOrders, WorkerWithRealOrders)
        await ask(sim, "install")
        await asyncio.sleep(60)
        ant = await define(sim, "ant", concurrency_groups=["big"])
        await define(sim, "bee", concurrency_groups=["big"])
        sim.luck.takes_s = (40.0, 41.0)  # of a process to become ready
        await Clients(sim, sim.chance("clients")).ask_for("bee")
        await asyncio.sleep(30)
        (worker,) = [one for one in workers if one.disk.processes]
        add_leftover(sim, worker, ant, ant.revision, replica=0, takes_s=100.0)
        await asyncio.sleep(200)
        rivals.extend({process.order.model for process in one.disk.processes.values()} for one in workers)

    told(template, story)
    assert sorted(map(sorted, rivals)) == [["ant"], ["bee"]]


def test_two_edited_models_of_one_group_do_not_wait_for_each_other(template: Path) -> None:
    """Each answered as before the edit, and its own load kept it from making room for the other's (seed 2330)."""
    running: list[set[str]] = []

    async def story(sim: Simulation) -> None:
        (worker,) = await begin(sim, WorkerWithRealOrders)
        await ask(sim, "install")
        await asyncio.sleep(60)
        clients = Clients(sim, sim.chance("clients"))
        for name in ("ant", "bee"):
            await define(sim, name)
            await clients.ask_for(name)
        await asyncio.sleep(10)  # both have only just been loaded: neither gives way at once
        running.append({process.order.model for process in worker.disk.processes.values()})
        edit = {"concurrency_groups": ["big"], "context_size": 4096}
        await asyncio.gather(*(define(sim, name, **edit) for name in ("ant", "bee")))
        await asyncio.sleep(120)
        running.append({process.order.model for process in worker.disk.processes.values()})

    told(template, story)
    assert running[0] == {"ant", "bee"}
    assert len(running[1]) == 1
