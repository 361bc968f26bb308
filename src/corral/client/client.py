"""The client: `ApiConnection` with one class per resource of the API."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from corral.client.connection import ApiConnection
from corral.contract.codec import Message, always
from corral.kit.errors import NotFound

if TYPE_CHECKING:
    from corral.client.resources.backends import BackendsApi
    from corral.client.resources.bundles import Bundles
    from corral.client.resources.fleet import FleetFiles, Keys, ReleasesApi, Requests, Tokens, WhyApi
    from corral.client.resources.loads import Loads
    from corral.client.resources.logs import Logs
    from corral.client.resources.models import Models, Uploads
    from corral.client.resources.nodes import Nodes
    from corral.client.resources.operations import Operations, RolloutsApi
    from corral.contract.admin import Cluster, GalleryView


class KeyIdentity(Message, frozen=True):
    key_id: str = always(str)
    name: str = always(str)
    role: str = always(str)


class Client(ApiConnection):
    """`async with Client(endpoint) as client: await client.nodes.list()`.

    A resource and the types of its answers are imported at its first use: a command needs one or two of them.
    """

    @cached_property
    def nodes(self) -> Nodes:
        from corral.client.resources.nodes import Nodes

        return Nodes(self)

    @cached_property
    def tokens(self) -> Tokens:
        from corral.client.resources.fleet import Tokens

        return Tokens(self)

    @cached_property
    def keys(self) -> Keys:
        from corral.client.resources.fleet import Keys

        return Keys(self)

    @cached_property
    def backends(self) -> BackendsApi:
        from corral.client.resources.backends import BackendsApi

        return BackendsApi(self)

    @cached_property
    def models(self) -> Models:
        from corral.client.resources.models import Models

        return Models(self)

    @cached_property
    def uploads(self) -> Uploads:
        from corral.client.resources.models import Uploads

        return Uploads(self)

    @cached_property
    def bundles(self) -> Bundles:
        from corral.client.resources.bundles import Bundles

        return Bundles(self)

    @cached_property
    def fleet(self) -> FleetFiles:
        from corral.client.resources.fleet import FleetFiles

        return FleetFiles(self)

    @cached_property
    def loads(self) -> Loads:
        from corral.client.resources.loads import Loads

        return Loads(self)

    @cached_property
    def logs(self) -> Logs:
        from corral.client.resources.logs import Logs

        return Logs(self)

    @cached_property
    def why(self) -> WhyApi:
        from corral.client.resources.fleet import WhyApi

        return WhyApi(self)

    @cached_property
    def operations(self) -> Operations:
        from corral.client.resources.operations import Operations

        return Operations(self)

    @cached_property
    def releases(self) -> ReleasesApi:
        from corral.client.resources.fleet import ReleasesApi

        return ReleasesApi(self)

    @cached_property
    def rollouts(self) -> RolloutsApi:
        from corral.client.resources.operations import RolloutsApi

        return RolloutsApi(self)

    @cached_property
    def requests(self) -> Requests:
        from corral.client.resources.fleet import Requests

        return Requests(self)

    async def me(self) -> KeyIdentity:
        """The name and role of the key."""
        return await self.call("GET", "/api/me", KeyIdentity)

    async def cluster(self) -> Cluster:
        from corral.contract.admin import Cluster

        return await self.call("GET", "/api/cluster", Cluster)

    async def galleries(self) -> tuple[GalleryView, ...]:
        """The galleries and their errors. Empty from an older controller that does not report them."""
        from corral.client.resources.models import GALLERIES_S
        from corral.contract.admin import GalleryView

        try:
            return await self.call("GET", "/api/galleries", tuple[GalleryView, ...], timeout_s=GALLERIES_S)
        except NotFound:
            return ()
