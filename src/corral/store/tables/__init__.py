"""One module per table: its record type, its columns, its statements and the functions that use them.

`MODULES` and `all_tables()` are for code that handles the database as a whole: opening, copying, tests."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from sqlalchemy import Table

from corral.store.engine import leases
from corral.store.engine.schema import metadata

_modules = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
MODULES = (leases, *(module for module in _modules if hasattr(module, "table")))  # others use the table of another


def all_tables() -> list[Table]:
    """A table comes after those it refers to."""
    return list(metadata.sorted_tables)
