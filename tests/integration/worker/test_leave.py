"""Leaving in order, bounded, whatever the controller does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.nats import NatsServer, nats_server
from tests.support.running_worker import running_worker
from tests.support.scripted_controller import ScriptedController
from tests.support.waiting import until

__all__ = ["nats_server"]


@pytest.fixture
async def controller(nats_server: NatsServer) -> AsyncIterator[ScriptedController]:
    async with ScriptedController(nats_server) as started:
        yield started


async def test_the_order_of_goodbye(controller: ScriptedController, tmp_path: Path) -> None:
    async with running_worker(
        controller.url, tmp_path / "w", token=controller.token(), drain_timeout="50s", leave_timeout="100s"
    ) as worker:
        await worker.ready()
        node = controller.named("w1")
        node.in_flight = 2
        worker.stopped.set()
        await until(lambda: controller.calls.count("GET models") >= 1)
        assert await worker.get("/readyz") == (503, "not ready: leaving")  # still there for those under way
        assert node.status == "draining"
        node.in_flight = 0
        await worker.ended()
    after = controller.calls[controller.calls.index("POST drain") :]
    assert after[0] == "POST drain"
    assert after[-1] == "POST deregister"
    assert set(after[1:-1]) == {"GET models"}  # no heartbeat among them
    assert node.status == "offline"


async def test_requests_that_never_end_do_not_hold_the_worker(controller: ScriptedController, tmp_path: Path) -> None:
    async with running_worker(
        controller.url, tmp_path / "w", token=controller.token(), drain_timeout="300ms", leave_timeout="100s"
    ) as worker:
        await worker.ready()
        controller.named("w1").in_flight = 1
        await worker.leave()
    assert controller.named("w1").status == "offline"


async def test_a_second_signal_is_quicker(controller: ScriptedController, tmp_path: Path) -> None:
    async with running_worker(
        controller.url, tmp_path / "w", token=controller.token(), drain_timeout="50s", leave_timeout="60s"
    ) as worker:
        await worker.ready()
        controller.named("w1").in_flight = 1
        worker.stopped.set()
        await until(lambda: controller.calls.count("GET models") >= 1)
        worker.hurry.set()
        await worker.ended()
    assert controller.named("w1").status == "offline"  # goodbye was still said


async def test_a_controller_that_is_gone_does_not_hold_the_worker(
    controller: ScriptedController, tmp_path: Path
) -> None:
    async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        await worker.ready()
        await controller.stop()
        await worker.leave()


async def test_a_controller_that_hangs_does_not_hold_the_worker(controller: ScriptedController, tmp_path: Path) -> None:
    async def hang(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await asyncio.sleep(100)
        finally:
            writer.close()

    async with running_worker(
        controller.url, tmp_path / "w", token=controller.token(), leave_timeout="1s", http_timeout="100s"
    ) as worker:
        await worker.ready()
        await controller.stop()
        silent = await asyncio.start_server(hang, "127.0.0.1", controller.port)
        try:
            await worker.leave()
        finally:
            silent.close()


async def test_a_controller_that_refuses_goodbye(controller: ScriptedController, tmp_path: Path) -> None:
    async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        await worker.ready()
        controller.answer_next("drain", 500, b'{"error":"database is locked"}')
        controller.answer_next("models", 500)
        controller.answer_next("deregister", 500)
        await worker.leave()


async def test_leaving_while_the_controller_was_never_there(tmp_path: Path) -> None:
    controller = ScriptedController()
    async with running_worker(controller.url, tmp_path / "w", token="cj_x") as worker:
        await worker.ready(503)
        await worker.leave()


async def test_after_a_clean_leave_the_same_node_comes_back(controller: ScriptedController, tmp_path: Path) -> None:
    node_ids = set()
    for _ in range(3):
        token = controller.token() if not controller.nodes else ""
        async with running_worker(controller.url, tmp_path / "w", token=token) as worker:
            await worker.ready()
            node_ids.add(controller.named("w1").id)
            await worker.leave()
        assert controller.named("w1").status == "offline"
    assert len(node_ids) == 1


async def test_a_node_that_is_stopped_before_it_has_registered_again_says_goodbye_too(
    controller: ScriptedController, tmp_path: Path
) -> None:
    """As after a reload, or while the controller restarts: else the node would seem to be silent."""
    async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        await worker.ready()
        await worker.leave()
    node = controller.named("w1")
    node.status = "healthy"  # as if another worker had run until now
    calls = len(controller.calls)
    for _ in range(100):
        controller.answer_next("register", 503)
    async with running_worker(controller.url, tmp_path / "w") as worker:
        await until(lambda: len(controller.calls) > calls)
        await worker.leave()
    assert controller.calls[-1] == "POST deregister"
    assert node.status == "offline"
