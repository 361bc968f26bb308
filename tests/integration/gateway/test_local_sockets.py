"""A gateway with a folder of unix sockets: it reaches workers of this machine there, all others by their addresses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import pytest

from corral.gateway.main import Gateway
from corral.gateway.receipts.metrics import render
from corral.kit.certificates import Ca, make_ca
from tests.integration.gateway.conftest import OpenGateway
from tests.integration.gateway.fleet import SMALL, GatewayFleet, open_fleet
from tests.integration.gateway.scripted_controller import ScriptedController
from tests.integration.gateway.scripted_ingress import ScriptedIngress, running_ingress, server_tls
from tests.integration.gateway.test_gateway_processes import several
from tests.support.waiting import until


@pytest.fixture
async def fleet(
    controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession
) -> AsyncIterator[GatewayFleet]:
    async with open_fleet(controller, open_one, http) as fleet:
        yield fleet


@pytest.fixture
async def near(short_folder: Path) -> AsyncIterator[ScriptedIngress]:
    async with running_ingress("n3", sockets=short_folder) as near:
        yield near


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def local_connects(gateway: Gateway) -> int:
    return gateway.metrics.relay.upstream_local_connects


async def test_a_worker_of_this_machine_is_reached_through_its_socket(
    fleet: GatewayFleet, near: ScriptedIngress, short_folder: Path
) -> None:
    fleet.controller.change(
        nodes=[near.view, fleet.one.view], replicas=[near.replica("p3", slots=4), fleet.one.replica("p1", slots=4)]
    )
    gateway = await fleet.gateway(local_sockets=short_folder)
    assert {await fleet.who(gateway) for _ in range(8)} == {"p1", "p3"}
    assert {came.locally for came in near.came} == {True}
    assert {came.locally for came in fleet.one.came} == {False}, "it has no socket there"
    assert {(row["node_id"], row["status"]) for row in await fleet.receipts(8)} == {("n1", 200), ("n3", 200)}
    lines = render(gateway.metrics, now=0.0).decode().splitlines()
    assert "corral_gateway_upstream_local_connects_total 1.0" in lines
    assert gateway.metrics.relay.upstream_reuses >= 6, "on the fast path as over TCP"


async def test_streams_take_the_socket_too(fleet: GatewayFleet, near: ScriptedIngress, short_folder: Path) -> None:
    fleet.controller.change(nodes=[near.view], replicas=[near.replica("p3", slots=4)])
    gateway = await fleet.gateway(local_sockets=short_folder)
    for _ in range(3):
        body = {"model": "small", "messages": [], "stream": True}
        headers = {"Authorization": "Bearer ck_user"}
        async with fleet.http.post(f"{gateway.url}/v1/chat/completions", headers=headers, json=body) as answer:
            assert (await answer.text()).endswith("data: [DONE]\n\n")
    assert [came.locally for came in near.came] == [True] * 3
    assert local_connects(gateway) == 1


async def test_without_the_folder_the_address_is_used(fleet: GatewayFleet, near: ScriptedIngress) -> None:
    fleet.controller.change(nodes=[near.view], replicas=[near.replica("p3")])
    gateway = await fleet.gateway()
    assert await fleet.who(gateway) == "p3"
    assert [came.locally for came in near.came] == [False]


async def test_a_worker_whose_socket_is_gone_is_reached_by_its_address_and_is_not_ejected(
    fleet: GatewayFleet, near: ScriptedIngress, short_folder: Path
) -> None:
    fleet.controller.change(nodes=[near.view], replicas=[near.replica("p3")])
    path = only_file(short_folder)
    path.unlink()
    gateway = await fleet.gateway(local_sockets=short_folder, upstream_idle_s=0.2)
    assert await fleet.who(gateway) == "p3"
    await until(lambda: not gateway.metrics.relay.upstream_open, "the end of the idle connection")
    await near.listen_locally(short_folder)
    assert await fleet.who(gateway) == "p3"
    assert [came.locally for came in near.came] == [False, True], "the next connection tries the socket again"
    assert [row.get("tries", 1) for row in await fleet.receipts(2)] == [1, 1]


async def test_a_stale_socket_of_a_worker_that_has_ended_counts_as_refused(
    fleet: GatewayFleet, near: ScriptedIngress, short_folder: Path
) -> None:
    """As after kill -9: the file stays, and nothing listens on the port either."""
    near.sockets = None
    fleet.controller.change(
        nodes=[near.view, fleet.one.view], replicas=[near.replica("p3", slots=4), fleet.one.replica("p1", slots=4)]
    )
    gateway = await fleet.gateway(local_sockets=short_folder, eject_s=30.0)
    assert {await fleet.who(gateway) for _ in range(4)} == {"p1", "p3"}
    path = only_file(short_folder)
    path.rename(short_folder / "kept")
    await near.stop()
    (short_folder / "kept").rename(path)
    assert {await fleet.who(gateway) for _ in range(4)} == {"p1"}
    receipts = await fleet.receipts(8)
    assert [row.get("tries", 1) for row in receipts].count(2) == 1, "then its node is ejected"
    assert {row["status"] for row in receipts} == {200}


async def test_a_socket_of_another_port_or_node_is_not_taken(
    fleet: GatewayFleet, near: ScriptedIngress, short_folder: Path
) -> None:
    """A worker that was replaced still listens, while the view has the address of the new one."""
    path = only_file(short_folder)
    path.rename(short_folder / f"n3-{near.port + 1}.sock")
    fleet.controller.change(nodes=[near.view], replicas=[near.replica("p3")])
    gateway = await fleet.gateway(local_sockets=short_folder)
    assert await fleet.who(gateway) == "p3"
    assert [came.locally for came in near.came] == [False]


async def test_the_way_on_this_machine_has_no_tls(fleet: GatewayFleet, short_folder: Path, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    made = make_ca("fleet", now)
    issued = Ca(made.certificate_pem, made.key_pem).issue_server(["n4"], now, life=timedelta(hours=1))
    (tmp_path / "ca.pem").write_text(made.certificate_pem)
    tls = server_tls(issued.certificate_pem, issued.key_pem, tmp_path)
    async with running_ingress("n4", tls=tls, sockets=short_folder) as secure:
        fleet.controller.change(nodes=[secure.view], replicas=[secure.replica("p4")])
        gateway = await fleet.gateway(local_sockets=short_folder, ingress_ca=tmp_path / "ca.pem", upstream_idle_s=0.2)
        assert await fleet.who(gateway) == "p4"
        await until(lambda: not gateway.metrics.relay.upstream_open, "the end of the idle connection")
        only_file(short_folder).unlink()
        assert await fleet.who(gateway) == "p4"
        assert [came.locally for came in secure.came] == [True, False], "and over TCP there is TLS as before"


async def test_every_process_of_a_gateway_uses_the_socket(controller: ScriptedController, short_folder: Path) -> None:
    async with several(controller, local_sockets=str(short_folder)) as gateway:
        ingress = gateway.ingress
        await ingress.listen_locally(short_folder)
        controller.change(models=[SMALL])
        before = len(ingress.came)
        assert set(await asyncio.gather(*(gateway.ask() for _ in range(20)))) == {200}
        assert all(came.locally for came in ingress.came[before:])
        assert await gateway.number("corral_gateway_upstream_local_connects_total") >= 2
