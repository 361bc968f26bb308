"""Brings about what a file says: labels, then backends, models and schedules. Each by the service it belongs to, one
after the other; one that fails does not stop the rest. With `dry_run` the same is found out and nothing is done."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from corral.contract.admin import PlanNode
from corral.contract.catalogue import InstallModel, ScheduleBody
from corral.contract.fleet import ApplyBody, FleetChange, FleetDiff, FleetFile
from corral.controller.fleetfile.differences import differences
from corral.controller.fleetfile.document import Document, WantedBackend, name_of, read_fleet
from corral.controller.fleetfile.export import export_fleet, schedule_data, wanted_backends
from corral.controller.models.edits import ModelOrigin
from corral.controller.models.schedules import Schedules, next_schedule
from corral.controller.models.service import Models
from corral.controller.operations.requests import OperationKind, OperationRequest, parse_request
from corral.controller.operations.service import Operations
from corral.controller.registry.nodes import NodeAdmin
from corral.kit.errors import CorralError
from corral.kit.redact import redact_urls
from corral.store.engine.transactions import Store
from corral.store.records import BackendRequest, Scope, ScopeKind
from corral.store.tables import backend_rules, model_schedules, models, node_labels, nodes
from corral.store.tables.model_schedules import Schedule
from corral.store.tables.models import StoredModel

_NAMES_SHOWN = 5


@dataclass(frozen=True)
class Present:
    """The fleet as it is."""

    nodes: dict[str, dict[str, str]]  # labels by the node's name
    node_ids: frozenset[str]
    backends: frozenset[WantedBackend]
    models: dict[str, StoredModel]
    schedules: dict[str, Schedule]


class FleetFiles:
    def __init__(
        self, store: Store, models_service: Models, schedules: Schedules, operations: Operations, admin: NodeAdmin
    ) -> None:
        self._store = store
        self._models = models_service
        self._schedules = schedules
        self._operations = operations
        self._admin = admin

    async def apply(self, body: ApplyBody, *, by: str = "") -> FleetDiff:
        """Raises Invalid for a file that cannot be meant: then nothing is done."""
        wanted = read_fleet(body.text, prune=body.prune)
        present = await self._read()
        changes = [self._label(node, labels, present) for node, labels in wanted.labels.items()]
        changes += [await self._backend(each, present, wanted.labels, by) for each in wanted.backends]
        changes += [await self._model(each, present, wanted.backends, by) for each in wanted.models]
        defined = {step.change.name for step in changes if step.change.kind == "model"} | present.models.keys()
        changes += [self._schedule(each, present, known=each.model_name in defined) for each in wanted.schedules]
        if body.prune:
            changes += self._prune(wanted, changes, present)
        done = [each.change if body.dry_run else await each.do() for each in changes]
        return FleetDiff(tuple(done), body.dry_run)

    async def export(self) -> FleetFile:
        return await export_fleet(self._store)

    async def _read(self) -> Present:
        async with self._store.read() as tx:
            outlines = await nodes.list_outlines(tx)
            labels = await node_labels.list_for(tx)
            rules = await backend_rules.list_live(tx)
            defined = {row.id: row for row in await models.list_(tx)}
            schedules = {row.model: row for row in await model_schedules.list_(tx)}
        names = {row.id: row.name for row in outlines}
        return Present(
            nodes={row.name: labels.get(row.id, {}) for row in outlines},
            node_ids=frozenset(names),
            backends=frozenset(wanted_backends(rules, names)),
            models=defined,
            schedules=schedules,
        )

    def _label(self, node: str, labels: dict[str, str], present: Present) -> FleetStep:
        if node not in present.nodes:
            return FleetStep(FleetChange("label", node, "skip", reason=f"there is no node {node} yet"))
        there = {key: value for key, value in present.nodes[node].items() if key in labels}
        if there == labels:
            return FleetStep(FleetChange("label", node, "nothing"))

        async def set_labels() -> str:
            await self._admin.merge_labels(node, labels)
            return ""

        return FleetStep(FleetChange("label", node, "change", differences(there, labels)), set_labels)

    async def _backend(
        self, wanted: WantedBackend, present: Present, labels: Mapping[str, Mapping[str, str]], by: str
    ) -> FleetStep:
        """`labels`: those the file gives to nodes, by name; they are set before backends are asked for."""
        name = wanted.backend or wanted.uri
        where = wanted.node or wanted.selector or "every node"
        if any(msgspec.structs.replace(each, uri=redact_urls(each.uri)) == wanted for each in present.backends):
            return FleetStep(FleetChange("backend", name, "nothing"))  # as it was exported
        if wanted in present.backends:
            return FleetStep(FleetChange("backend", name, "nothing"))
        if wanted.node and wanted.node not in present.nodes and wanted.node not in present.node_ids:
            return FleetStep(FleetChange("backend", name, "skip", reason=f"there is no node {wanted.node} yet"))

        async def install() -> str:
            return (await self._operations.accept(await self._request_for(wanted, by))).operation_id

        try:
            nodes = await self._plan_backend(wanted, present, labels, by)
        except CorralError as error:
            return FleetStep(FleetChange("backend", name, "skip", reason=error.message, failed=True))
        reason, lines = describe_fit(nodes, wanted)
        return FleetStep(FleetChange("backend", name, "create", (f"on {where}", *lines), reason=reason), install)

    async def _plan_backend(
        self, wanted: WantedBackend, present: Present, labels: Mapping[str, Mapping[str, str]], by: str
    ) -> list[PlanNode]:
        """What it would do on each node it is for. Raises what an install would be refused with."""
        request = await self._request_for(wanted, by)
        if not wanted.selector:
            return list((await self._operations.plan(request)).nodes)
        # Which nodes a selector means is decided with the labels the file is about to set.
        everywhere = await self._operations.plan(dataclasses.replace(request, scope=Scope(ScopeKind.ALL)))
        return [
            node
            for node in everywhere.nodes
            if request.scope.matches(
                node.node_id, present.nodes.get(node.node_name, {}) | dict(labels.get(node.node_name, {}))
            )
        ]

    async def _request_for(self, wanted: WantedBackend, by: str) -> OperationRequest:
        scope = await self._operations.scope(node=wanted.node, selector=wanted.selector)
        request = BackendRequest(backend=wanted.backend, uri=wanted.uri, alias=wanted.alias)
        return parse_request(OperationKind.INSTALL, request, scope=scope, by=by)

    async def _model(
        self, wanted: InstallModel, present: Present, backends: Sequence[WantedBackend], by: str
    ) -> FleetStep:
        try:
            definition = await self._models.defined_by(wanted)
        except CorralError as error:
            return FleetStep(FleetChange("model", name_of(wanted), "skip", reason=error.message, failed=True))
        before = present.models.get(definition.name)
        after = {"name": definition.name} | definition.whole
        there = {"name": before.id} | before.definition if before is not None else {}
        if there == after:
            return FleetStep(FleetChange("model", definition.name, "nothing"))
        if before is not None and before.origin == ModelOrigin.FILE:
            reason = "a file in the models folder defines it otherwise"
            return FleetStep(FleetChange("model", definition.name, "skip", reason=reason, failed=True))

        async def install() -> str:
            await self._models.install(msgspec.structs.replace(wanted, replace=True), by=by)
            return ""

        details = differences(there, after) if before is not None else ()
        action = "create" if before is None else "change"
        known = {name for each in (*backends, *present.backends) for name in (each.backend, each.alias)}
        asks = definition.backend and definition.backend not in known
        notes = await self._models.notes_on_backend(definition) if asks else ()
        change = FleetChange("model", definition.name, action, details, reason="; ".join(notes))
        return FleetStep(change, install)

    def _schedule(self, wanted: ScheduleBody, present: Present, *, known: bool) -> FleetStep:
        """One for a model that is not there counts from when it is; a name misspelt looks the same, so it is told."""
        before = present.schedules.get(wanted.model_name)
        # A file says all there is to say: what it leaves out has its usual value.
        body = msgspec.structs.replace(
            wanted,
            route_policy=wanted.route_policy or "",
            balance_abs_threshold=wanted.balance_abs_threshold or 0,
            balance_rel_threshold=wanted.balance_rel_threshold or 0.0,
            min_prefix_match=wanted.min_prefix_match or 0.0,
        )
        after = schedule_data(next_schedule(None, body))
        if before is not None and schedule_data(before) == after:
            return FleetStep(FleetChange("schedule", wanted.model_name, "nothing"))

        async def put() -> str:
            await self._schedules.put(body)
            return ""

        details = differences(schedule_data(before) if before is not None else {"model_name": wanted.model_name}, after)
        action = "create" if before is None else "change"
        reason = "" if known else f"there is no model {wanted.model_name} yet"
        return FleetStep(FleetChange("schedule", wanted.model_name, action, details, reason=reason), put)

    def _prune(self, wanted: Document, changes: list[FleetStep], present: Present) -> list[FleetStep]:
        """What came from files is those files' business. A model that could not be found out about is not deleted."""
        named = {step.change.name for step in changes if step.change.kind == "model"}
        scheduled = {body.model_name for body in wanted.schedules}
        steps = []
        for name, row in present.models.items():
            if name not in named and row.origin != ModelOrigin.FILE:
                steps.append(FleetStep(FleetChange("model", name, "delete"), self._deleting(name)))
        for name in present.schedules.keys() - scheduled:
            steps.append(FleetStep(FleetChange("schedule", name, "delete"), self._unscheduling(name)))
        return steps

    def _deleting(self, name: str) -> Act:
        async def delete() -> str:
            await self._models.delete(name, force=True)
            return ""

        return delete

    def _unscheduling(self, name: str) -> Act:
        async def delete() -> str:
            await self._schedules.delete(name)
            return ""

        return delete


