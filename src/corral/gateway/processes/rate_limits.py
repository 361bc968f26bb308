"""`http/rate_limits.py` for several processes: the usage of a key, counted over all of them.

A bucket of L that fills at L per minute contains L + filled - taken - spilled, where `spilled` is what overflowed while
the bucket was full. Each process adds to its own `taken`. `spilled` is the largest value of filled - taken before an
amount was taken; a process writes that value to its own column before it takes, so the maximum over all columns is
correct without a lock. A process checks again after it has taken, and returns an amount that was not available.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from corral.contract.view import KeyLimits, ViewKey
from corral.gateway.http.rate_limits import KeyLimiter, Limiters, Refusal
from corral.gateway.processes.table import SharedTable

_MINUTE_S = 60.0
_ROUNDING = 1e-3  # of a request: the numbers are sums of many floats


def running_row(key_id: str) -> str:
    return f"running {key_id}"


def bucket_row(what: str, key_id: str, limit: int) -> str:
    """The name includes the limit: a new limit is a new bucket, which starts full."""
    return f"{what} {limit} {key_id}"


def rows_of(keys: Iterable[ViewKey]) -> Iterable[tuple[str, int]]:
    """The rows that keys need, each with the size of its bucket; 0: a plain counter."""
    for key in keys:
        if (limits := key.limits) is None:
            continue
        if limits.requests_per_min or limits.tokens_per_min or limits.concurrent:
            yield running_row(key.id), 0
        for what, limit in (("requests", limits.requests_per_min), ("tokens", limits.tokens_per_min)):
            if limit:
                yield bucket_row(what, key.id, limit), limit


def fill(table: SharedTable, row: int, limit: int, now: float) -> None:
    """In the parent: a new bucket is full."""
    table.cells[table.second(row)] = now * limit / _MINUTE_S


class SharedBucket:
    __slots__ = ("_cells", "_columns", "_first", "_own", "_second", "limit")

    def __init__(self, table: SharedTable, row: int, limit: int) -> None:
        self.limit = limit
        self._cells = table.cells
        self._columns = table.columns
        self._first = table.first(row)
        self._second = table.second(row)
        self._own = table.column

    def _level(self, now: float) -> float:
        cells, first, second = self._cells, self._first, self._second
        taken = sum(cells[first : first + self._columns].tolist())
        over = now * self.limit / _MINUTE_S - taken
        spilled = max(cells[second : second + self._columns].tolist())
        return self.limit + min(0.0, over - spilled)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` is available; 0: it is."""
        level = self._level(now)
        return 0.0 if level >= amount - _ROUNDING else (amount - level) * _MINUTE_S / self.limit

    def take(self, amount: float, now: float) -> None:
        cells, own = self._cells, self._second + self._own
        taken = sum(cells[self._first : self._first + self._columns].tolist())
        cells[own] = max(cells[own], now * self.limit / _MINUTE_S - taken)
        cells[self._first + self._own] += amount

    def give_back(self, amount: float) -> None:
        self._cells[self._first + self._own] -= amount

    def is_overdrawn(self, now: float) -> bool:
        return self._level(now) < -_ROUNDING


class SharedKeyLimiter(KeyLimiter):
    def __init__(
        self,
        limits: KeyLimits,
        table: SharedTable,
        rows: Mapping[str, int],
        key_id: str,
        monotonic: Callable[[], float],
    ) -> None:
        now = monotonic()
        self._monotonic = monotonic
        self._table = table
        self._rows = rows
        self._key_id = key_id
        self._running_row = rows.get(running_row(key_id))
        self._now = now
        super().__init__(limits, now)

    def change(self, limits: KeyLimits, now: float) -> None:
        super().change(limits, now)  # used where the table is full: this process counts by itself
        self._shared_requests = self._bucket("requests", limits.requests_per_min)
        self._shared_tokens = self._bucket("tokens", limits.tokens_per_min)

    def use(self, rows: Mapping[str, int]) -> None:
        self._rows = rows

    def _bucket(self, what: str, limit: int | None) -> SharedBucket | None:
        row = self._rows.get(bucket_row(what, self._key_id, limit)) if limit else None
        return None if row is None or not limit else SharedBucket(self._table, row, limit)

    def check(self, now: float) -> Refusal | None:
        self._now = now
        limit = self.limits.concurrent
        if limit and self._all_running() >= limit:
            return Refusal("concurrent", limit, self._busy_retry_s)
        for what, bucket in (("requests", self._shared_requests), ("tokens", self._shared_tokens)):
            if bucket is not None and (wait_s := bucket.wait_s(1.0, now)):
                return Refusal(what, bucket.limit, wait_s)
        return None

    def begin(self) -> bool:
        self._count(1)
        if self._shared_requests is not None:
            self._shared_requests.take(1.0, self._now)
        limit = self.limits.concurrent
        if (limit and self._all_running() > limit) or (
            self._shared_requests is not None and self._shared_requests.is_overdrawn(self._now)
        ):
            self._count(-1)
            if self._shared_requests is not None:
                self._shared_requests.give_back(1.0)
            return False
        return True

    def end(self, tokens: int) -> None:
        self._count(-1)
        if self._shared_tokens is not None and tokens:
            self._shared_tokens.take(tokens, self._monotonic())

    def _count(self, change: int) -> None:
        self.running += change
        if self._running_row is not None:
            table = self._table
            table.cells[table.first(self._running_row) + table.column] = self.running

    def _all_running(self) -> float:
        if self._running_row is None:
            return self.running
        return self._table.total(self._table.first(self._running_row))


class SharedLimiters(Limiters):
    def __init__(self, table: SharedTable, monotonic: Callable[[], float]) -> None:
        super().__init__()
        self._table = table
        self._monotonic = monotonic
        self._rows: Mapping[str, int] = {}

    def use(self, rows: Mapping[str, int]) -> None:
        """The rows of the view that is applied next."""
        self._rows = rows
        for limiter in self._by_key.values():
            if isinstance(limiter, SharedKeyLimiter):
                limiter.use(rows)

    def new_limiter(self, key_id: str, limits: KeyLimits, now: float) -> KeyLimiter:
        return SharedKeyLimiter(limits, self._table, self._rows, key_id, self._monotonic)
