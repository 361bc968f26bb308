"""Small worlds for tests of the scheduler: machines, models and replicas in a line each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from corral.contract.hardware import Device
from corral.contract.messages.replicas import ReplicaDevice
from corral.controller.scheduler.world import GIB, Build, BuildState, Memory, Model, Node, Replica, World

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
INSTALLED = Build(BuildState.INSTALLED)
MANY = Build(BuildState.INSTALLED, devices="many")


def ago(seconds: float) -> datetime:
    return NOON - timedelta(seconds=seconds)


def gpu(index: int, total_gib: float = 8, free_gib: float | None = None, **more: Any) -> Device:
    free = total_gib if free_gib is None else free_gib
    return Device(
        index=index,
        vendor=more.pop("vendor", "nvidia"),
        uuid=more.pop("uuid", f"GPU-{index}"),
        total_bytes=int(total_gib * GIB),
        free_bytes=int(free * GIB),
        **more,
    )


def gpu_node(name: str = "gpu", gpus: Iterable[Device] = (), **more: Any) -> Node:
    devices = tuple(gpus) or (gpu(0),)
    defaults: dict[str, Any] = {
        "builds": {"llama-cpp": INSTALLED},
        "capability": "nvidia-cuda-12",
        "gpu_vendor": "nvidia",
        "total_ram": 64 * GIB,
        "available_ram": 60 * GIB,
    }
    return Node(id=f"id-{name}", name=name, devices=devices, **(defaults | more))


def cpu_node(name: str = "cpu", ram_gib: float = 16, free_gib: float | None = None, **more: Any) -> Node:
    defaults: dict[str, Any] = {
        "builds": {"llama-cpp": INSTALLED},
        "capability": "default",
        "total_ram": int(ram_gib * GIB),
        "available_ram": int((ram_gib if free_gib is None else free_gib) * GIB),
    }
    return Node(id=f"id-{name}", name=name, **(defaults | more))


def model(name: str = "m", gib: float = 0, **more: Any) -> Model:
    defaults: dict[str, Any] = {"backend": "llama-cpp", "revision": "r1", "memory": Memory(int(gib * GIB), how="told")}
    return Model(name=name, **(defaults | more))


def replica(node: Node, of: Model | str, gib: float = 0, **more: Any) -> Replica:
    """Ready and unused for an hour, unless told otherwise."""
    defaults: dict[str, Any] = {
        "revision": "r1",
        "memory_bytes": int(gib * GIB),
        "process_id": f"{node.name}-{of if isinstance(of, str) else of.name}-{more.get('index', 0)}",
        "ready_at": ago(3600),
    }
    return Replica(node.id, of if isinstance(of, str) else of.name, **(defaults | more))


def on(*indices: int) -> tuple[ReplicaDevice, ...]:
    return tuple(ReplicaDevice(vendor="nvidia", index=index, uuid=f"GPU-{index}") for index in indices)


def world(
    nodes: Iterable[Node] = (), models: Iterable[Model] = (), replicas: Iterable[Replica] = (), **more: Any
) -> World:
    return World(
        NOON,
        {node.id: node for node in nodes},
        {one.name: one for one in models},
        tuple(replicas),
        **more,
    )


def with_schedule(of: Model, **more: Any) -> Model:
    return replace(of, schedule=replace(of.schedule, **more))
