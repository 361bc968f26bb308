"""The processes of a LocalAI worker: their keys and addresses (docs/reference/wire/processes.md#process-key), and the
list that the worker would report if it reported one. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from corral.contract.manifest import GRPC
from corral.contract.messages.replicas import ReplicaProcess
from corral.controller.runtime.node_views import rfc3339
from corral.kit.errors import Failed
from corral.kit.hosts import is_loopback
from corral.store.tables.peer_processes import PeerProcess

_NOT_IN_AN_ADDRESS = frozenset("/\\?#@ \"'<>%,")


def process_key(model: str, replica: int) -> str:
    return f"{model}#{replica}"


def port_of(address: str) -> int | None:
    """None: that is no address."""
    try:
        return urlsplit(f"//{address}").port
    except ValueError:
        return None


def reachable_address(reported: str, node_address: str) -> str:
    """Where a process is, from what its worker answered. It answers nothing when it means its own address, and the
    loopback when it could not make sense of how it is to be reached. Raises Failed for what is no address at all."""
    address = reported or node_address
    port = port_of(address)
    if port is None or _NOT_IN_AN_ADDRESS & set(address) or not address.isprintable():
        raise Failed(f"its worker says that the process is at {address[:100]!r}, and that is no host:port")
    host, own = urlsplit(f"//{address}").hostname or "", urlsplit(f"//{node_address}").hostname or ""
    if not host or (is_loopback(host) and own and not is_loopback(own)):
        host = own
    if not host:
        raise Failed(f"its worker says that the process is at {address[:100]!r}, and nobody knows on which host")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listed(rows: Iterable[PeerProcess]) -> tuple[ReplicaProcess, ...]:
    return tuple(_shown(row) for row in rows)


def _shown(row: PeerProcess) -> ReplicaProcess:
    return ReplicaProcess(
        process_id=row.process_id,
        model=row.model,
        replica=row.replica,
        backend=row.backend,
        state=row.state,
        protocol=GRPC,
        revision=row.revision,
        slots=row.slots,
        devices=row.devices,
        memory_bytes=row.memory_bytes,
        started_at=rfc3339(row.started_at),
        ready_at=rfc3339(row.ready_at),
        error=row.error,
    )
