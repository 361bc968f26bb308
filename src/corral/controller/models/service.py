"""The models of the fleet: install, edit, delete, show. A model is its definition and nothing else; `replicas/` reads
it and decides where the model runs.

Every change raises the counter `models` (`store.revisions`), which wakes its subscribers, gateways included.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec

from corral.contract.catalogue import AvailableModel, EditModel, InstallModel, ModelChanged, ModelView
from corral.contract.manifest import can_continue
from corral.contract.messages.nodes import NodeStatus
from corral.contract.messages.replicas import ReplicaState
from corral.contract.models import Definition, deleted_revision, read_definition
from corral.controller.backends.catalogue import Catalogue
from corral.controller.backends.world import kind_of, kinds_of
from corral.controller.models.edits import (
    ModelOrigin,
    alias_of,
    check_alias,
    check_source,
    file_notes,
    next_row,
    read_whole,
    refuse_if_from_file,
    refuse_if_on_trial,
)
from corral.controller.models.galleries import ModelGalleries
from corral.controller.models.schedules import COUNTER as SCHEDULES
from corral.controller.models.suggestions import UnknownModel, misspelled_fields, unknown_model
from corral.controller.models.views import (
    FilesMeasured,
    available_view,
    definition_of,
    explain_resumption,
    model_view,
    ready_by_model,
)
from corral.controller.runtime.change_feed import ChangeFeed
from corral.gallery.models.definition import is_contained, merged
from corral.kit.errors import Conflict, CorralError, Invalid, NotFound
from corral.kit.log import get_log
from corral.kit.redact import restore
from corral.store.engine.transactions import Store, Transaction
from corral.store.records import BackendRequest
from corral.store.tables import (
    model_files,
    model_revisions,
    model_schedules,
    models,
    node_backends,
    nodes,
    revisions,
    rollouts,
)
from corral.store.tables.model_files import StoredFile
from corral.store.tables.model_revisions import ModelRevision
from corral.store.tables.models import StoredModel

log = get_log(__name__)

COUNTER = "models"
MAX_NOTES_S = 2.0  # a gallery lookup that only adds a note may take so long


class FileSizes(Protocol):
    def measure(self, definition: Definition, stored: Sequence[StoredFile]) -> FilesMeasured:
        """The files of a model, with what was stored of those that were fetched. Blocking: it may look at the disk."""


class Models:
    def __init__(
        self,
        store: Store,
        changes: ChangeFeed,
        catalogue: ModelGalleries,
        backends: Catalogue | None = None,
        sizes: FileSizes | None = None,
    ) -> None:
        """`backends`: to tell people early that nobody has the one a definition names. `sizes`: of files whose
        definition does not say how large they are."""
        self._store = store
        self._changes = changes
        self._catalogue = catalogue
        self._backends = backends
        self._sizes = sizes

    async def definition(self, model_id: str) -> Definition | None:
        """Of exactly that model: an alias is one that stands for another."""
        async with self._store.read() as tx:
            model = await models.find(tx, model_id)
        return definition_of(model) if model is not None else None

    async def meant(self, name: str) -> str:
        """The model a name is for: what it stands for, else itself. Raises NotFound with similar names."""
        definition = await self.definition(name)
        if definition is None:
            return (await self.view(name)).id  # one that an earlier release stored is itself
        return definition.alias or definition.name

    async def definitions(self) -> dict[str, Definition]:
        """Of all that can be used, by name."""
        async with self._store.read() as tx:
            rows = await models.list_(tx)
        return {row.id: found for row in rows if (found := definition_of(row)) is not None}

    async def ensure(self, name: str, *, by: str = "", install: bool = True) -> Definition:
        """The model somebody asks for, of itself if `name` is an alias; with `install` out of a gallery when it is not
        there yet. Raises NotFound with names that are near, Unavailable while a gallery that may have it is silent."""
        found = await self.definition(name)
        if found is None and install:
            try:
                called = (await self.install(InstallModel(model=name), by=by)).id
            except Conflict:  # somebody else made one of that name in between
                called = _own_name(name)
            except UnknownModel as error:
                raise NotFound(await self._unknown_model_text(name, error.known, error.unread)) from error
            found = await self.definition(called)
        if found is not None and found.alias:
            found = await self.definition(found.alias)
        if found is None:
            raise NotFound(await self._unknown_model_text(name))
        return found

    async def plan_install(self, request: InstallModel) -> ModelChanged:
        """Raises what `install` would; nothing is changed. A client asks before it uploads the model's files."""
        definition, _, source = await self.resolve_request(request)
        async with self._store.read() as tx:
            before = await self._check_install(tx, request, definition, source)
        same = before is not None and not request.replace
        will = "is installed already" if same else "would be installed" if before is None else "would be replaced"
        revision = before.revision if before is not None and same else definition.revision
        return ModelChanged(definition.name, revision, False, f"{definition.name} {will}", not same)

    async def install(self, request: InstallModel, *, by: str = "") -> ModelChanged:
        """Raises Conflict when there is another model of that name, unless it is to be replaced."""
        definition, origin, source = await self.resolve_request(request)
        async with self.changing() as tx:
            before = await self._check_install(tx, request, definition, source)
            if before is not None and not request.replace:
                # What was edited since stays as it was edited: asking twice must not undo that.
                after = None
            else:
                after = await self.write(
                    tx, before, definition, origin=origin, source=source, by=by, recreate=request.recreate
                )
                await self._bump(tx, after)
        verb = "installed" if before is None else "replaced"
        return await self._changed(before, after, verb, definition)

    async def _check_install(
        self, tx: Transaction, request: InstallModel, definition: Definition, source: str
    ) -> StoredModel | None:
        """The model of that name. Raises Conflict if it keeps this one from being installed."""
        before = await models.find(tx, definition.name)
        refuse_if_from_file(before)
        if request.replace:
            refuse_if_on_trial(await rollouts.find_trial(tx, definition.name))
        elif before is not None:
            if before.definition != definition.whole and not before.source == source != "":
                raise Conflict(
                    f"there is a model {definition.name} already; edit it, replace it, or give this another name"
                )
            if request.overrides and not is_contained(request.overrides, before.definition):
                raise Conflict(
                    f"{definition.name} is installed with other settings: change it with "
                    f"`corral models edit {definition.name} --set …`, or install it anew with --replace"
                )
        return before

    async def edit(self, model_id: str, request: EditModel) -> ModelChanged:
        """Raises Conflict when `row_version` is not the model's any more."""
        async with self.changing() as tx:
            before, definition = await self.read_edit(tx, model_id, request)
            after = await self.write(
                tx,
                before,
                definition,
                origin=ModelOrigin(before.origin),
                source=before.source,
                recreate=request.recreate,
            )
            await self._bump(tx, after)
        return await self._changed(before, after, "edited", definition)

    async def read_edit(self, tx: Transaction, model_id: str, request: EditModel) -> tuple[StoredModel, Definition]:
        """The model, and its definition as the request would have it. Raises what keeps it from being stored."""
        whole = read_whole(request.definition, request.text)
        if bool(whole) == bool(request.changes):
            raise Invalid("give either a whole definition or changes to it")
        before = await self._get(tx, model_id)
        refuse_if_from_file(before)
        refuse_if_on_trial(await rollouts.find_trial(tx, model_id))
        if request.row_version and request.row_version != before.row_version:
            raise Conflict(f"{model_id} was changed meanwhile: read it again")
        wanted = restore(whole or merged(before.definition, request.changes), before.definition)
        wanted = {"name": model_id} | wanted
        definition = read_definition(wanted)
        if definition.name != model_id:
            raise Invalid("a model keeps its name: install it under the other name, then delete this one")
        return before, definition

    async def delete(self, model_id: str, *, force: bool = False) -> ModelChanged:
        """With its schedule. Refused while other models stand for it, or a file defines it, unless forced."""
        async with self.changing() as tx:
            before = await self._get(tx, model_id)
            if not force:
                refuse_if_from_file(before)
                if pointing := await self._aliases_of(tx, model_id):
                    stand, them = ("stands", "it") if len(pointing) == 1 else ("stand", "them")
                    names = ", ".join(pointing)
                    raise Conflict(f"{names} {stand} for {model_id}: delete {them} first, or force it")
            await models.delete(tx, model_id)
            scheduled = await model_schedules.delete(tx, model_id)
            if scheduled:
                await revisions.bump(tx, SCHEDULES)
            await revisions.bump(tx, COUNTER)
        log.info("model changed", model=model_id, change="deleted")
        self._changes.notify(COUNTER, model_id)
        return ModelChanged(
            id=model_id,
            config_revision=deleted_revision(model_id),
            pending_cleanup=await self._pending(model_id, ""),
            message=f"{model_id} deleted" + (", with its schedule" if scheduled else ""),
            changed=True,
            notes=file_notes(before),
        )

    async def put_of_file(self, tx: Transaction, definition: Definition, source: str) -> bool:
        """A file says so, and takes over whatever was there. False when it was so; else the caller raises the counter
        when it has done with the file."""
        before = await models.find(tx, definition.name)
        after = await self.write(tx, before, definition, origin=ModelOrigin.FILE, source=source)
        return after is not None

    async def list_views(self) -> list[ModelView]:
        async with self._store.read() as tx:
            rows = await models.list_(tx)
            schedules = {row.model: row for row in await model_schedules.list_(tx)}
            ready = await _ready(tx)
            stored = await model_files.list_(tx)
        measured = await asyncio.to_thread(self._measure, rows, stored)
        return [
            model_view(row, schedules.get(row.id), ready=ready.get(row.id, 0), measured=measured.get(row.id))
            for row in rows
        ]

    async def view(self, model_id: str) -> ModelView:
        async with self._store.read() as tx:
            row = await self._get(tx, model_id)
            schedule = await model_schedules.find(tx, model_id)
            ready = await _ready(tx)
            stored = await model_files.list_of(tx, model_id)
        measured = (await asyncio.to_thread(self._measure, [row], stored)).get(model_id)
        return model_view(row, schedule, ready=ready.get(model_id, 0), measured=measured, with_definition=True)

    def _measure(self, rows: Sequence[StoredModel], stored: Sequence[StoredFile]) -> dict[str, FilesMeasured]:
        """Of those that can be used, by name."""
        if self._sizes is None:
            return {}
        files: dict[str, list[StoredFile]] = {}
        for file in stored:
            files.setdefault(file.model, []).append(file)
        known = ((row.id, definition_of(row)) for row in rows)
        return {id: self._sizes.measure(found, files.get(id, ())) for id, found in known if found is not None}

    async def available(self, term: str = "") -> list[AvailableModel]:
        entries = await self._catalogue.available()
        async with self._store.read() as tx:
            installed = {row.source for row in await models.list_(tx) if row.origin == ModelOrigin.GALLERY}
        words = term.lower().split()
        shown = [available_view(entry, installed) for entry in entries]
        return [each for each in shown if all(word in _searched(each) for word in words)]

    async def available_one(self, name: str) -> AvailableModel:
        """An entry of a gallery, with the definition that installing it would give. Raises NotFound."""
        entry = await self._catalogue.find(name)
        definition = await self._catalogue.define(entry)
        async with self._store.read() as tx:
            installed = {row.source for row in await models.list_(tx) if row.origin == ModelOrigin.GALLERY}
        shown = available_view(entry, installed)
        return msgspec.structs.replace(
            shown, backend=definition.backend, files=len(definition.files), definition=dict(definition.whole)
        )

    async def defined_by(self, request: InstallModel) -> Definition:
        """What it would install, without doing so."""
        return (await self.resolve_request(request))[0]

    async def users_of(self, backend: str) -> list[str]:
        """Models that name this backend."""
        return [name for name, found in (await self.definitions()).items() if found.backend == backend]

    async def resolve_request(self, request: InstallModel) -> tuple[Definition, ModelOrigin, str]:
        whole = read_whole(request.definition, request.text)
        if bool(whole) == bool(request.model):
            raise Invalid("say which model of a gallery, or give a definition")
        if request.model:
            entry = await self._catalogue.find(request.model)
            definition = await self._catalogue.define(
                entry, variant=request.variant, name=request.name, overrides=request.overrides
            )
            return definition, ModelOrigin.GALLERY, entry.id
        if request.variant:
            raise Invalid("variants are a gallery's")
        whole = merged(whole, request.overrides)
        definition = read_definition(whole | {"name": request.name} if request.name else whole)
        return await self._restored(definition), ModelOrigin.PERSON, check_source(request.source)

    async def _restored(self, definition: Definition) -> Definition:
        """An exported definition hides users and passwords: those that are stored for this model still hold."""
        async with self._store.read() as tx:
            stored = await models.find(tx, definition.name)
        whole = restore(definition.whole, stored.definition if stored is not None else {})
        return definition if whole is definition.whole else read_definition(whole)

    async def write(
        self,
        tx: Transaction,
        before: StoredModel | None,
        definition: Definition,
        *,
        origin: ModelOrigin,
        source: str,
        by: str = "",
        recreate: bool = False,
    ) -> StoredModel | None:
        """The row as it was written; None when nothing changes. The caller raises the counter."""
        row = next_row(before, definition, origin=origin, source=source, by=by, recreate=recreate)
        if row is None:
            return None
        others = {each.id: alias_of(each) for each in await models.list_(tx) if each.id != row.id}
        check_alias(definition, others)
        written = await models.put(tx, row)
        await model_revisions.add(
            tx,
            ModelRevision(
                model=written.id,
                row_version=written.row_version,
                at=written.updated_at,
                revision=written.revision,
                definition=written.definition,
            ),
        )
        return written

    async def list_revisions(self, name: str) -> list[ModelRevision]:
        """The last definitions of the model, the newest first."""
        async with self._store.read() as tx:
            return await model_revisions.list_(tx, name)

    @asynccontextmanager
    async def changing(self, *, also: str = "") -> AsyncIterator[Transaction]:
        """Nobody else changes models meanwhile: of two who install the same, one finds it there. `also`: another
        counter to hold."""
        async with self._store.write() as tx:
            if also:
                await revisions.hold(tx, also)
            await revisions.hold(tx, COUNTER)
            yield tx

    async def _bump(self, tx: Transaction, written: StoredModel | None) -> None:
        if written is not None:
            await revisions.bump(tx, COUNTER)

    async def _changed(
        self, before: StoredModel | None, after: StoredModel | None, verb: str, definition: Definition
    ) -> ModelChanged:
        name = definition.name
        current = after or before
        assert current is not None
        if after is not None:
            log.info("model changed", model=name, change=verb, revision=after.revision[:12], origin=after.origin)
            self._changes.notify(COUNTER, name)
        return ModelChanged(
            id=name,
            config_revision=current.revision,
            pending_cleanup=await self._pending(name, current.revision) if after is not None else False,
            message=f"{name} {verb}" if after is not None else f"{name} is as it was",
            changed=after is not None,
            notes=await self.notes(definition),
        )

    async def notes(self, definition: Definition) -> tuple[str, ...]:
        """What does not keep it from being stored, but from answering as it says."""
        if definition.alias:
            target = await self.definition(definition.alias)
            return () if target is not None else (f"there is no model {definition.alias} yet for it to stand for",)
        if not definition.backend:
            return ("its definition names no backend, so nothing can serve it",)
        return (
            *misspelled_fields(definition.whole),
            *await self._notes_on_stand_in(definition),
            *await self.notes_on_backend(definition),
            *await self._notes_on_streams(definition),
        )

    async def _notes_on_stand_in(self, definition: Definition) -> tuple[str, ...]:
        other = definition.while_loading.use
        if not other or await self.definition(other) is not None:
            return ()
        return (f"there is no model {other} yet to answer while it loads: requests wait until then",)

    async def _notes_on_streams(self, definition: Definition) -> tuple[str, ...]:
        """That broken streams stay broken on machines of the fleet, though the definition asks for more."""
        if self._backends is None or not definition.resume_streams:
            return ()
        async with self._store.read() as tx:
            outlines = [outline for outline in await nodes.list_outlines(tx) if outline.approved]
        request, declares = BackendRequest(definition.backend), {}
        try:
            async with asyncio.timeout(MAX_NOTES_S):
                for kind in kinds_of(outlines):
                    declares[kind] = can_continue(await self._backends.manifest(request, kind))
        except (CorralError, TimeoutError):
            return ()
        resumption = explain_resumption(definition, {each.name: declares[kind_of(each)] for each in outlines})
        return (f"streams that break off are {resumption.text}",) if resumption.is_limited else ()

    async def notes_on_backend(self, definition: Definition) -> tuple[str, ...]:
        """That nobody knows the backend it names; nothing where that cannot be found out soon."""
        if self._backends is None:
            return ()
        try:
            async with asyncio.timeout(MAX_NOTES_S):
                await self._backends.look_up(BackendRequest(definition.backend))
        except NotFound as error:
            async with self._store.read() as tx:
                inventories = await node_backends.list_(tx)
            there = any(backend.name == definition.backend for row in inventories for backend in row.backends)
            return () if there else (error.message,)
        except (CorralError, TimeoutError):
            return ()  # a gallery that is silent now says nothing about the model
        return ()

    async def _pending(self, model_id: str, revision: str) -> bool:
        async with self._store.read() as tx:
            reports = await node_backends.list_processes(tx)
        return any(
            process.model == model_id and process.revision != revision and process.state != ReplicaState.FAILED
            for row in reports.values()
            for process in row.processes
        )

    async def _aliases_of(self, tx: Transaction, model_id: str) -> list[str]:
        return [row.id for row in await models.list_(tx) if alias_of(row) == model_id]

    async def _get(self, tx: Transaction, model_id: str) -> StoredModel:
        row = await models.find(tx, model_id)
        if row is None:
            raise NotFound(unknown_model(model_id, [each.id for each in await models.list_(tx)]))
        return row

    async def _unknown_model_text(
        self, name: str, more: Sequence[str] = (), unread: Mapping[str, str] | None = None
    ) -> str:
        """`more`: names galleries have."""
        async with self._store.read() as tx:
            return unknown_model(name, [*await models.list_ids(tx), *more], unread)


async def _ready(tx: Transaction) -> dict[str, int]:
    """By model, how many processes can answer. What a node said before it was gone does not count."""
    gone = {node.id for node in await nodes.list_outlines(tx) if node.status == NodeStatus.OFFLINE}
    reports = await node_backends.list_processes(tx)
    return ready_by_model(row for node_id, row in reports.items() if node_id not in gone)


def _own_name(query: str) -> str:
    """gallery@name is called name here."""
    return query.rpartition("@")[2]


def _searched(entry: AvailableModel) -> str:
    return " ".join((entry.id, entry.description, entry.backend, *entry.tags)).lower()
