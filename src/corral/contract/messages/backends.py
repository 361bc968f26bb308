"""Backends on a node: install, upgrade, list, delete, stop, progress (contract: nats.md §4.1–4.5, §6)."""

from __future__ import annotations

from enum import StrEnum

from corral.contract.codec import Message, always
from corral.contract.subjects import call, event


class Phase(StrEnum):
    RESOLVING = "resolving"
    DOWNLOADING = "downloading"
    VERIFYING = "verifying"  # since protocol 1
    EXTRACTING = "extracting"
    STARTING = "starting"


class NodeRowStatus(StrEnum):
    """State of one node in an operation, as the contract shows it."""

    QUEUED = "queued"
    DOWNLOADING = "downloading"
    RUNNING_ON_WORKER = "running_on_worker"
    SUCCESS = "success"
    ERROR = "error"


class InstallBackend(Message, frozen=True):
    backend: str = always(str)
    model_id: str = ""
    backend_galleries: str = ""  # JSON inside JSON: an array of gallery objects
    uri: str = ""
    name: str = ""
    alias: str = ""
    replica_index: int = 0
    force: bool = False
    op_id: str = ""
    accept: bool = False  # since protocol 1: answer at once, report the outcome as an event
    attempt: int = 0  # since protocol 1


class InstallReply(Message, frozen=True):
    success: bool = always(bool)
    address: str = ""
    error: str = ""
    accepted: bool = False  # since protocol 1


class UpgradeBackend(Message, frozen=True):
    backend: str = always(str)
    backend_galleries: str = ""
    uri: str = ""
    name: str = ""
    alias: str = ""
    replica_index: int = 0
    op_id: str = ""
    accept: bool = False  # since protocol 1
    attempt: int = 0  # since protocol 1


class StoppedReply(Message, frozen=True):
    """Answer to upgrade and delete. `reports_stopped_processes` false means an older worker: its list says nothing."""

    success: bool = always(bool)
    error: str = ""
    stopped_process_keys: tuple[str, ...] = ()
    reports_stopped_processes: bool = False
    accepted: bool = False  # since protocol 1


class InstallProgress(Message, frozen=True):
    op_id: str = always(str)
    node_id: str = always(str)
    backend: str = always(str)
    file_name: str = ""
    current: str = ""
    total: str = ""
    percentage: float = always(float)
    phase: str = ""
    attempt: int = 0  # since protocol 1
    seq: int = 0  # since protocol 1
    current_bytes: int = 0  # since protocol 1
    total_bytes: int = 0  # since protocol 1
    rate: float = 0.0  # since protocol 1: bytes per second


class ListBackends(Message, frozen=True):
    pass


class NodeBackend(Message, frozen=True):
    name: str = always(str)
    is_system: bool = always(bool)
    is_meta: bool = always(bool)
    installed_at: str = ""
    gallery_url: str = ""
    version: str = ""
    uri: str = ""
    digest: str = ""


class BackendList(Message, frozen=True):
    backends: tuple[NodeBackend, ...] = always(tuple)
    error: str = ""


class DeleteBackend(Message, frozen=True):
    backend: str = always(str)


class StopBackend(Message, frozen=True):
    """An empty `backend` stops everything; so does an empty payload. A payload that cannot be read stops nothing."""

    backend: str = ""
    force: bool = False


INSTALL_BACKEND = call("nodes.{node}.backend.install", InstallBackend, InstallReply)
UPGRADE_BACKEND = call("nodes.{node}.backend.upgrade", UpgradeBackend, StoppedReply)
LIST_BACKENDS = call("nodes.{node}.backend.list", ListBackends, BackendList)
DELETE_BACKEND = call("nodes.{node}.backend.delete", DeleteBackend, StoppedReply)
STOP_BACKEND = event("nodes.{node}.backend.stop", StopBackend)
INSTALL_PROGRESS = event("nodes.{node}.backend.install.{op}.progress", InstallProgress)
