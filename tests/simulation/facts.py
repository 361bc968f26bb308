"""The facts the invariants speak of, read from the store; for the simulation only what has changed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Generic, TypeVar

from corral.store.engine.inline_sqlite import InlineFile
from corral.store.engine.transactions import Transaction
from corral.store.tables import (
    backend_intents,
    backend_rules,
    node_backends,
    nodes,
    operation_nodes,
    operations,
    rollouts,
)
from tests.support.invariants import Facts

T = TypeVar("T")


class FactsReader:
    TABLES: ClassVar = {
        "operations",
        "operation_nodes",
        "backend_rules",
        "node_backends",
        "nodes",
        "backend_intents",
        "rollouts",
    }

    def __init__(self, file: InlineFile) -> None:
        self._store = file.store()

    def read(self, before: Facts, tables: frozenset[str]) -> Facts:
        return at_once(self._read(before, tables))

    async def _read(self, before: Facts, tables: frozenset[str]) -> Facts:
        async with self._store.read() as tx:
            return await read_facts(tx, before, tables)


async def read_facts(tx: Transaction, before: Facts, tables: frozenset[str]) -> Facts:
    """`before`, and of the tables that were written what they say now."""
    known = before.operations
    if "operations" in tables:
        known = {row.id: row for row in await operations.list_(tx, limit=10_000)}
    rows = before.rows
    if tables & {"operations", "operation_nodes"}:
        found = await operation_nodes.list_for(tx, list(known))
        rows = {(row.operation_id, row.node_id): row for own in found.values() for row in own}
        rows = {key: _same(before.rows.get(key), row) for key, row in rows.items()}
    rules = before.rules
    if "backend_rules" in tables:
        rules = {row.generation: row for row in await backend_rules.list_live(tx)}
    pulses, bus_down = before.nodes, before.bus_down
    if "nodes" in tables:
        pulses = {row.id: row for row in await nodes.list_pulses(tx)}
        bus_down = {row.id for row in await nodes.list_outlines(tx) if row.bus_down}
    gone = before.nodes.keys() - pulses.keys()  # and with them what was theirs
    inventories = before.inventories
    if "node_backends" in tables or gone:
        inventories = {row.node_id: row for row in await node_backends.list_(tx)}
    intents = before.intents
    if "backend_intents" in tables or gone:
        intents = {(row.node_id, row.backend): row for row in await backend_intents.list_(tx)}
    tried = before.rollouts
    if tables & {"rollouts", "operations"}:
        tried = {row.operation_id: row for row in await rollouts.list_(tx, limit=10_000)}
    return Facts(known, rows, rules, inventories, pulses, intents, bus_down, tried)


class Lately(Generic[T]):
    """What was so at any moment of the last seconds: between reading the world and writing what follows from it, a
    controller takes less than that."""

    LOOK_TAKES_S = 5.0

    def __init__(self, now: Callable[[], float], first: T) -> None:
        self._now = now
        self._moments: list[tuple[float, T]] = [(float("-inf"), first)]

    @property
    def last(self) -> T:
        return self._moments[-1][1]

    def until_now(self) -> list[T]:
        """Facts count until the next ones: those in force when the window began belong to it."""
        began = self._now() - self.LOOK_TAKES_S
        first = max((index for index, (at, _) in enumerate(self._moments) if at <= began), default=0)
        self._moments = self._moments[first:]
        return [facts for _, facts in self._moments]

    def add(self, facts: T) -> None:
        self._moments.append((self._now(), facts))


def _same(before: T | None, row: T) -> T:
    return before if before is not None and before == row else row


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Runs what never waits."""
    try:
        work.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    raise RuntimeError("it waits for something")
