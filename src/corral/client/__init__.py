"""The HTTP API as Python calls, for the CLI and the e2e tests. Independent of terminals and of the fleet's processes.

`find_endpoint` finds the fleet's URL and key; `Client` calls it. Results are types of `contract/admin.py`, errors those
of `kit/errors.py`.
"""

from __future__ import annotations

from corral.client.client import Client
from corral.client.contexts import LocalFleet, local_file, read_local, write_local
from corral.client.endpoint import Endpoint, find_endpoint
from corral.client.events import (
    Changed,
    FleetEvent,
    Lost,
    NodeRemoved,
    NodeSeen,
    OperationRemoved,
    OperationSeen,
    Restarted,
    StateComplete,
)

__all__ = [
    "Changed",
    "Client",
    "Endpoint",
    "FleetEvent",
    "LocalFleet",
    "Lost",
    "NodeRemoved",
    "NodeSeen",
    "OperationRemoved",
    "OperationSeen",
    "Restarted",
    "StateComplete",
    "find_endpoint",
    "local_file",
    "read_local",
    "write_local",
]
