"""Staging is an operation with a row per node: shared, cancelled, retried, resumed by the next leader."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from corral.bus.api import Bus
from corral.contract.messages.backends import InstallProgress
from corral.contract.messages.models import DoneReply
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.messages.staging import (
    CANCEL_STAGE,
    COLLECT_FILES,
    LIST_FILES,
    STAGE_MODEL,
    STAGE_PROGRESS,
    STAGE_RESULT,
    CancelStage,
    CollectedFiles,
    CollectFiles,
    FilesOnNode,
    ListFiles,
    RemovedFiles,
    StageModel,
    StageReply,
    StageResult,
)
from corral.contract.models import Definition, read_definition
from corral.controller.settings.backends import BackendSettings
from corral.controller.staging.calls import StageCalls
from corral.controller.staging.cleanup import FleetCleanup
from corral.controller.staging.locations import FileLocations
from corral.controller.staging.stages import Stages
from corral.kit.clock import SystemClock
from corral.kit.errors import CorralError, Invalid, NotFound, Unreachable
from corral.kit.settings import Seconds
from corral.kit.tasks import run_every
from corral.store.records import Scope, ScopeKind
from corral.store.tables import models, node_files, nodes, revisions
from corral.store.tables.models import StoredModel
from tests.support.backend_fleet import Controller, Fleet
from tests.support.waiting import until

LEASE = "replicas"
ALL = Scope(ScopeKind.ALL)
QUICK = BackendSettings(
    retry_first_s=Seconds(0.1),
    retry_cap_s=Seconds(0.1),
    backend_accept_timeout_s=Seconds(2),
)
FILES = (ReplicaFile("m/abc/w.gguf", "sha256:" + "a" * 64, 1000), ReplicaFile("m/abc/t.json", "sha256:" + "b" * 64, 24))


@dataclass
class PreparedFiles:
    """The files of the model on the controller; the test decides when and whether they come."""

    files: tuple[ReplicaFile, ...] = FILES
    errors: list[CorralError] = field(default_factory=list)
    pause: asyncio.Event = field(default_factory=asyncio.Event)
    asked: int = 0

    async def ensure(self, definition: Definition, on_progress: object = None) -> tuple[ReplicaFile, ...]:
        self.asked += 1
        await self.pause.wait()
        if self.errors:
            raise self.errors.pop(0)
        return self.files

    async def known(self, definition: Definition) -> tuple[ReplicaFile, ...] | None:
        return self.files if self.pause.is_set() else None

    def find(self, digest: str) -> Path | None:
        return Path("/blobs") / digest

    def sources_for(self, node_id: str, files: Sequence[ReplicaFile] = ()) -> tuple[tuple[str, ...], str]:
        return ("http://{host}:8090",), f"token-of-{node_id}"

    async def collect(self, *, dry_run: bool) -> list[RemovedFiles]:
        return [RemovedFiles("downloads", 1, 7, "no model refers to them")]


class StagingWorker:
    """A worker that knows only the orders about files. It remembers outcomes, as real ones do."""

    def __init__(self, bus: Bus, node_id: str) -> None:
        self.bus, self.node_id = bus, node_id
        self.orders: list[StageModel] = []
        self.cancelled: list[str] = []
        self.hold: asyncio.Event | None = None
        self.errors: list[tuple[str, bool]] = []  # text, and whether it is final
        self.have: tuple[int, ...] = ()
        self.lose_results = False
        self.collected: list[CollectFiles] = []
        self._outcomes: dict[tuple[str, int], StageResult] = {}
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}

    async def start(self) -> StagingWorker:
        await self.bus.serve(STAGE_MODEL, self.stage, node=self.node_id)
        await self.bus.serve(CANCEL_STAGE, self.cancel, node=self.node_id)
        await self.bus.serve(LIST_FILES, self.list_files, node=self.node_id)
        await self.bus.serve(COLLECT_FILES, self.collect, node=self.node_id)
        return self

    async def stage(self, order: StageModel, _tokens: object) -> StageReply:
        self.orders.append(order)
        key = (order.op_id, order.attempt)
        if key in self._outcomes:
            await self.bus.publish(STAGE_RESULT, self._outcomes[key], node=self.node_id, op=order.op_id)
        elif key not in self._running:
            self._running[key] = asyncio.create_task(self._work(order))
        return StageReply(success=True, accepted=True)

    async def cancel(self, order: CancelStage, _tokens: object) -> DoneReply:
        self.cancelled.append(order.op_id)
        return DoneReply(success=True)

    async def list_files(self, request: ListFiles, _tokens: object) -> FilesOnNode:
        return FilesOnNode(have_bytes=self.have, free_bytes=5000)

    async def collect(self, request: CollectFiles, _tokens: object) -> CollectedFiles:
        self.collected.append(request)
        return CollectedFiles(removed=(RemovedFiles("gone/abc", 2, 100, "no model needs these files"),))

    async def report(self, order: StageModel, done: int, *, bad: tuple[str, ...] = (), **sources: int) -> None:
        event = InstallProgress(
            op_id=order.op_id,
            node_id=self.node_id,
            backend=order.model,
            percentage=100.0 * done / 1024,
            phase="downloading",
            attempt=order.attempt,
            seq=done,
            current_bytes=done,
            total_bytes=1024,
            rate=64.0,
            sources=sources,
            bad_sources=bad,
        )
        await self.bus.publish(STAGE_PROGRESS, event, node=self.node_id, op=order.op_id)

    async def _work(self, order: StageModel) -> None:
        if self.hold is not None:
            await self.hold.wait()
        error, final = self.errors.pop(0) if self.errors else ("", False)
        result = StageResult(order.op_id, order.attempt, not error, order.model, error, final)
        self._outcomes[order.op_id, order.attempt] = result
        if not self.lose_results:
            await self.bus.publish(STAGE_RESULT, result, node=self.node_id, op=order.op_id)


@dataclass
class Site:
    fleet: Fleet
    files: PreparedFiles = field(default_factory=PreparedFiles)
    workers: dict[str, StagingWorker] = field(default_factory=dict)

    async def stages(self, controller: Controller) -> Stages:
        clock = SystemClock()
        stages = Stages(
            controller.store,
            controller.bus,
            self.files,
            self.calls(controller),
            controller.backends.progress,
            controller.leadership,
            controller.feed,
            clock,
            QUICK,
            lease=LEASE,
            interval_s=0.05,
            resend_s=0.2,
        )

        async def lead() -> None:
            await controller.leadership.lead(LEASE)

        controller.tasks.append(asyncio.create_task(run_every("lead", 0.05, lead, clock=clock)))
        await until(lambda: controller.leadership.epoch(LEASE) or len(self.fleet.controllers) > 1)
        controller.tasks.append(asyncio.create_task(stages.run()))
        return stages

    def calls(self, controller: Controller) -> StageCalls:
        return StageCalls(controller.bus, SystemClock(), QUICK, second_try_s=0.01, list_s=2.0, collect_s=2.0)

    async def worker(self, name: str, **known: Any) -> StagingWorker:
        scripted = await self.fleet.corral(name, **known)
        self.workers[name] = await StagingWorker(scripted.bus, f"id-of-{name}").start()
        return self.workers[name]

    async def model(self, name: str = "m", **words: Any) -> None:
        definition = read_definition({"name": name, "backend": "tiny"} | words)
        async with self.fleet.store.write() as tx:
            now = await tx.now()
            row = StoredModel(name, definition.whole, definition.revision, "person", now, now)
            await models.put(tx, row)
            await revisions.bump(tx, "models")

    async def until(self, operation: str, wanted: Callable[[Any], bool]) -> Any:
        async def reached() -> bool:
            return wanted(await self.fleet.view(operation))

        with contextlib.suppress(TimeoutError):
            await until(reached, "the operation")
        return await self.fleet.view(operation)


@pytest.fixture
async def site(fleet: Fleet) -> AsyncIterator[Site]:
    made = Site(fleet)
    made.files.pause.set()
    await made.model()
    yield made
    for controller in fleet.controllers:
        await controller.kill()


async def test_every_node_gets_an_order_and_a_row(site: Site) -> None:
    attic, barn = await site.worker("attic"), await site.worker("barn")
    await site.fleet.localai("cellar")
    stages = await site.stages(site.fleet.first)
    attic.hold = asyncio.Event()
    operation = await stages.request("m", ALL, by="boss")
    assert await stages.request("m", ALL) == operation, "asking twice is one operation"
    await site.fleet.until_row(operation, "barn", "success")
    await until(lambda: attic.orders)
    await attic.report(attic.orders[0], 512, barn=384, controller=128)
    moving = await site.until(operation, lambda view: view.nodes[0].sources)
    row = moving.nodes[0]
    assert (row.node_name, row.current_bytes, row.rate, row.eta_s) == ("attic", 512, 64.0, 8.0)
    assert row.sources == {"barn": 384, "controller": 128}
    assert (moving.id, moving.task_type, moving.kind, moving.is_backend) == ("staging:m", "staging", "stage", False)
    attic.hold.set()
    done = await site.fleet.until(operation, "done")
    assert (done.outcome, done.created_by, done.counts) == ("completed", "boss", {"success": 2, "skipped": 1})
    assert done.nodes[0].note == "384 B from barn, 128 B from controller"
    assert done.nodes[2].error == "a LocalAI worker receives files when the model is loaded there"
    order = attic.orders[0]
    assert (order.model, order.files, order.sources) == ("m", FILES, ("http://{host}:8090",))
    assert (order.source_token, order.accept) == ("token-of-id-of-attic", True)
    async with site.fleet.store.read() as tx:
        assert await node_files.by_node(tx) == {
            worker.node_id: frozenset(file.digest for file in FILES) for worker in (attic, barn)
        }, "placement knows where the files are"
    backend_rows = await site.fleet.first.backends.installed.matrix()
    assert not backend_rows.backends, "it is no work on a backend"


async def test_a_node_that_sends_wrong_data_is_named_in_the_operation(site: Site) -> None:
    attic = await site.worker("attic")
    stages = await site.stages(site.fleet.first)
    attic.hold, attic.errors = asyncio.Event(), [("the disk is full", False)]
    operation = await stages.request("m", ALL)
    await until(lambda: attic.orders)
    await attic.report(attic.orders[0], 512, bad=("barn",), controller=512)
    moving = await site.until(operation, lambda view: view.nodes[0].bad_sources)
    assert moving.nodes[0].bad_sources == ("barn",)
    attic.hold.set()
    await until(lambda: len(attic.orders) > 1)
    done = await site.fleet.until(operation, "done")
    assert done.nodes[0].bad_sources == ("barn",), "the second attempt did not meet it again"
    assert done.nodes[0].note == "512 B from controller; wrong data from barn"


async def test_a_failure_is_tried_again_and_a_final_one_waits_for_a_retry(site: Site) -> None:
    attic = await site.worker("attic")
    stages = await site.stages(site.fleet.first)
    attic.errors = [("the disk is full", False), ("a path leads out of the folder", True)]
    operation = await stages.request("m", Scope(ScopeKind.NODE, "id-of-attic"))
    stuck = await site.until(operation, lambda view: view.nodes[0].failures == 2)
    assert (stuck.state, stuck.nodes[0].error) == ("failing", "a path leads out of the folder")
    assert (stuck.nodes[0].next_retry_at, stuck.message) == ("", "failing; not tried again by itself")
    await site.fleet.operations.retry(operation)
    done = await site.fleet.until(operation, "done")
    assert (done.outcome, sorted({order.attempt for order in attic.orders})) == ("completed", [1, 2, 3])


async def test_files_that_cannot_be_fetched_fail_the_rows_until_they_can(site: Site) -> None:
    await site.worker("attic")
    site.files.errors = [Unreachable("the source does not answer")]
    site.files.pause.clear()
    stages = await site.stages(site.fleet.first)
    operation = await stages.request("m", ALL)
    waiting = await site.until(operation, lambda view: view.nodes[0].error)
    assert waiting.nodes[0].error == "waits for the files on the controller"
    site.files.pause.set()
    done = await site.fleet.until(operation, "done")
    assert (done.outcome, site.files.asked) == ("completed", 2)
    site.files.files = ()
    await site.model("bare")
    empty = await stages.request("bare", ALL)
    failed = await site.fleet.until(empty, "failing")
    assert "has no files to stage" in failed.nodes[0].error


async def test_a_cancelled_one_stops_on_the_node_and_can_be_asked_for_again(site: Site) -> None:
    attic, barn = await site.worker("attic"), await site.worker("barn")
    stages = await site.stages(site.fleet.first)
    attic.hold = barn.hold = asyncio.Event()
    operation = await stages.request("m", ALL)
    await until(lambda: attic.orders and barn.orders)
    await site.fleet.operations.cancel(operation, node="barn")
    await until(lambda: barn.cancelled == [operation])
    shown = await site.fleet.view(operation)
    assert ([row.status for row in shown.nodes], attic.cancelled) == (["downloading", "cancelled"], [])
    await site.fleet.operations.cancel(operation)
    await until(lambda: attic.cancelled == [operation])
    ended = await site.fleet.view(operation)
    assert (ended.outcome, ended.cancellable) == ("cancelled", False)
    again = await site.fleet.operations.retry(operation)
    attic.hold.set()
    assert (await site.fleet.until(again.operation_id, "done")).counts == {"success": 2}


async def test_a_lost_result_and_another_leader_cost_no_second_transfer(site: Site) -> None:
    attic = await site.worker("attic")
    stages = await site.stages(site.fleet.first)
    attic.lose_results = True
    operation = await stages.request("m", ALL)
    done = await site.fleet.until(operation, "done")
    assert (done.outcome, {order.attempt for order in attic.orders}) == ("completed", {1})
    attic.lose_results, attic.hold = False, asyncio.Event()
    attic.orders.clear()
    second = await site.fleet.controller("c2")
    await site.stages(second)
    operation = await stages.request("m", ALL)
    await until(lambda: attic.orders)
    await site.fleet.first.kill()
    site.fleet.controllers.reverse()
    await until(lambda: second.leadership.epoch(LEASE))
    await until(lambda: len(attic.orders) > 2)
    attic.hold.set()
    assert (await site.fleet.until(operation, "done")).outcome == "completed"
    assert {order.attempt for order in attic.orders} == {1}, "the same order, sent again"


async def test_a_node_that_is_away_waits_and_one_that_is_deleted_ends(site: Site) -> None:
    attic = await site.worker("attic")
    await site.worker("barn")
    await site.fleet.until_heard("attic")
    await site.fleet.until_heard("barn")
    await site.fleet.set_node("attic", status="offline")
    await site.fleet.set_node("barn", status="offline")
    stages = await site.stages(site.fleet.first)
    operation = await stages.request("m", ALL)
    waiting = await site.fleet.until(operation, "waiting")
    assert waiting.nodes[0].error == "node offline, will be tried when it is healthy"
    async with site.fleet.store.write() as tx:
        await nodes.delete(tx, "id-of-barn")
    await site.fleet.set_node("attic", status="healthy")
    done = await site.fleet.until(operation, "done")
    assert [(row.status, row.error) for row in done.nodes] == [("success", ""), ("withdrawn", "the node was deleted")]
    assert len(attic.orders) == 1


async def test_a_deleted_model_ends_it_and_unknown_names_are_refused(site: Site) -> None:
    attic = await site.worker("attic")
    attic.hold = asyncio.Event()
    stages = await site.stages(site.fleet.first)
    operation = await stages.request("m", ALL)
    await until(lambda: attic.orders)
    async with site.fleet.store.write() as tx:
        await models.delete(tx, "m")
        await revisions.bump(tx, "models")
    done = await site.fleet.until(operation, "done")
    assert (done.nodes[0].status, done.nodes[0].error) == ("withdrawn", "the model was deleted")
    await until(lambda: attic.cancelled)
    with pytest.raises(NotFound):
        await stages.request("m", ALL)
    await site.model()
    with pytest.raises(NotFound, match="no approved node matches"):
        await stages.request("m", Scope(ScopeKind.SELECTOR, "tier=none"))


async def test_where_the_files_are(site: Site) -> None:
    attic, barn = await site.worker("attic"), await site.worker("barn")
    await site.worker("cellar")
    await site.fleet.localai("dock")
    await site.fleet.corral("elder")  # a worker that does not know the order
    attic.have, barn.have = (1000, 24), (300, 24)
    locations = FileLocations(site.fleet.store, site.files, site.calls(site.fleet.first))
    view = await locations.view("m")
    assert [(file.path, file.size_bytes, file.controller_bytes) for file in view.files] == [
        ("w.gguf", 1000, 1000),
        ("t.json", 24, 24),
    ]
    shown = {node.node_name: (node.state, node.have_bytes, node.total_bytes) for node in view.nodes}
    assert shown == {
        "attic": ("whole", 1024, 1024),
        "barn": ("partial", 324, 1024),
        "cellar": ("none", 0, 1024),
        "dock": ("unknown", 0, 1024),
        "elder": ("unknown", 0, 1024),
    }
    assert "older than this controller" in view.nodes[4].reason
    barn_id = view.nodes[1].node_id
    assert (await locations.on_node(barn_id)) == {"m": view.nodes[1]}
    assert (await locations.on_node(view.nodes[4].node_id))["m"].reason == view.nodes[4].reason
    await site.model("twin")
    barn.have = (300, 24, 1000, 24)  # of both models in one answer
    have = await locations.on_node(barn_id)
    assert {model: node.state for model, node in have.items()} == {"m": "partial", "twin": "whole"}
    site.files.pause.clear()
    unknown = await locations.view("m")
    assert (unknown.nodes[0].state, "corral models stage m" in unknown.note) == ("unknown", True)
    with pytest.raises(NotFound):
        await locations.view("nothing")


async def test_what_a_cleanup_keeps_and_frees(site: Site) -> None:
    attic = await site.worker("attic")
    await site.worker("barn")
    await site.fleet.until_heard("barn")
    await site.fleet.set_node("barn", status="offline")
    await site.model("other/name")
    cleanup = FleetCleanup(site.fleet.store, site.files, site.calls(site.fleet.first))
    view = await cleanup.run(dry_run=True)
    assert (view.dry_run, view.freed_bytes) == (True, 107)
    assert [(place.node_name, place.freed_bytes) for place in view.places] == [
        ("controller", 7),
        ("attic", 100),
        ("barn", 0),
    ]
    assert view.places[2].error == "the node is not reachable now"
    (request,) = attic.collected
    assert request.dry_run
    assert request.keep == ("m/abc/", "other/name/m/"), "the present set of each model, and nothing else"
    site.files.pause.clear()
    await cleanup.run(dry_run=False)
    assert attic.collected[-1].keep == ("m/", "other/name/"), "all of a model whose files are not known"


async def test_a_definition_that_cannot_be_used_is_refused(site: Site) -> None:
    async with site.fleet.store.write() as tx:
        now = await tx.now()
        await models.put(tx, StoredModel("bad", {"name": "bad", "parameters": 3}, "r", "person", now, now))
    stages = await site.stages(site.fleet.first)
    with pytest.raises(Invalid):
        await stages.request("bad", ALL)
