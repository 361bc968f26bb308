"""A worker's ingress in front of one process. Run: `ingress.py PORT HOST:PORT`.

The routes and the relay are real: tokens are verified, requests are counted, the process is found by its id. Only the
supervisor is left out: its table has one row that never changes.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from corral.contract.access import AccessClaims, Scope
from corral.contract.codec import encode
from corral.inference.request_files import LocalFiles
from corral.kit.log import configure_logging
from corral.kit.process import freeze_gc_after_start
from corral.kit.settings import read_settings
from corral.kit.signing import Signer
from corral.kit.tasks import background
from corral.kit.tracing.settings import TraceSettings
from corral.kit.tracing.tracer import open_tracer
from corral.relay import RelayServer, UpstreamPool
from corral.worker.ingress.routes import IngressRoutes
from corral.worker.ingress.tokens import TokenVerifier
from corral.worker.metrics import WorkerMetrics
from corral.worker.status import WorkerStatus
from corral.worker.supervisor.logs import LogBook
from corral.worker.supervisor.table import Running

NODE, PROCESS = "n1", "p1"
_SIGNER = Signer("YmVuY2gtYmVuY2gtYmVuY2gtYmVuY2gtYmVuY2gtYmU")  # valid in this benchmark only


def token() -> str:
    claims = AccessClaims(sub="gateway", aud=NODE, scope=(Scope.REPLICAS.value,), exp=int(time.time()) + 3000)
    return _SIGNER.sign(encode(claims))


class OneProcess:
    """The part of a supervisor that the ingress uses."""

    def __init__(self, port: int) -> None:
        self._running = Running(PROCESS, "k", "bench", 0, "bench", "r", "d", "openai", port, "secret", slots=10_000)

    def find(self, process_id: str) -> Running | None:
        return self._running if process_id == PROCESS else None


async def serve(port: int, upstream: int) -> None:
    configure_logging(role="worker")  # as a worker does, and
    freeze_gc_after_start(asyncio.get_running_loop())
    with tempfile.TemporaryDirectory() as folder:
        tokens = TokenVerifier(time.time)
        tokens.trust(_SIGNER.public_key, NODE)
        status = WorkerStatus("boot", "bench", node_id=NODE)
        processes = OneProcess(upstream)
        files = LocalFiles(Path(folder))
        tracer = open_tracer(read_settings(TraceSettings, flags={}, env=os.environ), "corral-worker", time.time)
        routes = IngressRoutes(status, tokens, WorkerMetrics(), processes.find, LogBook(), files, tracer=tracer)
        server = RelayServer(routes, pool=UpstreamPool(), fast_path=routes.fast_path)
        await server.listen("127.0.0.1", port)
        async with background(*([tracer.exporter.run()] if tracer is not None else [])):
            await asyncio.Event().wait()


def main() -> None:
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2].rpartition(":")[2])))


if __name__ == "__main__":
    main()
