"""`/install.sh` and `/install/wheels`: how a machine without Corral gets it from its controller."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Controller, Request, Response, get
from litestar.params import Parameter
from litestar.response import Stream

from corral.contract.admin import InstallWheel, InstallWheels
from corral.controller.access.join_tokens import JoinTokens
from corral.controller.api.auth import bearer_of
from corral.controller.api.file_bodies import read_blocks
from corral.controller.distribution.packages import CorralPackages
from corral.kit.errors import Unauthenticated

AnyRequest = Request[Any, Any, Any]
Platform = Annotated[str, Parameter(max_length=32, description="Operating system and processor: linux/amd64")]
Python = Annotated[str, Parameter(max_length=8, description="Version of Python: 3.12")]
Sha256 = Annotated[str, Parameter(pattern="^[0-9a-f]{64}$", description="Of the wheel, in hexadecimal digits")]


@get("/install.sh", tags=["installer"], media_type="text/plain", summary="Get the installer for a machine that joins")
async def installer(packages: CorralPackages) -> str:
    """Without a login: the installer contains no secret, and the join line has its SHA-256."""
    return (await packages.installer()).text


class WheelRoutes(Controller):
    """They need a join token that can still be used, and do not use it up."""

    path = "/install/wheels"
    tags = ("installer",)

    @get("/", summary="List the packages that a machine needs; the controller begins to fetch them")
    async def list_(
        self, request: AnyRequest, packages: CorralPackages, join_tokens: JoinTokens, platform: Platform, python: Python
    ) -> InstallWheels:
        token = await join_tokens.check(_secret(request))
        wheels = await packages.list_(platform, python, token.id)
        if wheels is None:
            return InstallWheels()
        return InstallWheels(tuple(InstallWheel(wheel.name, wheel.sha256, wheel.size) for wheel in wheels), ready=True)

    @get("/{sha256:str}", summary="Get a package of the list, or the wheel of Corral itself")
    async def fetch(
        self, request: AnyRequest, packages: CorralPackages, join_tokens: JoinTokens, sha256: Sha256
    ) -> Response[bytes] | Stream:
        await join_tokens.check(_secret(request))
        found = await packages.find(sha256)
        if isinstance(found, bytes):
            return Response(found, media_type="application/octet-stream")
        size = str(found.stat().st_size)
        return Stream(read_blocks(found), media_type="application/octet-stream", headers={"Content-Length": size})


def _secret(request: AnyRequest) -> str:
    secret = bearer_of(request)
    if not secret:
        raise Unauthenticated("send the join token as `Authorization: Bearer …`")
    return secret


ROUTES: tuple[Any, ...] = (installer, WheelRoutes)
