"""Rows that tests put in."""

from __future__ import annotations

import itertools
import uuid
from datetime import UTC, datetime
from typing import Any

import msgspec

from corral.contract.manifest import Manifest
from corral.contract.messages.backends import BackendResult, NodeBackend, OrderReport
from corral.contract.messages.replicas import ReplicaDevice, ReplicaFile
from corral.contract.sources import Source
from corral.store.engine.types import to_us
from corral.store.records import (
    BackendIntent,
    BackendRequest,
    BackendRule,
    BackendTarget,
    DesiredReplica,
    LoadJob,
    ModelTrial,
    OperationNode,
    Rollout,
    RolloutClass,
    RolloutNodeBefore,
    RolloutPhase,
    RolloutSettings,
    RolloutWindow,
    TargetBuild,
)
from corral.store.tables.model_files import StoredFile
from corral.store.tables.model_schedules import Schedule
from corral.store.tables.models import StoredModel
from corral.store.tables.node_backends import Inventory
from corral.store.tables.nodes import Node
from corral.store.tables.operations import Operation, StoredRequest
from corral.store.tables.peer_processes import PeerProcess
from corral.store.tables.receipts import ReceiptRow, StoredReceipt

NOON = datetime(2026, 3, 4, 12, 0, 0, 123456, tzinfo=UTC)
_numbers = itertools.count(1)


def a_node(**known: Any) -> Node:
    defaults: dict[str, Any] = {
        "id": str(uuid.uuid4()),
        "name": f"node-{next(_numbers)}",
        "created_at": NOON,
        "updated_at": NOON,
        "status_changed_at": NOON,
        "status": "healthy",
    }
    return Node(**(defaults | known))


def a_rollout(operation_id: str, node_id: str, **more: Any) -> Rollout:
    state = RolloutClass("cpu", canary=node_id, soaking=True, new_windows=(RolloutWindow(1e9, 3, 1, 0.5),))
    values: dict[str, Any] = {
        "operation_id": operation_id,
        "generation": 1,
        "subject": "vllm",
        "phase": RolloutPhase.SOAK,
        "settings": RolloutSettings(soak_s=60),
        "started_at": NOON,
        "classes": (state,),
        "nodes": {node_id: RolloutNodeBefore("cpu", "ümläut", "sha256:old")},
        "trial": ModelTrial("new", "old", {"name": "smöl"}, {}, "person", "gallery", failed_on={node_id: "no memory"}),
    }
    return Rollout(**(values | more))


def a_rule(**known: Any) -> BackendRule:
    defaults: dict[str, Any] = {
        "generation": next(_numbers),
        "operation_id": "op",
        "scope_kind": "all",
        "scope_value": "",
        "backend": "vllm",
        "want": "present",
        "target": "t",
        "created_at": NOON,
        "request": BackendRequest("vllm", uri="oci://x/y:z", alias="ä"),
    }
    return BackendRule(**(defaults | known))


def a_target(**known: Any) -> BackendTarget:
    build = TargetBuild(
        "cuda12-vllm",
        "sha256:abc",
        sources=(Source("oci", "x/y:z", digest="sha256:abc", platform="linux/amd64"),),
        manifest=Manifest(command=("run", "{port}")),
    )
    defaults: dict[str, Any] = {
        "id": "t",
        "capability": "nvidia",
        "platform": "linux/amd64",
        "python": "3.11",
        "resolved_at": NOON,
        "build": build,
    }
    return BackendTarget(**(defaults | known))


def an_intent(node_id: str, backend: str = "vllm", **known: Any) -> BackendIntent:
    defaults: dict[str, Any] = {
        "kind": "install",
        "stage": "waiting",
        "generation": 7,
        "operation_id": "op",
        "attempt": 1,
        "updated_at": NOON,
    }
    return BackendIntent(node_id, backend, **(defaults | known))


def an_operation(**known: Any) -> Operation:
    defaults: dict[str, Any] = {
        "id": "op",
        "kind": "install",
        "backend": "vllm",
        "scope_kind": "all",
        "scope_value": "",
        "generation": 7,
        "created_at": NOON,
        "request": StoredRequest(BackendRequest("vllm"), force=True, max_parallel="25%"),
    }
    return Operation(**(defaults | known))


def an_op_row(**known: Any) -> OperationNode:
    defaults: dict[str, Any] = {
        "operation_id": "op",
        "node_id": "n1",
        "node_name": "barn",
        "status": "queued",
        "updated_at": NOON,
    }
    return OperationNode(**(defaults | known))


