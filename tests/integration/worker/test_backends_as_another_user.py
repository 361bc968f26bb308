"""`--backend-user`: whoever backends run as gets to their files, and to nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.cli.common.data_folder import DataFolder
from corral.cli.doctor.machine_checks import check_backend_user
from corral.worker.status import FatalError
from corral.worker.system import users
from corral.worker.system.users import User, give_folder
from tests.support.nats import NatsServer, nats_server
from tests.support.ordering import ordered_worker, tiny_order
from tests.support.running_worker import running_worker
from tests.support.scripted_controller import ScriptedController
from tests.support.supervising import identities

__all__ = ["nats_server"]

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can run backends as somebody else"),
]


@pytest.fixture
async def controller(nats_server: NatsServer) -> AsyncIterator[ScriptedController]:
    async with ScriptedController(nats_server) as started:
        yield started


@pytest.fixture
def public() -> Iterator[Path]:
    """Pytest's own folders are for root only."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def readable_by_others(folder: Path) -> set[str]:
    """What somebody who knows its name could open, folders that can be listed included."""
    return {path.name for path in folder.iterdir() if path.lstat().st_mode & 0o004}


async def test_its_files_can_be_reached_and_ours_cannot(controller: ScriptedController, public: Path) -> None:
    data = public / "w"
    async with running_worker(controller.url, data, token=controller.token(), backend_user="nobody") as worker:
        await worker.ready()
        assert data.stat().st_mode & 0o777 == 0o711
        assert readable_by_others(data) <= {"backends", "models", "blobs"}  # downloads, none of them secret


async def test_a_folder_it_cannot_enter_is_named(controller: ScriptedController, public: Path) -> None:
    closed = public / "closed"
    closed.mkdir(mode=0o700)
    async with running_worker(controller.url, closed / "w", token=controller.token(), backend_user="nobody") as worker:
        with pytest.raises(FatalError, match=f"nobody cannot enter {closed}: open it"):
            await worker.ended()
    assert controller.calls == []


async def test_a_user_that_is_not_there(controller: ScriptedController, public: Path) -> None:
    async with running_worker(controller.url, public / "w", token=controller.token(), backend_user="nil") as worker:
        with pytest.raises(FatalError, match="there is no user 'nil' on this machine"):
            await worker.ended()


# By default

PYTHON = Path("/usr/bin/python3")  # one that everybody can run; the tests' own may be root's


def python_order() -> dict[str, Any]:
    order = tiny_order("a", "lines=3")
    command = [str(PYTHON), *order["manifest"]["command"][1:]]
    return order | {"manifest": order["manifest"] | {"command": command}}


def user_of(pid: int) -> int:
    return os.stat(f"/proc/{pid}").st_uid


def environ_of(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(word.split("=", 1) for word in words if word)


def try_to_read(path: Path, uid: int) -> str:
    program = f"import os; os.setgroups([]); os.setgid({uid}); os.setuid({uid}); open({str(path)!r})"
    return subprocess.run([PYTHON, "-c", program], capture_output=True, text=True).stderr


def read_state(data: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((data / "backend-user.json").read_bytes())
    return found


@pytest.fixture
def open_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users, "python_places", lambda: (PYTHON,))


@pytest.mark.usefixtures("open_python")
@pytest.mark.skipif(not PYTHON.exists(), reason="needs an interpreter everybody can run")
async def test_under_root_backends_get_a_user_without_rights(nats_server: NatsServer, public: Path) -> None:
    async with ordered_worker(nats_server, public) as fleet:
        data = public / "w"
        assert (await fleet.order("install", "op-1", python_order()))["success"]
        body = {"process_id": "p1", "model": "m", "replica": 0, "backend": "tiny", "op_id": "s", "attempt": 1}
        await fleet.ask("replica.start", body | {"accept": True})
        result = await fleet.result("replica.start", "s")
        assert result["success"], result
        [identity] = identities(data / "processes")
        uid = user_of(identity.pid)
        assert uid in users.NUMBERS
        assert read_state(data) == {"user": str(uid)}
        assert (data / "backend-home").stat().st_uid == uid
        assert environ_of(identity.pid)["HOME"] == str(data / "backend-home")
        assert "PermissionError" in try_to_read(data / "identity.json", uid)
        token = fleet.controller.ingress_token(scope="replicas")
        assert (await fleet.worker.get("/replicas/p1/x", token))[0] == 200
        log_token = fleet.controller.ingress_token(scope="logs")
        assert "tiny line" in (await fleet.worker.get("/v1/backend-logs/m", log_token))[1]


async def test_where_that_user_cannot_get_to_its_files_backends_run_as_the_worker_and_doctor_says_why(
    controller: ScriptedController, public: Path
) -> None:
    closed = public / "closed"
    closed.mkdir(mode=0o700)
    async with running_worker(controller.url, closed / "w", token=controller.token()) as worker:
        await worker.ready()
        state = read_state(closed / "w")
        assert "user" not in state
        assert f"another user cannot enter {closed}" in state["warning"]
        assert f"chmod o+x {closed}" in state["fix"]
        assert (closed / "w").stat().st_mode & 0o777 == 0o700
        told = controller.named("w1").registrations[-1]
        assert told["backend_user"] == "root"
        assert (told["backend_user_warning"], told["backend_user_fix"]) == (state["warning"], state["fix"])
        (closed / "worker").symlink_to(closed / "w")
        [finding] = check_backend_user(DataFolder(closed))
        assert finding.level == "warn"
        assert str(closed) in finding.seen


@pytest.mark.usefixtures("open_python")
async def test_roots_own_folder_is_opened_whatever_the_umask(
    controller: ScriptedController, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/var/lib/corral`, which the worker makes, or `corral controller` beside it."""
    own = public / "corral"
    own.mkdir(mode=0o700)
    monkeypatch.setattr(users, "ROOT_DATA", own)
    async with running_worker(controller.url, own / "worker", token=controller.token()) as worker:
        await worker.ready()
        user = read_state(own / "worker")["user"]
        assert int(user) in users.NUMBERS
        assert own.stat().st_mode & 0o777 == 0o711
        told = controller.named("w1").registrations[-1]
        assert told["backend_user"] == user
        assert "backend_user_warning" not in told


async def test_root_can_be_asked_for(controller: ScriptedController, public: Path) -> None:
    async with running_worker(controller.url, public / "w", token=controller.token(), backend_user="root") as worker:
        await worker.ready()
        assert read_state(public / "w") == {"user": "root"}
        assert (public / "w").stat().st_mode & 0o777 == 0o700


def test_a_localai_backend_may_write_into_its_own_folder(public: Path) -> None:
    """Its scripts rewrite their paths when they start."""
    folder = public / "build"
    (folder / "venv").mkdir(parents=True)
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "link").symlink_to("/etc/hostname")
    before = os.stat("/etc/hostname").st_uid
    give_folder(folder, User(uid=64100, gid=64100, groups=()))
    assert {path.lstat().st_uid for path in (folder, *folder.rglob("*"))} == {64100}
    assert os.stat("/etc/hostname").st_uid == before
