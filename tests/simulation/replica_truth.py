"""What must hold of loads and replicas after every commit of a simulated fleet, and once nothing fails any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from corral.contract.view import ViewReplica
from corral.controller.invariants import misrouted
from corral.controller.replicas.invariants import ReplicaFacts, broken
from corral.controller.replicas.reading import read_routing
from corral.kit.errors import CorralError
from corral.store import load_jobs, model_schedules, models, node_backends, nodes, replicas
from corral.store.api import Transaction
from corral.store.inline import InlineFile
from tests.simulation.controllers import Died
from tests.simulation.facts import at_once

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

_TABLES = {"replicas", "models", "node_backends", "model_schedules"}


class ReplicaTruth:
    def __init__(self, file: InlineFile) -> None:
        self._store = file.store()
        self._seen = ReplicaFacts()

    def breaches(self, tables: frozenset[str]) -> list[str]:
        """After a commit that wrote these."""
        if tables.isdisjoint(_TABLES):
            return []
        found, wrong = at_once(self._read())
        before, self._seen = self._seen, found
        return [*wrong, *broken(before, found)]

    async def _read(self) -> tuple[ReplicaFacts, list[str]]:
        async with self._store.read() as tx:
            return await _read(tx)


async def _read(tx: Transaction) -> tuple[ReplicaFacts, list[str]]:
    known = await models.list_(tx)
    if not known:
        return ReplicaFacts(), []
    shown, _ = await read_routing(tx)
    listed = {row.node_id: row for row in await node_backends.list_(tx)}
    schedules = await model_schedules.list_(tx)
    facts = ReplicaFacts(
        rows={(row.node_id, row.model, row.replica): row for row in await replicas.list_(tx)},
        revisions={row.id: row.revision for row in known},
        answering={replica.model: replica.revision for replica in shown},
        least={row.model: row.min_replicas for row in schedules},
        scaled={row.model for row in schedules if row.spread_all or row.min_replicas or row.max_replicas},
        statuses={outline.id: outline.status for outline in await nodes.list_outlines(tx)},
        ready={
            (node_id, process.model, process.replica)
            for node_id, told in listed.items()
            for process in told.processes
            if process.state == "ready"
        },
    )
    return facts, misrouted(shown, {row.id: (row.revision, *row.formers) for row in known}, listed)


async def unsettled(simulation: Simulation) -> list[str]:
    """What is not yet as it should be, of replicas."""
    async with simulation.store.read() as tx:
        known = {row.id: row for row in await models.list_(tx)}
        rows = await replicas.list_(tx)
        shown, _ = await read_routing(tx)
        active = [job.model for job in await load_jobs.list_(tx) if job.state != "failed"]
        schedules = {row.model: row for row in await model_schedules.list_(tx)}
        here = {outline.id for outline in await nodes.list_outlines(tx)}
    left = [f"{row.model} on {row.node_id} is {row.stage}: {row.reason}" for row in rows if row.stage == "leaving"]
    wanted = {(row.node_id, row.model, row.replica, row.revision) for row in rows if row.stage == "running"}
    there = {
        (worker.node_id, process.order.model, process.order.replica, process.order.revision)
        for worker in simulation.workers.values()
        if worker.node_id in here
        for process in worker.disk.processes.values()
    }
    left += [f"{each} runs and nobody wants it" for each in sorted(there - wanted)]
    left += [f"{each} is said to run and does not" for each in sorted(wanted - there)]
    by_node = {worker.node_id: worker for worker in simulation.workers.values()}
    for replica in shown:
        stall = by_node[replica.node_id].stall
        if stall is None or stall.ingress.serving(replica.process_id) is None:
            left.append(f"{replica.process_id} of {replica.model} is shown, and refuses every request")
    for name, row in sorted(known.items()):
        answers = [replica for replica in shown if replica.model == name]
        schedule = schedules.get(name)
        least = schedule.min_replicas if schedule is not None else 0
        asked = name in simulation.asked and "idle_unload" not in row.definition
        lacking = _lacking(name, row.revision, answers, max(least, asked), name in active)
        if lacking and not row.definition.get("disabled") and await _could_be_placed(simulation, name):
            left.append(lacking)
    return left


def _lacking(name: str, revision: str, answers: list[ViewReplica], least: int, active: bool) -> str:
    own = [replica for replica in answers if replica.revision == revision]
    if len(own) < len(answers):
        return f"{name} still answers as it was before"
    if len(own) < least:
        return f"{name} has {len(own)} of {least} replicas"
    return f"{name} is still being loaded" if active else ""


async def _could_be_placed(simulation: Simulation, model: str) -> bool:
    """What nobody has room for is not waited for."""
    controller = simulation.some_controller()
    if controller is None:
        return True
    try:
        told = await controller.asked(lambda: controller.replicas.why.model(model))
    except (Died, CorralError) as error:
        return str(error) != f"there is no model {model}"
    return bool(told.decision == "placed")
