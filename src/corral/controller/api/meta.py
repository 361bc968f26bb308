"""Health, metrics, the CA's certificate and the API's own description."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, get
from prometheus_client import CONTENT_TYPE_LATEST

from corral.controller.api.auth import viewers
from corral.controller.metrics.controller import ControllerMetrics
from corral.controller.runtime.database import Readiness
from corral.kit.errors import NotFound

AnyRequest = Request[Any, Any, Any]


@get("/healthz", include_in_schema=False, media_type="text/plain")
async def healthz() -> str:
    return "ok\n"


@get("/readyz", include_in_schema=False)
async def readyz(readiness: Readiness) -> Response[str]:
    reasons = await readiness.reasons()
    if reasons:
        return Response("not ready: " + "; ".join(reasons) + "\n", status_code=503, media_type="text/plain")
    return Response("ok\n", media_type="text/plain")


@get("/metrics", guards=[viewers], include_in_schema=False)
async def metrics(controller_metrics: ControllerMetrics) -> Response[bytes]:
    return Response(await controller_metrics.render(), media_type=CONTENT_TYPE_LATEST)


@get("/ca.pem", tags=["cluster"], summary="Get the CA certificate of the fleet; the join line has its fingerprint")
async def ca_certificate(request: AnyRequest) -> Response[str]:
    """The first certificate is the one that verifies the host of the request."""
    pem = await request.app.state.trust.bundle(f"https://{request.headers.get('host', '')}")
    if not pem:
        raise NotFound("this cluster has no CA of its own")
    return Response(pem, media_type="application/x-pem-file")


@get("/openapi.json", include_in_schema=False)
async def openapi(request: AnyRequest) -> dict[str, Any]:
    return request.app.openapi_schema.to_schema()


ROUTES: tuple[Any, ...] = (healthz, readyz, metrics, ca_certificate, openapi)
