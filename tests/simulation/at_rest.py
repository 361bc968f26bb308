"""What must be so once nothing fails any more, and what the machines really have."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import TYPE_CHECKING

from corral.controller.backends.rules import Unwanted, Wanted, fold
from corral.controller.inventory.nodes import takes_backends
from corral.controller.operations.views import KINDS_WITHOUT_RULE
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.store.records import ENDED, OperationNodeStatus
from corral.store.tables import (
    backend_intents,
    backend_rules,
    backend_targets,
    due_switches,
    models,
    node_labels,
    nodes,
    operation_nodes,
    operations,
)
from tests.simulation import replica_truth
from tests.simulation.model_traffic import Clients
from tests.simulation.releases import says_why
from tests.simulation.trials import Trials
from tests.simulation.workers import Worker
from tests.support import invariants
from tests.support.invariants import Facts

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

_LOOK_S = 15.0
_MAX_RETRIES = 6  # models that do not fit beside each other replace each other for as long as clients request them
_STAYS_S = 45.0  # longer than old news are left alone, and than the reconciler's own round


class Truth:
    """What every machine has had, and when."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._had: dict[tuple[str, str], list[tuple[datetime, str | None]]] = {}

    def changed(self, worker: Worker, name: str) -> None:
        row = worker.disk.installed.get(name)
        self._had.setdefault((worker.node_id, name), []).append(
            (self._clock.now(), row["digest"] if row is not None else None)
        )

    def had_since(self, node_id: str, name: str, since: datetime) -> list[str | None]:
        """Digests, None for absent, that it had at some moment from then on."""
        found: list[str | None] = [None]
        for at, digest in self._had.get((node_id, name), ()):
            if at <= since:
                found = [digest]
            else:
                found.append(digest)
        return found

    def unproven(self, before: Facts, after: Facts) -> list[str]:
        """3, by what the machine really had: a success for something that was not so since it was asked for."""
        wrong = []
        for key, row in after.rows.items():
            old = before.rows.get(key)
            if (
                row.status != OperationNodeStatus.SUCCESS
                or row is old
                or (old is not None and old.status == OperationNodeStatus.SUCCESS)
            ):
                continue
            operation = after.operations[key[0]]
            if operation.kind in KINDS_WITHOUT_RULE:
                continue  # no backend; see releases.py
            had = self.had_since(row.node_id, operation.backend, operation.created_at)
            shown = (
                None in had
                if operation.kind == "delete"
                else any(one is not None and (not one or not row.digest or one == row.digest) for one in had)
            )
            if not shown:
                wrong.append(
                    f"{operation.kind} {operation.backend} is called a success on {row.node_name}, which had {had}"
                )
        return wrong


async def comes_to_rest(simulation: Simulation) -> None:
    """Raises Broken, by way of `failed`, when it does not. A seed's trial comes as soon as all is at rest, and then it
    has to come to rest once more."""
    tried = not simulation.has_trial
    deadline = simulation.loop.time() + simulation.plan.rest_s
    left = ["nothing was looked at"]
    quiet_since: float | None = None
    retried_at, retries = float("-inf"), 0
    while simulation.loop.time() < deadline:
        await asyncio.sleep(_LOOK_S)
        left = await unsettled(simulation)
        if left:
            quiet_since = None
            if retries < _MAX_RETRIES and simulation.loop.time() - retried_at >= 60:
                retried_at, retries = simulation.loop.time(), retries + 1
                await _a_person_retries(simulation)
            continue
        if not tried:
            tried = True
            deadline += await Trials(simulation).run()
            continue
        quiet_since = quiet_since if quiet_since is not None else simulation.loop.time()
        if simulation.loop.time() - quiet_since >= _STAYS_S:
            return
    for why in left or ["it never stays as it is"]:
        simulation.failed(f"not at rest: {why}")


async def unsettled(simulation: Simulation) -> list[str]:
    """What is not yet as it should be."""
    async with simulation.store.read() as tx:
        left = []
        for operation in await operations.list_(tx, limit=10_000):
            rows = await operation_nodes.list_(tx, operation.id)
            open_rows = [row for row in rows if row.status not in ENDED and not says_why(operation, row)]
            for row in open_rows:
                left.append(f"{operation.kind} {operation.backend} on {row.node_name}: {row.status} {row.reason}")
        rules = await backend_rules.list_live(tx)
        labels = await node_labels.list_for(tx)
        wanted: list[tuple[str, str, str | None]] = []
        there: dict[tuple[str, str], str] = {}
        for outline in await nodes.list_outlines(tx):
            worker = next((one for one in simulation.workers.values() if one.node_id == outline.id), None)
            if worker is None or not takes_backends(outline):
                continue
            if outline.status != "healthy":
                left.append(f"{outline.name} is {outline.status}")
            there |= {(outline.id, name): found["digest"] for name, found in worker.disk.installed.items()}
            installed = frozenset(worker.disk.installed)
            folded = fold(rules, node_id=outline.id, labels=labels.get(outline.id, {}), installed=installed)
            for backend, want in folded.items():
                match want:
                    case Unwanted():
                        wanted.append((outline.id, backend, None))
                    case Wanted():
                        kind = (outline.capability, outline.platform)
                        targets = await backend_targets.list_for(tx, [want.target])
                        target = next((one for one in targets if (one.capability, one.platform) == kind), None)
                        if target is None:
                            left.append(f"nobody knows yet what {backend} is on {outline.name}")
                        elif target.build is not None:
                            wanted.append((outline.id, backend, target.build.digest if worker.protocol else ""))
        for intent in await backend_intents.list_(tx):
            if intent.stage in ("sent", "waiting"):
                left.append(f"intent {intent.kind} {intent.backend} on {intent.node_id} is {intent.stage}")
        for switch in await due_switches.list_(tx):
            left.append(f"{switch.node_id} waits for another node to serve {', '.join(switch.models)}")
    # An upgrade is a success as soon as the inventory shows the new version. Its worker may still be replacing
    # processes then, and what is replaced during an outage is in no view before its end.
    left += [
        f"{worker.name} still works on {op_id}"
        for worker in simulation.workers.values()
        for op_id in sorted(worker.orders_under_way())
        if not worker.deleted
    ]
    return left + invariants.unlike(wanted, there) + await replica_truth.unsettled(simulation)


async def _a_person_retries(simulation: Simulation) -> None:
    """What time does not cure waits for a person; and a model nobody asks for any more is not loaded."""
    async with simulation.store.read() as tx:
        stay = {row.id for row in await models.list_(tx) if "idle_unload" not in row.definition}
    for model in sorted(simulation.asked & stay):
        await Clients(simulation, simulation.chance("rest")).ask_for(model)
    async with simulation.store.read() as tx:
        parked = {row.operation_id for row in await backend_intents.list_(tx) if row.stage == "parked"}
    controller = simulation.some_controller()
    for operation in sorted(parked):
        if controller is not None:
            try:
                await controller.backends.operations.retry(operation)
                simulation.note("person", "retries", operation)
            except CorralError as error:
                simulation.note("person", "cannot retry", operation, error.message)
