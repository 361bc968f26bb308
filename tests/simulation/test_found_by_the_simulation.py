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
from tests.simulation.house_worker import HouseWorker
from tests.simulation.leftovers import add_leftover
from tests.simulation.model_traffic import Clients, ModelPeople
from tests.simulation.simulation import Plan, Simulation, simulate
from tests.simulation.workers import CorralWorker, LocalAIWorker, Worker

Story = Callable[[Simulation], Coroutine[Any, Any, None]]


def told(template: Path, story: Story) -> Simulation:
    """And then all comes to rest, as ever."""
    return simulate(0, template, chaos=story, plan=Plan(rest_s=1200))


async def begin(house: Simulation, *kinds: type[Worker]) -> list[Worker]:
    house.store_luck.waits = 0.0
    house.start_controller("c0")
    workers = [kind(house, f"w{number}", house.chance(f"w{number}")) for number, kind in enumerate(kinds)]
    for worker in workers:
        house.add_worker(worker)
    await asyncio.sleep(30)
    return workers


async def ask(house: Simulation, kind: str, **more: Any) -> str:
    controller = house.some_controller()
    assert controller is not None
    request = parse_request(OperationKind(kind), BackendRequest("vllm"), scope=Scope(ScopeKind.ALL), **more)
    accepted = await controller.backends.operations.accept(request)
    house.accepted[accepted.operation_id] = kind
    return accepted.operation_id


async def define(house: Simulation, name: str, **more: Any) -> models.StoredModel:
    controller = house.some_controller()
    assert controller is not None
    people = ModelPeople(house, house.chance("people"))
    await people.put(controller, {"name": name, "backend": "vllm", "memory": "4GiB", **more})
    async with house.store.read() as tx:
        return (await models.list_(tx, [name]))[0]


@pytest.mark.parametrize("kind", [CorralWorker, LocalAIWorker])
def test_claims_whose_commit_is_in_doubt_are_sent(template: Path, kind: type[Worker]) -> None:
    """They stood there as sent under our own epoch, and nobody ever sent them (seed 50)."""
    ended: list[bool] = []

    async def story(house: Simulation) -> None:
        (worker,) = await begin(house, kind)
        await ask(house, "install")
        house.store_luck.doubt = "backend_intents"
        await asyncio.sleep(150)
        ended.append("vllm" in worker.disk.installed)

    told(template, story)
    assert ended == [True]


def test_a_rule_that_decides_again_can_be_retried_though_its_row_has_ended(template: Path) -> None:
    """It was parked where nobody could see it, and a retry said that nothing of it was failing (seed 16)."""

    async def story(house: Simulation) -> None:
        (worker,) = await begin(house, CorralWorker)
        await ask(house, "install")
        await asyncio.sleep(60)
        assert "vllm" in worker.disk.installed
        house.luck.fails = house.luck.permanently = 1.0
        await ask(house, "delete")
        await asyncio.sleep(60)
        house.catalogue.publish("vllm")
        newer = await ask(house, "install")  # the delete is superseded
        await asyncio.sleep(60)
        controller = house.some_controller()
        assert controller is not None
        await controller.backends.operations.cancel(newer)  # and decides again, and fails again
        await asyncio.sleep(60)

    told(template, story)


def test_an_order_nobody_heard_is_sent_again_though_the_database_was_away(template: Path) -> None:
    """The node could not be marked as unreachable, so nobody said what became of the order (seed 180)."""
    ended: list[bool] = []

    async def story(house: Simulation) -> None:
        (worker,) = await begin(house, CorralWorker)
        assert worker.bus is not None
        worker.bus.lose_connection("cut off")
        await ask(house, "install")
        await asyncio.sleep(0.2)  # the order is on its way, for the first time of two
        house.store_luck.away = True
        await asyncio.sleep(10)
        house.store_luck.away = False
        worker.bus.restore_connection()
        await asyncio.sleep(400)
        ended.append("vllm" in worker.disk.installed)

    told(template, story)
    assert ended == [True]


