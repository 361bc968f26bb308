"""The worker's own status, which the agent keeps and `/readyz`, `/corral/hello` and heartbeats read; and the error that
ends the worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from corral.contract.messages.nodes import NodeStatus
from corral.kit.errors import CorralError


class FatalError(CorralError):
    """Only a person can fix this. `main.run` prints the message, which says how, on one line and exits with code 1."""

    code = "cannot_go_on"


def _never() -> bool:
    return False


@dataclass
class WorkerStatus:
    boot_id: str  # new for each start of this process
    name: str
    controller: str = ""  # its URL
    node_id: str = ""
    status: str = ""  # as the controller reported it last; empty: not yet
    leaving: bool = False
    bus_urls: tuple[str, ...] = ()  # of this session
    ingress_url: str = ""  # as the controller reported it last, and whether it reached that; None: not tried yet
    is_ingress_ok: bool | None = None
    ingress_error: str = ""
    handing_over: bool = False  # to a new worker on this machine: the node stays, and its processes run on
    is_bus_connected: Callable[[], bool] = field(default=_never)

    def not_ready_reason(self) -> str | None:
        """Why this node should get no requests; None when it is ready."""
        if self.leaving:
            return "leaving"
        if not self.status:
            return "not registered yet"
        if self.status == NodeStatus.PENDING:
            return "waiting for approval"
        return None if self.is_bus_connected() else "the bus is down"
