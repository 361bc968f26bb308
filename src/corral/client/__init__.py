"""The HTTP API as Python calls, for the CLI and the e2e tests. Independent of terminals and of the fleet's processes.

`find_endpoint` finds the fleet's URL and key; `Client` calls it. Results are types of `contract/admin.py`, errors those
of `kit/errors.py`, and the events of `Client.follow` are in `events.py`.
"""

from __future__ import annotations

from corral.client.client import Client
from corral.client.contexts import LocalFleet, local_file, read_local, write_local
from corral.client.endpoint import Endpoint, find_endpoint

__all__ = [
    "Client",
    "Endpoint",
    "LocalFleet",
    "find_endpoint",
    "local_file",
    "read_local",
    "write_local",
]
