"""A worker's ingress with real backend processes behind it, and no controller: what requests meet, and nothing else."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from corral.inference.request_files import LocalFiles
from corral.kit.clock import SystemClock
from corral.kit.hosts import HostPort
from corral.kit.signing import Signer
from corral.kit.tracing.tracer import Tracer
from corral.worker.agent.server_clock import ServerClock
from corral.worker.ingress.certificate import IngressCertificate
from corral.worker.ingress.routes import IngressRoutes
from corral.worker.ingress.server import Ingress
from corral.worker.ingress.tokens import TokenVerifier
from corral.worker.metrics import WorkerMetrics
from corral.worker.status import WorkerStatus
from corral.worker.supervisor.supervisor import Supervisor
from tests.support.supervising import make_supervisor, swept

NODE = "node-1"


class Worksite:
    """What a test holds: the supervisor, the routes, and a client with the controller's tokens."""

    def __init__(self, supervisor: Supervisor, routes: IngressRoutes, ingress: Ingress, signer: Signer) -> None:
        self.supervisor = supervisor
        self.routes = routes
        self.ingress = ingress
        self.signer = signer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ingress.port}"

    def token(self, scope: str = "replicas") -> str:
        claims = {"sub": "gateway", "aud": NODE, "scope": [scope], "exp": int(time.time() + 600)}
        return self.signer.sign(json.dumps(claims).encode())

    def headers(self, scope: str = "replicas") -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token(scope)}"}

    async def ask(
        self, path: str, *, scope: str = "replicas", method: str = "GET", body: Any = None
    ) -> tuple[int, Any]:
        """Status and answer; JSON is read."""
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.url + path, headers=self.headers(scope), json=body) as answer,
        ):
            text = await answer.text()
            return answer.status, json.loads(text) if text[:1] in ("{", "[") else text


@contextlib.asynccontextmanager
async def open_site(folder: Path, tracer: Tracer | None = None, **changed: Any) -> AsyncIterator[Worksite]:
    signer, clock = Signer(Signer.new_private_key()), ServerClock(SystemClock())
    tokens = TokenVerifier(clock.now)
    tokens.trust(signer.public_key, NODE)
    with swept(folder / "processes"):
        async with make_supervisor(folder / "processes", **changed) as supervisor:
            files = LocalFiles(folder / "requests")
            status = WorkerStatus("boot-1", "w1")
            routes = IngressRoutes(
                status, tokens, WorkerMetrics(), supervisor.find, supervisor.logs, files, tracer=tracer
            )
            certificate = IngressCertificate(folder)
            async with Ingress(HostPort("127.0.0.1", 0), routes, tokens, certificate, clock.now) as ingress:
                yield Worksite(supervisor, routes, ingress, signer)
            await supervisor.stop_all(grace_s=0.0, force=True, closing=True)
