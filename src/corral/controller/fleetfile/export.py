"""The fleet written out as the file that brings it about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from corral.contract.fleet import FleetFile
from corral.controller.fleetfile.document import WantedBackend
from corral.store.engine.transactions import Store, Transaction
from corral.store.records import BackendRule, RuleOrigin, ScopeKind, Want
from corral.store.tables import backend_rules, model_schedules, models, node_labels, nodes
from corral.store.tables.model_schedules import Schedule

_ADMIN = "admin"
_ALWAYS = ("model_name",)


async def export_fleet(store: Store) -> FleetFile:
    async with store.read() as tx:
        names = {row.id: row.name for row in await nodes.list_outlines(tx)}
        defined = await models.list_(tx)
        schedules = await model_schedules.list_(tx)
        wanted = wanted_backends(await backend_rules.list_live(tx), names)
        labels = await _labels(tx, names)
    return FleetFile(
        models=tuple({"name": row.id} | row.definition for row in defined),
        backends=tuple(_backend_document(each) for each in wanted),
        schedules=tuple(schedule_data(row) for row in schedules),
        labels=labels,
    )


def wanted_backends(rules: Iterable[BackendRule], names: Mapping[str, str]) -> list[WantedBackend]:
    """What people want where, as their rules say in the end: one that came later for the same nodes, or for every node,
    says otherwise. Pure. Rules for nodes that are gone are left out; so is what only loads brought."""
    found: dict[tuple[str, str, str], WantedBackend] = {}
    for rule in sorted(rules, key=lambda rule: rule.generation):
        if rule.origin != RuleOrigin.PERSON or rule.want == Want.UPGRADED:
            continue
        if rule.scope_kind == ScopeKind.ALL:
            found = {key: each for key, each in found.items() if key[0] != rule.backend}
        key = (rule.backend, rule.scope_kind, rule.scope_value)
        found.pop(key, None)
        if rule.want == Want.PRESENT and (rule.scope_kind != ScopeKind.NODE or rule.scope_value in names):
            found[key] = _wanted(rule, names)
    return sorted(found.values(), key=lambda each: (each.backend, each.selector, each.node))


def _wanted(rule: BackendRule, names: Mapping[str, str]) -> WantedBackend:
    gallery = f"{rule.request.gallery}@" if rule.request.gallery else ""
    return WantedBackend(
        backend=rule.backend if rule.request.uri else f"{gallery}{rule.backend}",
        uri=rule.request.uri,
        alias=rule.request.alias,
        node=names.get(rule.scope_value, "") if rule.scope_kind == ScopeKind.NODE else "",
        selector=rule.scope_value if rule.scope_kind == ScopeKind.SELECTOR else "",
    )


def schedule_data(row: Schedule) -> dict[str, Any]:
    """As a body has it, without what has its usual value."""
    document: dict[str, Any] = {
        "model_name": row.model,
        "node_selector": row.node_selector,
        "min_replicas": row.min_replicas,
        "max_replicas": row.max_replicas,
        "spread_all": row.spread_all,
        "route_policy": row.route_policy,
        "balance_abs_threshold": row.balance_abs_threshold,
        "balance_rel_threshold": row.balance_rel_threshold,
        "min_prefix_match": row.min_prefix_match,
    }
    return {key: value for key, value in document.items() if value or key in _ALWAYS}


async def _labels(tx: Transaction, names: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Those people set: what a machine says of itself it will say again."""
    found = {}
    for node_id, name in sorted(names.items(), key=lambda item: item[1]):
        labels = {row.key: row.value for row in await node_labels.list_(tx, node_id) if row.origin == _ADMIN}
        if labels:
            found[name] = labels
    return found


def _backend_document(wanted: WantedBackend) -> dict[str, Any]:
    return {key: value for key in wanted.__struct_fields__ if (value := getattr(wanted, key))}
