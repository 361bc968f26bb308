"""The counters of the change feed: a transaction that changes what one of them covers raises it (`store.revisions`)."""

from __future__ import annotations

RULES = "rules"  # backend rules; a reader of rules and of what follows from them takes it as a lock
INVENTORY = "inventory"  # what nodes report
REPLICAS = "replicas"  # the processes that gateways may send requests to
LOADS = "loads"  # load jobs, as clients that wait for a model see them
