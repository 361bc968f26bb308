"""Model files on a node, apart from any replica: stage them before a load, list them, remove those that nothing needs
(docs/reference/wire/staging.md). All since protocol 1, between Corral peers only.

Controllers order with `accept`: a transfer takes longer than any call may. Progress has the form of an install's.
"""

from __future__ import annotations

from corral.contract.codec import Message, always
from corral.contract.messages.backends import InstallProgress
from corral.contract.messages.models import DoneReply
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.subjects import call, event


class StageModel(Message, frozen=True):
    """Bring these files to the node. The fields are those of `StartReplica`."""

    op_id: str = always(str)
    attempt: int = always(int)
    model: str = always(str)
    files: tuple[ReplicaFile, ...] = ()
    sources: tuple[str, ...] = ()
    source_token: str = ""
    file_list: str = ""
    accept: bool = False


class StageReply(Message, frozen=True):
    success: bool = always(bool)
    accepted: bool = False
    error: str = ""


class StageResult(Message, frozen=True):
    """How an accepted order ended, under its own `op_id` and `attempt`."""

    op_id: str = always(str)
    attempt: int = always(int)
    success: bool = always(bool)
    model: str = always(str)
    error: str = ""
    final: bool = False  # another attempt would fail the same way
    cancelled: bool = False


class CancelStage(Message, frozen=True):
    """Stop the transfer. What has arrived stays for a later attempt. `success` of the reply: it was running."""

    op_id: str = always(str)
    model: str = always(str)


class ListFiles(Message, frozen=True):
    """How much of these files is on the node?"""

    files: tuple[ReplicaFile, ...] = always(tuple)


class FilesOnNode(Message, frozen=True):
    """Bytes of each requested file, in the order of the request. A file counts as whole when all its bytes are there
    and were verified; what has arrived of a transfer is a part of it."""

    have_bytes: tuple[int, ...] = always(tuple)
    free_bytes: int = 0  # on the disk of the models folder
    cache_bytes: int = 0  # of all model files that were fetched to this node
    error: str = ""


class CollectFiles(Message, frozen=True):
    """Remove fetched files that nothing needs. Never removed: files that a process reads or an order is about, and
    files that were used a moment ago."""

    keep: tuple[str, ...] = always(tuple)  # beginnings of paths below the models folder: `model/` or `model/set/`
    dry_run: bool = False


class RemovedFiles(Message, frozen=True):
    """One set of files, or blobs without a set. Bytes that another file shares are not counted: they stay."""

    name: str = always(str)
    files: int = always(int)
    size_bytes: int = always(int)
    why: str = ""


class CollectedFiles(Message, frozen=True):
    removed: tuple[RemovedFiles, ...] = always(tuple)
    error: str = ""


STAGE_MODEL = call("nodes.{node}.model.stage", StageModel, StageReply)
CANCEL_STAGE = call("nodes.{node}.model.stage.cancel", CancelStage, DoneReply)
STAGE_PROGRESS = event("nodes.{node}.model.stage.{op}.progress", InstallProgress)
STAGE_RESULT = event("nodes.{node}.model.stage.{op}.result", StageResult)
LIST_FILES = call("nodes.{node}.models.files", ListFiles, FilesOnNode)
COLLECT_FILES = call("nodes.{node}.models.collect", CollectFiles, CollectedFiles)
