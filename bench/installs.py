"""What an install costs the controller: on 1, 10, 100 and 1,000 simulated workers over a real NATS server.

    scripts/bench installs [--sizes 1,10,100,1000] [--store postgresql] [--seconds 20]

Every worker accepts at once, tells its progress four times a second and is done after 2 ± 1 s (drawn by a seed). A
person watches over the gateway, as `corral backends install` does. An operation takes from asking until its end is
written down; the ratio is that to the time of the slowest worker. Targets: 1.1 at 100 nodes, 1.2 at 1,000.

Then 1,000 nodes that tell progress for long: the controller's CPU with and without a watcher (target: half a core), how
often the watcher hears of it (target: 4 a second), and how long lists take meanwhile (target: 100 ms p99). CPU is the
controller's own user+system time; it counts on a busy machine too, where the ratios say little.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from bench.fleet import add_nodes, cpu_seconds, new_ids, quantile
from bench.support.simulated_workers import BOOT_ID
from corral.store import open_store
from corral.store.tables import node_backends, nodes
from tests.support.cluster import Cluster
from tests.support.fleet import SHORT
from tests.support.fleet import http as ask
from tests.support.postgres import running_postgres
from tests.support.processes import Process
from tests.support.waiting import wait_for

MEAN_S, SPREAD_S = 2.0, 1.0
TARGETS = {100: 1.1, 1000: 1.2}
WORKERS = Path(__file__).parent / "support" / "simulated_workers.py"


def draw_seconds(count: int, mean_s: float, spread_s: float, seed: int = 1) -> list[float]:
    roll = random.Random(seed)
    return [roll.uniform(mean_s - spread_s, mean_s + spread_s) for _ in range(count)]


def peak_mb(process: psutil.Process) -> float:
    """The most memory it ever had."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


class Watcher:
    """Follows one operation as a person's CLI does, and notes when it heard something. It reads no more of it than it
    must: it shares the machine with what is measured."""

    def __init__(self, url: str, key: str, operation_id: str) -> None:
        self.heard_at: list[float] = []
        self.ended = threading.Event()
        place = urlsplit(url)
        self._connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
        path = f"/api/operations/{operation_id}/events"
        self._connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._connection.sock is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(2)
        self._thread.join(10)
        self._connection.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            stream = self._connection.getresponse()
            for line in stream:
                if line.startswith(b"data: "):
                    self.heard_at.append(time.monotonic())
                    if b'"finished_at":' in line:
                        self.ended.set()
                        return


@dataclass
class Site:
    """A controller of its own with so many nodes, and what plays them."""

    cluster: Cluster
    workers: Process
    slowest_s: float
    count: int

    @property
    def url(self) -> str:
        return self.cluster.members[0].url

    @property
    def told(self) -> int:
        """Events of progress so far."""
        return int(self.workers.output().split()[-1])

    @property
    def controller(self) -> psutil.Process:
        process = self.cluster.members[0].controller
        assert process is not None
        return psutil.Process(process.pid)

    def install(self) -> str:
        folder = self.cluster.root / "own"
        folder.mkdir()
        (folder / "run.sh").touch()
        body = {"uri": str(folder), "name": "own"}
        asked = ask("POST", self.url + "/api/operations", key=self.cluster.key, body=body)
        assert asked.status == 202, asked.body
        return str(asked.json()["jobID"])


@contextlib.contextmanager
def site(count: int, store_url: str, mean_s: float, spread_s: float) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="corral-bench-") as name:
        root = Path(name)
        cluster = Cluster(root, store_url or f"sqlite:///{root}/corral.db", members=1)
        for setting in SHORT:  # the defaults are what people run
            del cluster.env[setting]
        cluster.env["CORRAL_GALLERIES"] = "[]"
        workers = None
        try:
            cluster.start()
            ids, seconds = new_ids(count), draw_seconds(count, mean_s, spread_s)
            fleet = root / "fleet.json"
            fleet.write_text(json.dumps(dict(zip(ids, seconds, strict=True))))
            command = (sys.executable, str(WORKERS), cluster.bus_url, str(cluster.secrets / "bus"), str(fleet))
            workers = Process(command, cluster.env, root / "workers.log")
            wait_for(lambda: "told" in workers.output(), "workers")
            asyncio.run(add_nodes(cluster.store_url, ids, BOOT_ID))
            wait_for(lambda: asyncio.run(_ready(cluster.store_url)) == count, "inventory of every node", 60)
            time.sleep(3)  # whatever that set in motion is none of the install's cost
            yield Site(cluster, workers, max(seconds), count)
        finally:
            if workers is not None:
                workers.kill()
            cluster.close()


