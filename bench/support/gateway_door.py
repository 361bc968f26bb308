"""The gateway's own door in one process, in front of one upstream: keys, model field, head rewriting, metrics and all.

Only the fleet is fixed: one key, one model, one target. Run: `gateway_door.py PORT HOST:PORT KEY`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import uvloop

from corral.contract.http import Target
from corral.contract.view import FleetView, ViewKey, ViewModel
from corral.gateway.main import build_door
from corral.gateway.metrics import Metrics
from corral.gateway.replicas import Route
from corral.gateway.settings import GatewaySettings
from corral.gateway.v1 import Ask
from corral.gateway.view import Fleet, prepare_fleet
from corral.kit.clock import SystemClock
from corral.kit.secrets import digest
from corral.relay import Limits, RelayServer, UpstreamPool


class FixedFleet:
    def __init__(self, key: str) -> None:
        shown = ViewKey(id="bench", secret_hash=digest(key), role="inference")
        self.fleet: Fleet | None = prepare_fleet(FleetView(keys=(shown,), models=(ViewModel(id="bench"),)))

    def server_now(self) -> float:
        return time.time()


class OneTarget:
    def __init__(self, target: Target) -> None:
        self._target = target

        self._routes: dict[bytes, Route] = {}

    async def route(self, ask: Ask) -> Route:
        return self.route_now(ask)

    def route_now(self, ask: Ask) -> Route:
        path = ask.request.path
        route = self._routes.get(path)
        if route is None:
            route = self._routes[path] = Route(self._target, path, b"token-for-the-ingress")
        return route


async def serve(port: int, target: Target, key: str) -> None:
    clock = SystemClock()
    settings = GatewaySettings(controller=f"unix:{Path('/nowhere')}")
    pool = UpstreamPool()
    door = build_door(settings, FixedFleet(key), OneTarget(target), Metrics(), clock, gateway_key="ck_bench")
    server = RelayServer(door, Limits(), pool=pool, shortcut=door.shortcut)
    await server.listen("127.0.0.1", port)
    await asyncio.Event().wait()


def main() -> None:
    host, _, upstream_port = sys.argv[2].rpartition(":")
    uvloop.run(serve(int(sys.argv[1]), Target(host=host, port=int(upstream_port)), sys.argv[3]))


if __name__ == "__main__":
    main()
