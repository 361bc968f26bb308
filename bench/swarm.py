"""A model's file from one controller to many workers that feed each other, over links with a rate.

    scripts/bench swarm [--nodes 1 8 16] [--megabytes 200] [--rate 20] [--rounds 1] [--tls] [--keep-log FOLDER]

`scripts/bench files` runs it with the highest rate that leaves the machine under 70 % busy.

Every machine is a network namespace on one switch (root only), and `tc tbf` limits each direction of each link. The
fleet is the real one: `corral up` on one machine, `corral join` on each of the others, and an origin on the switch. The
controller fetches each file first; a time runs from the request to stage until the operation shows the node as done. A
round stages one file to each number of nodes; each file is new.

Prints per number of nodes: the slowest node's time as a ratio to that of one node alone, the 99th percentile beside the
median, the bytes that the controller's machine sent and the origin sent as ratios to the file, the core-seconds of all
our processes per Gbit (more than they take idle, which is printed too; of the controller per Gbit that it sent, of the
workers per Gbit that arrived), and the share of the link's rate that the median node got. Targets: 8 nodes ≤ 1.5 ×,
16 nodes ≤ 1.7 ×, controller ≤ 1.5 ×, origin ≤ 1.02 ×, p99 ≤ 1.8 × p50, and more than the 50 % of the link rate that
Kraken publishes. The ratios mean something only while the machine has CPU to spare: above 70 % use a lower --rate.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import itertools
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.fleet import quantile
from bench.support.star_network import Star, star
from corral.kit.humanize import format_bytes
from tests.support.fleet import Answer, Fleet
from tests.support.network import Machine
from tests.support.processes import CORRAL, Process, clean_env
from tests.support.waiting import wait_for

MIB = 1 << 20
KRAKEN_SHARE = 0.5  # https://github.com/uber/kraken: "more than 50 % of max download speed limit", 3 GB to 2,600 hosts
MAX_CPU = 0.7
TARGETS = {8: 1.5, 16: 1.7}
POLL_S = 0.25
PROBE_BYTES = 32_000_000
MIN_RATE = 2.0  # MB/s
INSTALL_RATE = 100e6  # the controller's download is not measured
SETTLE_S = 4.0  # then the fleet is idle, and its CPU time is subtracted


class Origin:
    """Files of random bytes on the switch, and how many bytes of them were sent."""

    def __init__(self, machine: Machine, size: int) -> None:
        self.sent_bytes = 0
        self.size = size  # of each file
        self._machine = machine
        self._server: http.server.ThreadingHTTPServer | None = None

    def url(self, number: int) -> str:
        assert self._server is not None
        return f"http://{self._machine.address}:{self._server.server_address[1]}/{number}.gguf"

    @contextlib.contextmanager
    def serving(self) -> Iterator[Origin]:
        origin = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self._head()

            def do_GET(self) -> None:
                self._head()
                roll, left = random.Random(self.path), origin.size
                while left:
                    piece = roll.randbytes(min(left, MIB))
                    self.wfile.write(piece)
                    left -= len(piece)
                    origin.sent_bytes += len(piece)

            def _head(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(origin.size))
                self.send_header("ETag", f'"{self.path}"')
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Prints nothing."""

        def listen() -> http.server.ThreadingHTTPServer:
            return http.server.ThreadingHTTPServer((self._machine.address, 0), Handler)

        self._server = self._machine.run(listen)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()


class FleetOnStar(Fleet):
    """`corral up` on the first machine of the network, and a worker on each of the others."""

    def __init__(self, root: Path, network: Star, *options: str) -> None:
        super().__init__(root, "--lan", "--no-worker", *options)
        # The usual intervals, not the short ones of tests; and nothing is asked of the world outside.
        self.env = clean_env(root / "home", CORRAL_GALLERIES="[]", CORRAL_MODEL_GALLERIES="[]")
        self.network = network
        self.machine = network.add()
        self.prefix = self.machine.prefix

    def http(self, method: str, path: str, *, key: str = "", body: object = None) -> Answer:
        ask = super().http
        return self.machine.run(lambda: ask(method, path, key=key, body=body))

    def bring(self, name: str, labels: str) -> None:
        made = self.api("POST", "/api/tokens", {"name": name, "pre_approved": True}).json()
        line = str(made["join_command"]).split()
        machine = self.network.add()
        words = (*line[1:], "--name", name, "--port", "0", "--labels", labels)
        env = clean_env(self.root / "home", **{key: value for key, value in self.env.items() if "CORRAL" in key})
        env["CORRAL_DATA"] = str(self.root / f"worker-{name}")
        log = self.root / f"worker-{name}.log"
        self.workers[name] = Process((*machine.prefix, *CORRAL, *words), env, log)

    def cpu_s(self) -> tuple[float, float]:
        """Core-seconds so far: of `corral up` with all its processes, and of all workers."""
        assert self.up is not None
        return _cpu_s([self.up.pid]), _cpu_s([worker.pid for worker in self.workers.values()])


