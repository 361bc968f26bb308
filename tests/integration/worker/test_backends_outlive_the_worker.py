"""The worker as a process, with backends behind it: killed, stopped, replaced by a new one while requests run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from corral.kit.files import make_folder
from corral.worker.agent.join.identity import holder_of
from corral.worker.supervisor.spec import ProcessSpec
from corral.worker.supervisor.table import Running
from tests.support.certificates import TestCa
from tests.support.nats import NatsServer, nats_server
from tests.support.processes import Process, alive, clean_env, free_port
from tests.support.running_worker import worker_env
from tests.support.scripted_controller import ScriptedController
from tests.support.supervising import get, make_supervisor, mock_grpc, mock_openai, swept, tiny
from tests.support.waiting import until

__all__ = ["nats_server"]

WORKER = (sys.executable, "-m", "corral.cli.main", "worker")
Start = Callable[..., Process]


@pytest.fixture
async def controller(nats_server: NatsServer) -> AsyncIterator[ScriptedController]:
    async with ScriptedController(nats_server) as started:
        yield started


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    with swept(tmp_path / "w" / "processes"):
        yield tmp_path / "w"


@pytest.fixture
def start(controller: ScriptedController, data: Path, port: int, tmp_path: Path) -> Iterator[Start]:
    """Start `corral worker`; every one of them is gone after the test, and so are their successors."""
    started: list[Process] = []
    token = controller.token(uses=9)

    def begin(**more: str) -> Process:
        given = {"port": str(port), "token": token, "backend_grace": "5s", **more}
        env = clean_env(tmp_path) | worker_env(controller.url, data, **given)
        started.append(Process(WORKER, env, tmp_path / f"worker-{len(started)}.log"))
        return started[-1]

    yield begin
    for process in started:
        if process.running:
            process.kill()
        process.close()


async def plant(data: Path, spec: ProcessSpec) -> Running:
    """What an earlier worker has left running."""
    make_folder(data)
    async with make_supervisor(data / "processes") as supervisor:
        return await supervisor.start(spec)


async def ended(process: Process, timeout_s: float = 40.0) -> int:
    """Its exit code, waited for without holding up the controller, which runs in this loop."""
    return await asyncio.to_thread(process.wait, timeout_s)


@asynccontextmanager
async def client(
    controller: ScriptedController, port: int, *, sockets: Path | None = None
) -> AsyncIterator[aiohttp.ClientSession]:
    """Over TCP, or through the worker's unix socket in `sockets`."""
    token = controller.ingress_token(scope="replicas")
    connector = None
    if sockets is not None:
        await until(lambda: registered(controller, 1))
        connector = aiohttp.UnixConnector(str(sockets / f"{controller.named('w1').id}-{port}.sock"))
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {token}"}, connector=connector
    ) as session:
        yield session


async def serves(session: aiohttp.ClientSession, running: Running) -> int:
    """The process id behind `/replicas/…`, once the ingress serves it."""
    async with asyncio.timeout(40):
        while True:
            try:
                async with session.get(f"/replicas/{running.process_id}/who") as answer:
                    if answer.status == 200:
                        return int(json.loads(await answer.text())["pid"])
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.02)


def registered(controller: ScriptedController, boots: int) -> bool:
    if not controller.knows("w1"):
        return False
    node = controller.named("w1")
    return len(set(node.boot_ids)) >= boots and any(beat["boot_id"] == node.boot_ids[-1] for beat in node.beats)


async def test_kill_9_of_a_worker_leaves_its_backend_answering_and_the_next_start_serves_it(
    controller: ScriptedController, start: Start, data: Path, port: int, tmp_path: Path
) -> None:
    running = await plant(data, tiny(tmp_path / "tiny"))
    first = start()
    async with client(controller, port) as session:
        assert await serves(session, running) == running.pid
        await until(lambda: registered(controller, 1))
        first.kill()
        answer = await asyncio.to_thread(get, running.port, "/", token=running.token)
        assert answer["pid"] == running.pid
        start()
        assert await serves(session, running) == running.pid
        async with session.get("/replicas/another/x") as refused:
            assert refused.status == 410


async def test_sigterm_stops_backends_before_goodbye(
    controller: ScriptedController, start: Start, data: Path, port: int, tmp_path: Path
) -> None:
    running = await plant(data, tiny(tmp_path / "tiny", "children=2"))
    process = start()
    async with client(controller, port) as session:
        await serves(session, running)
    await until(lambda: registered(controller, 1))
    gone_at_goodbye: list[bool] = []
    controller.before = lambda call: gone_at_goodbye.append(not alive(running.pid)) if call == "deregister" else None
    process.signal(signal.SIGTERM)
    assert await ended(process) == 0
    assert gone_at_goodbye == [True]
    assert "Traceback" not in process.output()


