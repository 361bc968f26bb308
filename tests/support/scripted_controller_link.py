"""A gateway's link to a controller that no test process runs: tests override the calls that they answer."""

from __future__ import annotations

from corral.contract.loads import LoadStatus
from corral.contract.view import GatewayBus
from corral.gateway.view.controller_link import ControllerLink, ReadView
from corral.kit.errors import Unavailable


class ScriptedControllerLink(ControllerLink):
    def __init__(self) -> None:
        """No session: nothing is sent."""

    async def read_view(self, known_etag: str | None) -> ReadView | None:
        raise Unavailable("no view is scripted")

    async def bus_credentials(self) -> GatewayBus:
        raise Unavailable("no credentials are scripted")

    async def request_load(self, model: str) -> LoadStatus | None:
        raise Unavailable("no load is scripted")

    async def load_status(self, model: str, since: int, wait_s: float) -> LoadStatus | None:
        raise Unavailable("no load is scripted")

    async def send_receipts(self, batch: bytes) -> None:
        raise Unavailable("no receipts are scripted")
