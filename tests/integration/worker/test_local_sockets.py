"""The ingress's unix socket, for a gateway on the same machine: when it is there, and what it does not allow."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from corral.kit.settings import BadSettings
from corral.worker.status import FatalError
from tests.support.certificates import TestCa
from tests.support.nats import NatsServer, nats_server
from tests.support.running_worker import RunningWorker, running_worker, worker_settings
from tests.support.scripted_controller import ScriptedController
from tests.support.waiting import until

__all__ = ["nats_server"]


@pytest.fixture
async def controller(nats_server: NatsServer) -> AsyncIterator[ScriptedController]:
    async with ScriptedController(nats_server) as started:
        yield started


def socket_of(controller: ScriptedController, worker: RunningWorker, folder: Path, name: str = "w1") -> Path:
    return folder / f"{controller.named(name).id}-{worker.settings.ingress.port}.sock"


def list_files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


async def get(path: Path, route: str, token: str = "") -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
        session.get(f"http://w{route}", headers=headers) as answer,
    ):
        return answer.status


async def test_a_node_that_has_joined_listens_and_wants_tokens(
    controller: ScriptedController, short_folder: Path, tmp_path: Path
) -> None:
    sockets = short_folder / "s"
    async with running_worker(
        controller.url, tmp_path / "w", token=controller.token(), local_sockets=str(sockets)
    ) as worker:
        await worker.ready()
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
        path = socket_of(controller, worker, sockets)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert await get(path, "/healthz") == 200
        assert await get(path, "/corral/hello") == 401
        assert await get(path, "/replicas/p1/v1/models", "nonsense") == 401
        other = controller.ingress_token(aud="another-node", scope="replicas")
        assert await get(path, "/replicas/p1/v1/models", other) == 403
        assert await get(path, "/corral/hello", controller.ingress_token()) == 200
        assert (await worker.get("/healthz"))[0] == 200, "and the port is there as before"
        await worker.leave()
        assert not path.exists()


async def test_without_the_setting_there_is_no_socket(
    controller: ScriptedController, short_folder: Path, tmp_path: Path
) -> None:
    async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        await worker.ready()
        assert list_files(short_folder) == []


async def test_two_workers_of_a_machine_share_the_folder(
    controller: ScriptedController, short_folder: Path, tmp_path: Path
) -> None:
    given = {"local_sockets": str(short_folder)}
    async with (
        running_worker(controller.url, tmp_path / "1", token=controller.token(), **given) as one,
        running_worker(controller.url, tmp_path / "2", token=controller.token(), name="w2", **given) as two,
    ):
        await one.ready()
        await two.ready()
        for worker, name in ((one, "w1"), (two, "w2")):
            token = controller.ingress_token(aud=controller.named(name).id)
            assert await get(socket_of(controller, worker, short_folder, name), "/corral/hello", token) == 200
        await one.leave()
        assert list_files(short_folder) == [socket_of(controller, two, short_folder, "w2")]


async def test_a_deleted_node_that_comes_back_has_the_socket_of_its_new_id(
    controller: ScriptedController, short_folder: Path, tmp_path: Path
) -> None:
    async with running_worker(
        controller.url, tmp_path / "w", token=controller.token(uses=2), local_sockets=str(short_folder)
    ) as worker:
        await worker.ready()
        first = socket_of(controller, worker, short_folder)
        controller.delete("w1")
        await until(lambda: controller.knows("w1") and socket_of(controller, worker, short_folder) != first)
        second = socket_of(controller, worker, short_folder)
        await until(second.exists, "the new socket")
        await until(lambda: not first.exists(), "the end of the old one")
        assert await get(second, "/corral/hello", controller.ingress_token()) == 200


async def test_the_socket_stays_plain_while_the_port_changes_to_tls(
    nats_server: NatsServer, short_folder: Path, tmp_path: Path
) -> None:
    async with (
        ScriptedController(nats_server, ca=TestCa()) as controller,
        running_worker(
            controller.url, tmp_path / "w", token=controller.token(), local_sockets=str(short_folder)
        ) as worker,
    ):
        await until(lambda: controller.knows("w1") and socket_of(controller, worker, short_folder).exists())
        await until(lambda: controller.named("w1").beats, "its session")
        path = socket_of(controller, worker, short_folder)
        assert await get(path, "/corral/hello", controller.ingress_token()) == 200
        with pytest.raises(aiohttp.ClientError):
            await worker.get("/healthz")


async def test_a_socket_that_cannot_be_made_costs_only_the_socket(
    controller: ScriptedController, short_folder: Path, tmp_path: Path
) -> None:
    data = tmp_path / "w"
    async with running_worker(
        controller.url, data, token=controller.token(), local_sockets=str(short_folder)
    ) as worker:
        await worker.ready()
        path = socket_of(controller, worker, short_folder)
        await worker.leave()
    path.write_text("not a socket")
    async with running_worker(
        controller.url, data, local_sockets=str(short_folder), port=str(worker.settings.ingress.port)
    ) as worker:
        await worker.ready()
    assert path.read_text() == "not a socket"


async def test_a_folder_that_cannot_be_made_ends_the_worker_with_a_line(
    controller: ScriptedController, short_folder: Path, tmp_path: Path
) -> None:
    (short_folder / "file").write_text("")
    with pytest.raises(BadSettings, match=r"CORRAL_LOCAL_SOCKETS: .* cannot be used: Not a directory"):
        worker_settings(controller.url, tmp_path / "w", local_sockets=str(short_folder / "file" / "s"))
    async with running_worker(controller.url, tmp_path / "w", local_sockets="/proc/no/such") as worker:
        with pytest.raises(FatalError, match="cannot create the folder /proc/no/such"):
            await worker.ended()
