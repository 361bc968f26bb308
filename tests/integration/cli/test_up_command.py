"""`corral up` with stand-ins for its four processes: the start, the greeting, the stop, and what can go wrong first."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from corral.cli.common.data_folder import DataFolder, lock_file
from corral.cli.main import main
from corral.cli.up import prepare
from corral.cli.up.children import ChildSpec, Site
from corral.cli.up.command import serve
from corral.cli.up.settings import UpSettings
from corral.kit.errors import Failed
from corral.kit.settings import Seconds
from tests.support.scripted_fleet import KEY, ScriptedFleet, scripted_fleet
from tests.support.waiting import until

SLEEPER = (sys.executable, "-I", "-c", "import time; print('here', flush=True); time.sleep(600)")
ENV = {"PATH": os.environ["PATH"]}


class ScriptedSite:
    """A site whose gateway and worker are played by scripts; its four processes only sleep."""

    def __init__(self, tmp_path: Path, gateway: ScriptedFleet, worker: ScriptedFleet) -> None:
        self.gateway = gateway
        self.worker = worker
        self.folder = DataFolder(tmp_path / "data")
        prepare.make_folders(self.folder)
        self.folder.admin_key.write_text(KEY + "\n")
        self.settings = UpSettings(
            data=self.folder.root,
            restart_first_s=Seconds(0.02),
            restart_cap_s=Seconds(0.05),
            ready_timeout_s=Seconds(30),
        )
        self.site = Site(
            folder=self.folder,
            run=tmp_path / "run",
            bind="127.0.0.1",
            port=int(gateway.url.rpartition(":")[2]),
            bus_port=4222,
            ingress_port=int(worker.url.rpartition(":")[2]),
            lan=False,
            tls=False,
            address="127.0.0.1",
        )
        prepare.make_run_folder(self.site.run)
        self.specs = {name: ChildSpec(name, SLEEPER, ENV, 5.0) for name in ("bus", "controller", "gateway", "worker")}

    async def up(self) -> int:
        return await serve(self.settings, self.site, self.specs)


@pytest.fixture
def machine(no_fleet: None, tmp_path: Path) -> Iterator[ScriptedSite]:
    with scripted_fleet() as gateway, scripted_fleet() as worker:
        yield ScriptedSite(tmp_path, gateway, worker)


class Printed:
    """What was printed so far, readable while it is still being written."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.text = ""
        self.complaints = ""

    def out(self) -> str:
        more = self._capsys.readouterr()
        self.text += more.out
        self.complaints += more.err
        return self.text

    def err(self) -> str:
        self.out()
        return self.complaints


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    return Printed(capsys)


def local_file(tmp_path: Path) -> Path:
    return tmp_path / "config" / "contexts" / "data.json"


async def test_it_starts_greets_and_stops(machine: ScriptedSite, tmp_path: Path, printed: Printed) -> None:
    running = asyncio.create_task(machine.up())
    log = machine.folder.logs / "worker.log"
    await until(lambda: "Ctrl-C" in printed.out() and "here" in log.read_text())

    local = local_file(tmp_path)
    assert stat.S_IMODE(local.stat().st_mode) == 0o600
    assert json.loads(local.read_text())["admin_key_file"] == str(machine.folder.admin_key)
    assert machine.folder.worker_token.read_text() == "cj_x\n"
    assert stat.S_IMODE(machine.folder.worker_token.stat().st_mode) == 0o600
    bodies = [body for method, path, body in machine.gateway.calls if (method, path) == ("POST", "/api/tokens")]
    assert bodies[0]["pre_approved"] is True  # this machine's own worker
    assert "pre_approved" not in bodies[1]  # the printed line: somebody must approve
    assert ("DELETE", "/api/tokens/t1", None) in machine.gateway.calls  # a token that has served its turn

    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0
    assert f"  corral join {machine.gateway.url} --token cj_x" in printed.out().splitlines()
    assert str(machine.folder.admin_key) in printed.out()
    assert KEY not in printed.out()  # nobody's terminal
    assert not local.exists()
    assert not machine.folder.worker_token.exists()
    assert not machine.site.run.exists()


async def test_a_part_that_cannot_start_ends_it_with_its_last_words(machine: ScriptedSite, printed: Printed) -> None:
    dying = (sys.executable, "-I", "-c", "raise SystemExit('corral controller: no database')")
    machine.specs["controller"] = ChildSpec("controller", dying, ENV, 5.0)
    machine.gateway.ready = False
    with pytest.raises(Failed, match="controller cannot start: corral controller: no database"):
        await machine.up()
    assert "controller ended (exit code 1)" in printed.err()