async def test_a_backend_deaf_to_sigterm_does_not_hold_a_worker_in_a_hurry(
    controller: ScriptedController, start: Start, data: Path, port: int, tmp_path: Path
) -> None:
    running = await plant(data, tiny(tmp_path / "tiny", "deaf=1"))
    process = start(backend_grace="50s", leave_timeout="60s")
    async with client(controller, port) as session:
        await serves(session, running)
    await until(lambda: registered(controller, 1))
    process.signal(signal.SIGTERM)
    await until(lambda: "POST drain" in controller.calls)
    process.signal(signal.SIGTERM)
    assert await ended(process, 20) == 0
    assert not alive(running.pid)


@pytest.mark.parametrize(("protocol", "way"), [("openai", "tcp"), ("grpc", "tcp"), ("openai", "unix")])
async def test_no_request_fails_while_the_worker_is_replaced(
    controller: ScriptedController, start: Start, data: Path, port: int, protocol: str, way: str, short_folder: Path
) -> None:
    spec = mock_openai() if protocol == "openai" else mock_grpc(load='{"Model": "m"}')
    running = await plant(data, spec)
    original = start(local_sockets=str(short_folder) if way == "unix" else "")
    path = f"/replicas/{running.process_id}/v1/chat/completions"
    done: list[int] = []
    failed: list[object] = []
    stopping = asyncio.Event()

    async def ask(session: aiohttp.ClientSession, *, anew: bool) -> None:
        """On one connection after the other, or on a new one each."""
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"Connection": "close"} if anew else {}
        while not stopping.is_set():
            try:
                async with session.post(path, json=body, headers=headers) as answer:
                    await answer.read()
                    (done if answer.status == 200 else failed).append(answer.status)
            except aiohttp.ClientError as error:
                failed.append(error)

    async with client(controller, port, sockets=short_folder if way == "unix" else None) as session:
        await until_answers(session, running)
        await until(lambda: registered(controller, 1))
        long = {
            "model": "m",
            "stream": True,
            "messages": [{"role": "user", "content": "[[piece_delay_s=0.1]] " + "word " * 60}],
        }
        async with asyncio.TaskGroup() as tasks, session.post(path, json=long) as stream:
            await stream.content.readline()
            for number in range(4):
                tasks.create_task(ask(session, anew=number % 2 == 0))
            await until(lambda: len(done) >= 20)
            workers = [original.pid]
            for round_ in range(2):
                os.kill(workers[-1], signal.SIGUSR2)  # the second time, to the successor
                workers.append(await successor_of(data, *workers))
                await until(lambda: registered(controller, round_ + 2))  # noqa: B023
                before = len(done)
                await until(lambda: len(done) >= before + 20)  # noqa: B023
            stopping.set()
            assert (await stream.text()).rstrip().endswith("data: [DONE]")  # begun before any of it
    assert failed == []
    assert alive(running.pid)
    node = controller.named("w1")
    assert len(controller.nodes) == 1
    assert node.status == "healthy"
    assert "POST drain" not in controller.calls
    assert "POST deregister" not in controller.calls
    await until(lambda: not alive(workers[1]))
    assert original.running  # whoever started it still knows it by its number
    original.signal(signal.SIGTERM)
    assert await ended(original) == 0
    assert not alive(workers[2])
    assert not alive(running.pid)
    assert controller.calls[-1] == "POST deregister"
    assert "Traceback" not in original.output()
    assert list_files(short_folder) == [], "the last of them removed the socket"


def list_files(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


async def test_kill_9_leaves_the_unix_socket_and_the_next_start_replaces_it(
    controller: ScriptedController, start: Start, data: Path, port: int, short_folder: Path, tmp_path: Path
) -> None:
    running = await plant(data, tiny(tmp_path / "tiny"))
    first = start(local_sockets=str(short_folder))
    async with client(controller, port, sockets=short_folder) as session:
        assert await serves(session, running) == running.pid
        left = list_files(short_folder)
        first.kill()
        assert list_files(short_folder) == left
        with pytest.raises(aiohttp.ClientConnectorError):  # refused at once: a gateway uses TCP
            await session.get("/healthz")
        await controller.stop()  # the node knows its id, so the socket does not wait for the controller
        start(local_sockets=str(short_folder))
        assert await serves(session, running) == running.pid
        assert list_files(short_folder) == left
        await controller.start()


async def test_a_successor_without_the_folder_removes_nothing_and_serves_over_tcp(
    controller: ScriptedController, start: Start, data: Path, port: int, short_folder: Path, tmp_path: Path
) -> None:
    running = await plant(data, tiny(tmp_path / "tiny"))
    config = tmp_path / "worker.toml"
    config.write_text(f'local_sockets = "{short_folder}"\n')
    process = start(config=str(config))
    async with client(controller, port, sockets=short_folder) as session:
        assert await serves(session, running) == running.pid
    config.write_text("")
    process.signal(signal.SIGUSR2)
    await successor_of(data, process.pid)
    async with client(controller, port) as session:
        assert await serves(session, running) == running.pid
    await until(lambda: registered(controller, 2))


async def successor_of(data: Path, *before: int) -> int:
    """Who holds the folder, once it is none of these."""
    async with asyncio.timeout(40):
        while (holder := holder_of(data)) is None or holder in before:  # noqa: ASYNC110 - another process decides
            await asyncio.sleep(0.02)
    return holder


async def until_answers(session: aiohttp.ClientSession, running: Running) -> None:
    async with asyncio.timeout(40):
        while True:
            try:
                async with session.get(f"/replicas/{running.process_id}/v1/models") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.02)