def test_an_inventory_from_before_an_unheard_delete_proves_nothing(template: Path) -> None:
    """The delete was done, its sender had died, and the next install was called a success at once (seed 2002)."""

    async def story(house: Simulation) -> None:
        (worker,) = await begin(house, CorralWorker)
        await ask(house, "install")
        await asyncio.sleep(60)
        house.luck.takes_s = (0.2, 0.3)
        await ask(house, "delete")
        deleted = asyncio.Event()
        worker.on_change = deleted.set
        await deleted.wait()
        assert worker.bus is not None
        worker.bus.lose_connection("cut off")  # before it could tell
        house.kill_controller("c0")
        house.start_controller("c1")
        await asyncio.sleep(70)  # it is heard of, over HTTP: that it lives, and nothing else
        await ask(house, "install")
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

    async def story(house: Simulation) -> None:
        quick, slow = await begin(house, LocalAIWorker, LongToTell)
        assert isinstance(slow, LongToTell)
        house.luck.takes_s = (0.2, 0.3)
        slow.asked = asyncio.Event()
        await slow.asked.wait()
        await asyncio.sleep(0.5)
        await ask(house, "install")
        await asyncio.sleep(6)
        there.append("vllm" in quick.disk.installed)
        await asyncio.sleep(4)  # by now the slow one has answered
        await ask(house, "delete")
        await asyncio.sleep(10)
        there.append("vllm" in quick.disk.installed)
        slow.asked = None

    told(template, story)
    assert there == [True, False]


def test_no_such_order_is_no_proof_either(template: Path) -> None:
    """Told to stop a delete that was done already, a worker has no such order; what was on file was from before it."""

    async def story(house: Simulation) -> None:
        (worker,) = await begin(house, CorralWorker)
        await ask(house, "install")
        await asyncio.sleep(60)
        deleted = asyncio.Event()
        worker.on_change = deleted.set
        await ask(house, "delete")
        await deleted.wait()
        controller = house.controllers["c0"]
        assert controller is not None
        controller.bus.frozen = True  # nobody hears how it ended
        await asyncio.sleep(2)
        controller.bus.frozen = False
        await ask(house, "install")
        await asyncio.sleep(3)

    told(template, story)


def test_a_node_of_a_rollout_does_not_wait_for_itself(template: Path) -> None:
    """A LocalAI worker died over an upgrade; asked anew, it had to wait for its own last try (seed 6)."""

    async def story(house: Simulation) -> None:
        first, _ = await begin(house, LocalAIWorker, LocalAIWorker)
        await ask(house, "install")
        await asyncio.sleep(90)
        house.luck.takes_s = (20.0, 21.0)
        await ask(house, "upgrade", max_parallel="1")
        await asyncio.sleep(12)
        house.kill_controller("c0")
        house.kill_worker(first.name, 1.0)
        house.start_controller("c1")
        house.luck.takes_s = (0.2, 0.3)

    told(template, story)


def test_a_load_whose_node_turns_out_to_have_a_rival_ends_before_another_begins(template: Path) -> None:
    """The files were still on their way when a process of the same exclusive group was found running there. The load
    went on, and a second one of the same model began elsewhere (seeds 0 and 450)."""
    rivals: list[set[str]] = []

    async def story(house: Simulation) -> None:
        workers = await begin(house, HouseWorker, HouseWorker)
        await ask(house, "install")
        await asyncio.sleep(60)
        ant = await define(house, "ant", concurrency_groups=["big"])
        await define(house, "bee", concurrency_groups=["big"])
        house.luck.takes_s = (40.0, 41.0)  # of a process to become ready
        await Clients(house, house.chance("clients")).ask_for("bee")
        await asyncio.sleep(30)
        (worker,) = [one for one in workers if one.disk.processes]
        add_leftover(house, worker, ant, ant.revision, replica=0, takes_s=100.0)
        await asyncio.sleep(200)
        rivals.extend({process.order.model for process in one.disk.processes.values()} for one in workers)

    told(template, story)
    assert sorted(map(sorted, rivals)) == [["ant"], ["bee"]]


def test_two_edited_models_of_one_group_do_not_wait_for_each_other(template: Path) -> None:
    """Each answered as before the edit, and its own load kept it from making room for the other's (seed 2330)."""
    running: list[set[str]] = []

    async def story(house: Simulation) -> None:
        (worker,) = await begin(house, HouseWorker)
        await ask(house, "install")
        await asyncio.sleep(60)
        clients = Clients(house, house.chance("clients"))
        for name in ("ant", "bee"):
            await define(house, name)
            await clients.ask_for(name)
        await asyncio.sleep(10)  # both have only just been loaded: neither gives way at once
        running.append({process.order.model for process in worker.disk.processes.values()})
        edit = {"concurrency_groups": ["big"], "context_size": 4096}
        await asyncio.gather(*(define(house, name, **edit) for name in ("ant", "bee")))
        await asyncio.sleep(120)
        running.append({process.order.model for process in worker.disk.processes.values()})

    told(template, story)
    assert running[0] == {"ant", "bee"}
    assert len(running[1]) == 1
