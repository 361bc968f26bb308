"""`/api/apply` and `/api/export`: the fleet as one file."""

from __future__ import annotations

from typing import Any

from litestar import Request, get, post

from corral.contract.fleet import ApplyBody, FleetDiff, FleetFile
from corral.controller.api.auth import admins, principal_of, viewers
from corral.controller.fleetfile.service import FleetFiles


@post("/api/apply", guards=[admins], status_code=200, tags=["fleet"], summary="Bring about what a file says")
async def apply_file(request: Request[Any, Any, Any], fleet_files: FleetFiles, data: ApplyBody) -> FleetDiff:
    return await fleet_files.apply(data, by=principal_of(request).name)


@get("/api/export", guards=[viewers], tags=["fleet"], summary="The file that would bring this fleet about")
async def export_file(fleet_files: FleetFiles) -> FleetFile:
    return await fleet_files.export()


ROUTES: tuple[Any, ...] = (apply_file, export_file)
