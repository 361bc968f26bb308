"""`/api/model-plans` plans the install of a model from a source. `/api/uploads` takes files from the caller's machine,
in pieces, by their SHA-256: the controller never opens a path that it received, and a definition names an uploaded file
by its hash."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from litestar import Controller, Request, delete, get, post, put
from litestar.params import Parameter

from corral.blobs.upload import Uploads, UploadStatus
from corral.contract.installs import InstallPlan, PlanModel, UploadView
from corral.controller.api.auth import admins
from corral.controller.install.planner import InstallPlanner
from corral.kit.errors import Invalid, Unavailable


class InstallRoutes(Controller):
    path = "/api/model-plans"
    tags = ("models",)
    # Not for viewers: the controller asks servers that the caller names.
    guards = (admins,)

    @post("/", status_code=200, summary="Plan an install: the definition, the quantisation, and where it fits")
    async def plan(self, planner: InstallPlanner, data: PlanModel) -> InstallPlan:
        return await planner.plan(data)


AnyRequest = Request[Any, Any, Any]
MAX_PIECE_BYTES = 32 << 20  # of one call: it is kept in memory until it is whole
PIECE_TIMEOUT_S = 300.0
Offset = Annotated[int, Parameter(ge=0, description="Position of the first of these bytes in the file")]
Size = Annotated[int, Parameter(ge=1, description="Size of the whole file in bytes")]
Sha256 = Annotated[str, Parameter(pattern="^[0-9a-f]{64}$", description="Of the whole file, in hexadecimal digits")]


class UploadRoutes(Controller):
    path = "/api/uploads"
    tags = ("models",)
    guards = (admins,)

    @get("/{sha256:str}", summary="Get how much of a file is here")
    async def show(self, uploads: Uploads, sha256: Sha256) -> UploadView:
        return _view(await uploads.status(f"sha256:{sha256}"))

    @put(
        "/{sha256:str}",
        request_max_body_size=MAX_PIECE_BYTES,
        summary="Upload a piece of a file; the last piece completes and verifies it",
    )
    async def append(
        self, request: AnyRequest, uploads: Uploads, sha256: Sha256, offset: Offset, size: Size
    ) -> UploadView:
        try:
            async with asyncio.timeout(PIECE_TIMEOUT_S), uploads.slots:
                data = await request.body()
        except TimeoutError as error:
            raise Unavailable("too many uploads at once, or this one is too slow: send smaller pieces") from error
        if not data:
            raise Invalid("the piece is empty")
        return _view(await uploads.append(f"sha256:{sha256}", offset, size, data), size)

    @delete("/{sha256:str}", status_code=204, summary="Cancel an upload; a complete file stays")
    async def cancel(self, uploads: Uploads, sha256: Sha256) -> None:
        await uploads.cancel(f"sha256:{sha256}")


def _view(status: UploadStatus, size: int = 0) -> UploadView:
    return UploadView(
        sha256=status.digest.removeprefix("sha256:"),
        received_bytes=status.received_bytes,
        size_bytes=size or (status.received_bytes if status.complete else 0),
        complete=status.complete,
    )
