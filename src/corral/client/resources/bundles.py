"""Bundles: plans of new ones, their blobs, and those that are loaded."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from corral.client.connection import ApiConnection, segment
from corral.client.resources.models import GALLERIES_S, Uploads
from corral.contract.bundles import BundlePlan, BundleView, LoadBundle, PlanBundle


class Bundles:
    def __init__(self, api: ApiConnection) -> None:
        self._api = api
        self.uploads = Uploads(api, "/api/bundles/uploads")

    async def plan(self, request: PlanBundle) -> BundlePlan:
        """Repeat it until it is ready."""
        return await self._api.call("POST", "/api/bundle-plans", BundlePlan, request, timeout_s=GALLERIES_S)

    def download(self, sha256: str, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """A blob of a plan, from this byte on."""
        return self._api.read_bytes(f"/api/bundles/blobs/{segment(sha256)}?offset={offset}")

    async def load(self, document: bytes, *, operation: str = "") -> BundleView:
        """After all blobs were uploaded, by this operation."""
        body = LoadBundle(document.decode())
        path = "/api/bundles" + (f"?operation={segment(operation)}" if operation else "")
        return await self._api.call("POST", path, BundleView, body, timeout_s=GALLERIES_S)

    async def list(self) -> tuple[BundleView, ...]:
        """The one that was loaded last comes first."""
        return await self._api.call("GET", "/api/bundles", tuple[BundleView, ...])

    async def remove(self, digest: str) -> BundleView:
        return await self._api.call("DELETE", f"/api/bundles/{segment(digest)}", BundleView)
