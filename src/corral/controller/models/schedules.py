"""Schedules: `/api/nodes/scheduling` (docs/reference/wire/http-nodes.md#schedules), and those given at start."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from corral.contract.catalogue import ScheduleBody, ScheduleView
from corral.contract.labels import check_labels
from corral.contract.models import check_model_name
from corral.controller.models.views import schedule_view
from corral.controller.runtime.change_feed import ChangeFeed
from corral.kit.errors import Invalid
from corral.kit.log import get_log
from corral.store.engine.transactions import Store
from corral.store.tables import model_schedules, models, revisions
from corral.store.tables.model_schedules import Schedule

log = get_log(__name__)

COUNTER = "schedules"
_POLICIES = ("", "round_robin", "prefix_cache")
_KEPT = ("route_policy", "balance_abs_threshold", "balance_rel_threshold", "min_prefix_match")
MAX_REPLICAS = 10_000


class Schedules:
    def __init__(self, store: Store, feed: ChangeFeed) -> None:
        self._store = store
        self._feed = feed

    async def list_views(self) -> list[ScheduleView]:
        async with self._store.read() as tx:
            return [schedule_view(row) for row in await model_schedules.list_(tx)]

    async def view(self, model: str) -> ScheduleView:
        async with self._store.read() as tx:
            return schedule_view(await model_schedules.get(tx, model))

    async def put(self, body: ScheduleBody) -> ScheduleView:
        """Raises Invalid for an impossible schedule."""
        async with self._store.write() as tx:
            row = await models.find(tx, body.model_name)
            if row is not None and row.definition.get("alias"):
                raise Invalid(f"{row.id} only stands for {row.definition['alias']}: replicas are of that one")
            before = await model_schedules.find(tx, body.model_name)
            written = await model_schedules.put(tx, next_schedule(before, body))
            await revisions.bump(tx, COUNTER)
        log.info("schedule set", model=written.model, least=written.min_replicas, most=written.max_replicas)
        self._feed.notify(COUNTER, written.model)
        return schedule_view(written)

    async def delete(self, model: str) -> bool:
        """False when there was none, which is no error by the contract."""
        async with self._store.write() as tx:
            gone = await model_schedules.delete(tx, model)
            if gone:
                await revisions.bump(tx, COUNTER)
        if gone:
            log.info("schedule deleted", model=model)
            self._feed.notify(COUNTER, model)
        return gone

    async def seed(self, bodies: Iterable[ScheduleBody]) -> None:
        """Those given at start replace what is stored for their models, whole; the others stay."""
        bodies = list(bodies)
        if not bodies:
            return
        async with self._store.write() as tx:
            for body in bodies:
                await model_schedules.put(tx, next_schedule(None, body))
            await revisions.bump(tx, COUNTER)
        log.info("schedules given at start", models=[body.model_name for body in bodies])
        self._feed.notify(COUNTER)


def next_schedule(before: Schedule | None, body: ScheduleBody) -> Schedule:
    """The schedule the body comes to over what is stored. Raises Invalid."""
    check_model_name(body.model_name)
    selector = dict(body.node_selector or {})
    try:
        check_labels(selector)
    except ValueError as error:
        raise Invalid(f"node_selector: {error}") from error
    kept = {
        key: getattr(body, key) if getattr(body, key) is not None else getattr(before, key)
        for key in _KEPT
        if getattr(body, key) is not None or before is not None
    }
    moment = datetime.now(UTC)  # the database's own is written
    schedule = Schedule(
        model=body.model_name,
        id=before.id if before is not None else str(uuid.uuid4()),
        created_at=moment,
        updated_at=moment,
        node_selector=selector,
        min_replicas=body.min_replicas,
        max_replicas=body.max_replicas,
        spread_all=body.spread_all,
        **kept,
    )
    _check(schedule)
    return schedule


def _check(schedule: Schedule) -> None:
    least, most = schedule.min_replicas, schedule.max_replicas
    if not 0 <= least <= MAX_REPLICAS or not 0 <= most <= MAX_REPLICAS:
        raise Invalid(f"min_replicas and max_replicas are between 0 and {MAX_REPLICAS}")
    if most and least > most:
        raise Invalid(f"min_replicas ({least}) is more than max_replicas ({most}); 0 as the most means no bound")
    if schedule.spread_all and (least or most):
        raise Invalid("spread_all means one on every node that matches: it goes with neither min nor max")
    if schedule.route_policy not in _POLICIES:
        raise Invalid(f"route_policy {schedule.route_policy!r} is none of round_robin and prefix_cache, nor empty")
    if not 0 <= schedule.balance_abs_threshold <= 1 << 31:
        raise Invalid("balance_abs_threshold is 0 or more")
    if schedule.balance_rel_threshold != 0 and not 1 <= schedule.balance_rel_threshold <= 1e6:
        raise Invalid("balance_rel_threshold is 0 (the fleet's), or 1 or more")
    if not 0 <= schedule.min_prefix_match <= 1:
        raise Invalid("min_prefix_match is between 0 and 1")


class _Given(ScheduleBody, frozen=True):
    """One given at start: the contract also lets `replicas` say whether every node gets one."""

    replicas: object = None


def read_given(items: Iterable[Mapping[str, Any]]) -> tuple[ScheduleBody, ...]:
    """Raises Invalid and names the impossible schedule."""
    found = []
    for position, item in enumerate(items, 1):
        try:
            given = msgspec.convert(item, type=_Given)
        except msgspec.ValidationError as error:
            raise Invalid(f"schedule {position}: {error}") from error
        body = ScheduleBody(**{key: getattr(given, key) for key in ScheduleBody.__struct_fields__})
        body = msgspec.structs.replace(body, spread_all=body.spread_all or _is_spread_all(given.replicas, position))
        next_schedule(None, body)
        found.append(body)
    return tuple(found)


def _is_spread_all(replicas: object, position: int) -> bool:
    if isinstance(replicas, str):
        replicas = replicas.strip().lower()
    if replicas in ("all", "true") or replicas is True:
        return True
    if replicas in (None, "", "auto", "false") or replicas is False:
        return False
    raise Invalid(f"schedule {position}: replicas is all or auto; for numbers there are min_replicas and max_replicas")
