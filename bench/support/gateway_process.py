"""The gateway's handler in one process, in front of one upstream: keys, model field, choice of a replica, slots, head
rewriting, metrics, receipts and all.

Only the fleet is fixed: one key, one model, one replica unless the environment says otherwise. Run:
`gateway_process.py PORT HOST:PORT KEY`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import uvloop

from bench.support.traffic import MODEL
from corral.contract.loads import LoadStatus
from corral.contract.view import FleetView, ViewKey, ViewModel, ViewNode, ViewReplica
from corral.gateway.receipts.metrics import Metrics, RouteClass
from corral.gateway.receipts.sender import ReceiptSender
from corral.gateway.routing.load_watcher import LoadWatcher
from corral.gateway.routing.router import ReplicaRouter
from corral.gateway.settings import GatewaySettings
from corral.gateway.view.controller_link import ControllerLink
from corral.gateway.view.fleet import Fleet, prepare_fleet
from corral.gateway.wiring import GatewayState, build_handler, new_tracer
from corral.kit.clock import SystemClock
from corral.kit.process import freeze_gc_after_start
from corral.kit.secrets import digest
from corral.kit.settings import read_settings
from corral.kit.tasks import background
from corral.kit.tracing.settings import TraceSettings
from corral.relay import Limits, RelayServer, UpstreamPool


class FixedFleet:
    def __init__(self, view: FleetView) -> None:
        self.fleet: Fleet | None = prepare_fleet(view)

    def server_now(self) -> float:
        return time.time()

    async def refresh(self) -> None:
        pass


class Nowhere(ControllerLink):
    """The link to a controller that takes receipts and loads nothing."""

    def __init__(self) -> None:
        """No session: nothing is sent."""

    async def send_receipts(self, batch: bytes) -> None:
        pass

    async def request_load(self, model: str) -> LoadStatus | None:
        return None

    async def load_status(self, model: str, since: int, wait_s: float) -> LoadStatus | None:
        return None


def fixed_view(host: str, port: int, key: str, token: str = "token-for-the-ingress") -> FleetView:
    """`BENCH_REPLICAS`: more than one; `BENCH_TRIAL`: the last one is of a revision that gets so many percent."""
    count, percent = int(os.environ.get("BENCH_REPLICAS", "1")), int(os.environ.get("BENCH_TRIAL", "0"))
    trial = {"trial_revision": "r2", "trial_percent": percent} if percent else {}
    revisions = ["r1"] * count
    revisions[-1] = "r2" if percent else "r1"
    return FleetView(
        keys=(ViewKey(id="bench", secret_hash=digest(key), role="inference"),),
        nodes=(ViewNode("n1", "node", "healthy", f"http://{host}:{port}", token),),
        models=(ViewModel(id=MODEL, revision="r1", **trial),),  # type: ignore[arg-type]
        replicas=tuple(
            ViewReplica(f"p{number}", "n1", MODEL, number, revision, slots=10_000)
            for number, revision in enumerate(revisions, 1)
        ),
    )


async def serve(port: int, view: FleetView) -> None:
    clock = SystemClock()
    traces = read_settings(TraceSettings, flags={}, env=os.environ)
    settings = GatewaySettings(controller=f"unix:{Path('/nowhere')}", traces=traces)
    pool = UpstreamPool()
    state, fleets, client = GatewayState(settings), FixedFleet(view), Nowhere()
    loads = LoadWatcher(client, lambda: None, clock, poll_s=1.0)
    router = ReplicaRouter(state.in_flight, loads, clock, settings.routing, _never_newer)
    router.apply_view(view)
    metrics = Metrics()
    tracer = new_tracer(settings, metrics, fleets.server_now)
    handler = build_handler(
        settings, fleets, router, metrics, clock, gateway_key="ck_bench", state=state, tracer=tracer
    )
    server = RelayServer(handler, Limits(), pool=pool, fast_path=handler.fast_path)
    await server.listen("127.0.0.1", port)
    freeze_gc_after_start(asyncio.get_running_loop())  # as a gateway does
    counts = metrics.routes[RouteClass.INFERENCE]
    sender = ReceiptSender(state.receipts, counts, client, clock, fleets.server_now, router.waiting, interval_s=1.0)
    async with background(*([tracer.exporter.run()] if tracer is not None else [])):
        await sender.run()


async def _never_newer() -> None:
    """There is one view."""


def main() -> None:
    host, _, upstream_port = sys.argv[2].rpartition(":")
    token = (sys.argv[4],) if len(sys.argv) > 4 else ()
    uvloop.run(serve(int(sys.argv[1]), fixed_view(host, int(upstream_port), sys.argv[3], *token)))


if __name__ == "__main__":
    main()
