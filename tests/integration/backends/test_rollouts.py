"""Upgrades with a soak: one node per hardware class first, its requests against those of the old build, and back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable
from datetime import datetime
from typing import Any

import pytest

from corral.contract.messages.replicas import ReplicaProcess
from corral.contract.rollouts import RolloutView
from corral.controller.rollouts.options import parse_rollout
from corral.kit.errors import Conflict, Invalid
from corral.store.engine.types import to_us
from corral.store.records import IntentStage
from corral.store.tables import backend_intents, node_backends, receipts
from tests.support.backend_fleet import Fleet
from tests.support.scripted_worker import CorralWorker
from tests.support.waiting import until

OLD, NEW = "sha256:cpu-vllm-1", "sha256:2"
LONG, SHORT = "1h", "300ms"
_numbers = itertools.count(1)


async def installed(fleet: Fleet, *names: str, **known: Any) -> dict[str, CorralWorker]:
    """Nodes with the old build and a process of it each, and a newer build in the gallery."""
    workers = {name: await fleet.corral(name, **known) for name in names}
    await fleet.until(await fleet.install(), "done")
    for worker in workers.values():
        await tell(fleet, worker)
    fleet.catalogue.publish("vllm", NEW)
    return workers


async def tell(fleet: Fleet, worker: CorralWorker, *, restarts: int = 0) -> str:
    """The worker lists one process of the build that it has. Returns the id of the process."""
    digest = worker.installed["vllm"]["digest"]
    process_id = f"{worker.node_id}/{digest}"
    process = ReplicaProcess(process_id, "smol", 0, "vllm", "ready", "openai", digest=digest, restarts=restarts)
    worker.listed_processes = (process,)
    await worker.beat()

    async def known() -> bool:
        async with fleet.store.read() as tx:
            found = await node_backends.find(tx, worker.node_id)
        return found is not None and found.processes == (process,)

    await until(known)
    return process_id


async def serve(fleet: Fleet, worker: CorralWorker, count: int, *, failing: int = 0, first_ms: float = 100.0) -> None:
    """Receipts of requests that the process of the worker has served."""
    digest = worker.installed["vllm"]["digest"]
    async with fleet.store.write() as tx:
        now = await tx.now()
        await receipts.insert(tx, [_receipt(worker, digest, now, each < failing, first_ms) for each in range(count)])


def _receipt(worker: CorralWorker, digest: str, now: datetime, failed: bool, first_ms: float) -> tuple[Any, ...]:
    number = next(_numbers)
    spread_us = int(first_ms * 1000 * (0.8 + 0.4 * (number % 17) / 17))
    numbers = (500 if failed else 200, 0, 0, 0, 0 if failed else spread_us, spread_us + 500_000, 10, 50, 1, 0)
    texts = ("key", "smol", "/v1/chat/completions", "", worker.node_id, f"{worker.node_id}/{digest}", "r1", digest, "")
    return (to_us(now) + number, f"request-{number}", *texts, *numbers, False, not failed, "", "")


async def upgrade(fleet: Fleet, soak: str = LONG, **more: Any) -> str:
    return await fleet.ask("upgrade", "vllm", max_parallel="100%", rollout=parse_rollout(soak=soak, **more))


async def view(fleet: Fleet, operation: str) -> RolloutView:
    return await fleet.controllers[-1].backends.rollouts.view(operation)


async def until_phase(fleet: Fleet, operation: str, phase: str) -> RolloutView:
    async def reached() -> bool:
        return (await view(fleet, operation)).phase == phase

    try:
        await until(reached)
    except AssertionError:
        raise AssertionError(f"not {phase} but {await view(fleet, operation)}") from None
    return await view(fleet, operation)


async def until_soak(fleet: Fleet, workers: dict[str, CorralWorker], soak: str = LONG, **more: Any) -> tuple[str, str]:
    """The operation, and the name of its canary."""
    operation = await upgrade(fleet, soak, **more)
    found = await until_phase(fleet, operation, "soak")
    canary = found.classes[0].canary
    await tell(fleet, workers[canary])

    async def watched() -> bool:
        return (await view(fleet, operation)).classes[0].state == "soaking"

    await until(watched)
    return operation, canary


async def until_accepted(fleet: Fleet, workers: Iterable[CorralWorker]) -> None:
    """The controller knows that they work on their orders: it will not send them again, nor will another one."""

    async def accepted() -> bool:
        async with fleet.store.read() as tx:
            found = await backend_intents.list_(tx, [worker.node_id for worker in workers])
        return all(row.stage is IntentStage.SENT and row.accepted_at is not None for row in found)

    await until(lambda: all(worker.at_once for worker in workers))
    await until(accepted)


@contextlib.asynccontextmanager
async def heartbeats(workers: Iterable[CorralWorker]) -> AsyncIterator[None]:
    """As real workers send them: they list the outcomes of which no controller heard."""

    async def beat() -> None:
        while True:
            for worker in workers:
                await worker.beat()
            await asyncio.sleep(0.05)

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


def switched(workers: dict[str, CorralWorker]) -> list[str]:
    return sorted(name for name, worker in workers.items() if worker.installed["vllm"]["digest"] == NEW)


async def until_reverted(fleet: Fleet, operation: str, workers: dict[str, CorralWorker]) -> RolloutView:
    found = await until_phase(fleet, operation, "reverted")
    for revert in found.reverted_by:
        await fleet.until(revert, "done")
    await until(lambda: switched(workers) == [])
    return found


async def test_a_good_build_passes_its_soak_and_goes_everywhere(fleet: Fleet) -> None:
    workers = await installed(fleet, "a", "b", "c")
    for worker in workers.values():
        await serve(fleet, worker, 30)
    operation = await upgrade(fleet, "3s")
    found = await until_phase(fleet, operation, "soak")
    canary = found.classes[0].canary
    assert switched(workers) == [canary]
    await tell(fleet, workers[canary])
    await serve(fleet, workers[canary], 30)
    row = await fleet.row(operation, canary)
    assert (row.status, row.phase) == ("downloading", "soaking")
    assert not (await fleet.view(operation)).settled
    await fleet.until(operation, "done")
    assert switched(workers) == ["a", "b", "c"]
    found = await until_phase(fleet, operation, "done")
    assert found.classes[0].passed == "no figure was worse in 30 requests"
    assert [figure.name for figure in found.classes[0].figures] == ["errors", "first_token", "tokens_per_s"]
    assert len(found.classes[0].new_windows) == 1
    assert {row.status for row in (await fleet.view(operation)).nodes} == {"success"}


@pytest.mark.parametrize(
    ("wrong", "figure"),
    [({"failing": 15}, "failed requests of smol: 10.0 %"), ({"first_ms": 300.0}, "time to first token of smol")],
)
async def test_a_worse_build_stops_at_one_node_and_is_reverted(
    local_fleet: Fleet, wrong: dict[str, Any], figure: str
) -> None:
    fleet = local_fleet
    workers = await installed(fleet, "a", "b", "c")
    for worker in workers.values():
        await serve(fleet, worker, 50)
    operation, canary = await until_soak(fleet, workers)
    await serve(fleet, workers[canary], 150, **wrong)
    found = await until_reverted(fleet, operation, workers)
    assert figure in found.verdict
    ended = await fleet.until(operation, "done")
    assert (ended.outcome, ended.error) == ("reverted", found.verdict)
    assert {row.status for row in ended.nodes} == {"withdrawn"}
    (revert,) = found.reverted_by
    assert [(row.node_name, row.status) for row in (await fleet.view(revert)).nodes] == [(canary, "success")]
    for name, worker in workers.items():
        switches = [order for order in worker.orders("upgrade") if not order.get("fetch_only")]
        assert len(switches) == (2 if name == canary else 0), "there and back, on one node"
    await fleet.quiet()
    assert switched(workers) == []


async def test_a_process_that_keeps_dying_reverts(local_fleet: Fleet) -> None:
    workers = await installed(local_fleet, "a", "b")
    operation, canary = await until_soak(local_fleet, workers)
    for restarts in (1, 2):
        await tell(local_fleet, workers[canary], restarts=restarts)
    found = await until_reverted(local_fleet, operation, workers)
    assert found.verdict == f"a process of the new build ended by itself 2 times on {canary}"


async def test_too_few_requests_pass_a_soak_of_time_and_are_noted(local_fleet: Fleet) -> None:
    workers = await installed(local_fleet, "a", "b")
    operation = await upgrade(local_fleet, SHORT)
    await local_fleet.until(operation, "done")
    found = await until_phase(local_fleet, operation, "done")
    assert found.classes[0].passed.startswith("too few requests to judge: 0 by the new build, 0 by the old one")
    assert switched(workers) == ["a", "b"]


async def test_every_hardware_class_has_a_canary_of_its_own(local_fleet: Fleet) -> None:
    fleet = local_fleet
    small = await installed(fleet, "a", "b", total_ram=8 << 30)
    large = {name: await fleet.corral(name, total_ram=64 << 30) for name in ("c", "d")}
    await until(lambda: all("vllm" in worker.installed for worker in large.values()))
    operation = await upgrade(fleet)
    found = await until_phase(fleet, operation, "soak")

    async def both() -> bool:
        return [each.state for each in (await view(fleet, operation)).classes] == ["soaking", "soaking"]

    await until(both)
    found = await view(fleet, operation)
    assert [each.name for each in found.classes] == [
        "cpu, 64 GiB, linux/amd64",
        "cpu, 8 GiB, linux/amd64",
    ]
    assert len(switched(small)) == 1
    fleet_of_large = [name for name, worker in large.items() if worker.installed["vllm"]["digest"] == NEW]
    assert len(fleet_of_large) <= 1, "those that joined later may have the newer build from the start"


@pytest.mark.parametrize("where", ["fetching", "soak", "waves", "reverting"])
async def test_a_controller_killed_in_any_phase_is_continued_by_another(local_fleet: Fleet, where: str) -> None:
    fleet = local_fleet
    workers = await installed(fleet, "a", "b", "c")
    for worker in workers.values():
        await serve(fleet, worker, 40)
    if where == "fetching":
        for worker in workers.values():
            worker.script.hold = asyncio.Event()
        operation = await upgrade(fleet)
        await until_accepted(fleet, list(workers.values()))
        await fleet.first.kill()
        for worker in workers.values():
            assert worker.script.hold is not None
            worker.script.hold.set()
        await fleet.controller("c2")
        async with heartbeats(workers.values()):
            canary = (await until_phase(fleet, operation, "soak")).classes[0].canary
            await until(lambda: switched(workers) == [canary])
        return
    operation, canary = await until_soak(fleet, workers)
    others = [worker for name, worker in workers.items() if name != canary]
    if where == "waves":
        for worker in others:
            worker.script.hold = asyncio.Event()
        await fleet.first.backends.rollouts.promote(operation, by="ann")
        await until_accepted(fleet, others)
    elif where == "reverting":
        workers[canary].script.hold = asyncio.Event()
        await serve(fleet, workers[canary], 150, failing=30)
        await until_phase(fleet, operation, "reverted")
        await until_accepted(fleet, [workers[canary]])
    before = await view(fleet, operation)
    await fleet.first.kill()
    for worker in workers.values():
        if worker.script.hold is not None:
            worker.script.hold.set()
    second = await fleet.controller("c2")
    async with heartbeats(workers.values()):
        if where == "soak":
            await serve(fleet, workers[canary], 150, failing=30)
            found = await until_phase(fleet, operation, "reverted")
            assert found.classes[0].canary == canary
        await until(lambda: second.leadership.epoch("reconcile") > 0)
        if where == "waves":
            await fleet.until(operation, "done")
            assert switched(workers) == ["a", "b", "c"]
        else:
            await until(lambda: switched(workers) == [])
    if where == "reverting":
        assert (await second.backends.rollouts.view(operation)) == before, "the same decision"


async def test_a_canary_that_goes_offline_or_is_drained_is_replaced(local_fleet: Fleet) -> None:
    fleet = local_fleet
    workers = await installed(fleet, "a", "b", "c")
    operation, canary = await until_soak(fleet, workers)
    await fleet.set_node(canary, status="draining")

    async def another() -> bool:
        state = (await view(fleet, operation)).classes[0]
        return state.canary != canary and state.state == "soaking"

    await until(another)
    second = (await view(fleet, operation)).classes[0].canary
    assert switched(workers) == sorted([canary, second])
    await fleet.set_node(second, status="offline")
    found = await until_phase(fleet, operation, "reverted")
    assert "2 canaries" in found.verdict
    for name in (canary, second):
        await fleet.set_node(name, status="healthy")
    await until(lambda: switched(workers) == [])


async def test_a_second_rollout_is_refused_while_the_first_is_on_trial(local_fleet: Fleet) -> None:
    fleet = local_fleet
    workers = await installed(fleet, "a", "b")
    operation, _ = await until_soak(fleet, workers)
    assert await upgrade(fleet) == operation, "the same request joins it"
    fleet.catalogue.publish("vllm", "sha256:3")
    with pytest.raises(Conflict, match=f"corral rollouts promote {operation[:8]}"):
        await upgrade(fleet)
    await fleet.first.backends.rollouts.promote(operation, by="ann")
    await fleet.until(operation, "done")
    later = await upgrade(fleet, SHORT)
    await fleet.until(later, "done")
    assert {worker.installed["vllm"]["digest"] for worker in workers.values()} == {"sha256:3"}


async def test_a_delete_ends_the_rollout(local_fleet: Fleet) -> None:
    fleet = local_fleet
    workers = await installed(fleet, "a", "b")
    operation, _ = await until_soak(fleet, workers)
    await fleet.until(await fleet.ask("delete", "vllm", force=True), "done")
    assert all("vllm" not in worker.installed for worker in workers.values())
    await until_phase(fleet, operation, "ended")
    ended = await fleet.until(operation, "done")
    assert {row.status for row in ended.nodes} == {"superseded"}


async def test_pause_promote_and_abort(local_fleet: Fleet) -> None:
    fleet = local_fleet
    workers = await installed(fleet, "a", "b", "c")
    operation, canary = await until_soak(fleet, workers, "2s", max_errors="50%")
    rollouts = fleet.first.backends.rollouts
    await rollouts.pause(operation, by="ann")

    async def paused() -> bool:
        return (await fleet.view(operation)).settled

    await until(paused)
    await fleet.quiet(10)
    assert switched(workers) == [canary]
    assert (await view(fleet, operation)).message == "paused by ann"
    await rollouts.resume(operation)
    await fleet.until(operation, "done")
    with pytest.raises(Invalid, match="the rollout is over: done"):
        await rollouts.abort(operation, by="ann")


async def test_abort_returns_every_node_and_a_retry_requests_the_upgrade_again(local_fleet: Fleet) -> None:
    fleet = local_fleet
    workers = await installed(fleet, "a", "b", "c")
    operation, _ = await until_soak(fleet, workers)
    await fleet.first.backends.rollouts.abort(operation, by="ann")
    assert (await until_reverted(fleet, operation, workers)).verdict == "aborted by ann"
    again = await fleet.operations.retry(operation)
    assert again.operation_id != operation
    assert (await until_phase(fleet, again.operation_id, "soak")).soak == "1h"


async def test_a_backend_that_no_rule_names_returns_to_the_build_that_each_node_had(local_fleet: Fleet) -> None:
    """Nodes that had different builds go back to different ones."""
    fleet = local_fleet
    workers = {name: await fleet.corral(name) for name in "abc"}
    own = {"a": "sha256:of-a", "b": "sha256:of-b", "c": "sha256:of-b"}
    for name, worker in workers.items():
        worker.put("vllm", digest=own[name], version="0.9")
        await tell(fleet, worker)
    fleet.catalogue.publish("vllm", NEW)
    operation = await upgrade(fleet)
    canary = (await until_phase(fleet, operation, "soak")).classes[0].canary
    broken = next(name for name in workers if name != canary)
    workers[broken].script.failures = [{"error": "exit 1", "phase": "starting", "permanent": True}]
    await fleet.first.backends.rollouts.promote(operation, by="ann")
    found = await until_reverted(fleet, operation, workers)
    assert found.verdict == f"{broken} failed to switch once, and a retry cannot help: exit 1"
    assert {name: worker.installed["vllm"]["digest"] for name, worker in workers.items()} == own


async def test_without_a_soak_the_second_failed_switch_reverts_what_has_switched(local_fleet: Fleet) -> None:
    fleet = local_fleet
    workers = await installed(fleet, "a", "b", "c")
    gate = asyncio.Event()

    def hold() -> None:
        nonlocal gate
        gate.set()
        gate = asyncio.Event()
        for worker in workers.values():
            worker.script.hold = gate

    def at_work() -> list[str]:
        return [name for name, worker in workers.items() if worker.at_once]

    hold()
    operation = await fleet.ask("upgrade", "vllm", max_parallel="1")
    await until(lambda: len(at_work()) == 3)
    hold()
    await until(lambda: all(worker.installed["vllm"].get("fetched") for worker in workers.values()))
    await until(lambda: len(at_work()) == 1)
    (canary,) = at_work()
    hold()
    await until(lambda: switched(workers) == [canary])
    await until(lambda: len(at_work()) == 1)
    (broken,) = at_work()
    workers[broken].script.failures = [{"error": "exit 1", "phase": "starting"} for _ in range(2)]
    hold()
    await fleet.until_row(operation, broken, "error")
    await fleet.quiet()
    assert switched(workers) == [canary], "the first failure stops the rest"
    gate.set()
    await fleet.operations.retry(operation)
    found = await until_reverted(fleet, operation, workers)
    assert found.verdict == f"{broken} failed to switch 2 times: exit 1"
