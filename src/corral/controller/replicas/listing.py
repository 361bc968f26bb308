"""Lists replicas for the API (docs/reference/wire/http-nodes.md#replica-row): desired replicas, each with the state
that its node reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from corral.contract.messages.nodes import NodeStatus
from corral.contract.messages.replicas import ReplicaProcess, ReplicaState
from corral.controller.inventory.activity import ActivityTracker
from corral.controller.inventory.routing import read_routing
from corral.controller.replicas.lifecycle import ReplicaHost
from corral.controller.replicas.snapshot import read_desired
from corral.controller.runtime.node_views import rfc3339
from corral.store.engine.transactions import Store
from corral.store.records import DesiredReplica, ReplicaStage
from corral.store.tables import node_backends, nodes, peer_processes
from corral.store.tables.nodes import Node

_STATES = {
    ReplicaStage.PLACED: "staging",
    ReplicaStage.ORDERED: "loading",
    ReplicaStage.RUNNING: "loaded",
    ReplicaStage.LEAVING: "unloading",
}  # the contract's words


class ReplicaListing:
    def __init__(self, store: Store, activity: ActivityTracker) -> None:
        self._store = store
        self._activity = activity

    async def desired(self) -> list[DesiredReplica]:
        """Without what nodes report: cheap enough to draw a large fleet every few seconds."""
        async with self._store.read() as tx:
            return list((await read_desired(tx))[0])

    async def list_(self, *, node_id: str = "", model: str = "", answering: bool = False) -> list[dict[str, Any]]:
        """`answering`: only those that gateways send requests to."""
        async with self._store.read() as tx:
            rows, _ = await read_desired(tx)
            known = {node.id: node for node in await nodes.list_(tx)}
            reports = await node_backends.list_processes(tx)
            # Of the present revision, of the one before until that is ready, and of one that is on trial.
            routed = {each.process_id for each in (await read_routing(tx, model))[0]} if answering else set()
            addresses = {peer.process_id: peer.address for peer in await peer_processes.list_(tx)}
        found = []
        for row in rows:
            if node_id not in ("", row.node_id) or model not in ("", row.model) or row.node_id not in known:
                continue
            process = _process(row, reports.get(row.node_id))
            serves = process is not None and process.state == ReplicaState.READY
            if serves and row.stage is ReplicaStage.ORDERED:  # the reconciler has not stored it yet
                row = replace(row, stage=ReplicaStage.RUNNING)
            is_routed = process is not None and process.process_id in routed and row.stage is ReplicaStage.RUNNING
            if not answering or (is_routed and known[row.node_id].status == "healthy"):
                found.append(self._view(row, known[row.node_id], process, addresses))
        return found

    def _view(
        self, row: DesiredReplica, node: Node, process: ReplicaProcess | None, addresses: Mapping[str, str]
    ) -> dict[str, Any]:
        process_id = process.process_id if process is not None else row.process_id
        activity = self._activity.find(row.node_id, process_id) if process is not None else None
        url = node.ingress_url.rstrip("/") if node.protocol else ""  # a LocalAI worker's is a file server
        view: dict[str, Any] = {
            "id": row.op_id,
            "node_id": row.node_id,
            "node_name": node.name,
            "model_name": row.model,
            "replica_index": row.replica,
            "address": f"{url}/replicas/{process_id}" if url and process_id else addresses.get(process_id, ""),
            "state": _STATES[row.stage],
            "in_flight": activity.in_flight if activity is not None else 0,
            "last_used": rfc3339(row.last_used_at or row.ready_at or row.created_at),
            "backend_type": row.backend,
            "config_revision": row.revision,
            "process_id": process_id,
            "process_state": _process_state(node, process),
            "memory_bytes": row.memory_bytes,
            "devices": [device.index for device in row.devices],
            "reason": row.reason,
            "restarts": process.restarts if process is not None else 0,
            "created_at": rfc3339(row.created_at),
            "updated_at": rfc3339(row.updated_at),
        }
        if process is not None and process.error:
            view["error"] = process.error
        return view


def _process_state(node: Node, process: ReplicaProcess | None) -> str:
    if process is None:
        return ""
    # The last report of an offline node is out of date.
    return "node offline" if node.status == NodeStatus.OFFLINE else process.state


def _process(row: DesiredReplica, reports: node_backends.Processes | None) -> ReplicaProcess | None:
    return ReplicaHost(row.node_id, "", processes=reports.processes).process_of(row) if reports is not None else None
