"""BackendsApi of the fleet (docs/reference/wire/http-backends.md): available, installed, and newer ones.

Changes are operations: see `operations.py`.
"""

from __future__ import annotations

import msgspec

from corral.client.connection import ApiConnection, segment
from corral.contract.admin import BackendBody, BackendMatrix, BackendVerified
from corral.contract.codec import Message, always
from corral.contract.messages.backends import UpgradeInfo
from corral.kit.errors import NotFound

_VERIFY_S = 120.0  # as long as the gateway waits for the controller


class GalleryName(Message, frozen=True):
    name: str = always(str)
    url: str = always(str)


class AvailableBackend(Message, frozen=True):
    """An entry of a gallery (docs/reference/wire/gallery.md#backend-entry), with the fields that users see."""

    name: str = always(str)
    id: str = always(str)  # gallery@name
    gallery: GalleryName = msgspec.field(default_factory=GalleryName)
    version: str = ""
    alias: str = ""
    uri: str = ""
    description: str = ""
    license: str = ""
    tags: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    capabilities: dict[str, str] = msgspec.field(default_factory=dict)
    is_meta: bool = False
    installed: bool = False


class BackendsApi:
    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    async def available(self) -> tuple[AvailableBackend, ...]:
        """Entries of galleries that suit a node of the fleet."""
        try:
            return await self._api.call("GET", "/api/backends/available", tuple[AvailableBackend, ...])
        except NotFound:  # a controller of the baseline release
            return await self._api.call("GET", "/backends/available", tuple[AvailableBackend, ...])

    async def matrix(self) -> BackendMatrix:
        """Installed backends per node, and pending changes."""
        return await self._api.call("GET", "/api/backends/matrix", BackendMatrix)

    async def upgrades(self) -> dict[str, UpgradeInfo]:
        """Newer builds in the galleries, as of the last check."""
        return await self._api.call("GET", "/api/backends/upgrades", dict[str, UpgradeInfo])

    async def check_upgrades(self) -> dict[str, UpgradeInfo]:
        """The same, after a new check."""
        return await self._api.call("POST", "/api/backends/upgrades/check?wait=true", dict[str, UpgradeInfo])

    async def verify(self, node: str, backend: str) -> BackendVerified:
        """The node reads every file of the backend again, which takes long."""
        path = f"/api/nodes/{segment(node)}/backends/verify"
        request = BackendBody(backend=backend)
        return await self._api.call("POST", path, BackendVerified, request, timeout_s=_VERIFY_S)
