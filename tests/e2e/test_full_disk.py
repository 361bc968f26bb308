"""A data folder without room, or that may not be written: one line that says so, and nothing to clean up afterwards."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.fleet import STALE_S, Answer, Fleet
from tests.support.processes import Process
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(180)

ROLES = ("nats-server", "controller", "gateway", "worker")
# Root may write anywhere; without its capabilities it is a user like any other.
LIKE_ANYBODY = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()


class Disk:
    """A small file system in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def resize(self, size: str) -> None:
        self.remount(f"size={size}")

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.folder)], check=True, timeout=60)

    def fill(self) -> None:
        """To the last byte, whatever else is written meanwhile."""
        with self._filler.open("ab", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(b"\0" * 4096)

    def make_room(self) -> None:
        self._filler.unlink()


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Disk]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True, timeout=60)
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=60)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    with small_disk(tmp_path_factory.mktemp("disks") / "small", "1m") as disk:
        yield disk


@pytest.fixture(scope="module")
def fleet(disk: Disk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("small"))
    fleet.data = disk.folder / "data"
    try:
        yield fleet
    finally:
        fleet.close()


def up(fleet: Fleet, *options: str) -> str:
    words = ("--port", "0", "--bus-port", "0", "--ingress-port", "0", *options)
    return fleet.refused("up", "--data", str(fleet.data), *words)


@pytest.mark.root
def test_up_on_a_disk_without_room_says_so_and_starts_when_there_is_some(fleet: Fleet, disk: Disk) -> None:
    said = up(fleet)
    assert said.startswith(f"corral: {fleet.data}: only ")
    assert "free some space, or choose another folder with --data" in said
    disk.fill()
    assert "free some space" in up(fleet, "--lan")
    disk.make_room()
    disk.resize("64m")
    fleet.start()
    fleet.wait_status(fleet.own_node(), "healthy")


@pytest.mark.root
def test_a_full_disk_under_a_running_fleet_is_a_503_until_there_is_room(fleet: Fleet, disk: Disk) -> None:
    name = fleet.own_node()
    children = [fleet.child_pid(role) for role in ROLES]

    def make_token() -> Answer:
        return fleet.api("POST", "/api/tokens", {"name": "x" * 250})

    def refusal() -> Answer | None:
        """Not each one: what the database has already may hold a few more rows."""
        answer = make_token()
        return answer if answer.status == 503 else None

    disk.fill()
    refused = wait_for(refusal, "honest 503")
    assert refused is not None
    assert "database or disk is full" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"]
    assert fleet.api("GET", "/v1/models").status == 200, "what is warm goes on"
    until = time.monotonic() + 1.5 * STALE_S  # long enough to blame a node for what we could not write down
    wait_for(lambda: time.monotonic() > until, "end of the shortage")

    disk.make_room()
    wait_for(lambda: make_token().status == 201, "room again")
    seen = fleet.nodes()[name]["last_heartbeat"]
    wait_for(lambda: fleet.nodes()[name]["last_heartbeat"] > seen, "a heartbeat that is written")
    assert fleet.status(name) == "healthy"
    assert [fleet.child_pid(role) for role in ROLES] == children, "nothing had to be restarted"


@pytest.mark.root
def test_join_on_a_full_disk_says_so_and_spends_nothing(fleet: Fleet, disk: Disk, tmp_path: Path) -> None:
    with small_disk(tmp_path / "full", "64k") as full:
        data = full.folder / "worker"
        full.fill()
        token = fleet.token("--pre-approved")
        words = ("join", fleet.url, "--token", token, "--name", "barn", "--port", "0", "--data", str(data))
        said = fleet.refused(*words)
        assert str(data) in said
        assert "No space left on device; free disk space" in said
        full.make_room()
        assert "barn" not in fleet.nodes()
        worker = fleet.paste(f"corral join {fleet.url} --token {token} --name barn", "barn", CORRAL_DATA=str(data))
        fleet.wait_status("barn", "healthy")
        assert worker.stop() == 0


@pytest.mark.root
def test_a_read_only_disk_is_told(fleet: Fleet, tmp_path: Path) -> None:
    with small_disk(tmp_path / "fixed", "8m") as fixed:
        fixed.remount("ro")
        for words in (
            ("up", "--data", f"{fixed.folder}/data", "--port", "0", "--bus-port", "0", "--ingress-port", "0"),
            ("join", "http://127.0.0.1:1", "--token", "cj_x", "--data", f"{fixed.folder}/worker"),
        ):
            said = fleet.refused(*words)
            assert f"{fixed.folder}/" in said
            assert "Read-only file system" in said
            assert "--data" in said


@pytest.mark.root
def test_a_first_start_that_ran_out_of_room_waits_for_some_and_leaves_nothing_half_made(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    with small_disk(tmp_path / "tiny", "160k") as tiny:  # enough to begin with
        cluster = Cluster(tmp_path, f"sqlite:///{tiny.folder}/corral.db", members=1)
        member = cluster.members[0]
        full = f"the database {tiny.folder}/corral.db cannot be used: database or disk is full"

        def start_without_room() -> Process:
            cluster.start_controller(member)
            controller = member.controller
            assert controller is not None
            wait_for(lambda: full in controller.output(), "word about the disk")
            return controller

        try:
            start_without_room().kill()
            patient = start_without_room()
            tiny.resize("16m")
            cluster.wait_ready(member)
            assert patient.running
            assert "Traceback" not in patient.output()
        finally:
            cluster.close()


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[Fleet]:
    """A person who owns nothing but a folder that may not be written."""
    fleet = Fleet(tmp_path)
    fleet.prefix = LIKE_ANYBODY
    fixed = tmp_path / "fixed"
    fixed.mkdir(mode=0o500)
    (tmp_path / "file").write_text("not a folder")
    try:
        yield fleet
    finally:
        fixed.chmod(0o700)


@pytest.mark.parametrize("role", ["up", "join"])
@pytest.mark.parametrize(
    ("place", "reason"),
    [("fixed/data", "Permission denied"), ("fixed", "Permission denied"), ("file/data", "Not a directory")],
)
def test_a_folder_that_may_not_be_written_is_told(stranger: Fleet, role: str, place: str, reason: str) -> None:
    data = stranger.root / place
    more = {
        "up": ("--port", "0", "--bus-port", "0", "--ingress-port", "0"),
        "join": ("http://127.0.0.1:1", "--token", "cj_x"),
    }[role]
    said = stranger.refused(role, *more, "--data", str(data))
    assert reason in said
    assert str(data) in said
    assert "--data" in said
    assert list((stranger.root / "fixed").iterdir()) == []
