"""What should run where, compared with what does: for every model, from one look at the world. Pure.

First each replica by itself (`life.py`), then each model: is one wanted, is there one too many, does an old revision
still serve, is its node to be emptied. Where a new one goes, what makes room for it and how many there should be are
the scheduler's to say.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from msgspec.structs import replace as changed

from corral.contract.messages.replicas import ReplicaProcess, ReplicaState
from corral.controller.inventory.records import ProcessActivity
from corral.controller.replicas import load_jobs as jobs
from corral.controller.replicas.facts import Decided, Facts, Files, Rows
from corral.controller.replicas.lifecycle import (
    AWAY,
    DRAINING,
    OFFLINE,
    Broke,
    Gone,
    Keep,
    Place,
    Ready,
    Start,
    Stop,
    hear,
    leave,
    next_of,
)
from corral.controller.replicas.load_jobs import Moved
from corral.controller.replicas.scheduler_replicas import mirror
from corral.controller.scheduler.eviction import Decision, EvictFirst, Purpose, WaitForCapacity, choose_placement
from corral.controller.scheduler.placement import NoCapacity, Placed, choose_node
from corral.controller.scheduler.scaling import Hold, ScaleDown, ScaleUp, Unsatisfied, plan_scaling, replace_in_place
from corral.controller.scheduler.world import Model, World
from corral.store.records import DesiredReplica, LoadJob, ReplicaStage

MOST_STEPS = 16  # of one model in one look
MOST_REASONS = 3  # of those why nodes cannot take a model, told to those who wait for it


def decide(facts: Facts) -> Decided:
    decided = Decided(Rows(facts.rows), dict(facts.jobs))
    failures = _step(facts, decided)
    _take_in_strays(facts, decided)
    names = {key[1] for key in decided.rows} | set(decided.jobs) | set(failures)
    names |= {name for name, model in facts.world.models.items() if model.schedule.scales}
    plans = []
    for name in sorted(names):
        model = facts.world.models.get(name)
        if model is None or model.disabled:
            _end(facts, decided, name, "the model was deleted" if model is None else "the model was disabled")
        else:
            plans.append(_ModelPlan(facts, decided, model, failures.get(name, [])))
    # All of them first: what must not answer any more is not counted when another model needs room.
    for plan in plans:
        plan.give_up_what_is_stale()
    for plan in plans:
        plan.carry_out()
    return decided


# Each replica by itself.


def _step(facts: Facts, decided: Decided) -> dict[str, list[Broke]]:
    """By model, what broke."""
    failures: dict[str, list[Broke]] = {}
    for key, row in list(decided.rows.items()):
        after = _heard(facts, row)
        where = facts.places.get(row.node_id)
        if isinstance(after, DesiredReplica) and (fitted := _fitted(facts, decided, after)) is None:
            del decided.rows[key]
            decided.events.append(("replica does not fit where it was placed", row))
            continue
        if isinstance(after, DesiredReplica):
            after, ready = _prepared(facts, fitted or after)
            following = next_of(after, where, ready, facts.now, facts.epoch, facts.times)
        else:
            following = after
        match following:
            case Keep(row=kept):
                if kept.stage is ReplicaStage.RUNNING and row.stage is not ReplicaStage.RUNNING:
                    decided.events.append(("replica ready", kept))
                decided.rows[key] = kept
            case Start(row=sent):
                decided.rows[key] = sent
                decided.starts.append(following)
            case Stop(row=sent, process_id=process_id):
                decided.rows[key] = sent
                decided.stops.append((sent, process_id))
            case Gone():
                del decided.rows[key]
                decided.events.append((following.why or "replica gone", row))
            case Broke():
                del decided.rows[key]
                failures.setdefault(row.model, []).append(following)
                left = where.process_of(row) if where is not None and where.known else None
                # One that serves may be busy, whoever says that it failed: it is looked at like any that has no row.
                if left is not None and left.state != ReplicaState.READY:
                    decided.clear.append((row.node_id, left.process_id))
    return failures


def _heard(facts: Facts, row: DesiredReplica) -> DesiredReplica | Broke:
    for told in facts.heard:
        if (told.order.node_id, told.order.operation) == (row.node_id, row.op_id):
            after = hear(row, told, facts.now, facts.times)
            if isinstance(after, Broke):
                return after
            row = after
    return row


def _fitted(facts: Facts, decided: Decided, row: DesiredReplica) -> DesiredReplica | None:
    """Before its files were there nobody knew for certain what it needs. None: it has to go elsewhere."""
    model = facts.world.models.get(row.model)
    if row.stage is not ReplicaStage.PLACED or model is None or not model.memory.known:
        return row
    arrived = row.files is None and facts.files.get((row.model, row.revision), Files()).files is not None
    if row.memory_bytes and not arrived:
        return row
    others = [each for key, each in decided.rows.items() if key != row.key]
    found = choose_node(replace(facts.world, replicas=mirror(others, facts.places)), model, only={row.node_id})
    if isinstance(found, NoCapacity):
        return None
    return changed(row, devices=found.fit.devices, memory_bytes=found.fit.memory_bytes, reason=found.text)


def _prepared(facts: Facts, row: DesiredReplica) -> tuple[DesiredReplica, Ready]:
    ready = facts.backends.get((row.node_id, row.backend), Ready())
    if row.stage is not ReplicaStage.PLACED:
        return row, ready
    files = facts.files.get((row.model, row.revision), Files())
    if files.trouble:
        return row, replace(ready, trouble=files.trouble, everywhere=True)
    if row.files is None and files.files is not None:
        row = changed(row, files=files.files, updated_at=facts.now)
    return row, ready


# Processes without a row.


def _take_in_strays(facts: Facts, decided: Decided) -> None:
    """Those that serve what is wanted are taken in; the rest ends after a while, when it has nothing to do."""
    cleared = {process_id for _, process_id in decided.clear}
    mine = {process.process_id for row in decided.rows.values() for process in _of_row(facts, row)}
    for where in facts.places.values():
        if not (where.accepts and where.known and where.reachable):
            continue
        for process in where.processes:
            if not process.model or process.process_id in cleared | mine:
                continue
            if _is_wanted(facts, decided, where, process):
                row = _adopted(facts, where, process)
                decided.rows[row.key] = row
                decided.events.append(("replica taken in", row))
                continue
            since = facts.strays.get(process.process_id, facts.now)
            decided.strays[process.process_id] = since
            idle = where.quiet.get(process.process_id, ProcessActivity())
            if facts.now - since >= facts.times.orphan and idle.known and idle.in_flight == 0:
                decided.clear.append((where.id, process.process_id))


def _of_row(facts: Facts, row: DesiredReplica) -> list[ReplicaProcess]:
    """The process it has, and one that is about to take its place because its backend is being upgraded. Two that serve
    are one too many, once the change from one to the other must be over."""
    where = facts.places.get(row.node_id)
    if where is None:
        return []
    own, key = where.process_of(row), (row.model, row.replica, row.revision)
    coming = (ReplicaState.STARTING, ReplicaState.RESTARTING)
    return [
        process
        for process in where.processes
        if process is own or ((process.model, process.replica, process.revision) == key and process.state in coming)
    ]


def _is_wanted(facts: Facts, decided: Decided, where: Place, process: ReplicaProcess) -> bool:
    model = facts.world.models.get(process.model)
    if model is None or model.disabled or (where.id, process.model, process.replica) in decided.rows:
        return False
    if process.process_id in facts.cleared:
        return False
    allowed = (model.revision, *facts.previous_revisions.get(model.name, ()))
    return process.state == ReplicaState.READY and process.revision in allowed


def _adopted(facts: Facts, where: Place, process: ReplicaProcess) -> DesiredReplica:
    return DesiredReplica(
        where.id,
        process.model,
        process.replica,
        process.revision,
        process.backend,
        ReplicaStage.RUNNING,
        f"adopted-{process.process_id}",
        process.process_id,
        facts.now,
        facts.now,
        attempt=1,
        devices=process.devices,
        memory_bytes=process.memory_bytes,
        files=(),
        reason="it was running",
        boot_id=where.boot_id,
        ready_at=facts.now,
    )


def _end(facts: Facts, decided: Decided, name: str, why: str) -> None:
    decided.jobs.pop(name, None)
    for row in decided.rows.of_model(name):
        _let_go(decided, row, why, facts)


def _let_go(decided: Decided, row: DesiredReplica, why: str, facts: Facts) -> None:
    if row.stage is ReplicaStage.PLACED:
        del decided.rows[row.key]  # nothing was ordered yet
    elif row.stage is not ReplicaStage.LEAVING:
        decided.rows[row.key] = leave(row, why, facts.now)
        decided.events.append((f"replica leaves: {why}", row))


def _with_reasons(found: NoCapacity) -> str:
    """For requests that wait: nodes that say the same are named once, and not all of a large fleet."""
    if len(found.verdicts) < 2:
        return found.text
    reasons = {verdict.why_not: f"{verdict.node}: {verdict.why_not}" for verdict in reversed(found.verdicts)}
    shown = list(reversed(reasons.values()))[:MOST_REASONS]
    return "; ".join((found.text, *shown, *(("…",) if len(reasons) > len(shown) else ())))


class _ModelPlan:
    """One model's turn."""

    def __init__(self, facts: Facts, decided: Decided, model: Model, broken: list[Broke]) -> None:
        self._facts = facts
        self._decided = decided
        self._job = decided.jobs.get(model.name)
        self._model = model
        self._broken = broken

    def carry_out(self) -> None:
        self._note_failures()
        serving = self._serving()
        if serving:
            self._decided.ready[self._model.name] = self._model.revision
            if self._job is not None and self._job.active:
                self._job = None
        self._settle_returned(serving)
        if self._job is not None and self._job.active and not self._present():
            self._place_first()
        else:
            self._scale()
        self._keep_job()

    def _place_first(self) -> None:
        """The first replica of the present revision. Those of an earlier one give way where there is no room for both:
        what they run is not what people asked for any more."""
        decision = choose_placement(self._world(), self._tried(), Purpose.COLD)
        instead = replace_in_place(self._world(), self._tried()) if isinstance(decision, NoCapacity) else None
        row = self._decided.rows.get(instead.replica.key) if instead is not None else None
        if instead is not None and row is not None:
            _let_go(self._decided, row, instead.text, self._facts)
            self._wait(f"waits for the replica of the earlier definition to end: it {instead.text}")
        else:
            self._place(decision, Purpose.COLD)

    # What there is of it.

    def _rows(self, *stages: ReplicaStage) -> list[DesiredReplica]:
        rows = self._decided.rows.of_model(self._model.name)
        return [row for row in rows if row.stage in stages] if stages else rows

    def _present(self) -> list[DesiredReplica]:
        """Of the present revision, there or on the way, where they may stay."""
        rows = self._rows(ReplicaStage.PLACED, ReplicaStage.ORDERED, ReplicaStage.RUNNING)
        own = [row for row in rows if row.revision == self._model.revision]
        return [row for row in own if self._status(row) not in (DRAINING, OFFLINE)]

    def _serving(self) -> list[DesiredReplica]:
        """Of the present revision, able to answer."""
        rows = self._rows(ReplicaStage.RUNNING)
        return [row for row in rows if row.revision == self._model.revision and self._answers(row)]

    def _status(self, row: DesiredReplica) -> str:
        where = self._facts.places.get(row.node_id)
        return where.status if where is not None else OFFLINE

    def _answers(self, row: DesiredReplica) -> bool:
        where = self._facts.places.get(row.node_id)
        process = where.process_of(row) if where is not None else None
        ready = process is not None and process.state == ReplicaState.READY
        return ready and self._status(row) not in (OFFLINE, DRAINING)

    def _tried(self) -> Model:
        """With where it failed lately."""
        return replace(self._model, failed_on=self._job.failed_on) if self._job is not None else self._model

    def _world(self) -> World:
        """As the scheduler sees it: the same for all models until one of them changes a row."""
        rows, seen = self._decided.rows, self._decided.seen
        if seen is None or seen[0] != rows.changes:
            seen = (rows.changes, replace(self._facts.world, replicas=mirror(rows.values(), self._facts.places)))
            self._decided.seen = seen
        return seen[1]

    # What becomes of it.

    def give_up_what_is_stale(self) -> None:
        previous_revisions = self._facts.previous_revisions.get(self._model.name, ())
        for row in self._rows():
            if row.revision == self._model.revision:
                continue
            if row.stage in (ReplicaStage.PLACED, ReplicaStage.ORDERED):
                _let_go(self._decided, row, "the model was changed", self._facts)
            elif row.revision not in previous_revisions:
                _let_go(self._decided, row, "it is of an earlier revision", self._facts)
        job = self._job
        if job is not None and job.revision != self._model.revision:
            # Whoever waits, waits for the model, not for its revision; what failed before may work now.
            before = changed(job, failures=0)
            again = jobs.begin(self._model.name, self._model.revision, self._facts.now, before)
            self._job = again if job.active else None

    def _note_failures(self) -> None:
        for broke in self._broken:
            job = self._job or jobs.begin(self._model.name, self._model.revision, self._facts.now)
            failed_on = {**job.failed_on, broke.row.node_id: broke.error}
            others = [node_id for node_id in self._facts.world.nodes if node_id not in failed_on]
            # While others answer there is no hurry: it waits, and what failed is not repeated at once. Neither is a
            # load that has failed already, and of which this replica is what was left.
            elsewhere = (
                not broke.everywhere
                and not self._is_cooling()
                and not self._serving()
                and isinstance(choose_node(self._world(), self._tried(), only=others), Placed)
            )
            blamed = "" if broke.everywhere else broke.row.node_id
            self._job = jobs.fail(job, blamed, broke.error, self._facts.now, self._facts.cooldown, elsewhere=elsewhere)
            self._decided.events.append((f"replica failed: {broke.error}", broke.row))

    def _settle_returned(self, serving: list[DesiredReplica]) -> None:
        """A replica whose node was offline and is back: it leaves where others have taken its place meanwhile, once
        they answer and no request waits."""
        schedule = self._model.schedule
        wanted = max(1, schedule.min_replicas)
        coming = sum(row.error != AWAY for row in self._present())
        kept = sum(row.error != AWAY for row in serving)
        for row in [each for each in serving if each.error == AWAY]:
            if schedule.spread_all or coming < wanted:
                self._decided.rows[row.key] = changed(row, error="", updated_at=self._facts.now)
                coming += 1
                kept += 1
            elif kept >= wanted and not self._model.waiting:
                why = "its node was offline, and another replica has taken its place"
                _let_go(self._decided, row, why, self._facts)

    def _scale(self) -> None:
        """Step by step, as the scheduler says, as long as one leads to the next."""
        for _ in range(MOST_STEPS):
            step = plan_scaling(self._world(), self._tried())
            match step:
                case ScaleUp(decision=decision, purpose=purpose):
                    if self._is_cooling() or not self._place(decision, purpose):
                        return
                case ScaleDown(replica=replica, text=text):
                    row = self._decided.rows.get(replica.key)
                    if row is not None:
                        _let_go(self._decided, row, text, self._facts)
                    return
                case Unsatisfied(ticks=ticks, until=until, why=why):
                    self._decided.unsatisfied[self._model.name] = (ticks, until)
                    self._no_room(why)
                    return
                case Hold(satisfied=satisfied):
                    schedule = self._model.schedule
                    if satisfied and (schedule.unsatisfiable_ticks or schedule.unsatisfiable_until is not None):
                        self._decided.unsatisfied[self._model.name] = (0, None)
                    return

    def _is_cooling(self) -> bool:
        return self._job is not None and not self._job.active and not self._job.may_try(self._facts.now)

    def _place(self, decision: Decision, purpose: Purpose) -> bool:
        """True: it has a place now."""
        if purpose is not Purpose.GROWTH and not self._serving() and (self._job is None or not self._job.active):
            self._job = jobs.begin(self._model.name, self._model.revision, self._facts.now, self._job)
        match decision:
            case Placed():
                self._take(decision)
                return True
            case EvictFirst(victims=victims, text=text):
                for victim in victims:
                    row = self._decided.rows.get(victim.key)
                    if row is not None:
                        _let_go(self._decided, row, f"it makes room for {self._model.name}", self._facts)
                self._wait(text)
            case WaitForCapacity(text=text):
                self._wait(text)
            case NoCapacity():
                self._no_room(decision)
        return False

    def _take(self, found: Placed) -> None:
        now = self._facts.now
        named = f"{self._model.name}\0{found.node_id}\0{found.index}\0{now.isoformat()}"
        row = DesiredReplica(
            found.node_id,
            self._model.name,
            found.index,
            self._model.revision,
            self._model.backend,
            ReplicaStage.PLACED,
            hashlib.sha256(named.encode()).hexdigest()[:20],  # nobody else's, at no other moment
            "",
            now,
            now,
            devices=found.fit.devices,
            memory_bytes=found.fit.memory_bytes,
            reason=found.text,
        )
        self._decided.rows[row.key] = row
        self._decided.events.append(("replica placed", row))

    def _no_room(self, found: NoCapacity) -> None:
        """What only people can change is told at once; the rest may pass."""
        if found.fits_later or not found.verdicts or self._model.backend in self._facts.looking:
            self._wait(_with_reasons(found))
        elif self._job is not None and self._job.active:
            why = "\n".join((found.text, *(found.why if len(found.verdicts) > 1 else ())))
            self._job = jobs.fail(self._job, "", why, self._facts.now, self._facts.cooldown, elsewhere=False)

    def _wait(self, text: str) -> None:
        if self._job is not None and self._job.active:
            self._job = jobs.waits(self._job, text, self._facts.now)

    def _keep_job(self) -> None:
        job = self._job
        if job is not None and job.active:
            job = self._followed(job)
        if job is None or jobs.is_over(job, self._facts.now, self._facts.cooldown):
            self._decided.jobs.pop(self._model.name, None)
        else:
            self._decided.jobs[self._model.name] = job

    def _followed(self, job: LoadJob) -> LoadJob:
        """The furthest of its replicas is the one that is waited for."""
        coming = [row for row in self._present() if row.stage is ReplicaStage.ORDERED]
        coming = coming or [row for row in self._present() if row.stage is ReplicaStage.PLACED]
        if not coming:
            return jobs.follow(job, None, "", installed=False, moved=Moved(), now=self._facts.now)
        row = min(coming, key=lambda row: row.created_at)
        where = self._facts.places[row.node_id]
        installed = self._facts.backends.get((row.node_id, row.backend), Ready()).backend
        moved = self._facts.moved.get(row.key)
        if moved is None and row.stage is ReplicaStage.PLACED and installed:
            moved = self._facts.files.get((row.model, row.revision), Files()).moved
        return jobs.follow(
            job,
            row,
            where.name,
            installed=installed,
            moved=moved or Moved(),
            now=self._facts.now,
            unreachable=where.why_unreachable,
        )
