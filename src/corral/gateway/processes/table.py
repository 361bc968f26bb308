"""Counters that several processes share: a table in shared memory, with one row per counter and one column per process.

A process writes only its own column and reads all columns, so the table needs no lock, and the part of a dead process
is known. Cells are 8 bytes, aligned: a read returns an old number or a new one, never a mixture. Column 0 is the
parent's. The parent assigns rows (`RowAllocator`) and sends them to the children with every view.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterable

MAX_ROWS = 1 << 15
PARENT = 0
_CELL_BYTES = 8


class SharedTable:
    """Each row has two numbers per process: `first(row)` and `second(row)` are the cells of column 0."""

    def __init__(self, descriptor: int, *, columns: int, column: int) -> None:
        self.descriptor = descriptor
        self.columns = columns
        self.column = column
        self.others = tuple(each for each in range(columns) if each != column)
        self.cells = memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size)).cast("B").cast("d")

    @classmethod
    def create(cls, columns: int, *, rows: int = MAX_ROWS) -> SharedTable:
        """A new table, in the parent."""
        with tempfile.TemporaryFile() as file:  # an unlinked file: no other process finds it
            descriptor = os.memfd_create("corral-gateway") if hasattr(os, "memfd_create") else os.dup(file.fileno())
        os.truncate(descriptor, rows * 2 * columns * _CELL_BYTES)
        return cls(descriptor, columns=columns, column=PARENT)

    @property
    def rows(self) -> int:
        return len(self.cells) // (2 * self.columns)

    def first(self, row: int) -> int:
        return row * 2 * self.columns

    def second(self, row: int) -> int:
        return row * 2 * self.columns + self.columns

    def total(self, first: int) -> float:
        cells = self.cells
        return sum(cells[at] for at in range(first, first + self.columns))


class RowAllocator:
    """Assigns rows to names. Row 0 is for the processes themselves. A row without a name is reused when all its cells
    are zero and `rest_s` have passed: by then every child has a view without it."""

    def __init__(self, table: SharedTable, monotonic: Callable[[], float], *, rest_s: float = 60.0) -> None:
        self.rows: dict[str, int] = {}
        self._table = table
        self._monotonic = monotonic
        self._rest_s = rest_s
        self._next = 1
        self._retired: dict[int, float] = {}  # rows without a name, and since when

    def assign(self, names: Iterable[str]) -> set[str]:
        """Rows for exactly these names. Returns the new names; a name without a free row gets none."""
        wanted = dict.fromkeys(names)
        now = self._monotonic()
        for gone in [name for name in self.rows if name not in wanted]:
            self._retired[self.rows.pop(gone)] = now
        new = set()
        for name in wanted:
            if name not in self.rows and (row := self._free_row(now)) is not None:
                self.rows[name] = row
                new.add(name)
        return new

    def _free_row(self, now: float) -> int | None:
        for row, since in self._retired.items():
            if now - since < self._rest_s:
                break  # the others were retired later
            if not self._is_in_use(row):
                del self._retired[row]
                self._clear(row)
                return row
        if self._next >= self._table.rows:
            return None
        self._next += 1
        return self._next - 1

    def _is_in_use(self, row: int) -> bool:
        """Whether requests are still in flight there: they count in the first number of their process."""
        first = self._table.first(row)
        return any(self._table.cells[at] for at in range(first + 1, first + self._table.columns))

    def _clear(self, row: int) -> None:
        first = self._table.first(row)
        for at in range(first, first + 2 * self._table.columns):
            self._table.cells[at] = 0.0