async def _ready(store_url: str) -> int:
    """How many nodes could be given an order."""
    async with open_store(store_url) as store, store.read() as tx:
        told = {row.node_id: row.boot_id for row in await node_backends.list_(tx)}
        shown = await nodes.list_outlines(tx)
        return sum(row.status == "healthy" and bool(row.boot_id) and told.get(row.id) == row.boot_id for row in shown)


def bench_install(count: int, store_url: str) -> None:
    with site(count, store_url, MEAN_S, SPREAD_S) as here:
        quiet_mb, before = peak_mb(here.controller), cpu_seconds(here.controller)
        asked_at, started = time.time(), time.monotonic()
        operation_id = here.install()
        watcher = Watcher(here.url, here.cluster.key, operation_id)
        ended = watcher.ended.wait(120)
        seen_s = time.monotonic() - started
        spent = cpu_seconds(here.controller) - before
        watcher.close()
        view = ask("GET", f"{here.url}/api/operations/{operation_id}", key=here.cluster.key).json()
        assert ended, f"not done within 120 s: {view['counts']}\n{here.workers.output()[-2000:]}"
        assert view["counts"] == {"success": count}, view["counts"]
        took_s = datetime.fromisoformat(view["finished_at"]).timestamp() - asked_at
        ratio, target = took_s / here.slowest_s, TARGETS.get(count)
        aim = f" (target ≤ {target}: {'met' if ratio <= target else 'MISSED'})" if target else ""
        print(
            f"install on {count} nodes: {took_s:.2f} s, slowest worker {here.slowest_s:.2f} s: {ratio:.2f} ×{aim}; "
            f"seen by the watcher after {seen_s:.2f} s, in {len(watcher.heard_at)} updates; "
            f"controller {spent:.2f} s of CPU, {quiet_mb:.0f} → {peak_mb(here.controller):.0f} MB"
        )


def bench_progress(count: int, store_url: str, seconds: float) -> None:
    with site(count, store_url, 3600.0, 0.0) as here:
        operation_id = here.install()
        path = f"{here.url}/api/operations/{operation_id}"

        def all_at_it() -> bool:
            shown = ask("GET", path, key=here.cluster.key).json()
            return bool(shown["counts"] == {"downloading": count} and shown["currentBytes"] > 0)

        wait_for(all_at_it, "progress of every node", 60)
        alone = _share(here.controller, seconds)
        watcher = Watcher(here.url, here.cluster.key, operation_id)
        wait_for(lambda: watcher.heard_at, "word of it")
        before, told, started = len(watcher.heard_at), here.told, time.monotonic()
        watched = _share(here.controller, seconds)
        passed_s = time.monotonic() - started
        updates, each = (len(watcher.heard_at) - before) / passed_s, (here.told - told) / passed_s / count
        print(
            f"progress of {count} nodes, {each:.1f}/s each: controller {alone:.2f} of a core, "
            f"{watched:.2f} with a watcher (target < 0.50: {'met' if watched < 0.5 else 'MISSED'}), "
            f"who hears {updates:.1f}/s (target ≤ 4); {peak_mb(here.controller):.0f} MB at most"
        )
        watcher.close()
        for words in (
            "/api/operations",
            "/api/operations?rows=false",
            "/api/operations?all=true&rows=false",
            f"/api/operations/{operation_id}",
        ):
            _time_gets(here, words, count)


def _share(process: psutil.Process, seconds: float) -> float:
    before, started = cpu_seconds(process), time.monotonic()
    time.sleep(seconds)
    return (cpu_seconds(process) - before) / (time.monotonic() - started)


def _time_gets(here: Site, path: str, count: int, rounds: int = 100) -> None:
    took = []
    for _ in range(rounds):
        started = time.perf_counter()
        assert ask("GET", here.url + path, key=here.cluster.key).status == 200
        took.append((time.perf_counter() - started) * 1000)
    shown = path.rsplit("/", 1)[0] + "/ID" if path.count("/") > 2 else path
    print(
        f"GET {shown} meanwhile, {count} nodes: p50 {statistics.median(took):.1f} ms, "
        f"p99 {quantile(took, 0.99):.1f} ms (target ≤ 100 ms p99)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["install", "progress"], help="install, progress")
    parser.add_argument("--sizes", default="1,10,100,1000", help="of the fleets installed on")
    parser.add_argument("--nodes", type=int, default=1000, help="that tell progress")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each look at the CPU")
    parser.add_argument("--store", choices=("sqlite", "postgresql"), default="sqlite")
    chosen = parser.parse_args()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running_postgres()) if chosen.store == "postgresql" else None

        def store_url() -> str:
            return server.new_database() if server is not None else ""

        print(f"on {chosen.store}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before we begin", flush=True)
        if "install" in chosen.what:
            for count in (int(size) for size in chosen.sizes.split(",")):
                bench_install(count, store_url())
        if "progress" in chosen.what:
            bench_progress(chosen.nodes, store_url(), chosen.seconds)


if __name__ == "__main__":
    main()
