"""`--processes N`: several processes serve as one gateway would. Real processes, a scripted controller and ingress."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from corral.gateway.processes.child import ParentLink
from corral.gateway.processes.table import SharedTable
from corral.gateway.receipts.metrics import Metrics
from corral.kit.clock import SystemClock
from tests.integration.gateway.certificates import self_signed
from tests.integration.gateway.conftest import KEYS, USER, VIEWER, bearer
from tests.integration.gateway.scripted_controller import GATEWAY_KEY, ScriptedController, key
from tests.integration.gateway.scripted_ingress import ScriptedIngress, running_ingress
from tests.integration.gateway.test_gateway_process import RUN, process, until_ready
from tests.integration.gateway.test_gateway_resumption import CONTINUES, Engine
from tests.support.processes import alive, free_port
from tests.support.waiting import until
from tests.unit.gateway.test_resumption import WORDS, Seen

CHAT = "/v1/chat/completions"
SMALL = {"id": "small", "revision": "r1"}
BODY = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
OTHER = "ck_other"


@dataclass
class Several:
    """A gateway of several processes before one scripted ingress."""

    url: str
    process: asyncio.subprocess.Process
    controller: ScriptedController
    ingress: ScriptedIngress

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    async def ask(self, secret: str = USER, **body: Any) -> int:
        """On a connection of its own, so that any process may get it."""
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http,
            http.post(self.url + CHAT, headers=bearer(secret), json=BODY | body) as answer,
        ):
            await answer.read()
            return answer.status

    async def get(self, path: str, secret: str = VIEWER) -> tuple[int, str]:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http,
            http.get(self.url + path, headers=bearer(secret)) as answer,
        ):
            return answer.status, await answer.text()

    async def number(self, name: str) -> float:
        """From /metrics; its series added up."""
        status, text = await self.get("/metrics")
        assert status == 200, text
        found = re.findall(rf"(?m)^{name}(?:{{[^}}]*}})? (\S+)$", text)
        assert found, text
        return sum(map(float, found))


@contextlib.asynccontextmanager
async def several(controller: ScriptedController, *, processes: int = 2, **settings: str) -> AsyncIterator[Several]:
    port = free_port()
    told = {
        "controller": f"unix:{controller.socket}",
        "gateway_key": GATEWAY_KEY,
        "port": str(port),
        "processes": str(processes),
        "hints": "false",
        "view_check_interval": "50ms",
        "receipts_interval": "50ms",
    }
    async with (
        running_ingress("n1") as ingress,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http,
    ):
        controller.change(models=[SMALL], nodes=[ingress.view], replicas=[ingress.replica("p1", slots=100)])
        async with process(**(told | settings)) as started:
            try:
                await until_ready(http, port)
                gateway = Several(f"http://127.0.0.1:{port}", started, controller, ingress)
                await until(lambda: len(gateway.children()) == processes)
                await until_all_serve(gateway, processes)
                yield gateway
            finally:
                if started.returncode is None:
                    started.send_signal(signal.SIGTERM)
                    await asyncio.wait_for(started.wait(), 60)


async def until_seen(gateway: Several) -> None:
    """Every process has the present view. The parent asks whether there is a newer one only after it has sent this one
    to its children, and they report their metrics after what was sent before."""
    await until(lambda: gateway.controller.view_reads[-1] == f'"{gateway.controller.revision}"')
    await gateway.number("corral_gateway_processes")


async def until_number(gateway: Several, name: str, wanted: float) -> None:
    async def reached() -> bool:
        return await gateway.number(name) == wanted

    await until(reached, f"{name} to be {wanted}")


async def until_all_serve(gateway: Several, processes: int) -> None:
    await until_number(gateway, "corral_gateway_processes", processes)


@pytest.fixture
async def gateway(controller: ScriptedController) -> AsyncIterator[Several]:
    async with several(controller, eject="60s") as gateway:
        yield gateway


async def test_a_broken_stream_is_continued_as_by_one_process(gateway: Several) -> None:
    engine = Engine("one")
    engine.breaks = [b" an"]
    gateway.ingress.script = engine
    replicas = [gateway.ingress.replica(name, slots=100, continues=CONTINUES) for name in ("p1", "p2")]
    gateway.controller.change(models=[{**SMALL, "resume_streams": True}], replicas=replicas)
    await until_seen(gateway)
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http,
        http.post(gateway.url + CHAT, headers=bearer(USER), json=BODY | {"stream": True}) as answer,
    ):
        seen = Seen(await answer.read())
    assert (seen.text, seen.done) == ("".join(WORDS), 1)
    assert {came.process for came in gateway.ingress.came} == {"p1", "p2"}
    await until_number(gateway, "corral_gateway_streams_resumed_total", 1)
    await until(lambda: gateway.controller.receipts)
    assert gateway.controller.receipts[0]["resumed"] == 1


async def serving(gateway: Several, connections: int) -> Counter[int]:
    """Open so many connections at once; how many each process has got."""
    port = int(gateway.url.rpartition(":")[2])
    links = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(connections)))
    try:
        for reader, writer in links:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n")
            await reader.readuntil(b"ok\n")
        ours = {writer.get_extra_info("sockname")[1] for _, writer in links}
        return Counter(
            child.pid
            for child in gateway.children()
            for each in child.net_connections(kind="tcp")
            if each.laddr.port == port and each.raddr and each.raddr.port in ours
        )
    finally:
        for _, writer in links:
            writer.close()


async def test_connections_spread_over_the_processes(gateway: Several) -> None:
    """How evenly is for the relay's own test: here it also depends on which process the machine lets run."""

    async def is_spread() -> bool:
        spread = await serving(gateway, 40)
        assert sum(spread.values()) == 40
        return len(spread) == 2

    await until(is_spread, "connections to both processes")


