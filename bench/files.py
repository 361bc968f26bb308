"""A model's file from a controller to a worker: ours beside `socat | tee | sha256sum`, in turn, as ratios.

    scripts/bench files [--rounds N] [--megabytes N] [--plain-only]

Ours is the real listener and the real worker's side, each in a process of its own: token, verification, fsync and the
rename at the end included; the other side is `socat` to `socat`, with large buffers, whose bytes are written and hashed
on the way, and synced. Both use loopback and the same disk; the median of the rounds counts. Target: at least 0.8 ×
(docs/explanation/design.md#targets), and memory that does not grow with the file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import multiprocessing
import os
import random
import resource
import shlex
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from corral.blobs.store import BlobStore
from corral.blobs.transfer.remote import open_session
from corral.contract.messages.replicas import ReplicaFile
from corral.controller.access.signing import IngressTokens
from corral.controller.files.blob_listener import open_blob_listener
from corral.controller.settings import FileSettings
from corral.kit.certificates import Ca, make_ca
from corral.kit.clock import SystemClock
from corral.kit.humanize import format_bytes
from corral.kit.log import configure_logging
from corral.kit.signing import Signer
from corral.worker.agent.join.trust import trust_only
from corral.worker.files.fleet_blobs import FleetBlobs
from corral.worker.files.model_files import WorkerFiles

TARGET = 0.8
BLOCK = 1 << 20


class BenchNode:
    """The node that fetches is there all the time."""

    def is_current(self, _node_id: str, _credential: str) -> bool:
        return True

    ask = is_current


def serve(blobs: Path, signing_key: str, pipe: Connection, certificate: Path | None, key: Path | None) -> None:
    """The controller's side, until the pipe is closed."""
    configure_logging(role="bench", level="error", json=False)

    async def main() -> None:
        clock = SystemClock()
        settings = FileSettings(blob_port=0, blob_tls_cert=certificate, blob_tls_key=key)
        public = Signer(signing_key).public_key
        async with open_blob_listener(
            settings, BlobStore(blobs), public, clock, BenchNode(), is_expected=lambda _digest: False
        ) as url:
            pipe.send(url)
            await asyncio.to_thread(pipe.recv)

    uvloop.run(main())


def fetch(models: Path, file: ReplicaFile, url: str, token: str, ca: str, pipe: Connection) -> None:
    """The worker's side. Tells how long it took, and the most memory it had."""
    configure_logging(role="bench", level="error", json=False)

    async def main() -> float:
        async with open_session(trust=trust_only(ca) if ca else None, inside=True) as session:
            files = WorkerFiles(models, FleetBlobs(session), SystemClock())
            began = time.perf_counter()
            await files.ensure([file], [url], token)
            return time.perf_counter() - began

    took = uvloop.run(main())
    pipe.send((took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


@contextlib.contextmanager
def serving(blobs: Path, signing_key: str, certificate: Path | None, key: Path | None) -> Iterator[str]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(blobs, signing_key, there, certificate, key)
    )
    process.start()
    try:
        yield here.recv()
    finally:
        here.send(None)
        process.join(10)


def time_ours(folder: Path, file: ReplicaFile, url: str, token: str, ca: str) -> tuple[float, int]:
    models = folder / "models"
    shutil.rmtree(models, ignore_errors=True)
    models.mkdir()
    os.sync()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=fetch, args=(models, file, url, token, ca, there))
    process.start()
    took: float
    memory: int
    took, memory = here.recv()
    process.join()
    return took, memory


def time_socat(source: Path, target: Path) -> float:
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    target.unlink(missing_ok=True)
    os.sync()
    sender = subprocess.Popen(
        ["socat", "-b", str(BLOCK), "-u", f"FILE:{source}", f"TCP-LISTEN:{port},bind=127.0.0.1,reuseaddr"]
    )
    receive = f"socat -b {BLOCK} -u TCP:127.0.0.1:{port},retry=50,interval=0.02 -"
    written = shlex.quote(str(target))
    began = time.perf_counter()
    subprocess.run(f"{receive} | tee {written} | sha256sum > /dev/null && sync {written}", shell=True, check=True)
    took = time.perf_counter() - began
    sender.wait()
    return took


def make_blob(blobs: Path, megabytes: int) -> ReplicaFile:
    roll, whole = random.Random(1), hashlib.sha256()
    path = BlobStore(blobs).folder / "sha256" / "being-made"
    with path.open("wb") as file:
        for _ in range(megabytes):
            block = roll.randbytes(1 << 20)
            file.write(block)
            whole.update(block)
    os.replace(path, path.with_name(whole.hexdigest()))
    return ReplicaFile("m/set/weights", f"sha256:{whole.hexdigest()}", megabytes << 20)


def make_certificate(folder: Path) -> tuple[Path, Path, str]:
    now = datetime.now(UTC)
    made = make_ca("bench", now)
    issued = Ca(made.certificate_pem, made.key_pem).issue_server(["127.0.0.1"], now, life=timedelta(days=1))
    certificate, key = folder / "crt", folder / "key"
    certificate.write_text(issued.certificate_pem)
    key.write_text(issued.key_pem)
    return certificate, key, made.certificate_pem


def measure(name: str, folder: Path, file: ReplicaFile, rounds: int, *, tls: bool) -> float:
    certificate, key, ca = make_certificate(folder) if tls else (None, None, "")
    signing_key = Signer.new_private_key()
    token = IngressTokens(Signer(signing_key), SystemClock()).sign_for_node("bench", "bench")
    source = folder / "blobs" / "sha256" / file.digest.removeprefix("sha256:")
    ours, theirs, most = [], [], 0
    with serving(folder / "blobs", signing_key, certificate, key) as url:
        for number in range(rounds + 1):
            took, memory = time_ours(folder, file, url, token, ca)
            other = time_socat(source, folder / "theirs")
            if number:  # the first round warms the page cache
                ours.append(took)
                theirs.append(other)
                most = max(most, memory)
    mine, other = statistics.median(ours), statistics.median(theirs)
    speeds = [format_bytes(int(file.size_bytes / each)) for each in (mine, other)]
    print(
        f"{name:10} ours {speeds[0]}/s   socat {speeds[1]}/s   ratio {other / mine:5.2f} ×   {format_bytes(most)} held"
    )
    return other / mine


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--rounds", type=int, default=5)
    asked.add_argument("--megabytes", type=int, default=1024)
    asked.add_argument("--folder", type=Path, default=None, help="where to write; the disk matters")
    asked.add_argument("--plain-only", action="store_true", help="without the round over TLS")
    options = asked.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        file = make_blob(folder / "blobs", options.megabytes)
        ratio = measure("plain", folder, file, options.rounds, tls=False)
        if not options.plain_only:
            measure("TLS", folder, file, options.rounds, tls=True)  # socat's bytes still go in clear
    print(f"{ratio:.2f} × socat | tee | sha256sum; target ≥ {TARGET} ×: {'met' if ratio >= TARGET else 'MISSED'}")


if __name__ == "__main__":
    main()
