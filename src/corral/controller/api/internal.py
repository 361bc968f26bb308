"""`/internal/…`: what gateways ask for, with the gateway's own key."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, get, post

from corral.contract.codec import encode
from corral.controller.api.auth import gateways, principal_of
from corral.controller.gateways.view import FleetViews

AnyRequest = Request[Any, Any, Any]


@get("/internal/view", guards=[gateways], include_in_schema=False)
async def fleet_view(request: AnyRequest, views: FleetViews) -> Response[bytes]:
    """Whole, or 304 when the gateway has it already."""
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