async def test_requests_are_served_by_all_and_each_leaves_its_receipt(gateway: Several) -> None:
    asked = 0

    async def has_receipts_of_both() -> bool:
        """A process that does not run for a moment may have none of the first forty."""
        nonlocal asked
        assert await asyncio.gather(*(gateway.ask() for _ in range(40))) == [200] * 40
        asked += 40
        await until(lambda: len(gateway.controller.receipts) >= asked)
        return len({batch["gateway"] for batch in gateway.controller.batches}) == 2

    await until(has_receipts_of_both, "receipts of both processes")
    assert len({receipt["id"] for receipt in gateway.controller.receipts}) == asked == len(gateway.controller.receipts)


async def test_one_process_reads_the_view_and_a_change_reaches_all(gateway: Several) -> None:
    gateway.controller.view_reads.clear()
    began = time.monotonic()
    await asyncio.sleep(1.0)  # what is measured is a rate
    assert len(gateway.controller.view_reads) <= (time.monotonic() - began) / 0.05 + 5
    gateway.controller.change(keys=[*KEYS, key(OTHER, "inference")])
    assert await asyncio.gather(*(gateway.ask(OTHER) for _ in range(10))) == [200] * 10
    gateway.controller.change(keys=list(KEYS))
    await until_seen(gateway)
    assert set(await asyncio.gather(*(gateway.ask(OTHER) for _ in range(10)))) == {401}


@pytest.mark.parametrize("limit", [{"requests_per_min": 12}, {"concurrent": 12}])
async def test_limits_of_a_key_hold_for_all_processes_together(gateway: Several, limit: dict[str, int]) -> None:
    gateway.controller.change(keys=[*KEYS, key(OTHER, "inference", limits=limit)])
    assert await gateway.ask(OTHER, model="none") == 404  # it is known from here on
    if "requests_per_min" in limit:  # that one counted
        gateway.controller.change(keys=[*KEYS, key(OTHER, "inference", limits={"requests_per_min": 11})])
        await until_seen(gateway)
    gateway.ingress.held = asyncio.Event()
    asked = [asyncio.create_task(gateway.ask(OTHER)) for _ in range(60)]
    most = 11 if "requests_per_min" in limit else 12
    await until(lambda: sum(task.done() for task in asked) == 60 - most)
    await until(lambda: gateway.ingress.running["p1"] == most, "those that are allowed at the ingress")
    gateway.ingress.held.set()
    answers = Counter(await asyncio.gather(*asked))
    assert answers == {200: most, 429: 60 - most}


