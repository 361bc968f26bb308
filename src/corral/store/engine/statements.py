"""Compiles SQLAlchemy Core statements into SQL text and positional arguments for a driver, and converts rows to values.

Only Core's compiler is used, not its engine: see `sqlite.py` for why. Every name used here is public in SQLAlchemy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, cast

from sqlalchemy import text
from sqlalchemy.engine import Dialect
from sqlalchemy.sql.base import Executable
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.selectable import ReturnsRows

from corral.kit.errors import Invalid
from corral.store.engine.types import check_value

Statement = Executable | str
Parameters = Mapping[str, Any]
Row = tuple[Any, ...]
Processor = Callable[[Any], Any]

_Take = tuple[str, Any, Processor | None]  # the key of a parameter, the value without it, and its conversion

_MISSING = object()
# Statements that are module constants stay in the cache; statements built per call are evicted.
_MAX_CACHED = 512


class Plan:
    """One statement, compiled for one kind of database."""

    def __init__(self, statement: Executable, dialect: Dialect) -> None:
        compiled = statement.compile(dialect=dialect)  # type: ignore[attr-defined]
        self._compiled = cast(SQLCompiler, compiled)
        self.text = str(compiled)
        self._names = tuple(self._compiled.positiontup or ())
        self._expanding = frozenset(bind.key for bind in self._compiled.binds.values() if bind.expanding)
        self._writers = {
            name: writer
            for name, bind in self._compiled.binds.items()
            if (writer := bind.type.dialect_impl(dialect).bind_processor(dialect)) is not None
        }
        self._takes = tuple(self._taken(name) for name in self._names)
        self._readers = tuple(_readers(statement, dialect))
        self.changes = statement.is_dml  # unknown for text: there the database refuses writes in a read transaction

    def bind(self, parameters: Parameters) -> tuple[str, tuple[Any, ...]]:
        """Text and arguments. Raises `Invalid` where a value cannot be stored."""
        if not self._expanding:
            return self.text, self._arguments(parameters)
        if self._expanding.isdisjoint(parameters):
            text, takes = self._constant_lists
            return text, self._arguments(parameters, takes)
        state = self._compiled.construct_expanded_state(parameters)
        writers = self._writers | dict(state.processors)
        names = state.positional_parameters if state.positiontup is None else state.positiontup
        return state.statement, tuple(_written(state.parameters[name], writers.get(name)) for name in names)

    def bind_many(self, rows: Sequence[Parameters]) -> tuple[str, list[tuple[Any, ...]]]:
        """The same for several rows of one shape."""
        if not self._expanding:
            return self.text, [self._arguments(row) for row in rows]
        bound = [self.bind(row) for row in rows]
        return bound[0][0], [arguments for _, arguments in bound]

    @cached_property
    def _constant_lists(self) -> tuple[str, tuple[_Take, ...]]:
        """Of a statement whose lists are all constants: what `construct_expanded_state` finds anew for each call."""
        required = {bind.key: None for bind in self._compiled.binds.values() if bind.required}
        state = self._compiled.construct_expanded_state(required)
        writers = self._writers | dict(state.processors)
        return state.statement, tuple(
            self._taken(name) if name in self._compiled.binds else (name, state.parameters[name], writers.get(name))
            for name in state.positiontup or ()
        )

    def _taken(self, name: str) -> _Take:
        bind = self._compiled.binds[name]
        return bind.key, _MISSING if bind.required else bind.effective_value, self._writers.get(name)

    def _arguments(self, parameters: Parameters, takes: Sequence[_Take] | None = None) -> tuple[Any, ...]:
        """The values that `construct_params` would find, without its unused rules: thousands of rows pass here at
        once."""
        values = []
        for key, default, writer in self._takes if takes is None else takes:
            value = parameters.get(key, default)
            if writer is None and type(value) is str and value.isascii() and "\0" not in value:
                values.append(value)  # most values
            elif value is _MISSING:
                raise LookupError(f"no value for {key!r} in: {self.text}")
            else:
                values.append(_written(value, writer))
        return tuple(values)

    def read(self, row: Sequence[Any]) -> Row:
        if not self._readers:
            return tuple(row)
        values = list(row)
        for index, reader in self._readers:
            values[index] = reader(values[index])
        return tuple(values)


def _written(value: Any, writer: Processor | None) -> Any:
    if writer is not None:
        try:
            value = writer(value)
        except UnicodeEncodeError:
            raise Invalid("text must not contain half of a surrogate pair") from None
    check_value(value)
    return value


def _readers(statement: Executable, dialect: Dialect) -> Iterable[tuple[int, Processor]]:
    if not isinstance(statement, ReturnsRows):
        return
    for index, column in enumerate(statement.exported_columns):
        reader = column.type.dialect_impl(dialect).result_processor(dialect, None)
        if reader is not None:
            yield index, reader


class Compiler:
    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        # Cached by identity: a statement is not hashed by its content.
        self.plan = lru_cache(maxsize=_MAX_CACHED)(self._plan)

    def _plan(self, statement: Statement) -> Plan:
        return Plan(text(statement) if isinstance(statement, str) else statement, self.dialect)
