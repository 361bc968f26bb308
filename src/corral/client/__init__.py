"""The HTTP API as Python calls, for the CLI and the e2e tests. Independent of terminals and of the fleet's processes.

`find_endpoint` finds the fleet's URL and key; `Client` calls it. Results are types of `contract/admin.py`, errors those
of `kit/errors.py`, and the events of `Client.follow` are in `events.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from corral.client.contexts import LocalFleet, local_file, read_local, write_local
from corral.client.endpoint import Endpoint, find_endpoint

if TYPE_CHECKING:
    from corral.client.client import Client

__all__ = [
    "Client",
    "Endpoint",
    "LocalFleet",
    "find_endpoint",
    "local_file",
    "read_local",
    "write_local",
]


def __getattr__(name: str) -> Any:
    """Import `Client` at its first use: lists find their fleet without it (`corral.cli.lists`)."""
    if name != "Client":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from corral.client.client import Client

    return Client
