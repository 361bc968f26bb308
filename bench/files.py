"""Files on their way: one controller to one worker, the CPU time of the senders, resume, and the swarm, with targets.

    scripts/bench files [--rounds N] [--megabytes N] [--plain-only] [--no-swarm] [--nodes 8 16] [--rate MB/S]

One worker: ours beside `socat | tee | sha256sum`, in turn, as a ratio. Ours is the real listener and the real worker's
side, each in a process of its own: token, verification, fsync and the rename at the end included; the other side is
`socat` to `socat`, with large buffers, whose bytes are written and hashed on the way, and synced. Both use loopback and
the same disk; the median of the rounds counts. The memory of the worker is that with this file beside that with a
quarter of it.

Sending: the CPU time of a controller's listener and of a worker's ingress per Gbit that they send in chunks.

Resume: a worker that is killed with -9 in the middle, and how many bytes are sent again; then the same files ordered
once more, and how many bytes of them are read.

Swarm: `bench/swarm.py` with the highest rate of the links that leaves the machine under 70 % busy (root only).

Targets: docs/explanation/design.md#targets.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import random
import resource
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec
import uvloop

from bench import swarm
from bench.support.blob_senders import (
    NODE,
    Sender,
    core_seconds_per_gbit,
    peer_token,
    sending,
    serve_as_controller,
    serve_as_worker,
)
from corral.blobs.chunks import CHUNK_BYTES
from corral.blobs.store import BlobStore
from corral.blobs.swarm.planner import PlanLimits, SourceKind
from corral.blobs.swarm.rate_limit import RateLimit
from corral.blobs.transfer.remote import open_session
from corral.contract.messages.replicas import ReplicaFile
from corral.controller.access.signing import IngressTokens
from corral.kit.certificates import Ca, make_ca
from corral.kit.clock import SystemClock
from corral.kit.humanize import format_bytes
from corral.kit.log import configure_logging
from corral.kit.signing import Signer
from corral.worker.agent.join.trust import trust_only
from corral.worker.files.fleet_blobs import FleetBlobs
from corral.worker.files.model_files import WorkerFiles

TARGET = 0.8
MAX_CORES_PER_GBIT = 0.3
MAX_MEMORY_GROWTH = 16 << 20  # with four times the file
BLOCK = 1 << 20


class Order(msgspec.Struct, frozen=True):
    """What a worker is to fetch."""

    file: ReplicaFile
    url: str
    token: str
    ca: str = ""
    max_download: float = 0.0


class Fetched(msgspec.Struct, frozen=True):
    took_s: float
    memory_bytes: int  # the most that the process had
    received_bytes: int
    again_s: float  # the same order once more
    again_read_bytes: int  # how much the process read from files meanwhile
    cores_per_gbit: float


def fetch(models: Path, order: Order, pipe: Connection) -> None:
    """The worker's side."""
    configure_logging(role="bench", level="error", json=False)
    received = 0

    def on_received(_kind: SourceKind, count: int) -> None:
        nonlocal received
        received += count

    async def main() -> Fetched:
        clock = SystemClock()
        limit = RateLimit(order.max_download, clock)
        async with open_session(trust=trust_only(order.ca) if order.ca else None, inside=True) as session:
            fleet = FleetBlobs(session, max_download=limit, on_received=on_received)
            files = WorkerFiles(models, fleet, clock)
            began_s, before = time.perf_counter(), _cpu_s()
            await files.ensure([order.file], [order.url], order.token)
            took_s, cpu_s = time.perf_counter() - began_s, _cpu_s() - before
            before_bytes, began_s = _read_bytes(), time.perf_counter()
            await files.ensure([order.file], [order.url], order.token)
            return Fetched(
                took_s,
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                received,
                time.perf_counter() - began_s,
                _read_bytes() - before_bytes,
                cpu_s / max(received * 8 / 1e9, 1e-9),
            )

    pipe.send(uvloop.run(main()))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _read_bytes() -> int:
    """What this process has read so far, also from the page cache and from sockets."""
    return int(Path("/proc/self/io").read_text().splitlines()[0].split()[1])


