"""The ASGI application: all routes of the controller, and the parts that their handlers use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from litestar import Litestar
from litestar.config.app import AppConfig
from litestar.datastructures import State
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin

from corral import __version__
from corral.controller.access.gateway_trust import GatewayTrust
from corral.controller.access.keys import Access
from corral.controller.api import (
    access,
    distribution,
    events,
    fleet,
    gateways,
    loads,
    meta,
    playground,
    requests,
    samples,
)
from corral.controller.api.backends import BackendRoutes
from corral.controller.api.bundles import BundlePlanRoutes, BundleRoutes
from corral.controller.api.errors import on_corral_error, on_http_exception, on_too_deep, on_unexpected
from corral.controller.api.installs import InstallRoutes, UploadRoutes
from corral.controller.api.logs import NodeLogRoutes, worker_log
from corral.controller.api.models import ModelRoutes, ScheduleRoutes
from corral.controller.api.node import NodeApiRoutes
from corral.controller.api.node_backends import NodeBackendRoutes
from corral.controller.api.nodes import NodeRoutes
from corral.controller.api.operations import OperationRoutes
from corral.controller.api.path_segments import keep_segments
from corral.controller.api.redaction import Redaction
from corral.controller.api.releases import ReleaseRoutes
from corral.controller.api.request_log import RequestLog
from corral.controller.api.rollouts import RolloutRoutes
from corral.controller.web import routes as web
from corral.controller.wiring.localai import localai_routes
from corral.kit.errors import CorralError

_LARGEST_BODY = 1024 * 1024


def build_app(
    services: Mapping[str, Any], *, access_service: Access, trust: GatewayTrust, settle_s: float = 60.0
) -> Litestar:
    """Handlers receive the `services` whose names are among their parameters, as the mapping has them when a request
    comes. `settle_s`: how long a route that
    responds at the end of an operation may take; after that it responds 202."""
    return _App(
        route_handlers=[
            NodeApiRoutes,
            NodeRoutes,
            NodeBackendRoutes,
            NodeLogRoutes,
            worker_log,
            OperationRoutes,
            RolloutRoutes,
            ReleaseRoutes,
            *localai_routes(),
            BackendRoutes,
            ModelRoutes,
            InstallRoutes,
            UploadRoutes,
            ScheduleRoutes,
            BundlePlanRoutes,
            BundleRoutes,
            *access.ROUTES,
            *fleet.ROUTES,
            events.events,
            *gateways.ROUTES,
            *loads.ROUTES,
            *requests.ROUTES,
            *samples.ROUTES,
            *playground.ROUTES,
            *meta.ROUTES,
            *distribution.ROUTES,
            *web.ROUTES,
        ],
        dependencies={name: Provide(_giver(services, name), sync_to_thread=False) for name in services},
        state=State({"access": access_service, "trust": trust, "settle_s": settle_s}),
        exception_handlers={
            CorralError: on_corral_error,
            HTTPException: on_http_exception,
            RecursionError: on_too_deep,
            Exception: on_unexpected,
        },
        middleware=[RequestLog, Redaction],
        openapi_config=OpenAPIConfig(
            title="Corral",
            version=__version__,
            path="/openapi",
            render_plugins=[JsonRenderPlugin()],
            description="One OpenAI-compatible endpoint over every machine you own: the control API.",
        ),
        request_max_body_size=_LARGEST_BODY,
        debug=False,
        on_app_init=[_quiet],
    )


class _App(Litestar):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        keep_segments(scope)
        await super().__call__(scope, receive, send)


def _giver(services: Mapping[str, Any], name: str) -> Any:
    def give() -> Any:
        return services[name]

    return give


def _quiet(config: AppConfig) -> AppConfig:
    config.logging_config = None  # our own logging is set up before the app is built
    return config