async def test_a_successor_that_cannot_start_costs_nothing(
    controller: ScriptedController, start: Start, data: Path, port: int, tmp_path: Path
) -> None:
    running = await plant(data, tiny(tmp_path / "tiny"))
    config = tmp_path / "worker.toml"
    config.write_text("")
    process = start(config=str(config))
    async with client(controller, port) as session:
        await serves(session, running)
        await until(lambda: registered(controller, 1))
        config.write_text("nonsense = 1\n")
        process.signal(signal.SIGUSR2)
        await until(lambda: "a successor has ended" in process.output())
        assert await serves(session, running) == running.pid
        assert holder_of(data) == process.pid
        config.write_text("")
        process.signal(signal.SIGUSR2)
        await successor_of(data, process.pid)
        assert await serves(session, running) == running.pid


async def test_a_keeper_that_is_killed_takes_the_worker_with_it_but_no_backend(
    controller: ScriptedController, start: Start, data: Path, port: int, tmp_path: Path
) -> None:
    running = await plant(data, tiny(tmp_path / "tiny"))
    first = start()
    async with client(controller, port) as session:
        await serves(session, running)
        await until(lambda: registered(controller, 1))
    first.signal(signal.SIGUSR2)
    successor = await successor_of(data, first.pid)
    await until(lambda: b"keeper.py" in Path(f"/proc/{first.pid}/cmdline").read_bytes())
    assert await ended_by_kill(first) == -signal.SIGKILL
    await until(lambda: not alive(successor))
    assert alive(running.pid)
    start()
    async with client(controller, port) as session:
        assert await serves(session, running) == running.pid


async def test_a_worker_that_speaks_tls_is_replaced_by_one_that_does(
    nats_server: NatsServer, data: Path, port: int, tmp_path: Path
) -> None:
    ca = TestCa()
    trust = ssl.create_default_context(cadata=ca.pem)
    failed: list[object] = []
    answered = 0
    stopping = asyncio.Event()

    async def ask() -> None:
        """Each on a connection of its own: what is under way when the sockets change hands must come through."""
        nonlocal answered
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust, force_close=True)) as session:
            while not stopping.is_set():
                try:
                    async with session.get(f"https://127.0.0.1:{port}/healthz") as answer:
                        assert answer.status == 200
                        answered += 1
                except (aiohttp.ClientError, AssertionError) as error:
                    failed.append(error)

    async with ScriptedController(nats_server, ca=ca) as controller:
        env = clean_env(tmp_path) | worker_env(controller.url, data, port=str(port), token=controller.token())
        process = Process(WORKER, env, tmp_path / "worker.log")
        try:
            await until(lambda: registered(controller, 1))
            await until(lambda: "tls=True" in process.output())
            async with asyncio.TaskGroup() as tasks:
                for _ in range(3):
                    tasks.create_task(ask())
                await until(lambda: answered > 10)
                process.signal(signal.SIGUSR2)
                await successor_of(data, process.pid)
                before = answered
                await until(lambda: answered > before + 10)
                stopping.set()
            await until(lambda: registered(controller, 2))
        finally:
            await asyncio.to_thread(process.close)  # the controller runs in this loop
    assert failed == []


async def test_reload_as_a_command(controller: ScriptedController, start: Start, data: Path, tmp_path: Path) -> None:
    first = start()
    await until(lambda: registered(controller, 1))

    async def reload(folder: Path) -> tuple[int, str]:
        command = Process((*WORKER, "reload", "--data", str(folder)), clean_env(tmp_path), tmp_path / "reload.log")
        try:
            return await ended(command), command.output()
        finally:
            command.close()

    code, said = await reload(data)
    handed_over = f"The worker with pid {first.pid} has handed over to the new one with pid {holder_of(data)}.\n"
    assert (code, said) == (0, handed_over)
    await until(lambda: registered(controller, 2))
    code, said = await reload(tmp_path / "nobody")
    assert code == 1
    assert "no worker runs in" in said


async def ended_by_kill(process: Process) -> int:
    os.kill(process.pid, signal.SIGKILL)
    return await ended(process)
