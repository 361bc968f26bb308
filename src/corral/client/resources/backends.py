"""Backends of the fleet (docs/reference/wire/http-backends.md): what there is, what is installed where, what is newer.

Asking for a change is an operation: see `operations.py`.
"""

from __future__ import annotations

import msgspec

from corral.client.caller import Caller, segment
from corral.contract.admin import BackendBody, BackendMatrix, BackendVerified
from corral.contract.codec import Message, always
from corral.contract.messages.backends import UpgradeInfo

_VERIFY_S = 120.0  # as long as the gateway waits for the controller


class GalleryName(Message, frozen=True):
    name: str = always(str)
    url: str = always(str)


class AvailableBackend(Message, frozen=True):
    """An entry of a gallery (docs/reference/wire/gallery.md#backend-entry), as far as people are shown it."""

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


class Backends:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def available(self) -> tuple[AvailableBackend, ...]:
        """What the galleries have that a node of the fleet could use."""
        return await self._caller.call("GET", "/backends/available", tuple[AvailableBackend, ...])

    async def matrix(self) -> BackendMatrix:
        """What is installed where, and what is still to be done."""
        return await self._caller.call("GET", "/api/backends/matrix", BackendMatrix)

    async def upgrades(self) -> dict[str, UpgradeInfo]:
        """What is newer in the galleries, as last looked up."""
        return await self._caller.call("GET", "/backends/upgrades", dict[str, UpgradeInfo])

    async def check_upgrades(self) -> dict[str, UpgradeInfo]:
        """The same, the galleries asked anew."""
        return await self._caller.call("POST", "/api/backends/upgrades/check?wait=true", dict[str, UpgradeInfo])

    async def verify(self, node: str, backend: str) -> BackendVerified:
        """The node reads every file of it again, which takes its time."""
        path = f"/api/nodes/{segment(node)}/backends/verify"
        asked = BackendBody(backend=backend)
        return await self._caller.call("POST", path, BackendVerified, asked, timeout_s=_VERIFY_S)
