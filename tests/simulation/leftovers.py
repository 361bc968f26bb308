"""Processes that serve on a machine and that no controller has ordered: left by another fleet, or by a database that
was lost. Some are of a revision that may answer, some of none, and some have requests of their own. Each runs from
files on its machine: where its backend is not installed there is none, for a worker removes nothing that is in use."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from corral.contract.messages.replicas import StartReplica
from corral.store.tables import models
from corral.store.tables.models import StoredModel
from tests.simulation.facts import at_once

if TYPE_CHECKING:
    from tests.simulation.processes import Process
    from tests.simulation.simulation import Simulation
    from tests.simulation.workers import Worker

FOREIGN = "of-another-fleet"
_MEMORY_BYTES = 4 << 30


def leave_behind(simulation: Simulation, chance: Random) -> None:
    """On some machine that runs, of some model."""
    known = at_once(_models(simulation))
    running = [worker for _, worker in sorted(simulation.workers.items()) if _can_have(worker)]
    pairs = [(worker, model) for worker in running for model in known if has_backend(worker, model)]
    if not pairs:
        return
    worker, model = chance.choice(pairs)
    if worker.lock(str(model.definition["backend"])).locked():
        return  # a worker that installs or deletes a backend starts no process of that backend meanwhile
    revision = chance.choice((FOREIGN, FOREIGN, model.revision, *model.previous_revisions))
    takes_s = chance.choice((0.0, 0.0, 100.0, 300.0))
    add_leftover(simulation, worker, model, revision, replica=chance.choice((0, 1, 2)), takes_s=takes_s)


def add_leftover(
    simulation: Simulation, worker: Worker, model: StoredModel, revision: str, *, replica: int, takes_s: float
) -> Process:
    assert worker.process_host is not None
    assert has_backend(worker, model), "a process runs from files"
    backend = str(model.definition["backend"])
    order = StartReplica(
        op_id="leftover",
        attempt=1,
        process_id="",
        model=model.id,
        replica=replica,
        backend=backend,
        revision=revision,
        memory_bytes=_MEMORY_BYTES,
    )
    process = worker.process_host.leave_behind(order)
    simulation.note(worker.name, "has a leftover", process.process_id, model.id, replica, revision, takes_s)
    if takes_s:
        simulation.spawn(worker.process_host.serve_alone(process.process_id, takes_s))
    return process


def has_backend(worker: Worker, model: StoredModel) -> bool:
    return str(model.definition["backend"]) in worker.disk.installed


def _can_have(worker: Worker) -> bool:
    """It was there before: what is done with backends just now would have known of it from its beginning."""
    return worker.process_host is not None and worker.bus is not None and not worker.orders_under_way()


async def _models(simulation: Simulation) -> list[StoredModel]:
    async with simulation.store.read() as tx:
        return await models.list_(tx)
