"""What the control plane costs: heartbeats of 10,000 nodes, lists of 1,000 and of operations, pages, and doing nothing.

    scripts/bench fleet

Everything runs on loopback, bounded in time. CPU is the process's own user+system time as a share of one core.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import statistics
import tempfile
import time
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import psutil
import structlog

from corral.bus.api import FixedCredentials
from corral.bus.auth import mint_service_credentials
from corral.bus.nats import NatsBus
from corral.contract.messages.nodes import NODE_HEARTBEAT, BusHeartbeat
from corral.controller.samples.series import begin_of
from corral.store import open_store
from corral.store.records import BackendRequest, DesiredReplica, OperationNode, OperationNodeStatus, ReplicaStage
from corral.store.tables import node_backends, nodes, operation_nodes, operations, replicas, revisions, samples
from corral.store.tables.node_backends import Inventory
from corral.store.tables.nodes import Heartbeat, Node, record_heartbeats
from corral.store.tables.operations import Operation, StoredRequest
from corral.store.tables.samples import Sample, SampleBody
from tests.support.cluster import Cluster
from tests.support.fleet import Fleet, http
from tests.support.page import PageApp, open_page_app
from tests.support.sqlite import sqlite_url
from tests.unit.web.browsing import Browser

INTERVAL_S = 10.0
OPEN_S = 20.0
PAGE_EVERY_S = 5.0
KEPT_S = 2.1  # longer than a drawn part is kept
BOOT = "b"


def new_ids(count: int) -> list[str]:
    return [str(uuid.uuid4()) for _ in range(count)]


async def add_nodes(store_url: str, ids: list[str], boot: str = BOOT) -> list[str]:
    """`boot`: of the workers that will speak for them; another than theirs would have every node ask anew."""
    async with open_store(store_url) as store, store.write() as tx:
        now = await tx.now()
        for number, node_id in enumerate(ids):
            node = Node(
                id=node_id,
                name=f"node-{number:05}",
                created_at=now,
                updated_at=now,
                status_changed_at=now,
                last_heartbeat=now,
                status="healthy",
                approved=True,
                protocol=1,
                os="linux",
                arch="amd64",
                gpu_vendor="nvidia",
                total_vram=24 * 2**30,
                available_vram=20 * 2**30,
                boot_id=boot,
            )
            await nodes.insert(tx, node)
            # They have told what they have, as every worker does: else they would be asked, and nobody would answer.
            await node_backends.put(
                tx, Inventory(node_id=node_id, boot_id=boot, seq=1, seen_at=now, backends=(), reported_at=now)
            )
        await revisions.bump(tx, "nodes")
    return ids


async def beat(cluster: Cluster, ids: list[str], seconds: float) -> int:
    """Every node once per interval, spread evenly, as a real fleet's beats are."""
    keys = cluster.keys
    minted = mint_service_credentials(
        keys.account_seed, keys.service_user_seed, now=datetime.now(UTC), ttl_s=600, reply_ttl_s=60
    )
    sent = 0
    async with NatsBus([cluster.bus_url], FixedCredentials(minted.credentials()), inbox_prefix=minted.inbox) as bus:
        await bus.wait_connected(10)
        started = time.monotonic()
        while (passed := time.monotonic() - started) < seconds:
            due = int(passed / INTERVAL_S * len(ids))
            for number in range(sent, due):
                message = BusHeartbeat(boot_id=BOOT, available_vram=number, available_ram=number, available_disk=number)
                await bus.publish(NODE_HEARTBEAT, message, node=ids[number % len(ids)])
            sent = max(sent, due)
            await asyncio.sleep(0.02)
    return sent


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def bench_heartbeats(root: Path, count: int, seconds: float) -> None:
    cluster = Cluster(
        root,
        f"sqlite:///{root}/corral.db",
        members=1,
        CORRAL_HEARTBEAT_FLUSH="1s",
        CORRAL_STALE_AFTER="60s",
        CORRAL_HEALTH_INTERVAL="5s",
        CORRAL_WATCH_INTERVAL="1s",
    )
    try:
        cluster.start()
        ids = asyncio.run(add_nodes(cluster.store_url, new_ids(count)))
        controller = cluster.members[0].controller
        assert controller is not None
        process = psutil.Process(controller.pid)
        asyncio.run(beat(cluster, ids, 2.0))
        before, started = cpu_seconds(process), time.monotonic()
        sent = asyncio.run(beat(cluster, ids, seconds))
        wall = time.monotonic() - started
        share = (cpu_seconds(process) - before) / wall
        memory = process.memory_info().rss / 2**20
        healthy = sum(node["status"] == "healthy" for node in cluster.nodes(cluster.members[0]).values())
        print(
            f"heartbeats, {count} nodes every {INTERVAL_S:.0f} s, SQLite: {sent / wall:.0f}/s, "
            f"controller {share:.2f} of a core (target < 1.00), {memory:.0f} MB; {healthy} of {count} healthy"
        )
    finally:
        cluster.close()


