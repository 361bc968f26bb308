"""Column types and SQL functions that work the same on both databases.

Times are integer microseconds since 1970 (UTC), so that they compare, sort and copy alike everywhere; Python code sees
only aware datetimes. JSON is text written by msgspec. `now()` in a statement is the database's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Generic, TypeVar

import msgspec
from sqlalchemy import BigInteger, ColumnElement, Float, Text, bindparam, type_coerce
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

from corral.kit.errors import Invalid

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SQLITE_NOW = "corral_now_us"  # registered on every SQLite connection
_MICROSECOND = timedelta(microseconds=1)
_LARGEST = 2**63 - 1

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


def to_us(moment: datetime) -> int:
    """Exact, unlike `timestamp()`, which goes through a float. A naive datetime raises."""
    return (moment - EPOCH) // _MICROSECOND


def from_us(microseconds: int) -> datetime:
    return EPOCH + timedelta(microseconds=microseconds)


class Instant(TypeDecorator[datetime]):
    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:
        return None if value is None else to_us(value)

    def process_result_value(self, value: int | None, dialect: Dialect) -> datetime | None:
        return None if value is None else from_us(value)

    # The same without the call per value: most rows of a large fleet have several of these.

    def bind_processor(self, dialect: Dialect) -> Callable[[datetime | None], int | None]:
        return lambda value: None if value is None else to_us(value)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[int | None], datetime | None]:
        return lambda value: None if value is None else from_us(value)


class Json(TypeDecorator[T], Generic[T]):
    """Text with JSON of one Python type; values are validated when read, unknown fields are dropped."""

    impl = Text
    cache_ok = True

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind  # part of SQLAlchemy's cache key
        self._decoder = msgspec.json.Decoder(kind)

    def process_bind_param(self, value: T | None, dialect: Dialect) -> str | None:
        return None if value is None else msgspec.json.encode(value).decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> T | None:
        return None if value is None else self._decoder.decode(value)

    # The same without a detour of ten times the decoder's time: rows of nodes and operations have several of these.

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[str | None], T | None]:
        decode = self._decoder.decode
        return lambda value: None if value is None else decode(value)


class Choice(TypeDecorator[E], Generic[E]):
    """Text that is one member of a StrEnum."""

    impl = Text
    cache_ok = True

    def __init__(self, kind: type[E]) -> None:
        super().__init__()
        self.kind = kind  # part of SQLAlchemy's cache key

    def process_bind_param(self, value: E | None, dialect: Dialect) -> str | None:
        return None if value is None else str(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> E | None:
        return None if value is None else self.kind(value)

    # The same, without a detour for each value: lists of operations have thousands of rows.

    def bind_processor(self, dialect: Dialect) -> Callable[[str | None], str | None]:
        return lambda value: None if value is None else str(value)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[str | None], E | None]:
        members: dict[str | None, E | None] = {member.value: member for member in self.kind}
        members[None] = None
        return members.__getitem__


class Real(TypeDecorator[float]):
    """A floating-point number. Both drivers return a float, so no conversion is needed."""

    impl = Float
    cache_ok = True

    def result_processor(self, dialect: Dialect, coltype: object) -> None:
        return None


class _TextList(TypeDecorator[Sequence[str]]):
    """One parameter for a list of any length: an array on PostgreSQL, JSON on SQLite."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name == "postgresql":
            return dialect.type_descriptor(postgresql.ARRAY(Text()))
        return dialect.type_descriptor(Text())

    def process_bind_param(self, value: Sequence[str] | None, dialect: Dialect) -> Any:
        if value is None or dialect.name == "postgresql":
            return value if value is None else list(value)
        return msgspec.json.encode(value).decode()


class _Now(FunctionElement[datetime]):
    type = Instant()
    inherit_cache = True
    name = "corral_now"


@compiles(_Now, "sqlite")
def _now_on_sqlite(element: _Now, compiler: SQLCompiler, **_: Any) -> str:
    return f"{SQLITE_NOW}()"


@compiles(_Now, "postgresql")
def _now_on_postgresql(element: _Now, compiler: SQLCompiler, **_: Any) -> str:
    # clock_timestamp, not now(): a transaction that waited for a lock must not judge by the time before the wait.
    return "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT)"


def now() -> ColumnElement[datetime]:
    """The database's clock, as an expression."""
    return _Now()


def now_plus(parameter: str) -> ColumnElement[datetime]:
    """That clock, and so many microseconds (see `span_us`) as the parameter says; a negative number goes back."""
    return type_coerce(type_coerce(_Now(), BigInteger()) + bindparam(parameter, type_=BigInteger()), Instant())


def span_us(seconds: float) -> int:
    """A duration for the parameter of `now_plus`."""
    return round(seconds * 1_000_000)


class _Among(FunctionElement[bool]):
    inherit_cache = True
    name = "corral_among"


@compiles(_Among, "sqlite")
def _among_on_sqlite(element: _Among, compiler: SQLCompiler, **kw: Any) -> str:
    column, values = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"{column} IN (SELECT value FROM json_each({values}))"


@compiles(_Among, "postgresql")
def _among_on_postgresql(element: _Among, compiler: SQLCompiler, **kw: Any) -> str:
    column, values = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"{column} = ANY({values})"


def among(column: ColumnElement[str], parameter: str) -> ColumnElement[bool]:
    """`column` is in the list given as `parameter`. Unlike `in_` it is one parameter for ten thousand values."""
    return _Among(column, bindparam(parameter, type_=_TextList()))


def storable(text: str, max_length: int = 4096) -> str:
    """A peer's text, cut and cleaned so that it can be stored and shown: it must neither break the write of other rows
    nor change the terminal of a reader."""
    text = text[:max_length]
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def check_value(value: object) -> None:
    """Raise `Invalid` for a value that one of the databases cannot store, before its driver sees it."""
    if isinstance(value, str):
        if not value.isascii() or "\0" in value:
            _check_text(value)
    elif value is None:
        return
    elif isinstance(value, int):
        if not -_LARGEST - 1 <= value <= _LARGEST:
            raise Invalid("a number is too large to be stored: at most 2^63-1")
    elif isinstance(value, list):
        for item in value:
            check_value(item)


def _check_text(text: str) -> None:
    if "\0" in text:  # SQLite accepts it, PostgreSQL does not, and data must be movable
        raise Invalid("text must not contain NUL characters")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Invalid("text must not contain half of a surrogate pair") from None
