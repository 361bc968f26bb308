"""What must hold of loads and replicas after every commit of a simulated fleet, and once nothing fails any more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from corral.contract.labels import selector_of_map
from corral.contract.view import ViewReplica
from corral.controller.inventory.routing import read_routing
from corral.controller.scheduler.world import Policy
from corral.kit.errors import CorralError
from corral.store.engine.inline_sqlite import InlineFile
from corral.store.engine.transactions import Transaction
from corral.store.records import DesiredReplica
from corral.store.tables import (
    load_jobs,
    model_schedules,
    models,
    node_backends,
    node_labels,
    nodes,
    replicas,
)
from corral.store.tables.nodes import Node
from tests.simulation.controllers import Died
from tests.simulation.facts import Lately, at_once
from tests.support.invariants import misrouted
from tests.support.replica_invariants import (
    EVICTED_FOR,
    Key,
    Memory,
    ReplicaFacts,
    broken,
    broken_lately,
    members_together,
)

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

_TABLES = {"replicas", "models", "node_backends", "model_schedules", "nodes", "node_labels", "load_jobs"}
_ROUTING_TABLES = {"replicas", "models", "node_backends"}
_ALLOWED_FOR_S = 30.0


class ReplicaTruth:
    def __init__(self, file: InlineFile, now: Callable[[], float], is_surely_busy: Callable[[str, str], bool]) -> None:
        """`is_surely_busy`: node and process; whether every controller must know that it has requests."""
        self._store = file.store()
        self._now = now
        self._is_surely_busy = is_surely_busy
        self._lately = Lately(now, ReplicaFacts())
        self._allowed: dict[str, dict[str, float]] = {}  # by model and revision: when it was last allowed
        self._evictions: list[tuple[float, Key, str]] = []  # when, which replica, for which model

    def breaches(self, tables: frozenset[str]) -> list[str]:
        """After a commit that wrote these."""
        if tables.isdisjoint(_TABLES):
            return []
        before = self._lately.last
        found, wrong = at_once(self._read(before, tables))
        if "replicas" in tables:
            wrong += broken_lately(self._lately.until_now(), found)
            wrong += self._busy_that_give_way(before, found)
            self._note_evictions(before, found)
        self._lately.add(found)
        return [*wrong, *broken(before, found)]

    def evicted_for(self, wanted: Collection[str], since: float) -> set[Key]:
        """Replicas that had to make room, from then on, for one of these models."""
        return {key for at, key, model in self._evictions if at >= since and model in wanted}

    def _note_evictions(self, before: ReplicaFacts, after: ReplicaFacts) -> None:
        for key, row in after.rows.items():
            was_leaving = key in before.rows and before.rows[key].stage == "leaving"
            if row.stage == "leaving" and not was_leaving and row.reason.startswith(EVICTED_FOR):
                self._evictions.append((self._now(), key, row.reason.removeprefix(EVICTED_FOR)))

    def _busy_that_give_way(self, before: ReplicaFacts, after: ReplicaFacts) -> list[str]:
        """5: what has to make room for another model is idle."""
        return [
            f"{row.model} on {row.node_id} has to make room, and has had requests for long"
            for key, row in after.rows.items()
            if row.stage == "leaving"
            and row.reason.startswith(EVICTED_FOR)
            and key in before.rows
            and before.rows[key].stage == "running"
            and self._is_surely_busy(row.node_id, row.process_id)
        ]

    async def _read(self, before: ReplicaFacts, tables: frozenset[str]) -> tuple[ReplicaFacts, list[str]]:
        async with self._store.read() as tx:
            return await self._changed(tx, before, tables)

    async def _changed(
        self, tx: Transaction, before: ReplicaFacts, tables: frozenset[str]
    ) -> tuple[ReplicaFacts, list[str]]:
        """`before`, and of the tables that were written what they say now."""
        known = await models.list_(tx) if before.revisions or "models" in tables else []
        if not known:
            return ReplicaFacts(), []
        if not before.revisions:  # the first model: nothing was read before
            tables = frozenset(_TABLES)
        now: dict[str, Any] = {"at": await tx.now()}
        wrong: list[str] = []
        if "replicas" in tables:
            now["rows"] = {(row.node_id, row.model, row.replica): row for row in await replicas.list_(tx)}
        if "load_jobs" in tables:
            now["jobs"] = {row.model: row for row in await load_jobs.list_(tx)}
        if "models" in tables:
            now["revisions"] = {row.id: row.revision for row in known}
            now["groups"] = _groups(known)
        moved = False  # whether a node came, went or is in another state
        if "nodes" in tables:
            found = await nodes.list_(tx)
            moved = before.statuses != {node.id: node.status for node in found}
            now["statuses"] = {node.id: node.status for node in found}
            now["bus_down"] = {node.id for node in found if node.bus_down}
            now["memory"] = {node.id: _memory(node) for node in found}
        if moved or tables & {"model_schedules", "node_labels"}:
            now |= await _scheduled(tx)
        if moved or tables & _ROUTING_TABLES:
            more, wrong = await _routed(tx, known, now.get("rows", before.rows))
            now |= more
        return replace(before, allowed=self._allowed_of(known), **now), wrong

    def _allowed_of(self, known: Sequence[models.StoredModel]) -> dict[str, Collection[str]]:
        """Also those that were allowed a moment ago: somebody may have looked then."""
        at = self._now()
        for row in known:
            for revision in (row.revision, *row.previous_revisions):
                self._allowed.setdefault(row.id, {})[revision] = at
        return {
            name: {revision for revision, last in found.items() if at - last < _ALLOWED_FOR_S}
            for name, found in self._allowed.items()
        }


def _groups(known: Sequence[models.StoredModel]) -> dict[str, frozenset[str]]:
    return {row.id: frozenset(row.definition.get("concurrency_groups", ())) for row in known}


def _memory(node: Node) -> Memory:
    policy = Policy()
    spare = min(int(node.total_ram * policy.ram_share), policy.ram_spare_bytes)
    return Memory(node.total_ram, node.available_ram, spare)


async def _scheduled(tx: Transaction) -> dict[str, Any]:
    schedules = await model_schedules.list_(tx)
    labels = await node_labels.list_for(tx)
    everywhere = [outline.id for outline in await nodes.list_outlines(tx)]
    return {
        "least": {row.model: row.min_replicas for row in schedules},
        "most": {row.model: row.max_replicas for row in schedules},
        "scaled": {row.model for row in schedules if row.spread_all or row.min_replicas or row.max_replicas},
        "selected": {
            row.model: {id for id in everywhere if selector_of_map(row.node_selector).matches(labels.get(id, {}))}
            for row in schedules
            if row.node_selector
        },
    }


async def _routed(
    tx: Transaction, known: Sequence[models.StoredModel], rows: Mapping[Key, DesiredReplica]
) -> tuple[dict[str, Any], list[str]]:
    shown, _ = await read_routing(tx)
    listed = {row.node_id: row for row in await node_backends.list_(tx)}
    wrong = misrouted(shown, {row.id: (row.revision, *row.previous_revisions) for row in known}, listed)
    for replica in shown:
        row = rows.get((replica.node_id, replica.model, replica.replica))
        if row is not None and row.stage == "leaving":
            wrong.append(f"{replica.process_id} of {replica.model} is shown to gateways, and is about to end")
    now = {
        "answering": {replica.model: replica.revision for replica in shown},
        "ready": {
            (node_id, process.model, process.replica)
            for node_id, told in listed.items()
            for process in told.processes
            if process.state == "ready"
        },
        "installed": {node_id: told.backends for node_id, told in listed.items()},
        "listed": {
            node_id: {process.model for process in told.processes if process.state != "failed"}
            for node_id, told in listed.items()
        },
    }
    return now, wrong


async def unsettled(simulation: Simulation) -> list[str]:
    """What is not yet as it should be, of replicas."""
    async with simulation.store.read() as tx:
        rows = await replicas.list_(tx)
        shown, _ = await read_routing(tx)
        here = {outline.id for outline in await nodes.list_outlines(tx)}
    # A load that has its place is under way, though `lacking` finds no room for another replica beside it.
    left = [f"{row.model} on {row.node_id} is {row.stage}: {row.reason}" for row in rows if row.stage != "running"]
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
        process_host = by_node[replica.node_id].process_host
        if process_host is None or process_host.ingress.serving(replica.process_id) is None:
            left.append(f"{replica.process_id} of {replica.model} is shown, and refuses every request")
    return [*left, *await not_parted(simulation), *(await lacking(simulation)).values()]


async def not_parted(simulation: Simulation) -> list[str]:
    """Members of one exclusive group that still run on one machine, where one of them could leave: what a schedule
    requires stays until there is room for it elsewhere."""
    async with simulation.store.read() as tx:
        known = {row.id: row for row in await models.list_(tx)}
        required = {row.model for row in await model_schedules.list_(tx) if row.min_replicas or row.spread_all}
        here = {outline.id for outline in await nodes.list_outlines(tx)}
    there = {
        worker.node_id: {process.order.model for process in worker.disk.processes.values()}
        for worker in simulation.workers.values()
        if worker.node_id in here
    }

    def precedence(model: str) -> tuple[bool, bool]:
        return (not known[model].definition.get("pinned", False), model not in required)

    return [
        f"{one} and {other} of the same exclusive group run on {node}"
        for node, one, other in members_together(there, _groups(list(known.values())))
        if max((one, other), key=precedence) not in required
    ]


async def lacking(simulation: Simulation) -> dict[str, str]:
    """By model, why it does not answer as somebody wants it to, though it could."""
    wanting = await wanting_more(simulation)
    return {name: why for name, why in wanting.items() if await _could_be_placed(simulation, name)}


async def wanting_more(simulation: Simulation) -> dict[str, str]:
    """By model, why it does not answer as somebody wants it to, whether there is room for it or not."""
    async with simulation.store.read() as tx:
        known = {row.id: row for row in await models.list_(tx)}
        shown, _ = await read_routing(tx)
        active = [job.model for job in await load_jobs.list_(tx) if job.state != "failed"]
        schedules = {row.model: row for row in await model_schedules.list_(tx)}
    left = {}
    for name, row in sorted(known.items()):
        answers = [replica for replica in shown if replica.model == name]
        schedule = schedules.get(name)
        least = schedule.min_replicas if schedule is not None else 0
        asked = name in simulation.asked and "idle_unload" not in row.definition
        lacks = _lacking(name, row.revision, answers, max(least, int(asked)), name in active)
        if lacks and not row.definition.get("disabled"):
            left[name] = lacks
    return left


async def spread_thin(simulation: Simulation) -> set[str]:
    """Models that belong on every node and are not on every one: each may still need room somewhere."""
    async with simulation.store.read() as tx:
        everywhere = {row.model for row in await model_schedules.list_(tx) if row.spread_all}
        shown, _ = await read_routing(tx)
        here = {node.id for node in await nodes.list_(tx) if node.protocol}
    return {name for name in everywhere if not {one.node_id for one in shown if one.model == name} >= here}


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
