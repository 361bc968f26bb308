"""Models on a node: unload, stop, delete, what runs (docs/reference/wire/models.md)."""

from __future__ import annotations

from corral.contract.codec import Message, always
from corral.contract.subjects import call, event


class UnloadModel(Message, frozen=True):
    model_name: str = always(str)
    address: str = ""


class DoneReply(Message, frozen=True):
    success: bool = always(bool)
    error: str = ""


class StopModel(Message, frozen=True):
    model_name: str = always(str)
    process_key: str = always(str)
    expected_address: str = always(str)
    force: bool = False
    config_revision: str = ""


class ModelStopped(Message, frozen=True):
    matched: bool = always(bool)
    freed: bool = always(bool)
    terminated: bool = always(bool)
    process_key: str = always(str)
    address: str = ""
    error: str = ""


class DeleteModel(Message, frozen=True):
    model_name: str = always(str)


class ListRunningModels(Message, frozen=True):
    pass


class RunningModel(Message, frozen=True):
    model_id: str = always(str)
    replica_index: int = always(int)
    address: str = ""


class RunningModels(Message, frozen=True):
    models: tuple[RunningModel, ...] = always(tuple)
    error: str = ""


class KeepModels(Message, frozen=True):
    """All models there are. What a worker has fetched for others may go. Since protocol 1, between Corral peers."""

    models: tuple[str, ...] = always(tuple)


UNLOAD_MODEL = call("nodes.{node}.model.unload", UnloadModel, DoneReply)
STOP_MODEL = call("nodes.{node}.model.stop", StopModel, ModelStopped)
DELETE_MODEL = call("nodes.{node}.model.delete", DeleteModel, DoneReply)
LIST_RUNNING_MODELS = call("nodes.{node}.models.running", ListRunningModels, RunningModels)
KEEP_MODELS = event("nodes.{node}.models.keep", KeepModels)