async def test_tokens_of_a_key_are_counted_together(gateway: Several) -> None:
    gateway.controller.change(keys=[*KEYS, key(OTHER, "inference", limits={"tokens_per_min": 40})])
    answers = []
    for _ in range(12):  # each answer costs 12 tokens: the fourth overdraws
        answers.append(await gateway.ask(OTHER))
    assert answers[:3] == [200] * 3
    assert 3 <= answers.count(200) <= 5
    assert answers.count(200) + answers.count(429) == 12


async def test_slots_of_a_replica_are_never_taken_twice(gateway: Several) -> None:
    gateway.controller.change(replicas=[gateway.ingress.replica("p1", slots=3)])
    await until_seen(gateway)
    gateway.ingress.held = asyncio.Event()
    asked = [asyncio.create_task(gateway.ask()) for _ in range(60)]
    await until_waiting(gateway, 57)
    await until(lambda: gateway.ingress.running["p1"] == 3, "those with a slot at the ingress")
    gateway.ingress.held.set()
    assert await asyncio.gather(*asked, *(gateway.ask() for _ in range(60))) == [200] * 120
    assert gateway.ingress.most == 3


async def test_the_queue_is_fair_by_key_over_all_processes(gateway: Several) -> None:
    gateway.controller.change(keys=[*KEYS, key(OTHER, "inference")], replicas=[gateway.ingress.replica("p1", slots=1)])
    await until_seen(gateway)
    gateway.ingress.held = asyncio.Event()
    many = [asyncio.create_task(gateway.ask()) for _ in range(20)]
    await until_waiting(gateway, 19)
    late = [asyncio.create_task(gateway.ask(OTHER, user="late")) for _ in range(2)]
    await until_waiting(gateway, 21)
    gateway.ingress.held.set()
    assert set(await asyncio.gather(*many, *late)) == {200}
    places = [place for place, came in enumerate(gateway.ingress.came) if b"late" in came.body]
    assert len(places) == 2
    assert places[-1] <= 9  # before most of the 20 that came first
    assert gateway.ingress.most == 1


async def until_waiting(gateway: Several, count: int) -> None:
    await until_number(gateway, "corral_gateway_waiting", count)


async def test_a_replica_that_one_process_could_not_reach_is_left_alone_by_all(gateway: Several) -> None:
    gone = gateway.ingress.replica("p9", slots=100)
    gateway.controller.change(replicas=[gateway.ingress.replica("p1", slots=100), gone])
    await until_seen(gateway)
    gateway.ingress.unreachable.add("p9")
    assert set(await asyncio.gather(*(gateway.ask() for _ in range(20)))) == {200}
    assert await gateway.number("corral_gateway_ejections_total") >= 1
    retries = await gateway.number("corral_gateway_replica_retries_total")
    assert retries >= 1
    assert set(await asyncio.gather(*(gateway.ask() for _ in range(20)))) == {200}
    assert await gateway.number("corral_gateway_replica_retries_total") == retries


async def test_a_cold_model_is_asked_for_once_and_all_who_wait_are_served(gateway: Several) -> None:
    cold = {"id": "cold", "revision": "r1"}
    gateway.controller.change(models=[SMALL, cold])
    gateway.controller.load("cold", state="loading")
    asked = [asyncio.create_task(gateway.ask(model="cold")) for _ in range(10)]
    await until_waiting(gateway, 10)
    ready = gateway.ingress.replica("p2", model="cold", slots=2)
    gateway.controller.change(replicas=[gateway.ingress.replica("p1", slots=100), ready])
    assert await asyncio.gather(*asked) == [200] * 10
    assert gateway.controller.asked_loads == ["cold"]


