"""`/internal/…`: routes for gateways, which authenticate with their own key. Loads are in `loads.py`."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, get, post

from corral.contract.codec import Undecodable, decode, encode
from corral.contract.receipts import Receipts, RunningReport
from corral.controller.api.auth import gateways, principal_of
from corral.controller.gateways.receipts import ReceiptService
from corral.controller.gateways.running import RunningRequests
from corral.controller.gateways.view import FleetViews
from corral.kit.errors import Invalid

AnyRequest = Request[Any, Any, Any]


@get("/internal/view", guards=[gateways], include_in_schema=False)
async def fleet_view(request: AnyRequest, views: FleetViews) -> Response[bytes]:
    """The whole view, or 304 when the gateway has it already."""
    tag = f'"{await views.tag()}"'
    if request.headers.get("if-none-match") == tag:
        return Response(b"", status_code=304, headers={"ETag": tag})
    body = encode(await views.build())
    return Response(body, media_type="application/json", headers={"ETag": tag, "Cache-Control": "no-store"})


@post("/internal/gateway/credentials", guards=[gateways], status_code=200, include_in_schema=False)
async def gateway_credentials(request: AnyRequest, views: FleetViews) -> Response[bytes]:
    name = request.query_params.get("name") or principal_of(request).key_id
    host = request.headers.get("x-forwarded-host") or request.headers.get("host") or ""
    return Response(encode(views.gateway_bus(name, host)), media_type="application/json")


@post("/internal/receipts", guards=[gateways], status_code=202, include_in_schema=False)
async def take_receipts(request: AnyRequest, receipts: ReceiptService) -> None:
    try:
        batch = decode(Receipts, await request.body())
    except Undecodable as error:
        raise Invalid(f"these are no receipts: {error}") from error
    await receipts.take(batch)


@post("/internal/running", guards=[gateways], status_code=202, include_in_schema=False)
async def take_running(request: AnyRequest, running: RunningRequests) -> None:
    try:
        report = decode(RunningReport, await request.body())
    except Undecodable as error:
        raise Invalid(f"this is no report of requests: {error}") from error
    await running.take(report)


ROUTES: tuple[Any, ...] = (fleet_view, gateway_credentials, take_receipts, take_running)
