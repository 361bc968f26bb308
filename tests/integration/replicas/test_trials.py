"""A new revision of a model on trial: its share of the requests, the figures that decide, and what goes wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from corral.contract.catalogue import EditModel, InstallModel
from corral.contract.models import read_definition
from corral.controller.operations.why import explain_rollout
from corral.kit.errors import Conflict, Invalid, NotFound
from corral.store.records import BackendRequest
from tests.support.model_catalogue import models_of
from tests.support.replica_fleet import GIB, ReplicaFleet, ReplicaWorker
from tests.support.trials import MODEL, Trial
from tests.support.waiting import until


async def two_nodes(fleet: ReplicaFleet) -> tuple[ReplicaWorker, ReplicaWorker]:
    return await fleet.worker("barn", has="llama-cpp"), await fleet.worker("byre", has="llama-cpp")


def host_of(trial: Trial, *workers: ReplicaWorker) -> ReplicaWorker:
    """The worker with the new revision."""
    (found,) = [worker for worker in workers if trial.of(worker, trial.new)]
    return found


async def old_host(trial: Trial, *workers: ReplicaWorker) -> ReplicaWorker:
    (found,) = [worker for worker in workers if trial.of(worker, trial.old)]
    return found


async def test_a_good_revision_gets_more_and_more_requests_and_stays(fleet: ReplicaFleet) -> None:
    workers = await two_nodes(fleet)
    trial = Trial(fleet)
    await trial.serve()
    before = await trial.stored()
    old = await old_host(trial, *workers)
    await trial.answer(old, trial.old, 60)
    shown = await trial.begin("6s")
    assert (shown.model, shown.backend, shown.in_place) == (MODEL, "", False)
    assert "a replica of the new revision starts" in shown.plan
    assert shown.percent == 5
    assert await trial.revisions() == {trial.old, trial.new}
    assert (await trial.stored()).revision == before.revision  # until the trial has ended
    new = host_of(trial, *workers)
    await trial.answer(new, trial.new, 60)
    seen = set[int]()

    async def done() -> bool:
        view = await trial.view()
        seen.add(view.percent)
        return view.phase == "done"

    await until(done)
    # A glance now and then may miss one; tests/unit/rollouts/test_trial.py has them all.
    assert {5, 100} <= seen <= {0, 5, 25, 100}
    view = await trial.view()
    assert view.classes[0].passed.startswith("no figure was worse in 60 requests")
    assert (await trial.stored()).revision == trial.new
    await trial.until_revisions(trial.new)
    await trial.until_stopped(workers, trial.old)
    operation = await fleet.fleet.first.backends.operations.view(trial.operation)
    assert (operation.kind, operation.outcome) == ("rollout", "completed")
    assert len(trial.of(new, trial.new)) == 1


@pytest.mark.parametrize(
    ("served", "figure"),
    [
        ({"first_ms": 300.0}, "time to first token of m"),
        ({"failing": 12}, "failed requests of m: 20.0 %"),
    ],
    ids=["slow", "unreliable"],
)
async def test_a_worse_revision_is_reverted_and_the_figure_is_named(
    fleet: ReplicaFleet, served: dict[str, Any], figure: str
) -> None:
    workers = await two_nodes(fleet)
    trial = Trial(fleet)
    await trial.serve()
    await trial.answer(await old_host(trial, *workers), trial.old, 60)
    await trial.begin()
    await trial.answer(host_of(trial, *workers), trial.new, 60, **served)
    view = await trial.until_phase("reverted")
    assert figure in view.verdict
    assert "of the old one" in view.verdict
    await trial.until_revisions(trial.old)
    await trial.until_stopped(workers, trial.new)
    assert (await trial.stored()).revision == trial.old
    operation = await fleet.fleet.first.backends.operations.view(trial.operation)
    assert operation.outcome == "reverted"
    assert figure in operation.error
    why = explain_rollout(view)
    assert any(figure in line and line.endswith("worse") for line in why.lines)
    with pytest.raises(Invalid, match="a trial is not repeated"):
        await fleet.fleet.first.backends.operations.retry(trial.operation)


async def test_too_few_requests_end_a_soak_of_a_time_and_hold_one_of_requests(local: ReplicaFleet) -> None:
    workers = await two_nodes(local)
    trial = Trial(local)
    await trial.serve()
    await trial.begin("300ms")
    view = await trial.until_phase("done")
    assert view.classes[0].passed.startswith("too few requests to judge: 0 by the new revision, 0 by the old one")

    trial.old = trial.new
    await trial.begin("30", context_size=8192)
    await trial.answer(host_of(trial, *workers), trial.new, 30)

    async def waits() -> bool:
        return "the old revision served too few requests" in (await trial.view()).classes[0].waiting

    await until(waits)
    assert await trial.percent() == 100
    assert (await trial.stored()).revision == trial.old
    await trial.rollouts.promote(trial.operation, by="ann")
    view = await trial.until_phase("done")
    assert view.classes[0].passed == "promoted by ann"
    await trial.until_revisions(trial.new)


async def test_pause_resume_and_abort(local: ReplicaFleet) -> None:
    workers = await two_nodes(local)
    trial = Trial(local)
    await trial.serve()
    await trial.begin("2s")
    assert "keeps its share" in await trial.rollouts.pause(trial.operation, by="ann")

    async def paused() -> bool:
        return "paused by ann" in (await trial.view()).classes[0].waiting

    await until(paused)
    soaked_s = (await trial.view()).classes[0].soaked_s
    await asyncio.sleep(0.5)  # time that must not count
    assert (await trial.view()).classes[0].soaked_s == soaked_s
    assert await trial.revisions() == {trial.old, trial.new}
    await trial.rollouts.resume(trial.operation)

    async def goes_on() -> bool:
        return (await trial.view()).classes[0].soaked_s > soaked_s

    await until(goes_on)
    await trial.rollouts.abort(trial.operation, by="ann")
    view = await trial.until_phase("reverted")
    assert view.verdict == "aborted by ann"
    await trial.until_stopped(workers, trial.new)
    with pytest.raises(Invalid, match="the rollout is over"):
        await trial.rollouts.promote(trial.operation, by="ann")


@pytest.mark.parametrize("leaves", ["offline", "draining"])
async def test_a_node_that_leaves_during_the_soak_is_replaced_once(local: ReplicaFleet, leaves: str) -> None:
    small: dict[str, Any] = {"total_ram": 16 * GIB, "available_ram": 15 * GIB}
    workers = {"barn": await local.worker("barn", has="llama-cpp", **small)}
    trial = Trial(local)
    await trial.serve(memory="10GiB")
    for name in ("byre", "shed", "coop"):
        workers[name] = await local.worker(name, has="llama-cpp")
    await trial.begin()
    names = {each.node_id: name for name, each in workers.items()}
    first = names[host_of(trial, *workers.values()).node_id]
    assert first != "barn"
    # By saying goodbye: a heartbeat that still waits to be written does not bring it back then.
    gone: dict[str, Any] = {"status": leaves, "left": leaves == "offline"}
    await local.set_node(first, **gone)

    async def elsewhere() -> bool:
        found = (await trial.view()).classes[0]
        return found.state == "soaking" and found.canary not in ("", first)

    await until(elsewhere, "another canary")
    assert trial.old in await trial.revisions()
    assert await trial.percent() == 5
    second = (await trial.view()).classes[0].canary
    await local.set_node(second, **gone)
    view = await trial.until_phase("reverted")
    assert "2 canaries of revision" in view.verdict
    await trial.until_revisions(trial.old)


async def test_a_process_that_dies_reverts_the_trial(local: ReplicaFleet) -> None:
    workers = await two_nodes(local)
    trial = Trial(local)
    await trial.serve()
    await trial.begin()
    host = host_of(trial, *workers)
    (process,) = trial.of(host, trial.new)

    async def watched() -> bool:
        return (await trial.view()).classes[0].state == "soaking"

    await until(watched)
    await host.set_process(process.process_id, restarts=2)
    view = await trial.until_phase("reverted")
    assert "a process of the new revision ended by itself 2 times" in view.verdict


async def test_a_revision_that_does_not_start_is_reverted(local: ReplicaFleet) -> None:
    workers = await two_nodes(local)
    trial = Trial(local)
    await trial.serve()
    for worker in workers:
        worker.starts.failures += ["no such quantisation"] * 3
    await trial.edit()
    view = await trial.until_phase("reverted")
    assert "failed to start it 2 times: no such quantisation" in view.verdict
    assert await trial.revisions() == {trial.old}
    assert await local.jobs() == []  # requests of the model saw nothing of it


async def test_a_second_edit_is_refused_while_a_revision_is_on_trial(local: ReplicaFleet) -> None:
    await two_nodes(local)
    trial = Trial(local)
    await trial.serve()
    await trial.begin()
    models = models_of(local.fleet.store, local.fleet.first.feed)  # the service of the API
    whole = {"name": MODEL, "backend": "llama-cpp", "context_size": 512}
    for refused in (
        models.edit(MODEL, EditModel(changes={"context_size": 512})),
        models.install(InstallModel(definition=whole, replace=True)),
        trial.parts.trials.edit(MODEL, EditModel(changes={"context_size": 512}, soak="5m")),
        trial.parts.trials.install(InstallModel(definition=whole, replace=True, soak="5m")),
    ):
        with pytest.raises(Conflict, match=f"operation {trial.operation[:8]}.*corral rollouts promote"):
            await refused
    assert (await trial.view()).phase == "soak"


async def test_a_file_that_redefines_the_model_ends_the_trial(local: ReplicaFleet) -> None:
    workers = await two_nodes(local)
    trial = Trial(local)
    await trial.serve()
    await trial.begin()
    after = await local.define(MODEL, context_size=512)
    view = await trial.until_phase("ended")
    assert view.verdict == "a later edit of the model decides"
    await trial.until_revisions(after.revision)
    await trial.until_stopped(workers, trial.new)


async def test_deleting_the_model_ends_the_trial(local: ReplicaFleet) -> None:
    workers = await two_nodes(local)
    trial = Trial(local)
    await trial.serve()
    await trial.begin()
    await local.forget(MODEL)
    view = await trial.until_phase("ended")
    assert view.verdict == "the model was deleted"
    await until(lambda: not [each for worker in workers for each in worker.processes])
    operation = await local.fleet.first.backends.operations.view(trial.operation)
    assert operation.outcome == "cancelled"


async def test_cancelling_the_operation_ends_the_trial(local: ReplicaFleet) -> None:
    workers = await two_nodes(local)
    trial = Trial(local)
    await trial.serve()
    await trial.begin()
    await local.fleet.first.backends.operations.cancel(trial.operation)
    view = await trial.until_phase("ended")
    assert view.verdict == "it was cancelled"
    await trial.until_revisions(trial.old)
    await trial.until_stopped(workers, trial.new)


@pytest.mark.parametrize("phase", ["fetching", "canary", "soak", "paused"])
async def test_a_controller_killed_in_each_phase(local: ReplicaFleet, phase: str) -> None:
    workers = await two_nodes(local)
    trial = Trial(local)
    await trial.serve()
    await trial.answer(await old_host(trial, *workers), trial.old, 60)
    holds: dict[str, Any] = {"fetching": [local.files], "canary": [worker.starts for worker in workers]}
    for hold in holds.get(phase, ()):
        hold.hold = asyncio.Event()
    await trial.edit("1h")
    await trial.until_phase("soak" if phase == "paused" else phase)
    before = await trial.view()
    if phase == "paused":
        await trial.rollouts.pause(trial.operation, by="ann")
    await local.fleet.first.kill()
    local.replicas.clear()
    local.files.hold = None
    second = await local.fleet.controller("c2")
    local.fleet.controllers.reverse()
    local.add(second)
    for worker in workers:
        if worker.starts.hold is not None:
            worker.starts.hold.set()
    if phase == "paused":
        await trial.rollouts.resume(trial.operation)
    after = await trial.until_phase("soak")
    if before.classes and before.classes[0].canary:
        assert after.classes[0].canary == before.classes[0].canary
    host = host_of(trial, *workers)
    await trial.answer(host, trial.new, 60, first_ms=300.0)
    view = await trial.until_phase("reverted")
    assert "time to first token" in view.verdict
    assert len([body for body in host.started if body["revision"] == trial.new]) == 1
    await trial.until_revisions(trial.old)


async def test_without_room_for_both_the_plan_says_so_and_the_old_one_stops_first(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp", total_ram=16 * GIB, available_ram=15 * GIB)
    trial = Trial(local)
    await trial.serve(memory="10GiB")
    await trial.answer(barn, trial.old, 60)
    planned = await trial.edit(dry_run=True, memory="11GiB")
    assert not planned.changed
    assert "no node has room for both revisions" in planned.notes[0]
    assert "gateways hold the requests until the new one is ready" in planned.notes[0]
    assert (await trial.stored()).revision == trial.old
    await trial.edit(memory="11GiB")
    view = await trial.until_phase("soak")
    assert view.in_place
    assert [each["revision"] for each in barn.started] == [trial.old, trial.new]
    assert await trial.revisions() == {trial.new}
    await trial.answer(barn, trial.new, 60, first_ms=300.0)
    view = await trial.until_phase("reverted")
    assert "time to first token" in view.verdict
    await trial.until_revisions(trial.old)
    assert (await trial.stored()).revision == trial.old


async def test_another_node_takes_the_new_replica_where_memory_cannot_hold_both(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp", total_ram=16 * GIB, available_ram=15 * GIB)
    trial = Trial(local)
    await trial.serve(memory="10GiB")
    byre = await local.worker("byre", has="llama-cpp", total_ram=16 * GIB, available_ram=15 * GIB)
    planned = await trial.edit(dry_run=True, memory="11GiB")
    assert "on another node, byre: barn cannot hold both revisions" in planned.notes[0]
    await trial.edit(memory="11GiB")
    await trial.until_phase("soak")
    assert len(trial.of(barn, trial.old)) == len(trial.of(byre, trial.new)) == 1
    assert await trial.revisions() == {trial.old, trial.new}


async def test_a_model_that_nothing_serves_is_judged_from_the_next_request_on(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp")
    trial = Trial(local)
    trial.old = (await local.define(MODEL)).revision
    changed = await trial.edit()
    assert "no replica of the model runs" in changed.notes[0]
    assert (await trial.stored()).revision == trial.new
    assert (await trial.view()).phase == "fetching"
    await local.ask(MODEL)
    await trial.until_phase("soak")
    await trial.rollouts.abort(trial.operation, by="ann")
    await trial.until_phase("reverted")
    await until(lambda: trial.of(barn, trial.old) or not barn.processes)
    assert (await trial.stored()).revision == trial.old


async def test_a_load_that_fails_in_place_is_reverted(local: ReplicaFleet) -> None:
    barn = await local.worker("barn", has="llama-cpp")
    trial = Trial(local)
    trial.old = (await local.define(MODEL)).revision
    await trial.edit()
    barn.starts.failures += ["no such quantisation"] * 3
    await local.ask(MODEL)
    view = await trial.until_phase("reverted")
    assert "barn failed to start it 2 times: no such quantisation" in view.verdict
    assert (await trial.stored()).revision == trial.old


async def test_the_new_revision_gets_replicas_for_its_share(local: ReplicaFleet) -> None:
    workers = [await local.worker(name, has="llama-cpp") for name in ("a", "b", "c", "d")]
    trial = Trial(local)
    trial.old = (await local.define(MODEL)).revision
    await local.schedule(MODEL, min_replicas=4, max_replicas=4)
    await local.until_ready(MODEL, 4)
    await trial.begin("3s")
    assert sum(len(trial.of(worker, trial.new)) for worker in workers) == 1
    await until(lambda: sum(len(trial.of(worker, trial.new)) for worker in workers) == 4)
    await trial.until_phase("done")
    await trial.until_stopped(workers, trial.old)
    await local.until_ready(MODEL, 4)
    assert await trial.revisions() == {trial.new}


async def test_a_change_that_means_nothing_to_replicas_needs_no_soak(local: ReplicaFleet) -> None:
    await two_nodes(local)
    trial = Trial(local)
    await trial.serve()
    changed = await trial.edit(description="what it is for")
    assert not changed.rollout_id
    assert (await trial.stored()).definition["description"] == "what it is for"


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (EditModel(changes={"context_size": 1}, soak="5m", recreate=True), "recreate stops the old replicas at once"),
        (EditModel(changes={"context_size": 1}, soak="soon"), "is no soak"),
        (EditModel(definition={"alias": "other"}, soak="5m"), "is an alias"),
    ],
)
async def test_what_cannot_soak_is_refused(local: ReplicaFleet, request_: EditModel, why: str) -> None:
    await two_nodes(local)
    trial = Trial(local)
    await trial.serve()
    with pytest.raises(Invalid, match=why):
        await trial.parts.trials.edit(MODEL, request_)


async def test_files_of_both_revisions_are_fetched(local: ReplicaFleet) -> None:
    workers = await two_nodes(local)
    trial = Trial(local)
    sha = {name: f"{number:064x}" for number, name in enumerate(("one", "two"))}
    file = {name: {"filename": f"{name}.gguf", "uri": f"https://h.test/{name}", "sha256": sha[name]} for name in sha}
    await trial.serve(download_files=[file["one"]])
    await trial.begin(download_files=[file["two"]])
    host = host_of(trial, *workers)
    (started,) = [body for body in host.started if body["revision"] == trial.new]
    assert [each["path"] for each in started["files"]] == ["two.gguf"]
    assert started["definition"]["download_files"] == [file["two"]]
    assert read_definition(started["definition"]).revision == trial.new


async def test_an_edit_to_a_backend_that_nobody_knows_is_refused(
    local: ReplicaFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two_nodes(local)
    trial = Trial(local)
    await trial.serve()
    known = models_of(local.fleet.store, local.fleet.first.feed, backends=NoBackends())  # type: ignore[arg-type]
    monkeypatch.setattr(trial.parts.trials, "_models", known)
    for dry_run in (True, False):
        with pytest.raises(Invalid, match="could not be tried: there is no backend nope"):
            await trial.edit(dry_run=dry_run, backend="nope")
    assert (await trial.stored()).revision == trial.old
    assert await trial.rollouts.list_views() == []


class NoBackends:
    async def look_up(self, request: BackendRequest) -> None:
        raise NotFound(f"there is no backend {request.backend}")