async def test_a_killed_process_is_replaced_and_what_it_held_is_free(gateway: Several) -> None:
    gateway.controller.change(
        keys=[*KEYS, key(OTHER, "inference", limits={"concurrent": 4})],
        replicas=[gateway.ingress.replica("p1", slots=4)],
    )
    await until_seen(gateway)
    gateway.ingress.held = asyncio.Event()
    asked = [asyncio.create_task(gateway.ask(OTHER)) for _ in range(4)]
    await until(lambda: gateway.ingress.running.get("p1") == 4)
    waiting = asyncio.create_task(gateway.ask(USER))
    await until_waiting(gateway, 1)
    before = await gateway.number("corral_gateway_requests_total")
    for child in gateway.children():
        os.kill(child.pid, signal.SIGKILL)
    ended = await asyncio.gather(*asked, waiting, return_exceptions=True)
    assert all(isinstance(each, aiohttp.ClientError) for each in ended)
    await until(lambda: gateway.ingress.running.get("p1") == 0)
    await until_all_serve(gateway, 2)
    gateway.ingress.held.set()
    assert await asyncio.gather(*(gateway.ask(OTHER) for _ in range(4))) == [200] * 4
    assert await gateway.number("corral_gateway_requests_total") >= before + 4  # counters never run backwards
    assert gateway.process.returncode is None


async def test_new_connections_wait_while_every_process_is_being_replaced(gateway: Several) -> None:
    killed = gateway.children()
    for child in killed:
        os.kill(child.pid, signal.SIGKILL)
    await until(lambda: not any(alive(child.pid) for child in killed))
    assert await gateway.ask() == 200


async def test_a_stop_lets_requests_of_every_process_end(gateway: Several) -> None:
    gateway.ingress.held = asyncio.Event()
    asked = [asyncio.create_task(gateway.ask()) for _ in range(10)]
    await until(lambda: gateway.ingress.running.get("p1") == 10)
    gateway.process.send_signal(signal.SIGTERM)
    port = int(gateway.url.rpartition(":")[2])
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
            except ConnectionRefusedError:
                break
            except ConnectionResetError:
                pass
    gateway.ingress.held.set()
    assert await asyncio.gather(*asked) == [200] * 10
    assert await asyncio.wait_for(gateway.process.wait(), 60) == 0


async def test_it_is_ready_when_every_process_has_a_view(controller: ScriptedController) -> None:
    await controller.stop()
    port = free_port()
    settings = {"controller": f"unix:{controller.socket}", "gateway_key": GATEWAY_KEY, "port": str(port)}
    settings |= {"processes": "2", "hints": "false", "view_check_interval": "50ms"}
    async with process(**settings) as started:
        await until_serving(started, 2)
        first, second = psutil.Process(started.pid).children()
        assert await status_of(port, "/readyz") == 503, "none has a view"
        with suspended(first):  # it counts as one that accepts connections, and the view does not reach it
            await controller.start()
            await until_status(port, "/v1/models", 200)
            assert await status_of(port, "/readyz") == 503, "one has no view"
        await until_status(port, "/readyz", 200)
        with suspended(second):
            assert await status_of(port, "/v1/models") == 200, "the other one has it too"
        started.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(started.wait(), 60) == 0


