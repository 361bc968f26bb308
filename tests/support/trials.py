"""Trials of new revisions of models on a fleet of scripted workers: edits with a soak, and receipts of requests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from corral.contract.catalogue import EditModel, ModelChanged
from corral.contract.messages.replicas import ReplicaProcess
from corral.contract.rollouts import RolloutView
from corral.controller.operations.rollouts import Rollouts
from corral.controller.trials.accept import Trials
from corral.controller.wiring.replicas import Replicas
from corral.store.engine.types import to_us
from corral.store.tables import models, receipts
from corral.store.tables.models import StoredModel
from tests.support.replica_fleet import ReplicaFleet, ReplicaWorker
from tests.support.waiting import until

MODEL = "m"
_numbers = itertools.count(1)


class NoTrials(Trials):
    """Of models whose revisions nobody tries here."""

    def __init__(self) -> None:
        pass


class Trial:
    """One model that is served, and a new revision of it."""

    def __init__(self, fleet: ReplicaFleet) -> None:
        self.fleet = fleet
        self.old = self.new = self.operation = ""

    @property
    def parts(self) -> Replicas:
        return next(iter(self.fleet.replicas.values()))

    @property
    def rollouts(self) -> Rollouts:
        controller = self.fleet.fleet.first
        return Rollouts(controller.store, controller.feed)

    async def serve(self, **definition: Any) -> None:
        """Define the model and start its first replica."""
        self.old = (await self.fleet.define(MODEL, **definition)).revision
        await self.fleet.ask(MODEL)
        await self.fleet.until_ready(MODEL)

    async def edit(self, soak: str = "1h", *, dry_run: bool = False, **known: Any) -> ModelChanged:
        limits = {name: known.pop(name) for name in ("max_errors", "max_slowdown", "min_requests") if name in known}
        request = EditModel(changes=known or {"context_size": 4096}, soak=soak, **limits)
        changed = await self.parts.trials.edit(MODEL, request, by="ann", dry_run=dry_run)
        self.operation = changed.rollout_id
        if self.operation:
            self.new = (await self.view()).revision
        return changed

    async def view(self) -> RolloutView:
        return await self.rollouts.view(self.operation)

    async def until_phase(self, phase: str) -> RolloutView:
        async def reached() -> bool:
            return (await self.view()).phase == phase

        try:
            await until(reached, phase)
        except AssertionError:
            raise AssertionError(
                f"not {phase}: {await self.view()}; {await self.fleet.rows()}; {await self.fleet.shown()}"
            ) from None
        return await self.view()

    async def begin(self, soak: str = "1h", **known: Any) -> RolloutView:
        await self.edit(soak, **known)
        return await self.until_phase("soak")

    async def percent(self) -> int:
        return (await self.view()).percent

    async def stored(self) -> StoredModel:
        async with self.fleet.fleet.store.read() as tx:
            return await models.get(tx, MODEL)

    async def revisions(self) -> set[str]:
        """That gateways may send requests to."""
        return {each.revision for each in await self.fleet.shown(MODEL)}

    async def until_revisions(self, *wanted: str) -> None:
        async def right() -> bool:
            return await self.revisions() == set(wanted)

        await until(right, f"only {wanted}")

    async def until_stopped(self, workers: Sequence[ReplicaWorker], revision: str) -> None:
        await until(
            lambda: not [each for worker in workers for each in self.of(worker, revision)], "the processes' end"
        )

    def of(self, worker: ReplicaWorker, revision: str) -> list[ReplicaProcess]:
        return [each for each in worker.processes.values() if each.revision == revision]

    async def answer(
        self, worker: ReplicaWorker, revision: str, count: int, *, failing: int = 0, first_ms: float = 100.0
    ) -> None:
        """Receipts of requests that its process of that revision has served."""
        process = next(each for each in worker.processes.values() if each.revision == revision)
        async with self.fleet.fleet.store.write() as tx:
            at = to_us(await tx.now())
            rows: list[tuple[Any, ...]] = []
            for number in itertools.islice(_numbers, count):
                failed = len(rows) < failing
                first_us = int(first_ms * 1000 * (0.8 + 0.4 * (number % 17) / 17))
                times = (0, 0, 0 if failed else first_us, first_us + 500_000)
                texts = ("key", MODEL, "/v1/chat/completions", "", worker.node_id, process.process_id, revision, "", "")
                numbers = (500 if failed else 200, process.replica, *times, 10, 50, 1, 0)
                rows.append((at + number, f"r-{number}", *texts, *numbers, False, not failed, "", ""))
            await receipts.insert(tx, rows)
