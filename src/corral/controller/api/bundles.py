"""`/api/bundles` and `/api/bundle-plans`: archives with everything that a fleet without internet access needs.

The CLI writes and reads the archive. It downloads the blobs of a plan, and uploads those of a bundle in pieces, by
digest; the controller verifies each and opens no path that it received.
"""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Controller, Request, delete, get, post, put
from litestar.params import Parameter
from litestar.response import Stream

from corral.contract.bundles import MAX_DOCUMENT_BYTES, BundlePlan, BundleView, LoadBundle, PlanBundle
from corral.contract.installs import OpenUpload, UploadOpened, UploadView
from corral.controller.api.auth import admins, principal_of
from corral.controller.api.file_bodies import (
    MAX_PIECE_BYTES,
    Offset,
    OfUpload,
    Sha256,
    Size,
    read_blocks,
    take_piece,
    upload_view,
)
from corral.controller.bundles.maker import BundleService
from corral.controller.files.upload_operations import UploadOperations
from corral.kit.errors import Invalid, NotFound

AnyRequest = Request[Any, Any, Any]
From = Annotated[int, Parameter(ge=0, description="Begin at this byte")]
Digest = Annotated[str, Parameter(max_length=80, description="Of the bundle; may be shortened")]


class BundlePlanRoutes(Controller):
    path = "/api/bundle-plans"
    tags = ("bundles",)
    guards = (admins,)

    @post("/", status_code=200, summary="Plan a bundle; the controller fetches what it lacks. Repeat until it is ready")
    async def plan(self, request: AnyRequest, bundles: BundleService, data: PlanBundle) -> BundlePlan:
        return await bundles.maker.plan(data, by=principal_of(request).name)


class BundleRoutes(Controller):
    path = "/api/bundles"
    tags = ("bundles",)
    guards = (admins,)

    @get("/", summary="List the loaded bundles")
    async def list_bundles(self, bundles: BundleService) -> list[BundleView]:
        return [loaded.view for loaded in bundles.loaded.list_()]

    @post(
        "/",
        request_max_body_size=2 * MAX_DOCUMENT_BYTES,
        summary="Load a bundle whose blobs were uploaded",
    )
    async def load(
        self, bundles: BundleService, upload_operations: UploadOperations, data: LoadBundle, operation: OfUpload = ""
    ) -> BundleView:
        async with upload_operations.loading(operation):
            return (await bundles.loaded.load(data.document.encode())).view

    @delete("/{digest:str}", status_code=200, summary="Remove a bundle; what was installed from it stays")
    async def remove(self, bundles: BundleService, digest: Digest) -> BundleView:
        return (await bundles.loaded.remove(digest)).view

    @get("/blobs/{sha256:str}", summary="Download a blob of a planned bundle")
    async def download(self, bundles: BundleService, sha256: Sha256, offset: From = 0) -> Stream:
        blob = bundles.find_blob(f"sha256:{sha256}")
        if blob is None:
            raise NotFound("the blob is not on this controller any more: plan the bundle again")
        if offset > blob.size:
            raise Invalid(f"the blob has {blob.size} bytes")
        headers = {"Content-Length": str(blob.size - offset)}
        return Stream(read_blocks(blob.path, offset), media_type="application/octet-stream", headers=headers)

    @post("/uploads", status_code=200, summary="Begin or continue the operation of the upload of a bundle")
    async def open_upload(
        self, request: AnyRequest, bundles: BundleService, upload_operations: UploadOperations, data: OpenUpload
    ) -> UploadOpened:
        return await upload_operations.open(bundles.uploads, data, principal_of(request).name)

    @get("/uploads/{sha256:str}", summary="Get how much of a blob of a bundle is here")
    async def show_upload(self, bundles: BundleService, sha256: Sha256) -> UploadView:
        return upload_view(await bundles.uploads.status(f"sha256:{sha256}"))

    @put(
        "/uploads/{sha256:str}",
        request_max_body_size=MAX_PIECE_BYTES,
        summary="Upload a piece of a blob of a bundle; the last piece completes and verifies it",
    )
    async def append(
        self,
        request: AnyRequest,
        bundles: BundleService,
        upload_operations: UploadOperations,
        sha256: Sha256,
        offset: Offset,
        size: Size,
        operation: OfUpload = "",
    ) -> UploadView:
        return await take_piece(request, bundles.uploads, upload_operations, operation, sha256, offset, size)
