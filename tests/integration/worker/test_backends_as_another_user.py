"""`--backend-user`: whoever backends run as gets to their files, and to nothing else."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from corral.worker.agent.stop import CannotGoOn
from tests.support.nats import NatsServer, nats_server
from tests.support.running_worker import running_worker
from tests.support.scripted_controller import ScriptedController

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
        with pytest.raises(CannotGoOn, match=f"nobody cannot enter {closed}: open it"):
            await worker.ended()
    assert controller.calls == []


async def test_a_user_that_is_not_there(controller: ScriptedController, public: Path) -> None:
    async with running_worker(controller.url, public / "w", token=controller.token(), backend_user="nil") as worker:
        with pytest.raises(CannotGoOn, match="there is no user 'nil' on this machine"):
            await worker.ended()
