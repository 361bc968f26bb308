"""`/api/cluster`: the whole at a glance, and sentences a person should act on. `/api/galleries`: which can be read."""

from __future__ import annotations

from litestar import get

from corral.contract.admin import Cluster, GalleryView
from corral.controller.api.auth import viewers
from corral.controller.api.overview import Overview
from corral.controller.backends.gallery_status import GalleryStatus


@get("/api/cluster", guards=[viewers], tags=["cluster"], summary="The fleet at a glance")
async def cluster(overview: Overview) -> Cluster:
    return await overview.read()


@get("/api/galleries", guards=[viewers], tags=["cluster"], summary="The galleries, and which of them cannot be read")
async def galleries(gallery_status: GalleryStatus) -> list[GalleryView]:
    return await gallery_status.read()


ROUTES = (cluster, galleries)
