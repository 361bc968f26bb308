"""How long the store waits for what, and how much it opens at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoreOptions:
    turn_wait_s: float = 10.0  # for a connection of ours to become free
    readers: int = 4  # SQLite: connections beside the one writer
    busy_timeout_s: float = 5.0  # SQLite: for a turn to write and for another process to give up its lock, together
    pool_size: int = 10  # PostgreSQL: connections of this process
    connect_timeout_s: float = 5.0  # PostgreSQL
    statement_timeout_s: float = 10.0  # PostgreSQL: one statement, waiting for row locks included
    lock_timeout_s: float = 5.0  # PostgreSQL: for a row somebody else has changed; a wait for a connection counts
    # PostgreSQL: a controller that is stopped (not dead) amid a transaction must not hold its rows for ever.
    idle_in_transaction_s: float = 10.0
    migration_wait_s: float = 60.0  # for another process that is migrating
