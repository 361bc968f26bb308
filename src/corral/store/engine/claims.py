"""Claims: conditional writes that succeed only if the state is still the one that the caller has read.

Each claim is one statement, so it is safe between two tasks, two controllers and after any delay. A lost claim is
ordinary: read again, decide again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Table, update

from corral.store.engine.schema import insert_whole
from corral.store.engine.transactions import Transaction


async def claim_row(tx: Transaction, table: Table, condition: ColumnElement[bool], changes: Mapping[str, Any]) -> bool:
    """Change the one row for which `condition` holds. True if the claim succeeded; a condition that matches several
    rows is a bug."""
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
    """Change the row with this key and increment its version, if the version is still `expected`."""
    condition = table.c[version] == expected
    for name, value in key.items():
        condition &= table.c[name] == value
    return await claim_row(tx, table, condition, {**changes, version: expected + 1})


async def claim_insert(tx: Transaction, table: Table, row: Mapping[str, Any]) -> bool:
    """Insert unless a row with the same key exists. True if the row was inserted. Waits for a concurrent insert."""
    statement = insert_whole(table).on_conflict_do_nothing(index_elements=list(table.primary_key.columns))
    return (await tx.execute(statement, dict(row))).rowcount == 1
