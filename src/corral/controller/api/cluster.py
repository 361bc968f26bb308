"""`/api/cluster`: the whole at a glance, and sentences a person should act on."""

from __future__ import annotations

from litestar import get

from corral.contract.admin import Cluster
from corral.controller.api.auth import viewers
from corral.controller.overview import Overview


@get("/api/cluster", guards=[viewers], tags=["cluster"], summary="The fleet at a glance")
async def cluster(overview: Overview) -> Cluster:
    return await overview.read()
