"""Our HTTP API as Python calls, for the CLI and the e2e tests. Knows nothing of terminals, folders of a fleet or roles.

`find_endpoint` says where the fleet is and which key to show; `Client` talks to it; what comes back are the shapes of
`contract/admin.py`, what goes wrong is one of `kit/errors.py`.
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
    Ready,
    Restarted,
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
    "Ready",
    "Restarted",
    "find_endpoint",
    "local_file",
    "read_local",
    "write_local",
]