async def test_a_worker_that_cannot_start_is_told_and_the_fleet_stays(machine: ScriptedSite, printed: Printed) -> None:
    dying = (sys.executable, "-I", "-c", "raise SystemExit('corral worker: port 50050 is in use')")
    machine.specs["worker"] = ChildSpec("worker", dying, ENV, 5.0)
    machine.site = dataclasses.replace(machine.site, ingress_port=1)
    running = asyncio.create_task(machine.up())
    await until(lambda: "Corral is running, but the worker of this machine is not ready yet." in printed.out())
    os.kill(os.getpid(), signal.SIGINT)
    assert await running == 0
    assert "corral:   corral worker: port 50050 is in use" in printed.err()
    assert "Corral is ready." not in printed.out()


async def test_slow_is_told_not_given_up(machine: ScriptedSite, printed: Printed) -> None:
    machine.gateway.ready = False
    machine.settings = dataclasses.replace(machine.settings, ready_timeout_s=Seconds(0.2))
    running = asyncio.create_task(machine.up())
    await until(lambda: "the fleet is not ready yet: not yet" in printed.err())
    machine.gateway.ready = True
    await until(lambda: "Corral is ready." in printed.out())
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0


async def test_a_worker_that_is_late_does_not_hold_the_greeting_but_ready_is_said_only_with_it(
    machine: ScriptedSite, printed: Printed
) -> None:
    machine.worker.ready = False
    machine.settings = dataclasses.replace(machine.settings, ready_timeout_s=Seconds(0.2))
    running = asyncio.create_task(machine.up())
    await until(lambda: "Corral is running, but the worker of this machine is not ready yet." in printed.out())
    await until(lambda: "Ctrl-C" in printed.out())
    await until(lambda: "the worker of this machine is not ready yet: not yet" in printed.err())
    assert not any(method == "DELETE" for method, _, _ in machine.gateway.calls)  # it may still need its token
    assert "Corral is ready." not in printed.out()
    machine.worker.ready = True
    await until(lambda: "Corral is ready." in printed.out())
    await until(lambda: any(method == "DELETE" for method, _, _ in machine.gateway.calls))
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0


async def test_a_second_signal_stops_at_once(machine: ScriptedSite, printed: Printed) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    machine.specs["worker"] = ChildSpec("worker", (sys.executable, "-I", "-c", stubborn), ENV, 600.0)
    running = asyncio.create_task(machine.up())
    log = machine.folder.logs / "worker.log"
    await until(lambda: "Ctrl-C" in printed.out() and "deaf" in log.read_text())
    os.kill(os.getpid(), signal.SIGINT)
    await until(lambda: "stopping" in printed.err())
    os.kill(os.getpid(), signal.SIGINT)
    assert await running == 0
    assert "stopping at once" in printed.err()


def test_a_second_up_on_one_folder(no_fleet: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = DataFolder(tmp_path / "data")
    prepare.make_folders(folder)
    with lock_file(folder.lock):
        assert main(["up", "--data", str(folder.root)]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"corral: `corral up` already runs with {folder.root} (pid {os.getpid()})")
    assert err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--port", "--bus-port", "--ingress-port"])
def test_a_port_in_use_is_told_before_anything_starts(
    no_fleet: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    ports = {"--port": "0", "--bus-port": "0", "--ingress-port": "0"}
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        ports[flag] = str(other.getsockname()[1])
        words = [word for pair in ports.items() for word in pair]
        assert main(["up", "--data", str(tmp_path / "data"), *words]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"port {ports[flag]} is in use" in err
    assert f"choose another port with {flag}" in err
    assert list((tmp_path / "data" / "logs").iterdir()) == []


def test_a_folder_that_cannot_be_used(no_fleet: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for place in ("/proc/corral", "/dev/null/corral", str(tmp_path / "file" / "deeper")):
        assert main(["up", "--data", place]) == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert "--data" in err


def test_a_secret_that_cannot_be_used(no_fleet: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = DataFolder(tmp_path / "data")
    prepare.make_folders(folder)
    folder.admin_key.write_text("oops")
    assert main(["up", "--data", str(folder.root), "--port", "0", "--bus-port", "0", "--ingress-port", "0"]) == 1
    err = capsys.readouterr().err
    assert (
        err
        == f"corral: {folder.admin_key} does not contain a key: remove the file, and the next start creates a new key\n"
    )