def an_inventory(node_id: str, **known: Any) -> Inventory:
    result = BackendResult("op", 1, node_id, "vllm", True, digest="sha256:abc")
    defaults: dict[str, Any] = {
        "boot_id": "b1",
        "seq": 5,
        "seen_at": NOON,
        "backends": (NodeBackend("vllm", False, True, meta_backend_for="cuda12-vllm"),),
        "orders": (OrderReport("op", 1, "install", "vllm", result), OrderReport("op2", 2, "delete", "x")),
    }
    return Inventory(node_id, **(defaults | known))


def a_model(id: str = "smol", **known: Any) -> StoredModel:
    definition = {"name": id, "backend": "llama-cpp", "parameters": {"model": "ümläut.gguf"}, "f16": True}
    defaults: dict[str, Any] = {
        "definition": definition,
        "revision": "r1",
        "origin": "person",
        "created_at": NOON,
        "updated_at": NOON,
    }
    return StoredModel(id, **(defaults | known))


def a_file(model: str = "smol", path: str = "weights.gguf", **known: Any) -> StoredFile:
    defaults: dict[str, Any] = {
        "uri": "pypi://demo/weights.gguf",
        "resolved": "pypi://demo==1.0/weights.gguf",
        "digest": "sha256:" + "a" * 64,
        "size_bytes": 98_000_000_000,
        "fetched_at": NOON,
    }
    return StoredFile(model, path, **(defaults | known))


def a_schedule(model: str = "smol", **known: Any) -> Schedule:
    defaults: dict[str, Any] = {"id": str(uuid.uuid4()), "created_at": NOON, "updated_at": NOON}
    return Schedule(model, **(defaults | known))


def a_replica(node_id: str, model: str = "smol", **known: Any) -> DesiredReplica:
    defaults: dict[str, Any] = {
        "replica": 0,
        "revision": "r1",
        "backend": "llama-cpp",
        "stage": "running",
        "op_id": "start-1",
        "process_id": "p-1",
        "created_at": NOON,
        "updated_at": NOON,
        "devices": (ReplicaDevice("nvidia", 1, "GPU-ü"),),
        "files": (ReplicaFile("smol/w.gguf", "sha256:aa", 5),),
        "ready_at": NOON,
        "force": True,
    }
    return DesiredReplica(node_id, model, **(defaults | known))


def a_job(model: str = "smol", **known: Any) -> LoadJob:
    defaults: dict[str, Any] = {
        "state": "failed",
        "created_at": NOON,
        "updated_at": NOON,
        "error": "out of memory\nlast line",
        "failed_on": {"node-1": "out of memory"},
        "retry_at": NOON,
    }
    return LoadJob(model, **(defaults | known))


def a_receipt(**known: Any) -> StoredReceipt:
    defaults: dict[str, Any] = {
        "at": NOON,
        "id": f"request-{next(_numbers)}",
        "key_id": "k",
        "model": "smol",
        "path": "/v1/chat/completions",
        "status": 200,
        "total_us": 1_500,
        "tries": 1,
        "estimated": False,
        "streamed": True,
    }
    defaults |= (
        dict.fromkeys(("served_by", "node_id", "process_id", "revision", "digest", "ending", "error", "error_text"), "")
        | defaults
    )
    numbers = ("replica", "queue_us", "load_us", "first_byte_us", "prompt_tokens", "completion_tokens", "resumed")
    return StoredReceipt(**(dict.fromkeys(numbers, 0) | defaults | known))


def row_of(receipt: StoredReceipt) -> ReceiptRow:
    """As `receipts.insert` takes it."""
    at, *others = msgspec.structs.astuple(receipt)
    return (to_us(at), *others)


def a_peer_process(node_id: str, process_id: str = "p1", **known: Any) -> PeerProcess:
    defaults: dict[str, Any] = {
        "model": "org/smöl",
        "replica": 0,
        "revision": "r1",
        "backend": "llama-cpp",
        "address": "w1:50052",
        "state": "ready",
        "load": '{"Model":"smol.gguf"}',
        "definition": {"name": "org/smöl", "parameters": {"model": "smol.gguf"}},
        "started_at": NOON,
        "ready_at": NOON,
    }
    return PeerProcess(process_id, node_id, **(defaults | known))
