"""One node as its page shows it: devices, replicas, backends, labels, history, and what an action would cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from corral.contract.admin import BackendMatrix, NodeView
from corral.contract.hardware import Device
from corral.contract.labels import BUILT_IN_LABELS
from corral.controller.web.matrix import Cell, cell_of
from corral.controller.web.placement_map import hue_of
from corral.controller.web.words import ago, backend_href, counted, listed, model_href, parse_moment, size, used_of
from corral.store.records import DesiredReplica, ReplicaStage
from corral.store.tables.node_events import StatusChange

_MODELS_NAMED = 3
_STATES = {"staging": "on its way", "loading": "starting", "loaded": "ready", "unloading": "ending"}


@dataclass(frozen=True)
class DeviceLine:
    key: str
    name: str
    memory: str
    temperature: str
    power: str
    busy: str
    note: str


@dataclass(frozen=True)
class ReplicaOnNode:
    key: str
    model: str
    href: str
    css: str
    state: str
    words: str
    memory: str
    requests: str
    used_at: str
    used: str
    note: str


@dataclass(frozen=True)
class BackendOnNode:
    name: str
    href: str
    cell: Cell
    problem: str


@dataclass(frozen=True)
class HistoryLine:
    at: str
    ago: str
    status: str
    reason: str


@dataclass(frozen=True)
class NodeFacts:
    own_labels: tuple[tuple[str, str], ...]
    built_in_labels: tuple[tuple[str, str], ...]
    about: tuple[tuple[str, str], ...]
    drain_cost: str
    delete_cost: str


def device_lines(devices: Sequence[Device]) -> tuple[DeviceLine, ...]:
    return tuple(_device(device) for device in devices)


def _device(device: Device) -> DeviceLine:
    memory = size(device.total_bytes) if device.total_bytes else "not known"
    if device.total_bytes and device.free_bytes is not None:
        memory = used_of(device.total_bytes - device.free_bytes, device.total_bytes)
    notes = [
        f"MIG {device.mig}" if device.mig is not None else "",
        "shares the machine's RAM" if device.unified else "",
    ]
    notes += [f"driver {device.driver}" if device.driver else "", device.pci]
    return DeviceLine(
        key=f"{device.key} {device.mig}",
        name=f"{device.index}: {device.name or device.vendor}",
        memory=memory,
        temperature=f"{device.temperature_c} °C" if device.temperature_c is not None else "–",
        power=f"{device.power_w} W" if device.power_w is not None else "–",
        busy=f"{100 * device.utilisation:.0f} %" if device.utilisation is not None else "–",
        note=" · ".join(note for note in notes if note),
    )


def replica_lines(rows: Sequence[Mapping[str, Any]], now: datetime) -> tuple[ReplicaOnNode, ...]:
    """Of the listing of replicas."""
    ordered = sorted(rows, key=lambda row: (str(row["model_name"]), int(row["replica_index"])))
    return tuple(_replica(row, now) for row in ordered)


def _replica(row: Mapping[str, Any], now: datetime) -> ReplicaOnNode:
    failed = row.get("process_state") == "failed"
    state = "failed" if failed else str(row["state"])
    model, index = str(row["model_name"]), int(row["replica_index"])
    used = parse_moment(str(row.get("last_used", "")))
    in_flight = int(row.get("in_flight") or 0)
    devices = row.get("devices") or ()
    where = f" · GPU {', '.join(map(str, devices))}" if devices else ""
    return ReplicaOnNode(
        key=str(row["id"]),
        model=f"{model} #{index}" if index else model,
        href=f"{model_href(model)}#replica-{row['id']}",
        css=hue_of(model),
        state=state,
        words="failed" if failed else _STATES.get(state, state),
        memory=(size(row["memory_bytes"]) if row.get("memory_bytes") else "–") + where,
        requests=counted(in_flight, "request", "requests") if in_flight else "idle",
        used_at=used.isoformat() if used else "",
        used=ago(used, now),
        note=str(row.get("error") or row.get("reason") or ""),
    )


def backends_on(node_id: str, matrix: BackendMatrix) -> tuple[BackendOnNode, ...]:
    """Those that the node has, or still has something to do for."""
    node = next((each for each in matrix.nodes if each.id == node_id), None)
    if node is None:
        return ()
    return tuple(
        BackendOnNode(row.backend, backend_href(row.backend), cell_of(row, node), row.nodes[node_id].problem)
        for row in matrix.backends
        if node_id in row.nodes
    )


def history_lines(changes: Sequence[StatusChange], now: datetime) -> tuple[HistoryLine, ...]:
    return tuple(
        HistoryLine(change.at.isoformat(), ago(change.at, now), change.status, change.reason) for change in changes
    )


def node_facts(node: NodeView, replicas: Sequence[DesiredReplica]) -> NodeFacts:
    """`replicas`: of the whole fleet."""
    about = {
        "Platform": node.platform,
        "Capability": node.capability,
        "Version": node.version,
        "Address": node.ingress_url or node.address,
        "RAM": used_of(max(0, node.total_ram - node.available_ram), node.total_ram) if node.total_ram else "",
        "Disk": used_of(max(0, node.total_disk - node.available_disk), node.total_disk) if node.total_disk else "",
        "Replicas of a model": f"at most {node.max_replicas_per_model}" if node.max_replicas_per_model else "",
        "Backends run as": node.backend_user,
        "Id": node.id,
    }
    lost = drain_cost(node.id, replicas)
    labels = sorted(node.labels.items())
    return NodeFacts(
        own_labels=tuple(each for each in labels if each[0] not in BUILT_IN_LABELS),
        built_in_labels=tuple(each for each in labels if each[0] in BUILT_IN_LABELS),
        about=tuple((name, value) for name, value in about.items() if value),
        drain_cost=f"It completes its requests and gets no new work until it is resumed. {lost}",
        delete_cost=f"It is removed and its credentials end at once; to return it needs a new join line. {lost}",
    )


def drain_cost(node_id: str, replicas: Sequence[DesiredReplica]) -> str:
    """Which models lose their last ready replica."""
    running = [row for row in replicas if row.stage == ReplicaStage.RUNNING]
    here = {row.model for row in running if row.node_id == node_id}
    elsewhere = {row.model for row in running if row.node_id != node_id}
    count = sum(row.node_id == node_id for row in replicas)
    if not count:
        return "No replica is on it."
    last = sorted(here - elsewhere)
    words = f"{counted(count, 'replica is', 'replicas are')} on it."
    if not last:
        return f"{words} Each of its models is ready on another node too."
    named = [*last[:_MODELS_NAMED], *([f"{len(last) - _MODELS_NAMED} more"] if len(last) > _MODELS_NAMED else [])]
    return f"{words} Ready nowhere else: {listed(named)}; requests for {'it' if len(last) == 1 else 'them'} load again."
