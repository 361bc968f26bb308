"""A worker process killed in the middle of an order, and what the next one makes of it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.worker.test_accepted_orders import download
from tests.support.blob_server import BlobServer
from tests.support.nats import NatsServer, nats_server
from tests.support.ordering import QUICK, OrderedFleet, connected, digest, tiny_order
from tests.support.processes import Process, clean_env, free_port
from tests.support.running_worker import worker_env
from tests.support.scripted_controller import ScriptedController
from tests.support.supervising import identities, swept
from tests.support.waiting import until

__all__ = ["nats_server"]

WORKER = (sys.executable, "-m", "corral.cli.main", "worker")
Start = Callable[[], Process]


@pytest.fixture
async def controller(nats_server: NatsServer) -> AsyncIterator[ScriptedController]:
    async with ScriptedController(nats_server) as started:
        yield started


@pytest.fixture
async def fleet(controller: ScriptedController, nats_server: NatsServer) -> AsyncIterator[OrderedFleet]:
    async with connected(nats_server) as client:
        fleet = OrderedFleet(controller, client)
        await fleet.follow()
        yield fleet


@pytest.fixture
def start(controller: ScriptedController, tmp_path: Path) -> Iterator[Start]:
    """Start `corral worker`, always on the same folder."""
    started: list[Process] = []
    token = controller.token(uses=9)
    port = str(free_port())

    def begin() -> Process:
        env = clean_env(tmp_path) | worker_env(controller.url, tmp_path / "w", token=token, port=port, **QUICK)
        started.append(Process(WORKER, env, tmp_path / f"worker-{len(started)}.log"))
        return started[-1]

    with swept(tmp_path / "w" / "processes"):
        yield begin
        for process in started:
            if process.running:
                process.kill()
            process.close()


def boots(fleet: OrderedFleet) -> list[str]:
    """Of the workers that were heard, in that order."""
    return list(dict.fromkeys(beat["boot_id"] for beat in fleet.told("heartbeat")))


async def begun(fleet: OrderedFleet, number: int) -> None:
    """Until the so many-th worker is heard."""
    await until(lambda: len(boots(fleet)) == number)


def last_told(fleet: OrderedFleet, what: str) -> list[dict[str, Any]] | None:
    """By the last of the workers: words of the one before may come when it is dead."""
    told = [beat for beat in fleet.told("heartbeat") if what in beat and beat["boot_id"] == boots(fleet)[-1]]
    return told[-1][what] if told else None


def orders(fleet: OrderedFleet) -> dict[str, dict[str, Any]]:
    return {each["op_id"]: each for each in last_told(fleet, "orders") or ()}


async def test_killed_in_mid_download_it_forgets_the_order_and_goes_on_with_the_bytes(
    fleet: OrderedFleet, start: Start, tmp_path: Path
) -> None:
    async with BlobServer() as server:
        worker = start()
        await begun(fleet, 1)
        order = download(server, "big", 20_000_000)
        body = order | {"op_id": "op-1", "attempt": 1, "accept": True}
        assert (await fleet.ask("backend.install", body))["accepted"]
        incoming = tmp_path / "w" / "blobs" / "incoming"
        await until(lambda: sum(path.stat().st_size for path in incoming.glob("*.part")) > 2_000_000)
        server.pause.clear()
        await until(lambda: "op-1" in orders(fleet))
        worker.kill()
        start()
        await begun(fleet, 2)
        await until(lambda: last_told(fleet, "orders") is not None)
        assert orders(fleet) == {}  # so whoever ordered knows that it is to be sent again
        said = [event["seq"] for event in fleet.told("backend.install.op-1.progress")]
        assert await fleet.backends() == {}
        server.pause.set()
        result = await fleet.order("install", "op-1", order)
        assert result["success"], result
        assert server.asked[-1].range.startswith("bytes=")
        # Of the same attempt, and yet nobody takes it for older.
        since = [event["seq"] for event in fleet.told("backend.install.op-1.progress")][len(said) :]
        assert min(since) > max(said)
        assert (await fleet.backends())["big"]["digest"] == order["digest"]


async def test_killed_in_mid_upgrade_one_process_serves_and_the_order_can_be_repeated(
    fleet: OrderedFleet, start: Start, tmp_path: Path
) -> None:
    worker = start()
    await begun(fleet, 1)
    assert (await fleet.order("install", "op-1", tiny_order("a")))["success"]
    replica = {"process_id": "p1", "model": "m", "replica": 0, "backend": "tiny"}
    assert (await fleet.ask("replica.start", replica))["success"]
    slow = tiny_order("b", f"when={tmp_path}/go")
    assert (await fleet.ask("backend.upgrade", slow | {"op_id": "op-2", "attempt": 1, "accept": True}))["accepted"]
    await until(lambda: len(identities(tmp_path / "w" / "processes")) == 2)
    worker.kill()
    start()
    await begun(fleet, 2)

    def states() -> list[tuple[str, str]]:
        return [(row["digest"], row["state"]) for row in last_told(fleet, "processes") or ()]

    await until(lambda: states() == [(digest("a"), "ready")])
    assert (await fleet.backends())["tiny"]["digest"] == digest("a")
    (tmp_path / "go").touch()
    result = await fleet.order("upgrade", "op-2", slow, attempt=2)
    assert result["success"], result
    await until(lambda: states() == [(digest("b"), "ready")])
