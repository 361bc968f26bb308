"""A worker that gives up for good stops its backends: nobody would adopt them, and they hold memory and ports."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from corral.kit.files import make_folder
from corral.worker.supervisor.table import Running
from tests.support.nats import NatsServer, nats_server
from tests.support.processes import Process, alive, clean_env, free_port
from tests.support.running_worker import worker_env
from tests.support.scripted_controller import ScriptedController
from tests.support.supervising import make_supervisor, swept, tiny
from tests.support.waiting import until

__all__ = ["nats_server"]

WORKER = (sys.executable, "-m", "corral.cli.main", "worker")


@pytest.fixture
async def controller(nats_server: NatsServer) -> AsyncIterator[ScriptedController]:
    async with ScriptedController(nats_server) as started:
        yield started


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    with swept(tmp_path / "w" / "processes"):
        yield tmp_path / "w"


@pytest.fixture
async def backend(data: Path, tmp_path: Path) -> Running:
    """A backend with children, left running by an earlier worker on this data folder."""
    make_folder(data)
    async with make_supervisor(data / "processes") as supervisor:
        return await supervisor.start(tiny(tmp_path / "tiny", "children=2"))


async def run_to_end(process: Process) -> str:
    """What it printed, once it has exited with the code of a worker that needs a person."""
    try:
        assert await asyncio.to_thread(process.wait, 40.0) == 1
        return process.output()
    finally:
        process.close()


def worker(controller: ScriptedController, data: Path, **more: str) -> Process:
    given = {"port": str(free_port()), "backend_grace": "5s", **more}
    env = clean_env(data.parent) | worker_env(controller.url, data, **given)
    return Process(WORKER, env, data.parent / "worker.log")


async def joined(controller: ScriptedController) -> None:
    await until(lambda: controller.knows("w1") and bool(controller.named("w1").beats), timeout_s=40)


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex(("127.0.0.1", port)) != 0


async def test_a_deleted_nodes_worker_stops_its_backends(
    controller: ScriptedController, data: Path, backend: Running
) -> None:
    process = worker(controller, data, token=controller.token())  # its one use is spent by joining
    await joined(controller)
    assert alive(backend.pid)
    controller.delete("w1")
    assert "this node was deleted from the cluster" in await run_to_end(process)
    assert not alive(backend.pid)
    assert port_is_free(backend.port)
    assert (data / "processes" / backend.process_id / "exit.json").exists()


async def test_a_node_whose_credential_is_refused_stops_its_backends(
    controller: ScriptedController, data: Path, backend: Running
) -> None:
    process = worker(controller, data, token=controller.token())
    await joined(controller)
    controller.forget("w1")
    assert "corral token create" in await run_to_end(process)
    assert not alive(backend.pid)


async def test_backends_left_by_a_worker_that_cannot_join_again_are_stopped(
    controller: ScriptedController, data: Path, backend: Running
) -> None:
    """The worker was killed, its node deleted meanwhile: the next start finds both out."""
    process = worker(controller, data, token="cj_made_up")
    assert "no such token" in await run_to_end(process)
    assert not alive(backend.pid)


async def test_a_worker_without_its_port_stops_its_backends(
    controller: ScriptedController, data: Path, backend: Running
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = worker(controller, data, token=controller.token(), port=port)
        assert f"port {port} is in use" in await run_to_end(process)
    assert not alive(backend.pid)


async def test_a_deleted_node_that_joins_as_a_new_one_brings_no_backends_along(
    controller: ScriptedController, data: Path, backend: Running
) -> None:
    process = worker(controller, data, token=controller.token(uses=2))
    try:
        await joined(controller)
        first = controller.named("w1").id
        controller.delete("w1")
        await until(lambda: controller.knows("w1") and controller.named("w1").id != first, timeout_s=40)
        assert not alive(backend.pid)
        assert process.running
    finally:
        process.kill()
        process.close()