def start_worker(models: Path, order: Order) -> tuple[BaseProcess, Connection]:
    models.mkdir(exist_ok=True)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=fetch, args=(models, order, there))
    process.start()
    return process, here


def run_worker(folder: Path, order: Order) -> Fetched:
    models = folder / "models"
    shutil.rmtree(models, ignore_errors=True)
    os.sync()
    return _result(*start_worker(models, order))


def _result(process: BaseProcess, pipe: Connection) -> Fetched:
    result: Fetched = pipe.recv()
    process.join()
    return result


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
    roll, whole = random.Random(megabytes), hashlib.sha256()
    path = BlobStore(blobs).folder / "sha256" / "being-made"
    with path.open("wb") as file:
        for _ in range(megabytes):
            block = roll.randbytes(1 << 20)
            file.write(block)
            whole.update(block)
    os.replace(path, path.with_name(whole.hexdigest()))
    return ReplicaFile(f"m/{megabytes}/weights", f"sha256:{whole.hexdigest()}", megabytes << 20)


def make_certificate(folder: Path) -> tuple[Path, Path, str]:
    now = datetime.now(UTC)
    made = make_ca("bench", now)
    issued = Ca(made.certificate_pem, made.key_pem).issue_server(["127.0.0.1"], now, life=timedelta(days=1))
    certificate, key = folder / "crt", folder / "key"
    certificate.write_text(issued.certificate_pem)
    key.write_text(issued.key_pem)
    return certificate, key, made.certificate_pem


def compare(name: str, folder: Path, make_order: Callable[[], Order], rounds: int, target: float = 0.0) -> Fetched:
    """Ours beside socat, in turn."""
    file = make_order().file
    source = folder / "blobs" / "sha256" / file.digest.removeprefix("sha256:")
    ours, theirs = [], []
    for number in range(rounds + 1):
        fetched = run_worker(folder, make_order())
        other = time_socat(source, folder / "theirs")
        if number:  # the first round warms the page cache
            ours.append(fetched)
            theirs.append(other)
    mine, other = statistics.median(each.took_s for each in ours), statistics.median(theirs)
    speeds = [format_bytes(int(file.size_bytes / each)) for each in (mine, other)]
    ratio = other / mine
    aim = _verdict(f" (≥ {target} ×", ratio >= target) if target else " (socat's bytes are not encrypted)"
    line(f"one worker, {name}", f"ours {speeds[0]}/s, socat {speeds[1]}/s: {ratio:.2f} ×{aim}")
    return max(ours, key=lambda each: each.memory_bytes)


def measure_memory(folder: Path, small: Order, large: Fetched, large_bytes: int) -> None:
    few = run_worker(folder, small).memory_bytes
    aim = _verdict(" (flat", large.memory_bytes - few <= MAX_MEMORY_GROWTH)
    line(
        "memory of the worker",
        f"{format_bytes(few)} with {format_bytes(small.file.size_bytes)}, "
        f"{format_bytes(large.memory_bytes)} with {format_bytes(large_bytes)}{aim}",
    )
    line("CPU to receive", f"{large.cores_per_gbit:.2f} core-seconds per Gbit: receive, verify, store")


def measure_senders(folder: Path, controller: Sender, order: Order, signing_key: str, rounds: int) -> None:
    with sending(serve_as_worker, folder / "blobs", signing_key) as worker:
        token = peer_token(signing_key, order.file.digest)
        for name, sender, shown in (("a controller", controller, order.token), ("a worker", worker, token)):
            spent = statistics.median(core_seconds_per_gbit(sender, order.file, shown) for _ in range(rounds))
            aim = _verdict(f" (≤ {MAX_CORES_PER_GBIT}", spent <= MAX_CORES_PER_GBIT)
            line(f"CPU to send, {name}", f"{spent:.2f} core-seconds per Gbit{aim}")