def _cpu_s(pids: Sequence[int]) -> float:
    found = 0.0
    for pid in pids:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                spent = process.cpu_times()
                found += spent.user + spent.system
    return found


@dataclass(frozen=True)
class Result:
    nodes: int
    file_bytes: int
    times_s: list[float]
    controller_bytes: int
    origin_bytes: int
    controller_cpu_s: float
    worker_cpu_s: float
    idle_cores: tuple[float, float]  # of the controller, and of all workers, before the transfer
    machine_cpu: float  # 0 to 1
    peer_bytes: int

    @property
    def slowest_s(self) -> float:
        return max(self.times_s)


def stage(fleet: FleetOnStar, origin: Origin, number: int, nodes: int) -> Result:
    """One new file to so many nodes."""
    name, size = f"m{number}", origin.size
    before_origin = origin.sent_bytes
    definition = f"name: {name}\nbackend: mock\nparameters: {{model: {origin.url(number)}}}\n"
    path = fleet.root / f"{name}.yaml"
    path.write_text(definition)
    with fleet.network.at_rate(INSTALL_RATE):
        installed = fleet.cli("models", "install", "--file", str(path), timeout_s=300)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    idle = fleet.cpu_s()
    time.sleep(SETTLE_S)
    controller_cpu, worker_cpu = fleet.cpu_s()
    idle_per_s = (controller_cpu - idle[0]) / SETTLE_S, (worker_cpu - idle[1]) / SETTLE_S
    sent, machine = fleet.network.sent_bytes(fleet.machine), psutil.cpu_times()
    began_s = time.monotonic()
    answer = fleet.api("POST", f"/api/models/{name}/stage", {"selector": f"n{nodes}=yes"})
    assert answer.status == 202, answer.body
    operation = answer.json()["jobID"]
    done: dict[str, float] = {}
    view: dict[str, Any] = {}
    while len(done) < nodes:
        view = fleet.api("GET", f"/api/operations/{operation}").json()
        now_s = time.monotonic() - began_s
        for row in view["nodes"]:
            assert row["status"] != "error", row
            if row["status"] == "success":
                done.setdefault(row["node_name"], now_s)
        time.sleep(POLL_S)
    took_s = time.monotonic() - began_s
    busy, every = _busy(machine, psutil.cpu_times())
    now_controller, now_worker = fleet.cpu_s()
    peers = sum(sum(row["sources"].values()) - row["sources"].get("controller", 0) for row in view["nodes"])
    result = Result(
        nodes,
        size,
        sorted(done.values()),
        fleet.network.sent_bytes(fleet.machine) - sent,
        origin.sent_bytes - before_origin,
        max(0.0, now_controller - controller_cpu - took_s * idle_per_s[0]),
        max(0.0, now_worker - worker_cpu - took_s * idle_per_s[1]),
        idle_per_s,
        busy / every,
        peers,
    )
    assert fleet.cli("models", "delete", name, "--yes", timeout_s=120).returncode == 0
    return result


def _busy(before: Any, after: Any) -> tuple[float, float]:
    spent = [late - early for early, late in zip(before, after, strict=True)]
    every = sum(spent[:8])  # guest time is counted in user time
    return every - spent[3] - spent[4], every