async def test_who_waits_at_an_inherited_socket_is_accepted_with_a_view(controller: ScriptedController) -> None:
    """As at a restart by a supervisor, which keeps the socket: no process answers that it knows no key yet."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        port, descriptor = listener.getsockname()[1], listener.fileno()
        told = {"controller": f"unix:{controller.socket}", "gateway_key": GATEWAY_KEY, "port": str(port)}
        told |= {"processes": "2", "hints": "false"}
        env = {**os.environ, "LISTEN_FDS": "1", **{f"CORRAL_{name.upper()}": value for name, value in told.items()}}
        waiting = [asyncio.create_task(status_of(port, "/v1/models")) for _ in range(16)]
        started = await asyncio.create_subprocess_exec(
            *("bash", "-c", f'LISTEN_PID=$$ exec "$0" "$@" 3<&{descriptor}', sys.executable, "-c", RUN),
            env=env,
            pass_fds=(descriptor,),
        )
        try:
            assert await asyncio.wait_for(asyncio.gather(*waiting), 60) == [200] * 16
            started.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(started.wait(), 60) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                started.kill()
            await started.wait()


async def test_a_process_waits_for_its_first_view_until_it_is_stopped() -> None:
    link = ParentLink(SharedTable.create(2), Metrics(), SystemClock(), 1.0)
    stopped = asyncio.Event()
    waiting = asyncio.create_task(link.wait_for_view(stopped))
    await asyncio.sleep(0)
    assert not waiting.done()
    stopped.set()
    await asyncio.wait_for(waiting, 2)


async def until_serving(started: asyncio.subprocess.Process, processes: int) -> None:
    assert started.stderr is not None
    async with asyncio.timeout(60):
        while processes:
            line = await started.stderr.readline()
            assert line, "it has ended"
            processes -= b"a gateway process serves" in line


@contextlib.contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    process.suspend()
    try:
        yield
    finally:
        process.resume()


async def until_status(port: int, path: str, status: int) -> None:
    async def answers() -> bool:
        return await status_of(port, path) == status

    await until(answers, f"{path} to answer {status}")


async def status_of(port: int, path: str) -> int:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http,
        http.get(f"http://127.0.0.1:{port}{path}", headers=bearer(USER)) as answer,
    ):
        return answer.status


async def test_children_end_with_a_parent_that_is_killed(gateway: Several) -> None:
    children = gateway.children()
    gateway.process.kill()
    await gateway.process.wait()
    await until(lambda: not any(alive(child.pid) for child in children))


async def test_settings_that_cannot_work_are_reported_once(controller: ScriptedController, tmp_path: Path) -> None:
    settings = {"controller": f"unix:{controller.socket}", "gateway_key": GATEWAY_KEY, "processes": "2"}
    async with process(**settings, tls_cert=str(tmp_path / "none.crt"), tls_key=str(tmp_path / "none.key")) as started:
        assert started.stderr is not None
        said = (await started.stderr.read()).decode()
        assert await started.wait() == 1
    assert said.count("corral gateway: TLS certificate and key cannot be used") == 1


async def test_every_process_uses_a_renewed_certificate(controller: ScriptedController, tmp_path: Path) -> None:
    port, (certificate, key) = free_port(), self_signed(tmp_path)
    settings = {
        "controller": f"unix:{controller.socket}",
        "gateway_key": GATEWAY_KEY,
        "port": str(port),
        "processes": "2",
        "hints": "false",
        "tls_cert": str(certificate),
        "tls_key": str(key),
        "tls_check": "20ms",
    }

    async def answers_as(trust: ssl.SSLContext, times: int) -> bool:
        """On that many connections, so that each process gets some."""
        for _ in range(times):
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http,
                http.get(f"https://127.0.0.1:{port}/healthz", ssl=trust) as answer,
            ):
                assert answer.status == 200
        return True

    async with process(**settings) as started:
        try:
            first = ssl.create_default_context(cafile=str(certificate))
            await until(lambda: answers_as(first, 8), "gateway with its first certificate")
            self_signed(tmp_path)
            second = ssl.create_default_context(cafile=str(certificate))
            await until(lambda: answers_as(second, 8), "every process with the second certificate")
        finally:
            started.send_signal(signal.SIGTERM)
            await asyncio.wait_for(started.wait(), 60)