def time_gets(cluster: Cluster, path: str, rounds: int, about: str, pause_s: float = 0.0) -> None:
    """Prints wall time per request, and the controller's CPU, which a busy machine does not change."""
    member = cluster.members[0]
    assert member.controller is not None
    process = psutil.Process(member.controller.pid)
    took = []
    before = cpu_seconds(process)
    for _ in range(rounds):
        started = time.perf_counter()
        assert http("GET", member.url + path, key=cluster.key).status == 200
        took.append((time.perf_counter() - started) * 1000)
        time.sleep(pause_s)
    cpu_ms = (cpu_seconds(process) - before) * 1000 / rounds
    print(
        f"GET {path} at {about}: p50 {statistics.median(took):.1f} ms, p99 {quantile(took, 0.99):.1f} ms "
        f"(target ≤ 100 ms p99), controller CPU {cpu_ms:.1f} ms"
    )


def bench_listing(root: Path, count: int, rounds: int) -> None:
    cluster = Cluster(root, f"sqlite:///{root}/corral.db", members=1, CORRAL_STALE_AFTER="10m")
    try:
        cluster.start()
        for total in (count // 10, count):
            asyncio.run(
                add_nodes(cluster.store_url, new_ids(total)) if total == count // 10 else _add_rest(cluster, count)
            )
            for path in ("/api/nodes?limit=50", "/api/nodes"):
                time_gets(cluster, path, rounds, f"{total} nodes")
    finally:
        cluster.close()


def bench_operations(root: Path, count: int, rounds: int) -> None:
    """Operations of many nodes each: a page costs what is on it, however many there are beside it."""
    cluster = Cluster(root, f"sqlite:///{root}/corral.db", members=1, CORRAL_STALE_AFTER="10m", CORRAL_GALLERIES="[]")
    try:
        cluster.start()
        member = cluster.members[0]
        ids = asyncio.run(add_nodes(cluster.store_url, new_ids(count)))
        (root / "own").mkdir()
        (root / "own" / "run.sh").touch()
        body = {"uri": str(root / "own"), "name": "own"}
        asked = http("POST", member.url + "/api/operations", key=cluster.key, body=body)  # these nodes never answer
        assert asked.status == 202, asked.body
        opened = msgspec.json.decode(asked.body)["jobID"]
        for total in (10, 200):
            asyncio.run(_add_operations(cluster.store_url, ids, total))
            for path in (
                "/api/operations",
                "/api/operations?rows=false",
                "/api/operations?all=true&limit=1",
                "/api/operations?all=true&limit=10",
                "/api/operations?all=true&limit=10&rows=false",
                "/api/operations/history",
                "/api/backends/matrix",
                "/page/work",
                "/page/operations",
                f"/page/operations?open={opened}",
            ):
                time_gets(cluster, path, rounds, f"{count} nodes, {total} operations")
    finally:
        cluster.close()


def bench_pages(root: Path, count: int, rounds: int) -> None:
    """The start page of a large fleet that serves: with models on a third of the nodes, 50 operations that run, and
    samples of 30 days. Then 100 pages that stay open."""
    cluster = Cluster(root, f"sqlite:///{root}/corral.db", members=1, CORRAL_STALE_AFTER="10m", CORRAL_GALLERIES="[]")
    try:
        cluster.start()
        member = cluster.members[0]
        assert member.controller is not None
        ids = asyncio.run(add_nodes(cluster.store_url, new_ids(count)))
        asyncio.run(_add_work(cluster.store_url, ids, operations_running=50))
        for path in ("/page/overview", "/page/overview?range=30d"):
            time_gets(cluster, path, rounds, f"{count} nodes, 50 operations, drawn for many")
            time_gets(cluster, path, max(10, rounds // 5), "the same, drawn each time", pause_s=KEPT_S)
            body = http("GET", member.url + path, key=cluster.key).body
            print(f"  {len(body) / 1000:.0f} kB (target ≤ 300 kB)")
        process = psutil.Process(member.controller.pid)
        before, started = cpu_seconds(process), time.monotonic()
        asyncio.run(_open_pages(cluster, 100, OPEN_S))
        share = (cpu_seconds(process) - before) / (time.monotonic() - started)
        print(f"100 open overviews of {count} nodes: controller {share:.2f} of a core (target < 0.50)")
    finally:
        cluster.close()


async def _open_pages(cluster: Cluster, count: int, seconds: float) -> None:
    """Each asks for its part every five seconds, as its script does."""

    async def one(place: int) -> None:
        await asyncio.sleep(PAGE_EVERY_S * place / count)
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            began = time.monotonic()
            answer = await asyncio.to_thread(http, "GET", cluster.members[0].url + "/page/overview", key=cluster.key)
            assert answer.status == 200
            await asyncio.sleep(max(0.0, PAGE_EVERY_S - (time.monotonic() - began)))

    async with asyncio.TaskGroup() as tasks:
        for place in range(count):
            tasks.create_task(one(place))


async def _add_work(store_url: str, ids: list[str], *, operations_running: int) -> None:
    async with open_store(store_url) as store, store.write() as tx:
        now = await tx.now()
        await replicas.put(
            tx,
            [
                DesiredReplica(
                    node_id=node_id,
                    model=f"model-{place % 12}",
                    replica=0,
                    revision="r",
                    backend="llama-cpp",
                    stage=ReplicaStage.ORDERED,
                    op_id=f"start-{place}",
                    process_id="",
                    created_at=now,
                    updated_at=now,
                    memory_bytes=8 * 2**30,
                )
                for place, node_id in enumerate(ids[::3])
            ],
        )
        for number in range(operations_running):
            operation = Operation(
                id=f"running-{number:05}",
                kind="install",
                backend=f"backend-{number:05}",
                scope_kind="all",
                scope_value="",
                generation=5000 + number,
                created_at=now,
                request=StoredRequest(BackendRequest(f"backend-{number:05}")),
            )
            await operations.insert(tx, operation)
            await operation_nodes.put(tx, [_downloading(operation.id, *node, now) for node in enumerate(ids)])
        for step_s, points in ((60, 1440), (900, 2880)):
            first = begin_of(now, step_s)
            body = SampleBody(until_s=step_s, requests=300, completion_tokens=40_000, first_token={38: 200, 44: 100})
            rows = [
                Sample("fleet", "", step_s, at=first - timedelta(seconds=step_s * place), source="bench", body=body)
                for place in range(points)
            ]
            await samples.put(tx, rows)


def _downloading(operation_id: str, place: int, node_id: str, now: datetime) -> OperationNode:
    return OperationNode(
        operation_id=operation_id,
        node_id=node_id,
        node_name=f"node-{place:05}",
        status=OperationNodeStatus.DOWNLOADING,
        updated_at=now,
        percentage=40.0,
        current_bytes=400_000_000,
        total_bytes=1_000_000_000,
        variant="cpu-backend",
        version="1.0",
    )


async def bench_drawing(root: Path, count: int, rounds: int) -> None:
    """Whole pages of the same fleet, drawn in this process, where nothing else happens. CPU of each request, client
    included: what others do on the machine does not show. A hundredth of the nodes beat between two requests."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    async with open_page_app(root) as page:
        ids = await add_nodes(sqlite_url(root), new_ids(count))
        await _add_work(sqlite_url(root), ids, operations_running=50)
        transport = httpx.ASGITransport(app=cast(Any, page.app))
        async with httpx.AsyncClient(transport=transport, base_url="http://page") as client:
            await Browser(client, page).signed_in()
            gc.collect()
            gc.freeze()  # as a controller does once it has started
            for path in ("/?range=1h", "/?range=30d", "/fleet/requests"):
                await _time_drawings(client, page, path, ids, rounds)


async def _time_drawings(client: httpx.AsyncClient, page: PageApp, path: str, ids: list[str], rounds: int) -> None:
    took = []
    for number in range(rounds):
        beating = ids[number % 100 :: 100]
        async with page.store.write() as tx:
            await record_heartbeats(tx, [Heartbeat(node_id=node_id, available_vram=number) for node_id in beating])
        began = time.process_time()
        answer = await client.get(path)
        took.append((time.process_time() - began) * 1000)
        assert answer.status_code == 200, answer.text
    print(
        f"GET {path} at {len(ids)} nodes, 50 operations of {len(ids)} rows: CPU first {took[0]:.0f} ms, "
        f"p50 {statistics.median(took):.0f} ms, p95 {quantile(took, 0.95):.0f} ms (target ≤ 150 ms), "
        f"most {max(took):.0f} ms; {len(answer.content) / 1000:.0f} kB (target ≤ 300 kB)"
    )


async def _add_operations(store_url: str, ids: list[str], total: int) -> None:
    """So many that have ended, each with a row per node."""
    async with open_store(store_url) as store:
        async with store.read() as tx:
            present = len(await operations.list_(tx, limit=10_000))
            now = await tx.now()
        for number in range(present, total):
            operation = Operation(
                id=f"operation-{number:05}",
                kind="install",
                backend=f"backend-{number:05}",
                scope_kind="all",
                scope_value="",
                generation=1000 + number,
                created_at=now,
                request=StoredRequest(BackendRequest(f"backend-{number:05}")),
                finished_at=now,
                outcome="completed",
            )
            rows = [
                OperationNode(
                    operation_id=operation.id,
                    node_id=node_id,
                    node_name=f"node-{place:05}",
                    status=OperationNodeStatus.SUCCESS,
                    updated_at=now,
                    percentage=100.0,
                    digest="sha256:" + "a" * 64,
                    variant="cpu-backend",
                    version="1.0",
                )
                for place, node_id in enumerate(ids)
            ]
            async with store.write() as tx:
                await operations.insert(tx, operation)
                await operation_nodes.put(tx, rows)


async def _add_rest(cluster: Cluster, count: int) -> None:
    async with open_store(cluster.store_url) as store, store.write() as tx:
        now = await tx.now()
        for number in range(count // 10, count):
            node_id = str(uuid.uuid4())
            await nodes.insert(
                tx,
                Node(
                    id=node_id,
                    name=f"node-{number:05}",
                    created_at=now,
                    updated_at=now,
                    status_changed_at=now,
                    last_heartbeat=now,
                    status="healthy",
                    approved=True,
                    protocol=1,
                    boot_id=BOOT,
                ),
            )
            await node_backends.put(
                tx, Inventory(node_id=node_id, boot_id=BOOT, seq=1, seen_at=now, backends=(), reported_at=now)
            )
        await revisions.bump(tx, "nodes")


def bench_idle(root: Path, seconds: float) -> None:
    fleet = Fleet(root)
    for name in [name for name in fleet.env if name.startswith("CORRAL_")]:
        del fleet.env[name]  # the defaults are what idles at people's homes
    fleet.env["CORRAL_CONFIG_DIR"] = str(root / "config")
    try:
        fleet.start()
        time.sleep(5)
        roles = ("nats-server", "controller", "gateway", "worker")
        processes = {role: psutil.Process(fleet.child_pid(role)) for role in roles}
        before = {role: cpu_seconds(process) for role, process in processes.items()}
        time.sleep(seconds)
        for role, process in processes.items():
            share = (cpu_seconds(process) - before[role]) / seconds * 100
            print(f"idle {role}: {process.memory_info().rss / 2**20:.0f} MB, {share:.2f} % of a core")
    finally:
        fleet.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["heartbeats", "listing", "operations", "pages", "drawing", "idle"])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=100, help="requests of each kind to lists of operations")
    chosen = parser.parse_args()
    benches = {
        "heartbeats": lambda root: bench_heartbeats(root, 10_000, chosen.seconds),
        "listing": lambda root: bench_listing(root, 1000, 200),
        "operations": lambda root: bench_operations(root, 1000, chosen.rounds),
        "pages": lambda root: bench_pages(root, 1000, chosen.rounds),
        "drawing": lambda root: asyncio.run(bench_drawing(root, 1000, chosen.rounds)),
        "idle": lambda root: bench_idle(root, chosen.seconds),
    }
    for name in chosen.what:
        with tempfile.TemporaryDirectory(prefix="corral-bench-") as folder:
            benches[name](Path(folder))


if __name__ == "__main__":
    main()