def measure_resume(folder: Path, order: Order) -> None:
    """Killed when half of it is there, at a rate at which requests are open."""
    models = folder / "models"
    shutil.rmtree(models, ignore_errors=True)
    size = order.file.size_bytes
    slow = msgspec.structs.replace(order, max_download=size / 4)
    process, _ = start_worker(models, slow)
    deadline_s = time.monotonic() + 60.0
    while _kept_bytes(models) < size / 2 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    kept = _kept_bytes(models)
    fetched = _result(*start_worker(models, order))
    again = fetched.received_bytes - (size - kept)
    connections = PlanLimits().per_controller
    line(
        "resume after kill -9",
        f"{format_bytes(kept)} of {format_bytes(size)} were verified, {format_bytes(fetched.received_bytes)} received "
        f"afterwards: {again // CHUNK_BYTES} verified chunks again{_verdict(' (0', again <= 0)}; at most "
        f"{connections} requests of one chunk were open",
    )
    aim = _verdict(" (no hash", fetched.again_read_bytes < BLOCK)
    read = format_bytes(fetched.again_read_bytes)
    line("the same order again", f"{fetched.again_s * 1000:.1f} ms, {read} read{aim}")


def _kept_bytes(models: Path) -> int:
    """The verified chunks of a download on the disk."""
    found = 0
    with contextlib.suppress(FileNotFoundError):
        for bitmap in (models / ".blobs" / "incoming").glob("*.have"):
            found += sum(byte.bit_count() for byte in bitmap.read_bytes().partition(b"\n")[2]) * CHUNK_BYTES
    return found


def _verdict(target: str, is_met: bool) -> str:
    return f"{target}: {'met' if is_met else 'MISSED'})"


def line(name: str, text: str) -> None:
    print(f"{name:26} {text}", flush=True)


@contextlib.contextmanager
def controller(folder: Path, signing_key: str, *, tls: bool) -> Iterator[tuple[Sender, str]]:
    certificate, key, ca = make_certificate(folder) if tls else (None, None, "")
    with sending(serve_as_controller, folder / "blobs", signing_key, certificate, key) as sender:
        yield sender, ca


def bench_one_worker(folder: Path, rounds: int, megabytes: int, *, plain_only: bool) -> None:
    large, small = make_blob(folder / "blobs", megabytes), make_blob(folder / "blobs", max(8, megabytes // 4))
    signing_key = Signer.new_private_key()

    def order(file: ReplicaFile, sender: Sender, ca: str = "") -> Order:
        token = IngressTokens(Signer(signing_key), SystemClock()).sign_for_node(NODE, NODE)
        return Order(file, sender.url, token, ca)

    with controller(folder, signing_key, tls=False) as (sender, _):
        fetched = compare("plain", folder, lambda: order(large, sender), rounds, TARGET)
        measure_memory(folder, order(small, sender), fetched, large.size_bytes)
        measure_senders(folder, sender, order(large, sender), signing_key, rounds)
        measure_resume(folder, order(small, sender))
    if not plain_only:
        with controller(folder, signing_key, tls=True) as (sender, ca):
            compare("TLS", folder, lambda: order(large, sender, ca), rounds)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--rounds", type=int, default=5)
    asked.add_argument("--megabytes", type=int, default=1024)
    asked.add_argument("--folder", type=Path, default=None, help="where to write; the disk matters")
    asked.add_argument("--plain-only", action="store_true", help="without the round over TLS")
    asked.add_argument("--no-swarm", action="store_true", help="one worker only")
    asked.add_argument("--nodes", type=int, nargs="+", default=[8, 16], help="sizes of the swarm")
    asked.add_argument("--rate", type=float, default=20.0, help="MB/s of each link of the swarm at most")
    options = asked.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        bench_one_worker(Path(name), options.rounds, options.megabytes, plain_only=options.plain_only)
    if options.no_swarm:
        return
    if os.geteuid() != 0:
        line("swarm", "left out: network namespaces need root")
        return
    swarm.bench_at_highest_rate(options.nodes, options.rate)


if __name__ == "__main__":
    main()
