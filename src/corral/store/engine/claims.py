"""Claims: writes that happen only if the world is still as the writer believes. The database has the last word.

Each is one statement, so it holds between two tasks, two controllers and after any delay. Losing is ordinary: read
again, decide again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Table, update

from corral.store.engine.schema import insert_whole
from corral.store.engine.transactions import Transaction


async def claim_row(tx: Transaction, table: Table, condition: ColumnElement[bool], changes: Mapping[str, Any]) -> bool:
    """Change the one row for which `condition` holds. True if it is ours; a condition on several rows is a mistake."""
    statement = update(table).where(condition).values(dict(changes))
    touched = (await tx.execute(statement)).rowcount
    if touched > 1:
        raise RuntimeError(f"a claim on {table.name} touched {touched} rows: its condition must name one")
    return touched == 1


async def compare_and_set(
    tx: Transaction,
    table: Table,
    key: Mapping[str, Any],
    expected: int,
    changes: Mapping[str, Any],
    *,
    version: str,
) -> bool:
    """Change the row with this key and raise its version, if the version is still the expected one."""
    condition = table.c[version] == expected
    for name, value in key.items():
        condition &= table.c[name] == value
    return await claim_row(tx, table, condition, {**changes, version: expected + 1})


async def claim_insert(tx: Transaction, table: Table, row: Mapping[str, Any]) -> bool:
    """Insert unless a row with the same key is there. True if it is ours. Waits for an insert that is under way."""
    statement = insert_whole(table).on_conflict_do_nothing(index_elements=list(table.primary_key.columns))
    return (await tx.execute(statement, dict(row))).rowcount == 1
