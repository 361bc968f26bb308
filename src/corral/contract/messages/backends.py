"""Backends on a node: install, upgrade, list, delete, stop, progress, results (docs/reference/wire/backends.md,
docs/reference/wire/progress.md).

Also what the admin API tells about upgrades (docs/reference/wire/http-backends.md#upgradeinfo)."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from corral.contract.codec import Message, always
from corral.contract.manifest import Manifest
from corral.contract.sources import Source
from corral.contract.subjects import call, event

# In a worker's error: what follows is what a person does on that machine, and then the order goes on by itself.
TO_FIX = " → "


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
    variant: str = ""  # since protocol 1: the concrete build `backend` was resolved to; empty = the worker resolves
    digest: str = ""  # since protocol 1: what the inventory must show afterwards; `alias` is then the build's own
    version: str = ""  # since protocol 1: of the gallery's entry
    gallery_url: str = ""  # since protocol 1: for metadata.json
    sources: tuple[Source, ...] = ()  # since protocol 1: alternatives for the same content, best first
    manifest: Manifest | None = None  # since protocol 1: how it is run; absent = LocalAI's run.sh


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
    variant: str = ""  # since protocol 1, these as in InstallBackend
    digest: str = ""
    version: str = ""
    gallery_url: str = ""
    sources: tuple[Source, ...] = ()
    manifest: Manifest | None = None
    # Since protocol 1, with `accept`: have the version beside the current one and change nothing else. The same order
    # without it (under its own attempt) switches: nothing is left to fetch by then.
    fetch_only: bool = False
    # Since protocol 1, with `accept`: the machine cannot hold a process of each version, so the old ones end before
    # the new ones start. Whoever orders sees to it that requests wait meanwhile, or go elsewhere.
    in_place: bool = False


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
    sources: dict[str, int] = msgspec.field(default_factory=dict)  # received bytes by source
    bad_sources: tuple[str, ...] = ()  # sources that sent wrong bytes and are not used any more


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
    alias: str = ""  # since protocol 1
    meta_backend_for: str = ""  # since protocol 1: the concrete build a meta row stands for
    previous: tuple[str, ...] = ()  # since protocol 1: digests kept beside the current one that once were, newest first
    fetched: tuple[str, ...] = ()  # since protocol 1: digests kept beside it that never were: an upgrade can switch
    problem: str = ""  # since protocol 1: why nothing of it can run on this machine now, and what to do about it


class BackendList(Message, frozen=True):
    backends: tuple[NodeBackend, ...] = always(tuple)
    error: str = ""
    seq: int = 0  # since protocol 1: rises with each change of the inventory, also from one start to the next


class DeleteBackend(Message, frozen=True):
    backend: str = always(str)
    op_id: str = ""  # since protocol 1
    accept: bool = False  # since protocol 1
    attempt: int = 0  # since protocol 1


class BackendResult(Message, frozen=True):
    """The outcome of an accepted order. Since protocol 1."""

    op_id: str = always(str)
    attempt: int = always(int)
    node_id: str = always(str)
    backend: str = always(str)
    success: bool = always(bool)
    error: str = ""
    code: str = ""  # of the error, as in kit/errors.py
    permanent: bool = False  # time will not cure it: unknown, no build, malformed, wrong digest twice
    cancelled: bool = False
    phase: str = ""  # a failure's: while it was fetched or unpacked, nothing was switched; empty = it may have been
    address: str = ""  # of the process, where the order started one
    variant: str = ""
    version: str = ""
    digest: str = ""  # now current; with `fetched`, of what is beside it now
    fetched: bool = False  # the order was `fetch_only`: nothing was switched
    missing: tuple[str, ...] = ()  # libraries of the system without which the worker did not begin
    stopped_process_keys: tuple[str, ...] = ()


class OrderReport(Message, frozen=True):
    """An accepted order in a heartbeat: those under way, and those that ended in the last ten minutes. An outcome whose
    event was lost is found here; an order that is not listed after the worker restarted is lost. Since protocol 1."""

    op_id: str = always(str)
    attempt: int = always(int)
    kind: str = always(str)  # install, upgrade, delete
    backend: str = always(str)
    result: BackendResult | None = None  # None: still at it
    cured: bool = False  # it was refused for `missing` libraries, and they are there now: another attempt would do


class CancelBackend(Message, frozen=True):
    """Stops the download or unpacking of one order. Since protocol 1."""

    op_id: str = always(str)
    backend: str = always(str)
    keep: bool = False  # what was fetched stays, for a later order to go on from


class CancelReply(Message, frozen=True):
    """`running` false: there is no such order any more, so its outcome stands. Since protocol 1."""

    success: bool = always(bool)
    running: bool = False
    error: str = ""


class VerifyBackend(Message, frozen=True):
    """Reads every file of what is installed again. Since protocol 1."""

    backend: str = always(str)


class VerifyReply(Message, frozen=True):
    """Paths inside the version's folder, the first of them only; how many in all is counted. Since protocol 1."""

    success: bool = always(bool)
    error: str = ""
    version: str = ""
    digest: str = ""
    missing: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    damaged: int = 0  # files that are missing or changed


class StopBackend(Message, frozen=True):
    """An empty `backend` stops everything; so does an empty payload. A payload that cannot be read stops nothing."""

    backend: str = ""
    force: bool = False


class NodeDrift(Message, frozen=True):
    """A node whose build differs from what most nodes have."""

    node_id: str = always(str)
    node_name: str = always(str)
    version: str = ""
    digest: str = ""


class UpgradeInfo(Message, frozen=True):
    backend_name: str = always(str)
    installed_version: str = always(str)
    available_version: str = always(str)
    installed_digest: str = ""
    available_digest: str = ""
    node_drift: tuple[NodeDrift, ...] = ()


INSTALL_BACKEND = call("nodes.{node}.backend.install", InstallBackend, InstallReply)
UPGRADE_BACKEND = call("nodes.{node}.backend.upgrade", UpgradeBackend, StoppedReply)
LIST_BACKENDS = call("nodes.{node}.backend.list", ListBackends, BackendList)
DELETE_BACKEND = call("nodes.{node}.backend.delete", DeleteBackend, StoppedReply)
CANCEL_BACKEND = call("nodes.{node}.backend.cancel", CancelBackend, CancelReply)
VERIFY_BACKEND = call("nodes.{node}.backend.verify", VerifyBackend, VerifyReply)
STOP_BACKEND = event("nodes.{node}.backend.stop", StopBackend)
INSTALL_PROGRESS = event("nodes.{node}.backend.install.{op}.progress", InstallProgress)
INSTALL_RESULT = event("nodes.{node}.backend.install.{op}.result", BackendResult)
UPGRADE_RESULT = event("nodes.{node}.backend.upgrade.{op}.result", BackendResult)
DELETE_RESULT = event("nodes.{node}.backend.delete.{op}.result", BackendResult)
