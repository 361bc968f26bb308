"""Whatever happens, carrying out plans comes to rest with what is wanted there, and on the way nothing goes wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from corral.contract.messages.replicas import ReplicaProcess
from corral.controller.inventory.activity import ProcessActivity
from corral.controller.orders.observations import OrderEnded, ReplicaObservation, WorkerUnreachable
from corral.controller.orders.order import OrderId
from corral.controller.replicas.lifecycle import Prerequisites, ReplicaHost
from corral.controller.replicas.load_jobs import Cooldown, begin, fail
from corral.controller.replicas.plan import plan_replicas
from corral.controller.replicas.plan_input import FileStatus, PlanInput, PlanResult
from corral.controller.scheduler.world import Build, BuildState, Memory, Model, Node, Schedule, World
from corral.store.records import DesiredReplica, LoadJob, ReplicaStage

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
GIB = 1024**3


@dataclass
class Machine:
    name: str
    status: str = "healthy"
    processes: dict[str, ReplicaProcess] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)
    ram: int = 16 * GIB
    switching: dict[str, str] = field(default_factory=dict)


@dataclass
class Sim:
    """Nodes that do what they are told, sooner or later, or fail to."""

    machines: dict[str, Machine]
    models: dict[str, Model]
    previous_revisions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rows: dict[tuple[str, str, int], DesiredReplica] = field(default_factory=dict)
    jobs: dict[str, LoadJob] = field(default_factory=dict)
    now: datetime = NOON
    observations: list[ReplicaObservation] = field(default_factory=list)
    orphans: dict[str, datetime] = field(default_factory=dict)
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    failing: float = 0.0

    def data(self) -> PlanInput:
        free = {
            name: each.ram - sum(process.memory_bytes for process in each.processes.values())
            for name, each in self.machines.items()
        }
        nodes = {
            name: Node(
                name,
                name,
                each.status,
                total_ram=each.ram + GIB,
                available_ram=free[name] + GIB,
                builds={"b": Build(BuildState.INSTALLED)},
                max_replicas_per_model=2,
                switching=each.switching,
            )
            for name, each in self.machines.items()
        }
        hosts = {
            name: ReplicaHost(
                name,
                name,
                each.status,
                boot_id="boot",
                processes=tuple(each.processes.values()),
                activity={id: ProcessActivity(int(id in each.busy), True) for id in each.processes},
            )
            for name, each in self.machines.items()
        }
        files = {(model.name, model.revision): FileStatus(files=()) for model in self.models.values()}
        backends = {(name, "b"): Prerequisites(backend=True) for name in self.machines}
        observations, self.observations = self.observations, []
        return PlanInput(
            self.now,
            1,
            World(self.now, nodes, self.models),
            hosts,
            list(self.rows.values()),
            self.jobs,
            observations,
            backends,
            files,
            previous_revisions=self.previous_revisions,
            orphans=self.orphans,
        )

    def step(self) -> PlanResult:
        result = plan_replicas(self.data())
        self.check(result)
        self.rows, self.jobs, self.orphans = result.rows, result.jobs, result.orphans
        for name in result.ready:
            self.previous_revisions.pop(name, None)
        for start in result.starts:
            self._start(start.row)
        for row, process_id in result.stops:
            self._stop(row.node_id, process_id, force=row.force)
        for node, process_id in result.unwanted:
            self._stop(node, process_id, force=False)
        self.now += timedelta(seconds=20)
        return result

    def check(self, result: PlanResult) -> None:
        for key, row in result.rows.items():
            assert key == row.key
        for model in self.models.values():
            if model.schedule.max_replicas:
                up = [row for row in result.rows.values() if row.model == model.name and row.stage != "leaving"]
                present = [row for row in up if row.revision == model.revision]
                assert len(present) <= max(model.schedule.max_replicas, len(self.rows)), present

    def _start(self, row: DesiredReplica) -> None:
        machine = self.machines[row.node_id]
        if machine.status != "healthy":
            return
        order = OrderId(row.node_id, row.op_id, row.attempt)
        if self.chance.random() < self.failing:
            self.observations.append(OrderEnded(order, False, "broken"))
            return
        mine = [each for each in machine.processes.values() if (each.model, each.replica) == (row.model, row.replica)]
        assert all(each.process_id == row.process_id for each in mine), "two processes of one replica"
        machine.processes[row.process_id] = ReplicaProcess(
            row.process_id,
            row.model,
            row.replica,
            row.backend,
            "ready",
            "openai",
            revision=row.revision,
            memory_bytes=row.memory_bytes,
        )
        used = sum(each.memory_bytes for each in machine.processes.values())
        assert used <= machine.ram, "more memory was given away than there is"

    def _stop(self, node: str, process_id: str, *, force: bool) -> None:
        machine = self.machines[node]
        if process_id in machine.processes:
            assert force or process_id not in machine.busy, "a busy process is never stopped"
            del machine.processes[process_id]

    def serving(self, model: Model) -> int:
        return sum(
            (process.model, process.revision, machine.status) == (model.name, model.revision, "healthy")
            for machine in self.machines.values()
            for process in machine.processes.values()
        )

    def rest(self, most: int = 60) -> None:
        for _ in range(most):
            before = (dict(self.rows), {name: job.state for name, job in self.jobs.items()})
            result = self.step()
            activity = not (result.starts or result.stops or result.unwanted)
            if activity and before == (dict(self.rows), {name: job.state for name, job in self.jobs.items()}):
                return
        pytest.fail(f"still moving: {self.rows} {self.jobs}")


def a_model(name: str, revision: str = "r1", need: int = 0, **schedule: Any) -> Model:
    return Model(name, "b", revision, Memory(need, how="said"), schedule=Schedule(**schedule))


@given(seed=st.integers(0, 10_000), nodes=st.integers(1, 4), least=st.integers(0, 3), need=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_after_any_mishaps_as_many_serve_as_can(seed: int, nodes: int, least: int, need: int) -> None:
    chance = random.Random(seed)
    sim = Sim({f"n{i}": Machine(f"n{i}") for i in range(nodes)}, {}, chance=chance, failing=0.2)
    model = a_model("m", need=need * GIB, min_replicas=least)
    sim.models = {"m": model}
    for _ in range(25):
        machine = chance.choice(list(sim.machines.values()))
        match chance.randrange(6):
            case 0:
                machine.status = chance.choice(["healthy", "offline", "draining", "unhealthy"])
            case 1 if machine.processes:
                del machine.processes[chance.choice(list(machine.processes))]
            case 2 if machine.processes:
                machine.busy = {chance.choice(list(machine.processes))}
            case 3:
                former = sim.models["m"].revision
                sim.models["m"] = replace(sim.models["m"], revision=f"r{chance.randrange(100)}")
                if sim.models["m"].revision != former:
                    sim.previous_revisions["m"] = (former, *sim.previous_revisions.get("m", ()))
            case 4 if "m" not in sim.jobs:
                sim.jobs["m"] = begin("m", sim.models["m"].revision, sim.now)
            case _:
                pass
        sim.step()
    sim.failing = 0.0
    for machine in sim.machines.values():
        machine.status, machine.busy = "healthy", set()
    sim.now += timedelta(hours=1)
    sim.rest()
    per_node = min(2, 16 // need) if need else 2
    assert sim.serving(sim.models["m"]) >= min(least, per_node * nodes)
    assert not [job for job in sim.jobs.values() if job.active]
    assert all(row.stage is ReplicaStage.RUNNING for row in sim.rows.values())
    listed = {id for machine in sim.machines.values() for id in machine.processes}
    assert len(listed) == len(sim.rows)


def test_the_last_of_a_deleted_model_goes_when_its_work_is_done() -> None:
    sim = Sim({"n": Machine("n")}, {"m": a_model("m", min_replicas=1)})
    sim.rest()
    [process_id] = sim.machines["n"].processes
    sim.machines["n"].busy = {process_id}
    sim.models = {}
    for _ in range(5):
        sim.step()
    assert process_id in sim.machines["n"].processes
    assert [row.stage for row in sim.rows.values()] == ["leaving"]
    sim.machines["n"].busy = set()
    sim.rest()
    assert (sim.rows, sim.machines["n"].processes) == ({}, {})


def test_one_that_serves_is_kept_whatever_is_said_of_its_order() -> None:
    sim = Sim({"n": Machine("n")}, {"m": a_model("m", min_replicas=1)})
    while not sim.machines["n"].processes:
        sim.step()
    [process_id], [row] = sim.machines["n"].processes, sim.rows.values()
    sim.machines["n"].busy = {process_id}  # its node lists it as ready, so gateways use it
    sim.observations.append(WorkerUnreachable(OrderId("n", row.op_id, row.attempt)))
    sim.rest()
    assert list(sim.machines["n"].processes) == [process_id]
    assert [(row.process_id, row.stage) for row in sim.rows.values()] == [(process_id, "running")]


def test_a_failed_start_of_a_scheduled_model_is_repeated_with_growing_pauses() -> None:
    sim = Sim({"n": Machine("n")}, {"m": a_model("m", min_replicas=1)}, failing=1.0)
    starts = sum(len(sim.step().starts) for _ in range(90))  # half an hour
    assert 4 <= starts <= 12
    sim.failing = 0.0
    sim.now += timedelta(minutes=6)
    sim.rest()
    assert sim.serving(sim.models["m"]) == 1


def test_what_is_left_of_a_load_that_failed_does_not_begin_it_again() -> None:
    """Of two replicas one failed, and the load waits for its next try; the other failed after it, and another node was
    tried at once."""
    sim = Sim({"n": Machine("n"), "other": Machine("other")}, {"m": a_model("m", min_replicas=2)})
    row = DesiredReplica("n", "m", 0, "r1", "b", ReplicaStage.ORDERED, "op", "op-1", NOON, NOON, attempt=1, files=())
    sim.rows[row.key] = row
    sim.jobs["m"] = fail(begin("m", "r1", NOON), "n", "no memory", NOON, Cooldown(), elsewhere=False)
    sim.observations.append(OrderEnded(OrderId("n", "op", 1), False, "no memory"))
    result = sim.step()
    assert (dict(result.rows), result.jobs["m"].state) == ({}, "failed")
    sim.now += timedelta(minutes=10)
    sim.rest()
    assert sim.serving(sim.models["m"]) == 2


def test_nobody_tries_again_by_itself_what_only_a_request_wanted() -> None:
    sim = Sim({"n": Machine("n")}, {"m": a_model("m")}, failing=1.0)
    sim.jobs["m"] = begin("m", "r1", NOON)
    starts = sum(len(sim.step().starts) for _ in range(90))
    assert starts == 1
    assert sim.jobs == {}, "after a while nobody needs to know any more"


def test_a_row_that_was_changed_keeps_its_revision() -> None:
    sim = Sim({"n": Machine("n")}, {"m": a_model("m", min_replicas=1)})
    sim.rest()
    sim.previous_revisions["m"] = ("r1",)
    sim.models["m"] = replace(sim.models["m"], revision="r2")
    seen = set()
    for _ in range(10):
        sim.step()
        seen |= {(row.replica, row.revision) for row in sim.rows.values()}
    assert seen == {(0, "r1"), (1, "r2")}
    assert all(changed(row, revision="r2") == row for row in sim.rows.values())


def test_one_that_was_told_to_end_is_not_taken_in_though_it_is_wanted_after_all() -> None:
    """It refuses new requests until its last ones have ended, and says that it is ready all the while."""
    machine = Machine("a")
    machine.processes["p"] = ReplicaProcess("p", "m", 0, "b", "ready", "openai", revision="r1")
    sim = Sim({"a": machine}, {"m": a_model("m")})
    assert [row.process_id for row in plan_replicas(sim.data()).rows.values()] == ["p"], "else it would be"
    was_told = plan_replicas(replace(sim.data(), stopped_unwanted=frozenset({"p"})))
    assert (list(was_told.rows), list(was_told.orphans)) == ([], ["p"])


def test_what_must_not_answer_any_more_is_not_counted_when_another_model_needs_room() -> None:
    """Two of an earlier revision were counted beside the one that has just come, and one of them had to make room:
    whoever has its turn first must not find more than will be left (seed 1326)."""
    sim = Sim({"a": Machine("a"), "b": Machine("b")}, {"cold": a_model("cold", need=10 * GIB)})
    sim.models["kept"] = a_model("kept", "r2", need=8 * GIB, min_replicas=2)
    for node, index, revision in (("a", 0, "r1"), ("b", 0, "r1"), ("b", 1, "r2")):
        id = f"{node}-{index}"
        process = ReplicaProcess(id, "kept", index, "b", "ready", "openai", revision=revision, memory_bytes=8 * GIB)
        sim.machines[node].processes[id] = process
        row = DesiredReplica(
            node, "kept", index, revision, "b", ReplicaStage.RUNNING, f"op-{id}", id, NOON, NOON, attempt=1
        )
        sim.rows[row.key] = changed(row, memory_bytes=8 * GIB)
    sim.jobs["cold"] = begin("cold", "r1", NOON)
    result = sim.step()
    leaving = {row.process_id: row.reason for row in result.rows.values() if row.stage is ReplicaStage.LEAVING}
    assert leaving == {"a-0": "it is of an earlier revision", "b-0": "it is of an earlier revision"}
    sim.rest()
    assert sim.serving(sim.models["kept"]) == 2


# --- a node that has to end its only replica for a while


def about_to_switch(**other: Any) -> Sim:
    """The only replica runs on `n`, whose backend is about to be switched."""
    sim = Sim({"n": Machine("n", ram=8 * GIB)}, {"m": a_model("m", need=8 * GIB, min_replicas=1)})
    sim.rest()
    sim.machines["other"] = Machine("other", **other)
    sim.machines["n"].switching = {"m": ""}
    return sim


def test_another_node_takes_the_model_first() -> None:
    sim = about_to_switch()
    sim.rest()
    assert sim.serving(sim.models["m"]) == 2
    assert sim.jobs == {}, "no request waits for it"


def test_why_no_node_takes_it_is_told() -> None:
    sim = about_to_switch(ram=4 * GIB)
    result = sim.step()
    assert result.not_taken["m"].startswith("no node can run m (needs 8.0 GiB: said): other")
    sim.machines["n"].switching = dict(result.not_taken)
    sim.rest()
    assert sim.serving(sim.models["m"]) == 1


def test_a_start_that_fails_there_is_no_failed_load() -> None:
    """Requests would be refused while the node switches, instead of waiting."""
    sim = about_to_switch()
    sim.failing = 1.0
    told: dict[str, str] = {}
    for _ in range(5):
        result = sim.step()
        told |= result.not_taken
        sim.machines["n"].switching = dict(told) or {"m": ""}
    assert told == {"m": "other: broken"}
    assert (sim.jobs, [row.node_id for row in sim.rows.values()]) == ({}, ["n"])


def test_a_failed_load_that_rests_is_not_waited_for() -> None:
    sim = about_to_switch()
    sim.jobs["m"] = fail(begin("m", "r1", sim.now), "other", "no memory", sim.now, Cooldown(), elsewhere=False)
    assert sim.step().not_taken == {"m": "no memory"}


@pytest.mark.parametrize("disabled", [True, False])
def test_a_model_that_is_not_wanted_any_more_holds_nothing_up(disabled: bool) -> None:
    sim = about_to_switch()
    sim.models = {"m": replace(sim.models["m"], disabled=True)} if disabled else {}
    assert sim.step().not_taken == {"m": "the model was disabled" if disabled else "the model was deleted"}
