"""A gateway with 1, 2 and 4 processes: how many requests a second, and what each further process brings.

    scripts/bench processes [--processes 1 2 4] [--seconds 5] [--rounds 3] [--connections 256] [--helpers 5]

Needs nothing but the runtime packages: controller, ingresses and clients are Python processes of this bench
(`--helpers` ingresses and as many processes of clients), so that neither of them is the limit on a machine with 16
cores. The gateway is the real one, `--processes N`, with keys, choice among a replica on each ingress, and receipts.
Counts take turns, medians are shown. Target: 1.8 times as many requests with two processes as with one. On fewer cores
than there are processes in all, the ratios mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.support.systems import HERE, free_port, running
from bench.support.traffic import KEY, MODEL

FLEET = [sys.executable, str(HERE / "process_fleet.py")]
GATEWAY_KEY = "ck_" + "g" * 52
RUN = """
import os, sys
from corral.gateway.main import run
from corral.gateway.settings import GatewaySettings
from corral.kit.settings import read_settings
sys.exit(run(read_settings(GatewaySettings, flags={}, env=os.environ)))
"""
TARGET = "≥ 1.8"


@dataclass
class Figures:
    rates: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    faults: int = 0


def view_of(ports: list[int]) -> str:
    nodes = [
        {"id": f"n{port}", "name": f"n{port}", "status": "healthy", "ingress_url": f"http://127.0.0.1:{port}"}
        for port in ports
    ]
    replicas = [
        {"process_id": f"p{port}", "node_id": f"n{port}", "model": MODEL, "revision": "r1", "slots": 4096}
        for port in ports
    ]
    key = {"id": "k1", "secret_hash": hashlib.sha256(KEY.encode()).hexdigest(), "role": "inference"}
    models = [{"id": MODEL, "revision": "r1"}]
    return json.dumps({"revision": 1, "keys": [key], "nodes": nodes, "models": models, "replicas": replicas})


@contextlib.contextmanager
def fleet(root: Path, helpers: int) -> Iterator[Path]:
    """The controller's socket."""
    ports = [free_port() for _ in range(helpers)]
    view, socket = root / "view.json", root / "c.sock"
    view.write_text(view_of(ports))
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(running([*FLEET, "ingress", str(port)], port, root / "ingress.log"))
        controller = subprocess.Popen([*FLEET, "controller", str(socket), str(view)])
        stack.callback(controller.wait)
        stack.callback(controller.terminate)
        _wait_until(socket.exists, "the controller")
        yield socket


@contextlib.contextmanager
def gateway(root: Path, socket: Path, processes: int) -> Iterator[tuple[int, psutil.Process]]:
    port = free_port()
    env = {
        **os.environ,
        "CORRAL_CONTROLLER": f"unix:{socket}",
        "CORRAL_GATEWAY_KEY": GATEWAY_KEY,
        "CORRAL_PORT": str(port),
        "CORRAL_PROCESSES": str(processes),
        "CORRAL_HINTS": "false",
        "CORRAL_LOG_LEVEL": "warning",
    }
    with (root / "gateway.log").open("ab") as log:
        started = subprocess.Popen([sys.executable, "-c", RUN], env=env, stdout=log, stderr=log)
    try:
        process = psutil.Process(started.pid)
        _wait_until(lambda: _is_ready(port) and len(process.children()) >= processes * (processes > 1), "the gateway")
        time.sleep(4)  # until each has settled its memory
        yield port, process
    finally:
        started.terminate()
        started.wait(60)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _wait_until(is_so: object, what: str) -> None:
    assert callable(is_so)
    deadline = time.monotonic() + 60
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not start")
        time.sleep(0.05)


def measure(root: Path, socket: Path, processes: int, chosen: argparse.Namespace, figures: Figures) -> None:
    with gateway(root, socket, processes) as (port, process):
        each = max(1, chosen.connections // chosen.helpers)
        before_s = _cpu_s(process)
        command = [*FLEET, "clients", str(port), str(each), str(chosen.seconds)]
        clients = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(chosen.helpers)]
        results = [json.loads(client.communicate(timeout=chosen.seconds + 60)[0]) for client in clients]
        spent_s = _cpu_s(process) - before_s
    answers = sum(result[0] for result in results)
    latencies = sorted(one for result in results for one in result[2])
    figures.rates.append(answers / chosen.seconds)
    figures.cpu_us.append(spent_s / max(1, answers) * 1e6 * chosen.seconds / (chosen.seconds + 1))  # less the warm-up
    figures.p50_ms.append(1000 * latencies[len(latencies) // 2] if latencies else 0.0)
    figures.p99_ms.append(1000 * latencies[len(latencies) * 99 // 100] if latencies else 0.0)
    figures.faults += sum(result[1] for result in results)


def _cpu_s(process: psutil.Process) -> float:
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(spent.user + spent.system for spent in times))


def show(found: dict[int, Figures], chosen: argparse.Namespace) -> None:
    counts = sorted(found)
    alone = statistics.median(found[counts[0]].rates)
    print(f"{chosen.connections} connections, {chosen.helpers} ingresses, {os.cpu_count()} cores")
    print(f"| processes | req/s | × of {counts[0]} | target | CPU per request | p50 | p99 | faults |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for count in counts:
        one = found[count]
        rate = statistics.median(one.rates)
        target = TARGET if count == 2 and counts[0] == 1 else ""
        print(
            f"| {count} | {rate:,.0f} | {rate / alone:.2f} | {target} | {statistics.median(one.cpu_us):.1f} µs "
            f"| {statistics.median(one.p50_ms):.2f} ms | {statistics.median(one.p99_ms):.2f} ms | {one.faults} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], help="of the gateway")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each single measurement")
    parser.add_argument("--rounds", type=int, default=3, help="each count takes its turn so often")
    parser.add_argument("--connections", type=int, default=256, help="of all clients together")
    parser.add_argument("--helpers", type=int, default=5, help="ingresses, and processes of clients")
    chosen = parser.parse_args()
    found = {count: Figures() for count in chosen.processes}
    with tempfile.TemporaryDirectory(prefix="cb-") as folder, fleet(Path(folder), chosen.helpers) as socket:
        for _ in range(chosen.rounds):
            for count, figures in found.items():
                measure(Path(folder), socket, count, chosen, figures)
    show(found, chosen)


if __name__ == "__main__":
    main()
