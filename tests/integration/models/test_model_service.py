"""The catalogue of models over a real store: what changes, who is told, two controllers at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from corral.contract.catalogue import EditModel, InstallModel
from corral.contract.messages.backends import NodeBackend
from corral.contract.messages.replicas import ReplicaProcess
from corral.controller.backends.catalogue import CatalogueEntry
from corral.controller.files.sizes import FileSizes
from corral.controller.models.galleries import ModelGalleries
from corral.controller.models.service import Models
from corral.controller.models.views import policy_of, view_models
from corral.controller.runtime.change_feed import ChangeFeed
from corral.kit.errors import Conflict, CorralError, Invalid, NotFound, Unavailable
from corral.store import Store
from corral.store.records import BackendRequest
from corral.store.tables import model_files, model_schedules, models, node_backends, nodes, revisions
from corral.store.tables.model_files import StoredFile
from tests.integration.store.rows import a_node, a_schedule, an_inventory
from tests.support.model_catalogue import model_library, models_of
from tests.support.scripted_catalogue import ScriptedCatalogue

INDEX = "- {name: qwen, config_file: {backend: vllm}}\n"


class Told(ChangeFeed):
    """Who would be woken."""

    def __init__(self) -> None:
        self.kinds: list[tuple[str, str]] = []

    def notify(self, kind: str, id: str = "") -> None:
        self.kinds.append((kind, id))


def mine(**more: Any) -> InstallModel:
    return InstallModel(definition={"name": "mine", "backend": "vllm", **more})


async def stored(store: Store, name: str = "mine") -> tuple[str, tuple[str, ...]]:
    async with store.read() as tx:
        row = await models.get(tx, name)
    return row.revision, row.previous_revisions


async def counter(store: Store, kind: str = "models") -> int:
    async with store.read() as tx:
        return (await revisions.read_all(tx)).get(kind, 0)


async def run_processes(store: Store, *states: tuple[str, str, str], status: str = "healthy") -> None:
    """(model, revision, state) on one node."""
    node = a_node(status=status)
    processes = tuple(
        ReplicaProcess(f"p{at}", model, at, "vllm", state, "openai", revision)
        for at, (model, revision, state) in enumerate(states)
    )
    async with store.write() as tx:
        await nodes.insert(tx, node)
        await node_backends.put(tx, an_inventory(node.id, processes=processes))


async def test_a_planned_install_is_refused_as_the_install_and_changes_nothing(store: Store) -> None:
    service = models_of(store, Told())
    planned = await service.plan_install(mine())
    assert (planned.changed, planned.message) == (True, "mine would be installed")
    assert await counter(store) == 0
    await service.install(mine())
    planned = await service.plan_install(mine())
    assert (planned.changed, planned.message) == (False, "mine is installed already")
    other = InstallModel(definition={"name": "mine", "backend": "llama-cpp"})
    with pytest.raises(Conflict, match="there is a model mine already"):
        await service.plan_install(other)
    planned = await service.plan_install(msgspec.structs.replace(other, replace=True))
    assert planned.message == "mine would be replaced"
    assert (await stored(store))[1] == ()


async def test_the_size_of_a_model_that_declares_none_is_that_of_its_files(store: Store, tmp_path: Path) -> None:
    (tmp_path / "local.gguf").write_bytes(b"x" * 500)
    sizes = FileSizes(tmp_path, (tmp_path,))
    service = Models(store, Told(), ModelGalleries(store, model_library()), sizes=sizes)
    uri = "https://house.test/mine.gguf"
    await service.install(mine(download_files=[{"filename": "mine.gguf", "uri": uri}]))
    await service.install(InstallModel(definition={"name": "local", "parameters": {"model": "local.gguf"}}))
    shown = {each.id: each.size_bytes for each in await service.list_views()}
    assert shown == {"mine": 0, "local": 500}
    async with store.write() as tx:
        await model_files.put(
            tx,
            StoredFile(
                model="mine", path="mine.gguf", uri=uri, resolved=uri, digest="sha256:" + "a" * 64, size_bytes=4000
            ),
        )
    shown = {each.id: each.size_bytes for each in await service.list_views()}
    assert shown == {"mine": 4000, "local": 500}
    assert [(await service.view(name)).size_bytes for name in ("mine", "local")] == [4000, 500]


async def test_asking_for_a_model_of_a_gallery_installs_it(store: Store) -> None:
    told = Told()
    service = models_of(store, told, {"a": INDEX})
    assert await service.definition("qwen") is None
    assert (await service.ensure("QWEN", by="ann")).backend == "vllm"
    assert (await service.ensure("qwen")).name == "qwen"
    assert told.kinds == [("models", "qwen")]
    assert (await service.view("qwen")).created_by == "ann"
    with pytest.raises(NotFound, match="there is no model 'smollm2-135m'"):
        await service.ensure("smollm2-135m", install=False)
    with pytest.raises(NotFound, match="did you mean qwen"):
        await service.ensure("qwem")
    with pytest.raises(NotFound, match="did you mean smollm2-135m"):
        await service.ensure("smollm-135m")


async def test_asking_for_an_alias_gives_what_it_stands_for(store: Store) -> None:
    service = models_of(store, Told())
    await service.install(mine())
    await service.install(InstallModel(definition={"name": "chat", "alias": "mine"}))
    assert (await service.ensure("chat")).name == "mine"
    await service.delete("mine", force=True)
    with pytest.raises(NotFound, match="there is no model 'chat'"):
        await service.ensure("chat")


async def test_two_controllers_install_the_same_at_once(store: Store, other: Store) -> None:
    services = [models_of(each, Told(), {"a": INDEX}) for each in (store, other)]
    found = await asyncio.gather(*(service.ensure("qwen") for service in services * 4))
    assert {each.revision for each in found} == {found[0].revision}
    assert (await services[0].view("qwen")).row_version == 1, "it was written once"


async def test_an_edit_keeps_the_old_revisions_until_one_of_the_new_is_ready(store: Store) -> None:
    service = models_of(store, Told())
    first = (await service.install(mine())).config_revision
    second = (await service.edit("mine", EditModel(changes={"f16": True}))).config_revision
    third = (await service.edit("mine", EditModel(changes={"context_size": 9}))).config_revision
    assert await stored(store) == (third, (second, first))
    await service.edit("mine", EditModel(changes={"description": "words"}))
    assert await stored(store) == (third, (second, first))
    back = (await service.edit("mine", EditModel(changes={"context_size": None}))).config_revision
    assert back == second
    assert await stored(store) == (second, (third, first))
    async with store.write() as tx:
        assert await models.forget_previous_revisions(tx, "mine", second)
    last = await service.edit("mine", EditModel(changes={"f16": None}, recreate=True))
    assert (last.config_revision, await stored(store)) == (first, (first, ()))


async def test_whoever_edits_tells_everybody_and_a_change_of_nothing_tells_nobody(store: Store) -> None:
    told = Told()
    service = models_of(store, told)
    await service.install(mine())
    before = await counter(store)
    same = await service.edit("mine", EditModel(definition={"backend": "vllm"}))
    assert (same.changed, await counter(store), told.kinds) == (False, before, [("models", "mine")])
    await service.edit("mine", EditModel(changes={"pinned": True}))
    assert (await counter(store), told.kinds[-1]) == (before + 1, ("models", "mine"))
    with pytest.raises(Invalid, match="keeps its name"):
        await service.edit("mine", EditModel(definition={"name": "other", "backend": "vllm"}))
    with pytest.raises(Conflict, match="changed meanwhile"):
        await service.edit("mine", EditModel(changes={"f16": True}, row_version=1))
    assert await counter(store) == before + 1


async def test_what_ran_on_a_node_that_is_gone_is_not_ready(store: Store) -> None:
    service = models_of(store, Told())
    revision = (await service.install(mine())).config_revision
    await run_processes(store, ("mine", revision, "ready"), status="offline")
    assert (await service.view("mine")).ready == 0
    assert [model.ready for model in await service.list_views()] == [0]


async def test_processes_of_another_revision_are_still_to_go(store: Store) -> None:
    service = models_of(store, Told())
    revision = (await service.install(mine())).config_revision
    await run_processes(store, ("mine", revision, "ready"), ("mine", "old", "failed"), ("other", "x", "ready"))
    assert (await service.view("mine")).ready == 1
    assert (await service.edit("mine", EditModel(changes={"pinned": True}))).pending_cleanup is False
    assert (await service.edit("mine", EditModel(changes={"f16": True}))).pending_cleanup is True
    gone = await service.delete("mine")
    assert (gone.pending_cleanup, gone.config_revision) == (
        True,
        "24312a590ff13f816cf668ba5623ba24432e6b8170f1f8f288abb7faafc32856",
    )


async def test_a_gallery_that_was_asked_again_does_not_undo_an_edit(store: Store) -> None:
    service = models_of(store, Told(), {"a": INDEX})
    await service.install(InstallModel(model="qwen"))
    edited = (await service.edit("qwen", EditModel(changes={"f16": True}))).config_revision
    again = await service.install(InstallModel(model="a@qwen"))
    assert (again.changed, again.config_revision) == (False, edited)
    assert (await service.install(InstallModel(model="a@qwen", replace=True))).config_revision != edited


class NoBackends(ScriptedCatalogue):
    def __init__(self, error: CorralError) -> None:
        super().__init__()
        self._error = error

    async def look_up(self, request: BackendRequest) -> CatalogueEntry:
        raise self._error


async def test_a_backend_nobody_has_is_told_early(store: Store) -> None:
    catalogue = models_of(store, Told())._catalogue
    unknown = Models(store, Told(), catalogue, NoBackends(NotFound("no backend is called 'vllm'")))
    assert (await unknown.install(mine())).notes == ("no backend is called 'vllm'",)
    silent = Models(store, Told(), catalogue, NoBackends(Unavailable("nobody answers")))
    assert (await silent.edit("mine", EditModel(changes={"f16": True}))).notes == ()
    node = a_node()
    async with store.write() as tx:
        await nodes.insert(tx, node)
        await node_backends.put(tx, an_inventory(node.id, backends=(NodeBackend("vllm", False, False),)))
    assert (await unknown.edit("mine", EditModel(changes={"f16": None}))).notes == ()


async def test_what_gateways_are_told(store: Store) -> None:
    service = models_of(store, Told())
    loading = {
        "while_loading": {"use": "chat"},
        "load_wait": "5s",
        "limits": {"max_concurrent": 3, "retry_after_seconds": 7},
    }
    await service.install(mine(**loading))
    await service.install(InstallModel(definition={"name": "chat", "alias": "mine"}))
    await service.install(InstallModel(definition={"name": "off", "backend": "x", "disabled": True}))
    async with store.write() as tx:
        await model_schedules.put(tx, a_schedule("mine", route_policy="round_robin", min_prefix_match=0.5))
        rows = await models.list_(tx)
        schedules = {row.model: row for row in await model_schedules.list_(tx)}
    chat, own, off = view_models(rows, schedules)
    assert (chat.id, chat.alias, off.disabled) == ("chat", "mine", True)
    assert (own.while_loading, own.stand_in, own.load_wait_s) == ("use", "chat", 5.0)
    assert (own.max_concurrent, own.retry_after_s) == (3, 7.0)
    assert own.revision == (await stored(store))[0]
    assert own.policy == chat.policy
    assert own.policy is not None
    assert (own.policy.prefix_cache, own.policy.min_match, own.policy.abs_slack) == (False, 0.5, 2)
    assert off.policy is None
    assert policy_of(a_schedule(min_replicas=2)) is None


async def test_a_stored_definition_nobody_understands_any_more_hurts_nobody_else(store: Store) -> None:
    service = models_of(store, Told())
    await service.install(mine())
    async with store.write() as tx:
        row = await models.get(tx, "mine")
        await models.put(tx, msgspec.structs.replace(row, id="odd", definition={"name": "odd", "context_size": "?"}))
    assert await service.definition("odd") is None
    assert list(await service.definitions()) == ["mine"]
    assert [(view.id, view.disabled) for view in await service.list_views()] == [("mine", False), ("odd", True)]
    assert (await service.users_of("vllm")) == ["mine"]
