"""SQL on SQLite and PostgreSQL: one module per table, transactions, claims, leases, migrations.

Whether a change is right is decided elsewhere; here it happens once, wholly or not at all.
"""

from corral.store.api import Result, Store, Transaction
from corral.store.opening import open_store
from corral.store.options import StoreOptions

__all__ = ["Result", "Store", "StoreOptions", "Transaction", "open_store"]