def show(result: Result, alone_s: float, rate: float) -> None:
    size = result.file_bytes
    gbit, sent_gbit = result.nodes * size * 8 / 1e9, result.controller_bytes * 8 / 1e9
    p50, p99 = statistics.median(result.times_s), quantile(result.times_s, 0.99)
    slowest = result.slowest_s / alone_s
    target = TARGETS.get(result.nodes)
    verdict = "" if target is None else f" (≤ {target}: {'met' if slowest <= target else 'MISSED'})"
    print(f"{result.nodes:3} nodes  slowest {result.slowest_s:6.1f} s = {slowest:4.2f} × one node{verdict}")
    print(f"           p50 {p50:.1f} s, p99 {p99:.1f} s: {p99 / p50:.2f} × (≤ 1.8)")
    print(
        f"           sent by the controller {result.controller_bytes / size:.2f} × the file (≤ 1.5), by the origin "
        f"{result.origin_bytes / size:.2f} × (≤ 1.02), by peers {format_bytes(result.peer_bytes)}"
    )
    print(
        f"           core-seconds: controller {result.controller_cpu_s / sent_gbit:.2f} per Gbit that it sent, "
        f"workers {result.worker_cpu_s / gbit:.2f} per Gbit that arrived, to receive and to send it (apart: "
        f"scripts/bench link); idle, not counted: controller {result.idle_cores[0]:.1%} of a core, all workers "
        f"{result.idle_cores[1]:.1%}; machine {result.machine_cpu:.0%} busy"
        + ("" if result.machine_cpu <= MAX_CPU else f", more than {MAX_CPU:.0%}: a lower rate would say more")
    )
    print(
        f"           share of the link rate at the median node: {size / p50 / rate:.0%} (Kraken: > {KRAKEN_SHARE:.0%})"
    )


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 16])
    asked.add_argument("--megabytes", type=int, default=200)
    asked.add_argument("--rate", type=float, default=20.0, help="MB/s of each link, in each direction")
    asked.add_argument("--rounds", type=int, default=1)
    asked.add_argument("--tls", action="store_true")
    asked.add_argument("--keep-log", type=Path, default=None, help="folder for the logs of all processes")
    options = asked.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root")
    size, rate = options.megabytes * 1_000_000, options.rate * 1e6
    print(f"{options.megabytes} MB over links of {options.rate:g} MB/s; {os.cpu_count()} cores")
    results: dict[int, list[Result]] = {}
    with open_fleet(options.nodes, rate, size, tls=options.tls, log_folder=options.keep_log) as (fleet, origin):
        for turn in range(options.rounds):
            for place, nodes in enumerate(options.nodes):
                result = stage(fleet, origin, turn * len(options.nodes) + place, nodes)
                results.setdefault(nodes, []).append(result)
                alone_s = statistics.median(each.slowest_s for each in results[min(results)])
                show(result, alone_s, rate)


@contextlib.contextmanager
def open_fleet(
    sizes: Sequence[int], rate: float, file_bytes: int, *, tls: bool = False, log_folder: Path | None = None
) -> Iterator[tuple[FleetOnStar, Origin]]:
    """A controller, as many workers as the largest of `sizes`, and an origin; `rate` in bytes per second."""
    with tempfile.TemporaryDirectory() as folder, star(rate) as network:
        root = log_folder or Path(folder)
        root.mkdir(exist_ok=True)
        fleet = FleetOnStar(root, network, *(() if tls else ("--plain",)))
        try:
            fleet.start()
            for number in range(max(sizes)):
                labels = ",".join(f"n{count}=yes" for count in sizes if number < count)
                fleet.bring(f"node{number}", labels)
            wait_for(lambda: len(_healthy(fleet)) == max(sizes), "healthy workers", 240)
            with Origin(network.switch, file_bytes).serving() as origin:
                yield fleet, origin
        finally:
            fleet.close()


def bench_at_highest_rate(sizes: Sequence[int], rate: float, megabytes: int = 200) -> None:
    """For each size of the swarm: halve the rate (MB/s) until the machine stays under 70 % busy, first with a small
    file, then with the file itself, which is staged to one node and to all of them."""
    alone_s: dict[float, float] = {}
    numbers = itertools.count()
    with open_fleet([1, *sizes], rate * 1e6, PROBE_BYTES) as (fleet, origin):

        def stage_at_rate(file_bytes: int, nodes: int) -> Result:
            fleet.network.set_rate(rate * 1e6)
            origin.size = file_bytes
            return stage(fleet, origin, next(numbers), nodes)

        for nodes in sizes:
            while stage_at_rate(PROBE_BYTES, nodes).machine_cpu > MAX_CPU and rate > MIN_RATE:
                rate = max(MIN_RATE, rate / 2)
            while True:
                print(f"swarm of {nodes}: {megabytes} MB over links of {rate:g} MB/s", flush=True)
                if rate not in alone_s:
                    alone_s[rate] = stage_at_rate(megabytes * 1_000_000, 1).slowest_s
                result = stage_at_rate(megabytes * 1_000_000, nodes)
                show(result, alone_s[rate], rate * 1e6)
                if result.machine_cpu <= MAX_CPU or rate <= MIN_RATE:
                    break
                rate = max(MIN_RATE, rate / 2)


def _healthy(fleet: Fleet) -> list[str]:
    return [name for name, node in fleet.nodes().items() if node["status"] == "healthy"]


if __name__ == "__main__":
    main()
