"""Where this worker stands: kept by the agent, read by whoever is asked (`/readyz`, `/corral/hello`, metrics)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from corral.contract.messages.nodes import NodeStatus


def _nowhere() -> bool:
    return False


@dataclass
class Standing:
    boot_id: str  # fresh per start of this process
    name: str
    node_id: str = ""
    status: str = ""  # as the controller last told it; empty = it has not yet
    leaving: bool = False
    handing_over: bool = False  # to a successor on this machine: nobody is told goodbye, nothing is stopped
    bus_connected: Callable[[], bool] = field(default=_nowhere)

    def not_ready(self) -> str | None:
        """Why no work should come here; None when it may."""
        if self.leaving:
            return "leaving"
        if not self.status:
            return "not registered yet"
        if self.status == NodeStatus.PENDING:
            return "waiting for approval"
        return None if self.bus_connected() else "the bus is down"