def describe_fit(nodes: Sequence[PlanNode], wanted: WantedBackend) -> tuple[str, tuple[str, ...]]:
    """Why no node gets the backend, empty where one does; and a line for each reason why some do not. Pure."""
    names_by_reason: dict[str, list[str]] = {}
    for node in nodes:
        if node.action == "skip":
            names_by_reason.setdefault(node.reason, []).append(node.node_name)
    unfit = [f"{_some(names)}: {reason}" for reason, names in names_by_reason.items()]
    if not nodes:
        return f"there is no node{f' with {wanted.selector}' if wanted.selector else ''} yet", ()
    if sum(map(len, names_by_reason.values())) < len(nodes):
        return "", tuple(f"not on {each}" for each in unfit)
    later = "" if wanted.node else "; one that joins and fits gets it"
    return f"fits no node now ({'; '.join(unfit)}){later}", ()


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


Act = Callable[[], Awaitable[str]]  # gives the operation that was begun, if it is one


@dataclass(frozen=True)
class FleetStep:
    change: FleetChange
    act: Act | None = None

    async def do(self) -> FleetChange:
        if self.act is None:
            return self.change
        try:
            return msgspec.structs.replace(self.change, operation=await self.act())
        except CorralError as error:
            return msgspec.structs.replace(self.change, reason=error.message, failed=True)
