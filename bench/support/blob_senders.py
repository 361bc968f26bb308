"""A controller's blob listener and a worker's ingress, each in a process of its own, that send one file in chunks; and
the CPU time that this takes them."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
import uvloop

from corral.blobs.chunks import CHUNK_BYTES
from corral.blobs.store import BlobStore
from corral.blobs.swarm.rate_limit import RateLimit
from corral.contract.access import Scope
from corral.contract.messages.replicas import ReplicaFile
from corral.controller.access.signing import IngressTokens
from corral.controller.files.blob_listener import open_blob_listener
from corral.controller.settings.models import FileSettings
from corral.inference.request_files import LocalFiles
from corral.kit.clock import SystemClock
from corral.kit.log import configure_logging
from corral.kit.signing import Signer
from corral.relay import RelayServer
from corral.worker.files.blob_exchange import RevokedNodes
from corral.worker.files.served_blobs import ServedBlobs
from corral.worker.ingress.blobs import BlobRoutes
from corral.worker.ingress.routes import IngressRoutes
from corral.worker.ingress.tokens import TokenVerifier
from corral.worker.metrics import WorkerMetrics
from corral.worker.status import WorkerStatus
from corral.worker.supervisor.logs import LogBook
from tests.support.network import Machine

NODE = "bench"
CONNECTIONS = 4
Serve = Callable[..., None]


class _Member:
    """The node that fetches is there all the time."""

    def is_current(self, _node_id: str, _credential: str) -> bool:
        return True

    ask = is_current


@dataclass(frozen=True)
class Sender:
    url: str
    pipe: Connection

    def cpu_s(self) -> float:
        """Core-seconds of the process so far."""
        self.pipe.send("cpu")
        spent: float = self.pipe.recv()
        return spent


def serve_as_controller(
    pipe: Connection,
    blobs: Path,
    signing_key: str,
    certificate: Path | None,
    key: Path | None,
    host: str = "127.0.0.1",
) -> None:
    async def main() -> None:
        settings = FileSettings(blob_port=0, blob_host=host, blob_tls_cert=certificate, blob_tls_key=key)
        public = Signer(signing_key).public_key
        async with open_blob_listener(
            settings, BlobStore(blobs), public, SystemClock(), _Member(), is_expected=lambda _digest: False
        ) as url:
            await _answer(pipe, url)

    configure_logging(role="bench", level="error", json=False)
    uvloop.run(main())


def serve_as_worker(pipe: Connection, blobs: Path, signing_key: str, host: str = "127.0.0.1") -> None:
    async def main() -> None:
        tokens = TokenVerifier(time.time)
        tokens.trust(Signer(signing_key).public_key, NODE)
        served = ServedBlobs()
        served.add_store(BlobStore(blobs))
        routes = BlobRoutes(served, tokens, RevokedNodes(), RateLimit(0, SystemClock()), lambda _count: None)
        with tempfile.TemporaryDirectory() as folder:
            ingress = IngressRoutes(
                WorkerStatus("boot", NODE),
                tokens,
                WorkerMetrics(),
                lambda _id: None,
                LogBook(),
                LocalFiles(Path(folder)),
                routes,
            )
            server = RelayServer(ingress)
            port = await server.listen(host, 0)
            await _answer(pipe, f"http://{host}:{port}")
            await server.drain(0.1)

    configure_logging(role="bench", level="error", json=False)
    uvloop.run(main())


async def _answer(pipe: Connection, url: str) -> None:
    """Until the other end says None."""
    pipe.send(url)
    while await asyncio.to_thread(pipe.recv) is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(used.ru_utime + used.ru_stime)


@contextlib.contextmanager
def sending(serve: Serve, *args: object, on: Machine | None = None) -> Iterator[Sender]:
    """`on` None: this machine."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there, *args))
    if on is None:
        process.start()
    else:
        on.run(process.start)
    try:
        yield Sender(here.recv(), here)
    finally:
        here.send(None)
        process.join(10)


def peer_token(signing_key: str, digest: str) -> str:
    """What a controller gives a worker for one blob of another worker."""
    tokens = IngressTokens(Signer(signing_key), SystemClock())
    return tokens.sign("asker", [Scope.BLOBS], aud=NODE, digests=(digest,))


def core_seconds_per_gbit(sender: Sender, file: ReplicaFile, token: str) -> float:
    """What sending the file takes, in chunks over several connections, as the swarm requests it."""
    before = sender.cpu_s()
    received = asyncio.run(_receive(f"{sender.url}/blobs/{file.digest}", file.size_bytes, token))
    assert received == file.size_bytes, f"{received} of {file.size_bytes} bytes"
    return (sender.cpu_s() - before) / (received * 8 / 1e9)


async def _receive(url: str, size: int, token: str) -> int:
    starts = iter(range(0, size, CHUNK_BYTES))

    async def receive_chunks(session: aiohttp.ClientSession) -> int:
        received = 0
        for start in starts:
            span = f"bytes={start}-{min(size, start + CHUNK_BYTES) - 1}"
            headers = {"Authorization": f"Bearer {token}", "Range": span}
            async with session.get(url, headers=headers) as response:
                assert response.status == 206, await response.text()
                async for piece in response.content.iter_any():
                    received += len(piece)
        return received

    async with aiohttp.ClientSession() as session:
        return sum(await asyncio.gather(*(receive_chunks(session) for _ in range(CONNECTIONS))))
