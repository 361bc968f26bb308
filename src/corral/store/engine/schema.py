"""What the table modules share: one `MetaData`, constraint names, statements for whole rows, and rows as records.

Each table is described in its own module. `migrations/` creates the tables; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, MetaData, Table, Text, bindparam
from sqlalchemy.dialects.postgresql import Insert

from corral.store.engine.statements import Row

T = TypeVar("T")

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    }
)

# Sorted by code point everywhere, so that a page that ends at a name is the same page on both databases.
NameText = Text().with_variant(Text(collation="C"), "postgresql")


def record(kind: type[T], row: Row | None) -> T | None:
    """The record of a row selected from its whole table: its fields are the table's columns, in order."""
    return None if row is None else kind(*row)


def records(kind: type[T], rows: Iterable[Row]) -> list[T]:
    return [kind(*row) for row in rows]


def columns_of(kind_record: Any) -> dict[str, Any]:
    """A record's columns, as an insert takes them."""
    return {name: getattr(kind_record, name) for name in kind_record.__struct_fields__}


def insert_whole(table: Table) -> Insert:
    """An INSERT of every column.

    It is PostgreSQL's INSERT because that has ON CONFLICT. SQLite uses the same syntax and its compiler accepts the
    statement, so one statement serves both; the store's tests run on both.
    """
    return Insert(table).values({column.key: bindparam(column.key) for column in table.columns})


def upsert_whole(table: Table, *, where: ColumnElement[bool] | None = None) -> Insert:
    """An INSERT of every column that replaces the row with the same primary key; with `where`, only if that holds for
    the row that is there."""
    insert = insert_whole(table)
    return insert.on_conflict_do_update(
        index_elements=list(table.primary_key.columns),
        set_={column.key: insert.excluded[column.key] for column in table.columns if not column.primary_key},
        where=where,
    )
