"""LocalAI's own orders on processes, answered to the letter (docs/reference/wire/models.md).

What comes in over the bus is decoded and answered by the agent; here is what it means.
"""

from __future__ import annotations

from collections.abc import Collection

from corral.contract.manifest import GRPC
from corral.contract.messages.models import (
    DoneReply,
    ModelStopped,
    RunningModel,
    RunningModels,
    StopModel,
    UnloadModel,
)
from corral.contract.messages.replicas import ReplicaState
from corral.kit.log import get_log
from corral.worker.supervisor.keys import parse_key
from corral.worker.supervisor.supervisor import Supervisor
from corral.worker.supervisor.table import Running

log = get_log(__name__)


def list_running(supervisor: Supervisor) -> RunningModels:
    """Alive and not stopping. A process without a model goes by its backend's name."""
    rows = []
    for running in supervisor.serving():
        slot = parse_key(running.key)
        if slot is not None:
            rows.append(RunningModel(model_id=slot.name, replica_index=slot.replica, address=running.address))
    return RunningModels(models=tuple(rows))


async def stop_model(supervisor: Supervisor, order: StopModel, hosts: Collection[str]) -> ModelStopped:
    """An exact, acknowledged stop. `hosts` are those under which this worker is known: controllers store the advertised
    address, workers know the local one, and upstream compares the two (docs/reference/wire/models.md#stop)."""
    key = order.process_key
    running = supervisor.find_key(key)
    if running is None:
        if supervisor.state_of(key) is ReplicaState.STOPPING:
            return ModelStopped(matched=True, process_key=key, error=f"{key} is already stopping")
        if supervisor.state_of(key) is None:
            return ModelStopped(terminated=True, process_key=key)
        await supervisor.stop_key(key, force=order.force)  # it starts, or waits to: nobody has its address yet
        return ModelStopped(matched=True, terminated=True, process_key=key)
    if not is_address_of(running, order.expected_address, hosts):
        error = f"address mismatch: {key} is at {running.address}, not at {order.expected_address}"
        return ModelStopped(matched=True, process_key=key, address=running.address, error=error)
    # Nothing is awaited between the look at the address and the mark that it is stopping: one critical section.
    stopped = await supervisor.stop(running.process_id, force=order.force)
    return ModelStopped(
        matched=True,
        freed=stopped.freed,
        terminated=stopped.terminated,
        process_key=key,
        address=stopped.address,
        error=stopped.error,
    )


def is_address_of(running: Running, address: str, hosts: Collection[str]) -> bool:
    host, _, port = address.rpartition(":")
    return port == str(running.port) and host.strip("[]") in {"127.0.0.1", "localhost", "::1", *hosts}


async def unload_model(supervisor: Supervisor, order: UnloadModel, hosts: Collection[str]) -> DoneReply:
    """Free memory, keep the process. Without an address every process of exactly that model is meant, never an
    arbitrary one. Whether it was freed is only logged: the contract's answer is always a success."""
    for running in supervisor.serving():
        if running.protocol != GRPC:
            continue
        named = running.model == order.model_name
        meant = is_address_of(running, order.address, hosts) if order.address else named
        if meant and (why := await supervisor.free(running.process_id)) is not None:
            log.warning("memory was not freed", model=order.model_name, process=running.process_id, why=why)
    return DoneReply(success=True)
