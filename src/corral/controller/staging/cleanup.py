"""Removes model files that nothing needs, on this controller and on all nodes, when a user asks for it.

Kept are the files of every present model, as its definition names them now, and everything in use. Without a user,
both sides clean up later by themselves (`controller/files/model_files.py`, `worker/files/cleanup.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from corral.contract.catalogue import CollectedOn, CollectedView
from corral.contract.codec import encode
from corral.contract.messages.nodes import NodeStatus
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.messages.staging import RemovedFiles
from corral.contract.models import Definition
from corral.controller.inventory.nodes import takes_backends
from corral.controller.models.views import definition_of
from corral.controller.staging.calls import StageCalls
from corral.kit.errors import CorralError, Invalid
from corral.kit.log import get_log
from corral.store.engine.transactions import Store
from corral.store.records import CONTROLLER
from corral.store.tables import models, nodes
from corral.store.tables.nodes import NodeOutline

log = get_log(__name__)

MAX_MESSAGE_BYTES = 512 * 1024


class CollectableFiles(Protocol):
    """The part of `controller/files` that this needs."""

    async def known(self, definition: Definition) -> tuple[ReplicaFile, ...] | None: ...
    async def collect(self, *, dry_run: bool) -> list[RemovedFiles]: ...


class FleetCleanup:
    def __init__(self, store: Store, files: CollectableFiles, calls: StageCalls) -> None:
        self._store = store
        self._files = files
        self._calls = calls

    async def run(self, *, dry_run: bool, by: str = "") -> CollectedView:
        """A node that cannot be reached is listed with the reason."""
        async with self._store.read() as tx:
            stored = await models.list_(tx)
            outlines = [each for each in await nodes.list_outlines(tx) if takes_backends(each) and each.protocol > 0]
        keep: list[str] = []
        for model in stored:
            definition = definition_of(model)
            files = await self._files.known(definition) if definition is not None else None
            keep.append(prefix_of(model.id, files))
        if len(encode(tuple(keep))) > MAX_MESSAGE_BYTES:
            raise Invalid("the fleet has too many models for one cleanup message; nodes clean up by themselves")
        own = await self._on_controller(dry_run)
        async with asyncio.TaskGroup() as tasks:
            replies = [tasks.create_task(self._on_node(outline, keep, dry_run)) for outline in outlines]
        places = (own, *(task.result() for task in replies))
        freed = sum(place.freed_bytes for place in places)
        log.info("unneeded model files removed", dry_run=dry_run, freed_bytes=freed, by=by)
        return CollectedView(dry_run=dry_run, freed_bytes=freed, places=places)

    async def _on_controller(self, dry_run: bool) -> CollectedOn:
        try:
            removed = tuple(await self._files.collect(dry_run=dry_run))
        except CorralError as error:
            return CollectedOn(CONTROLLER, CONTROLLER, (), 0, error.message)
        return CollectedOn(CONTROLLER, CONTROLLER, removed, _freed(removed))

    async def _on_node(self, outline: NodeOutline, keep: Sequence[str], dry_run: bool) -> CollectedOn:
        if outline.status == NodeStatus.OFFLINE or outline.bus_down:
            return CollectedOn(outline.id, outline.name, (), 0, "the node is not reachable now")
        try:
            removed = (await self._calls.collect(outline.id, keep, dry_run=dry_run)).removed
        except CorralError as error:
            return CollectedOn(outline.id, outline.name, (), 0, error.message)
        return CollectedOn(outline.id, outline.name, removed, _freed(removed))


def prefix_of(model: str, files: Sequence[ReplicaFile] | None) -> str:
    """The beginning of the paths that stay: the present set of files, or all of the model's when it is not known."""
    if not files:
        return f"{model}/"
    rest = files[0].path.removeprefix(f"{model}/")
    return f"{model}/{rest.partition('/')[0]}/"


def _freed(removed: Sequence[RemovedFiles]) -> int:
    return sum(each.size_bytes for each in removed)
