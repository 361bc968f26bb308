"""SQL on SQLite and PostgreSQL.

`engine/` has connections, transactions, claims, leases and migrations; `tables/` has one module per table and imports
`engine/`, never the other way round; `open.py` opens a store from its URL and `copy.py` copies one store to another.
Callers decide whether a change is right; the store applies it once, completely or not at all.
"""

from corral.store.engine.transactions import Result, Store, StoreOptions, Transaction
from corral.store.open import open_store

__all__ = ["Result", "Store", "StoreOptions", "Transaction", "open_store"]
