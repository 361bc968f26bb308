"""kill -9 in the middle of joining, of whoever takes part. Afterwards there is one node per name, and all are well.

The moments are random (the seed is printed; CORRAL_TEST_SEED repeats a run), what must hold afterwards is not.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import socketserver
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.processes import CORRAL, Process, free_port
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(180)

SOON_S = 0.06  # about as long as a registration takes


class Toll:
    """A relay before the gateway that notices when a registration has passed, and when its answer has."""

    def __init__(self, target_port: int) -> None:
        self.asked = threading.Event()
        self.answered = threading.Event()
        self._target_port = target_port
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), self._serve)  # type: ignore[arg-type]
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def forget(self) -> None:
        self.asked.clear()
        self.answered.clear()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _serve(self, near: socket.socket, _address: object, _server: object) -> None:
        with contextlib.suppress(OSError), near, socket.create_connection(("127.0.0.1", self._target_port)) as far:
            back = threading.Thread(target=self._pass_on, args=(far, near, b"", self.answered), daemon=True)
            back.start()
            self._pass_on(near, far, b"POST /api/node/register", self.asked)
            back.join()

    def _pass_on(self, source: socket.socket, target: socket.socket, mark: bytes, passed: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
                if mark in data:
                    passed.set()
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Joiner:
    """One machine that is started again and again with the same line, as a service would be."""

    def __init__(self, cluster: Cluster, name: str, folder: Path) -> None:
        member = cluster.members[0]
        self.cluster = cluster
        self.folder = folder
        self.name = name
        self.toll = Toll(member.port)
        self.token = cluster.token(member, pre_approved=True, name=f"{folder.name} {name}")
        self.starts = 0
        self._port = str(free_port())

    def start(self) -> Process:
        self.toll.forget()
        self.starts += 1
        words = ("join", self.toll.url, "--name", self.name, "--token", self.token, "--port", self._port)
        log = self.folder / f"{self.name}-{self.starts}.log"
        worker = Process((*CORRAL, *words, "--data", str(self.folder / self.name)), self.cluster.env, log)
        self.cluster.workers.append(worker)
        return worker

    def start_and_kill(self, moment: str, delay_s: float) -> None:
        worker = self.start()
        event = {"at any time": threading.Event(), "asked": self.toll.asked, "answered": self.toll.answered}[moment]
        if moment == "at any time":
            event.wait(delay_s * 20)
        else:
            assert event.wait(60), worker.output()
            threading.Event().wait(delay_s)
        worker.kill()


@pytest.fixture
def chance() -> random.Random:
    seed = int(os.environ.get("CORRAL_TEST_SEED") or random.SystemRandom().randrange(2**32))
    print(f"CORRAL_TEST_SEED={seed}")
    return random.Random(seed)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    root = tmp_path_factory.mktemp("joining")
    cluster = Cluster(root, f"sqlite:///{root}/corral.db", members=1)
    try:
        yield cluster.start()
    finally:
        cluster.close()


@contextlib.contextmanager
def joiners(cluster: Cluster, *names: str) -> Iterator[list[Joiner]]:
    """Machines of these names; gone without a trace afterwards."""
    run = cluster.root / secrets.token_hex(4)
    run.mkdir()
    made = [Joiner(cluster, name, run) for name in names]
    try:
        yield made
    finally:
        for worker in cluster.workers:
            worker.close()
        cluster.workers.clear()
        for each in made:
            each.toll.close()
    for name in cluster.nodes(cluster.members[0]):
        assert cluster.api(cluster.members[0], "DELETE", f"/api/nodes/{name}").status == 200


def are_well(cluster: Cluster, joined: Sequence[Joiner]) -> bool:
    """Everybody is there once, heard on the bus, and nobody's single use was spent on a stranger."""
    member = cluster.members[0]
    rows = cluster.api(member, "GET", "/api/nodes").json()
    assert sorted(row["name"] for row in rows) == sorted(each.name for each in joined)
    assert {row["status"] for row in rows} == {"healthy"}
    assert not any(row.get("bus_down") for row in rows)
    tokens = {token["name"]: token for token in cluster.api(member, "GET", "/api/tokens").json()}
    assert [tokens[f"{each.folder.name} {each.name}"]["uses"] for each in joined] == [1] * len(joined)
    return True


@pytest.mark.long
def test_a_worker_killed_again_and_again_while_it_registers(cluster: Cluster, chance: random.Random) -> None:
    with joiners(cluster, "barn", "byre") as machines:
        plans = {
            machine.name: [
                (moment, chance.uniform(0, SOON_S))
                for moment in chance.sample(["asked", "asked", "answered", "at any time"], k=4)
            ]
            for machine in machines
        }
        print(plans)

        def suffer(machine: Joiner) -> Process:
            for moment, delay_s in plans[machine.name]:
                machine.start_and_kill(moment, delay_s)
            return machine.start()

        with ThreadPoolExecutor(len(machines)) as threads:
            workers = list(threads.map(suffer, machines))
        wait_for(lambda: are_well(cluster, machines), "one healthy node per name", 45)
        assert all(worker.running for worker in workers)


LONG = pytest.mark.long


@pytest.mark.parametrize("victim", ["controller", pytest.param("gateway", marks=LONG), pytest.param("bus", marks=LONG)])
def test_whoever_is_killed_while_machines_join_they_all_arrive(
    cluster: Cluster, chance: random.Random, victim: str
) -> None:
    with joiners(cluster, "barn", "byre", "coop", "dairy") as machines:
        for machine in machines:
            machine.start()
        for _ in range(3):
            for machine in machines:
                machine.toll.forget()
            wait_for(lambda: is_under_way(cluster, machines), "registration")
            threading.Event().wait(chance.uniform(0, SOON_S))
            kill_and_restart(cluster, victim)
        wait_for(lambda: are_well(cluster, machines), "one healthy node per name", 45)
        assert all(worker.running for worker in cluster.workers), "nobody had to be started again"
    with closing(sqlite3.connect(f"file:{cluster.root}/corral.db?mode=ro", uri=True)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def is_under_way(cluster: Cluster, machines: Sequence[Joiner]) -> bool:
    """A registration has just passed; or all have, and the next blow meets machines that have only just arrived."""
    if any(machine.toll.asked.is_set() for machine in machines):
        return True
    return len(cluster.nodes(cluster.members[0])) == len(machines)


def kill_and_restart(cluster: Cluster, victim: str) -> None:
    member = cluster.members[0]
    process = {"controller": member.controller, "gateway": member.gateway, "bus": cluster.bus}[victim]
    assert process is not None
    process.kill()
    if victim == "controller":
        cluster.start_controller(member)
        cluster.wait_ready(member)
    elif victim == "gateway":
        cluster.start_gateway(member)
    else:
        cluster.start_bus()
