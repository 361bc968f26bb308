"""The client: `ApiConnection` with one class per resource of the API."""

from __future__ import annotations

from collections.abc import Callable

from corral.client.connection import ApiConnection
from corral.client.endpoint import Endpoint
from corral.client.resources.backends import BackendsApi
from corral.client.resources.bundles import Bundles
from corral.client.resources.fleet import FleetFiles, Keys, Requests, Tokens, WhyApi
from corral.client.resources.loads import Loads
from corral.client.resources.logs import Logs
from corral.client.resources.models import GALLERIES_S, Models, Uploads
from corral.client.resources.nodes import Nodes
from corral.client.resources.operations import Operations
from corral.client.resources.rollouts import RolloutsApi
from corral.contract.admin import Cluster, GalleryView
from corral.contract.codec import Message, always
from corral.kit.clock import Clock
from corral.kit.errors import NotFound


class KeyIdentity(Message, frozen=True):
    key_id: str = always(str)
    name: str = always(str)
    role: str = always(str)


class Client(ApiConnection):
    """`async with Client(endpoint) as client: await client.nodes.list()`."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timeout_s: float = 30.0,
        idle_s: float = 60.0,
        restart_s: float = 10.0,
        is_supervised: Callable[[], bool] | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(
            endpoint,
            timeout_s=timeout_s,
            idle_s=idle_s,
            restart_s=restart_s,
            is_supervised=is_supervised,
            clock=clock,
        )
        self.nodes = Nodes(self)
        self.tokens = Tokens(self)
        self.keys = Keys(self)
        self.backends = BackendsApi(self)
        self.models = Models(self)
        self.uploads = Uploads(self)
        self.bundles = Bundles(self)
        self.fleet = FleetFiles(self)
        self.loads = Loads(self)
        self.logs = Logs(self)
        self.why = WhyApi(self)
        self.operations = Operations(self)
        self.rollouts = RolloutsApi(self)
        self.requests = Requests(self)

    async def me(self) -> KeyIdentity:
        """The name and role of the key."""
        return await self.call("GET", "/api/me", KeyIdentity)

    async def cluster(self) -> Cluster:
        return await self.call("GET", "/api/cluster", Cluster)

    async def galleries(self) -> tuple[GalleryView, ...]:
        """The galleries and their errors. Empty from an older controller that does not report them."""
        try:
            return await self.call("GET", "/api/galleries", tuple[GalleryView, ...], timeout_s=GALLERIES_S)
        except NotFound:
            return ()
