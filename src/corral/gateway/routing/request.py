"""What the router is asked: one request for a model, as far as choosing a replica needs it."""

from __future__ import annotations

from typing import Protocol

import msgspec

from corral.contract.http import KnownHead, Request
from corral.gateway.responses import Response
from corral.gateway.routing.replicas import Route
from corral.gateway.view.fleet import Client, Fleet


class WaitTimes:
    """How long a request waited before it was sent. The router writes it."""

    __slots__ = ("load_s", "queue_s")

    def __init__(self) -> None:
        self.load_s = 0.0  # for a cold model
        self.queue_s = 0.0  # for a slot


class RouteRequest(
    msgspec.Struct, frozen=True, gc=False
):  # made per request: a frozen dataclass costs ten times as much
    """An authorized request that needs a replica of `model`."""

    request: Request | KnownHead  # its method, path and headers
    fleet: Fleet
    client: Client
    model: str  # as the client named it
    body: bytes
    wait_times: WaitTimes | None = None


class Router(Protocol):
    """Implemented by `ReplicaRouter`; a benchmark or a test hands in a router that always names one target."""

    async def route(self, request: RouteRequest) -> Route | Response:
        """Choose a replica, waiting for one within the request's budget, or return the error to send."""
