"""The worker as a process: killed at any point, signalled, started twice, started wrongly."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.support.nats import NatsServer, nats_server
from tests.support.processes import Process, clean_env, free_port
from tests.support.running_worker import worker_env
from tests.support.scripted_controller import ScriptedController
from tests.support.waiting import until

__all__ = ["nats_server"]

WORKER = (sys.executable, "-m", "corral.cli.main", "worker")
Start = Callable[..., Process]


@pytest.fixture
async def controller(nats_server: NatsServer) -> AsyncIterator[ScriptedController]:
    async with ScriptedController(nats_server) as started:
        yield started


@pytest.fixture
def start(controller: ScriptedController, tmp_path: Path) -> Iterator[Start]:
    """Start `corral worker`; every one of them is gone after the test."""
    started: list[Process] = []

    def begin(data: str = "w", **more: str) -> Process:
        settings = {"port": str(free_port()), **more}
        env = clean_env(tmp_path) | worker_env(controller.url, tmp_path / data, **settings)
        process = Process(WORKER, env, tmp_path / f"worker-{len(started)}.log")
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.running:
            process.kill()
        process.close()


async def ended(process: Process, timeout_s: float = 40.0) -> int:
    """Its exit code, waited for without holding up the controller, which runs in this loop."""
    return await asyncio.to_thread(process.wait, timeout_s)


def works(controller: ScriptedController, boots: int) -> bool:
    """Its node is healthy and heartbeats after so many starts that got as far as registering."""
    if not controller.knows("w1"):
        return False
    node = controller.named("w1")
    return len(set(node.boot_ids)) >= boots and any(beat["boot_id"] == node.boot_ids[-1] for beat in node.beats)


@pytest.mark.parametrize("when", ["before register", "after register", "before heartbeat", "after heartbeat"])
async def test_killed_at_any_point_it_comes_back_as_the_same_node(
    controller: ScriptedController, start: Start, tmp_path: Path, when: str
) -> None:
    moment, call = when.split()
    token = controller.token(uses=1)
    victim = start(token=token)

    def kill(seen: str) -> None:
        if seen == call and victim.running:
            os.kill(victim.pid, signal.SIGKILL)

    setattr(controller, moment, kill)
    assert await ended(victim) == -signal.SIGKILL
    node_id = controller.named("w1").id if controller.nodes else ""
    start(token=token)
    await until(lambda: works(controller, boots=1 if when == "before register" else 2), timeout_s=40)
    assert len(controller.nodes) == 1
    node = controller.named("w1")
    assert node_id in ("", node.id)
    identity = json.loads((tmp_path / "w" / "identity.json").read_bytes())
    assert (identity["node_id"], identity["node_token"]) == (node.id, node.token)
    assert controller.tokens[token].uses == 0


async def test_killed_again_and_again_while_it_starts(controller: ScriptedController, start: Start) -> None:
    token = controller.token(uses=1)
    for round_ in range(6):
        victim = start(token=token)
        with_delay = 0.35 + 0.12 * round_  # from before the folder exists to after the first heartbeats
        await asyncio.sleep(with_delay)
        victim.kill()
    start(token=token)
    await until(lambda: works(controller, boots=1), timeout_s=40)
    assert len(controller.nodes) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_is_an_orderly_leave(controller: ScriptedController, start: Start, number: int) -> None:
    process = start(token=controller.token())
    await until(lambda: works(controller, boots=1), timeout_s=40)
    process.signal(number)
    assert await ended(process) == 0
    after = controller.calls[controller.calls.index("POST drain") :]
    assert after == ["POST drain", "GET models", "POST deregister"]
    assert "Traceback" not in process.output()


async def test_a_second_signal_is_quicker(controller: ScriptedController, start: Start) -> None:
    process = start(token=controller.token(), drain_timeout="50s", leave_timeout="60s")
    await until(lambda: works(controller, boots=1), timeout_s=40)
    controller.named("w1").in_flight = 1
    process.signal(signal.SIGTERM)
    await until(lambda: "GET models" in controller.calls)
    process.signal(signal.SIGTERM)
    assert await ended(process, 30) == 0
    assert controller.named("w1").status == "offline"


async def test_a_second_worker_on_one_folder(controller: ScriptedController, start: Start) -> None:
    first = start(token=controller.token())
    await until(lambda: works(controller, boots=1), timeout_s=40)
    second = start(token=controller.token())
    assert await ended(second) == 1
    assert f"corral worker: another worker (pid {first.pid}) uses " in second.output()
    assert first.running


async def test_what_a_person_must_mend_is_the_last_line(
    controller: ScriptedController, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    cases = [
        (start(token="cj_wrong"), "corral worker: the controller refuses the join token (no such token): make a new"),
        (start(data="file/w", token="cj_x"), "corral worker: cannot use the data folder "),
        (start(data="other"), "corral worker: a join token is needed: "),
    ]
    for process, line in cases:
        assert await ended(process) == 1
        last = process.output().strip().splitlines()[-1]
        assert last.startswith(line)
        assert "Traceback" not in process.output()


async def test_bad_settings_are_told_at_once(start: Start) -> None:
    process = start(heartbeat_interval="-1s", labels="nonsense", port="99999")
    assert await ended(process) == 2
    said = process.output()
    assert "CORRAL_HEARTBEAT_INTERVAL: '-1s' is negative" in said
    assert "CORRAL_LABELS" in said
    assert "CORRAL_PORT" in said


async def test_no_secret_is_logged(controller: ScriptedController, start: Start, tmp_path: Path) -> None:
    token = controller.token(pre_approved=False)
    process = start(token=token, log_level="debug", log_json="true")
    await until(lambda: controller.credentials_given >= 1)
    controller.approve("w1")
    await until(lambda: works(controller, boots=1), timeout_s=40)
    process.signal(signal.SIGTERM)
    assert await ended(process) == 0
    said = process.output()
    identity = json.loads((tmp_path / "w" / "identity.json").read_bytes())
    for secret in (token, identity["node_token"], identity["enrolment"], "eyJ", "PRIVATE KEY", "Bearer"):
        assert secret not in said
    for line in said.strip().splitlines():
        assert json.loads(line)["role"] == "worker"
