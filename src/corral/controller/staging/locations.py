"""Where the files of a model are: on this controller and on each node, whole or in part. Nodes are queried now; a node
that does not answer soon is listed as unknown."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

from corral.contract.catalogue import ModelFilesView, ModelFileView, NodeFilesView
from corral.contract.messages.nodes import NodeStatus
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.models import Definition, read_definition
from corral.controller.inventory.nodes import takes_backends
from corral.controller.models.suggestions import unknown_model
from corral.controller.staging.calls import StageCalls
from corral.kit.errors import CorralError, NotFound
from corral.store.engine.transactions import Store
from corral.store.tables import model_files, models, nodes
from corral.store.tables.nodes import NodeOutline

WHOLE, PARTIAL, NONE, UNKNOWN = "whole", "partial", "none", "unknown"
NOT_FETCHED = "not all files are known yet: `corral models stage {model}` fetches them"
LOCALAI = "a LocalAI worker does not report its files"


class KnownFiles(Protocol):
    """The part of `controller/files` that this needs."""

    async def known(self, definition: Definition) -> tuple[ReplicaFile, ...] | None: ...
    def find(self, key: str, /) -> Path | None: ...


class FileLocations:
    def __init__(self, store: Store, files: KnownFiles, calls: StageCalls) -> None:
        self._store = store
        self._files = files
        self._calls = calls

    async def view(self, model_id: str) -> ModelFilesView:
        async with self._store.read() as tx:
            model = await models.find(tx, model_id)
            if model is None:
                raise NotFound(unknown_model(model_id, await models.list_ids(tx)))
            outlines = [each for each in await nodes.list_outlines(tx) if takes_backends(each)]
            uris = {row.path: row.uri for row in await model_files.list_of(tx, model_id)}
        definition = read_definition(model.definition)
        ordered = await self._files.known(definition)
        if ordered is None:
            return _unknown(definition, outlines)
        files = tuple(self._file_view(model_id, file, uris) for file in ordered)
        async with asyncio.TaskGroup() as tasks:
            replies = [tasks.create_task(self._on_node(outline, ordered)) for outline in outlines]
        return ModelFilesView(
            model=model_id,
            files=files,
            nodes=tuple(task.result() for task in replies),
            size_bytes=_total(ordered),
            note="" if ordered else "the model has no files: its backend fetches them by itself",
        )

    async def on_node(self, node_id: str) -> dict[str, NodeFilesView]:
        """The files of each model whose files are known, by model: the node is queried once for all of them."""
        async with self._store.read() as tx:
            outline = next((each for each in await nodes.list_outlines(tx) if each.id == node_id), None)
            definitions = [read_definition(model.definition) for model in await models.list_(tx)]
        if outline is None or not takes_backends(outline):
            return {}
        listed = {
            definition.name: files for definition in definitions if (files := await self._files.known(definition))
        }
        found = await self._on_node(outline, [file for files in listed.values() for file in files])
        if found.state == UNKNOWN:
            return {model: _node_view(outline, UNKNOWN, files, reason=found.reason) for model, files in listed.items()}
        sizes = iter(found.files)
        held = {model: tuple(islice(sizes, len(files))) for model, files in listed.items()}
        return {
            model: _node_view(
                outline, state_of(held[model], files), files, have=held[model], free_bytes=found.free_bytes
            )
            for model, files in listed.items()
        }

    def _file_view(self, model: str, file: ReplicaFile, uris: dict[str, str]) -> ModelFileView:
        path = named_path(model, file.path)
        here = self._files.find(file.digest or file.path)
        return ModelFileView(
            path=path,
            size_bytes=file.size_bytes,
            digest=file.digest,
            source=uris.get(path, ""),
            controller_bytes=file.size_bytes if here is not None else 0,
        )

    async def _on_node(self, outline: NodeOutline, files: Sequence[ReplicaFile]) -> NodeFilesView:
        reason = _why_silent(outline)
        if reason or not files:
            return _node_view(outline, UNKNOWN if reason else NONE, files, reason=reason)
        try:
            found = await self._calls.list_files(outline.id, files)
        except CorralError as error:
            return _node_view(outline, UNKNOWN, files, reason=error.message)
        have = tuple(min(max(0, size), file.size_bytes) for size, file in zip(found.have_bytes, files, strict=False))
        state = state_of(have, files)
        return _node_view(outline, state, files, have=have, free_bytes=found.free_bytes)


def state_of(have: Sequence[int], files: Sequence[ReplicaFile]) -> str:
    if len(have) == len(files) and all(size >= file.size_bytes for size, file in zip(have, files, strict=True)):
        return WHOLE
    return PARTIAL if any(have) else NONE


def named_path(model: str, path: str) -> str:
    """The path as the definition names it: a worker keeps files below `model/set/`."""
    rest = path.removeprefix(f"{model}/")
    return rest.partition("/")[2] if rest != path else path


def _why_silent(outline: NodeOutline) -> str:
    if outline.protocol == 0:
        return LOCALAI
    if outline.status in (NodeStatus.OFFLINE, NodeStatus.PENDING) or outline.bus_down:
        return f"the node is {outline.status}" if not outline.bus_down else "the node cannot reach the bus"
    return ""


def _total(files: Sequence[ReplicaFile]) -> int:
    return sum({file.digest or file.path: file.size_bytes for file in files}.values())


def _node_view(
    outline: NodeOutline,
    state: str,
    files: Sequence[ReplicaFile],
    *,
    have: tuple[int, ...] = (),
    free_bytes: int = 0,
    reason: str = "",
) -> NodeFilesView:
    by_content = {file.digest or file.path: size for file, size in zip(files, have, strict=False)}
    return NodeFilesView(
        node_id=outline.id,
        node_name=outline.name,
        state=state,
        have_bytes=sum(by_content.values()),
        total_bytes=_total(files),
        free_bytes=free_bytes,
        files=have,
        reason=reason,
    )


def _unknown(definition: Definition, outlines: Sequence[NodeOutline]) -> ModelFilesView:
    files = tuple(
        ModelFileView(
            path=file.path,
            size_bytes=file.size_bytes,
            digest=f"sha256:{file.sha256}" if file.sha256 else "",
            source=file.uri,
        )
        for file in definition.files
    )
    note = NOT_FETCHED.format(model=definition.name)
    return ModelFilesView(
        model=definition.name,
        files=files,
        nodes=tuple(_node_view(outline, UNKNOWN, (), reason=_why_silent(outline) or note) for outline in outlines),
        size_bytes=sum(file.size_bytes for file in files),
        note=note,
    )
