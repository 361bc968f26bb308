"""`/api/model-plans` plans the install of a model from a source. `/api/uploads` takes files from the caller's machine,
in pieces, by their SHA-256: the controller never opens a path that it received, and a definition names an uploaded file
by its hash."""

from __future__ import annotations

from typing import Any

from litestar import Controller, Request, delete, get, post, put

from corral.blobs.upload import Uploads
from corral.contract.installs import InstallPlan, OpenUpload, PlanModel, UploadOpened, UploadView
from corral.controller.api.auth import admins, principal_of
from corral.controller.api.file_bodies import MAX_PIECE_BYTES, Offset, OfUpload, Sha256, Size, take_piece, upload_view
from corral.controller.files.upload_operations import UploadOperations
from corral.controller.install.planner import InstallPlanner


class InstallRoutes(Controller):
    path = "/api/model-plans"
    tags = ("models",)
    # Not for viewers: the controller asks servers that the caller names.
    guards = (admins,)

    @post("/", status_code=200, summary="Plan an install: the definition, the quantisation, and where it fits")
    async def plan(self, planner: InstallPlanner, data: PlanModel) -> InstallPlan:
        return await planner.plan(data)


AnyRequest = Request[Any, Any, Any]


class UploadRoutes(Controller):
    path = "/api/uploads"
    tags = ("models",)
    guards = (admins,)

    @post("/", status_code=200, summary="Begin or continue the operation of an upload")
    async def open(
        self, request: AnyRequest, uploads: Uploads, upload_operations: UploadOperations, data: OpenUpload
    ) -> UploadOpened:
        return await upload_operations.open(uploads, data, principal_of(request).name)

    @get("/{sha256:str}", summary="Get how much of a file is here")
    async def show(self, uploads: Uploads, sha256: Sha256) -> UploadView:
        return upload_view(await uploads.status(f"sha256:{sha256}"))

    @put(
        "/{sha256:str}",
        request_max_body_size=MAX_PIECE_BYTES,
        summary="Upload a piece of a file; the last piece completes and verifies it",
    )
    async def append(
        self,
        request: AnyRequest,
        uploads: Uploads,
        upload_operations: UploadOperations,
        sha256: Sha256,
        offset: Offset,
        size: Size,
        operation: OfUpload = "",
    ) -> UploadView:
        return await take_piece(request, uploads, upload_operations, operation, sha256, offset, size)

    @delete("/{sha256:str}", status_code=204, summary="Cancel an upload; a complete file stays")
    async def cancel(self, uploads: Uploads, sha256: Sha256) -> None:
        await uploads.cancel(f"sha256:{sha256}")
