"""Flags of a first start are those of later ones on the same folder; and no token stays on the command line."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.support.nats import NatsServer, nats_server
from tests.support.processes import CORRAL, clean_env, free_port
from tests.support.running_worker import worker_env
from tests.support.scripted_controller import ScriptedController
from tests.support.waiting import until

__all__ = ["nats_server"]

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
async def controller(nats_server: NatsServer) -> AsyncIterator[ScriptedController]:
    async with ScriptedController(nats_server) as started:
        yield started


@pytest.fixture
def start(controller: ScriptedController, tmp_path: Path) -> Iterator[Start]:
    """Start a command of ours in the folder of one worker; each is gone after the test."""
    started: list[subprocess.Popen[str]] = []
    settings = worker_env("", tmp_path / "w", name="")

    def begin(*words: str, stdin: str = "", **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*CORRAL, *words],
            env=clean_env(tmp_path) | settings | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        started.append(process)
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.close()
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(30)


async def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 40) == 0


def command_line(process: subprocess.Popen[str]) -> str:
    return Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


async def boots(controller: ScriptedController, name: str, count: int) -> list[dict[str, object]]:
    """The registrations of that many starts."""

    def came() -> bool:
        return controller.knows(name) and len(set(controller.named(name).boot_ids)) >= count

    await until(came, f"start {count} of {name}", 40)
    return controller.named(name).registrations


def ingress_port(registration: dict[str, object]) -> object:
    ingress = registration["ingress"]
    assert isinstance(ingress, dict)
    return ingress["port"]


async def test_flags_of_join_are_those_of_a_plain_worker_later(
    controller: ScriptedController, start: Start, tmp_path: Path
) -> None:
    port, other = free_port(), free_port()
    token = controller.token()
    words = ("join", controller.url, "--name", "barn", "--port", str(port), "--labels", "tier=fast", "--token", token)
    first = start(*words)
    await boots(controller, "barn", 1)
    await stop(first)
    second = start("worker")
    registrations = await boots(controller, "barn", 2)
    assert ingress_port(registrations[-1]) == port
    assert registrations[-1]["labels"] == registrations[0]["labels"]
    await stop(second)
    third = start("worker", CORRAL_PORT=str(other))  # a variable of this start wins, and is not kept
    assert ingress_port((await boots(controller, "barn", 3))[-1]) == other
    await stop(third)
    fourth = start("worker", "--port", str(other))  # a flag wins, and is kept
    await boots(controller, "barn", 4)
    await stop(fourth)
    kept = json.loads((tmp_path / "w" / "settings.json").read_bytes())
    assert kept == {"port": str(other), "labels": "tier=fast"}
    assert (tmp_path / "w" / "settings.json").stat().st_mode & 0o777 == 0o600
    assert token not in (tmp_path / "w" / "settings.json").read_text()


@pytest.mark.parametrize("form", ["--token X", "--token=X", "--token -"])
@pytest.mark.parametrize("command", ["join", "worker"])
async def test_a_join_token_does_not_stay_on_the_command_line(
    controller: ScriptedController, start: Start, form: str, command: str
) -> None:
    token = controller.token()
    where = [controller.url] if command == "join" else ["--controller", controller.url]
    shown = {"--token X": ["--token", token], "--token=X": [f"--token={token}"], "--token -": ["--token", "-"]}[form]
    process = start(command, *where, "--name", "barn", *shown, stdin=f"{token}\n" if form == "--token -" else "")
    await boots(controller, "barn", 1)
    line = command_line(process)
    assert token not in line
    assert "--token" not in line
    assert "barn" in line
    await stop(process)


async def test_a_worker_that_is_started_again_with_a_faulty_remembered_setting_says_where_it_is(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "settings.json").write_text('{"port": "many", "unknown-by-now": "x"}')
    ran = await asyncio.to_thread(
        subprocess.run,
        [*CORRAL, "worker"],
        env=clean_env(tmp_path) | worker_env("http://127.0.0.1:1", tmp_path / "w"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 2
    assert f"{tmp_path}/w/settings.json: port" in ran.stderr
    assert "unknown-by-now" not in ran.stderr
