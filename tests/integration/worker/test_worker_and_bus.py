"""Heartbeats, orders and credentials over a real bus that comes, goes and forgets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from corral.bus.auth import node_user_key
from corral.bus.nats import NatsBus
from corral.contract.codec import Message
from corral.contract.messages.backends import LIST_BACKENDS, ListBackends
from corral.contract.messages.models import LIST_RUNNING_MODELS, ListRunningModels
from corral.contract.messages.nodes import NODE_HEARTBEAT, BusHeartbeat
from corral.contract.subjects import event
from corral.kit.signing import Signer
from tests.support.nats import Cable, NatsServer, nats_server, running_server
from tests.support.processes import free_port
from tests.support.running_worker import running_worker
from tests.support.scripted_controller import KnownNode, ScriptedController
from tests.support.waiting import until

__all__ = ["nats_server"]


class Anything(Message, frozen=True):
    """A payload that a test writes itself."""

    backend: Any = None


CALL_EVERY_S = 0.02  # often enough to fall into any gap, and no core is busy with calls alone
STOP = event("nodes.{node}.stop", Anything)
STOP_BACKEND = event("nodes.{node}.backend.stop", Anything)


@pytest.fixture
async def controller(nats_server: NatsServer) -> AsyncIterator[ScriptedController]:
    async with ScriptedController(nats_server) as started:
        yield started


@pytest.fixture
async def service(nats_server: NatsServer) -> AsyncIterator[NatsBus]:
    """The controller's end of the bus."""
    async with nats_server.bus(nats_server.service()) as bus:
        await bus.wait_connected(10)
        yield bus


async def heard(service: NatsBus) -> list[BusHeartbeat]:
    beats: list[BusHeartbeat] = []

    async def hear(beat: BusHeartbeat, _tokens: object) -> None:
        beats.append(beat)

    await service.subscribe(NODE_HEARTBEAT, hear)
    return beats


def never_went_down(node: KnownNode) -> bool:
    """The bus may take longer to come up than the first heartbeat waits for it, which then says so."""
    down = ["bus" in beat for beat in node.beats]
    return down == sorted(down, reverse=True)


async def test_heartbeats_go_over_the_bus_and_now_and_then_over_http(
    controller: ScriptedController, service: NatsBus, tmp_path: Path
) -> None:
    beats = await heard(service)
    async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        await worker.ready()
        node = controller.named("w1")

        def over_http() -> list[dict[str, Any]]:
            return [beat for beat in node.beats if "bus" not in beat]

        await until(lambda: len(over_http()) >= 3, "heartbeats over HTTP though the bus is up")
        await until(lambda: len(beats) >= 5 * len(over_http()), "many more over the bus")
        assert {beat.boot_id for beat in beats} == set(node.boot_ids)
        assert beats[-1].status_seen == "healthy"
        assert (beats[-1].available_ram or 0) > 0
        assert (beats[-1].total_disk or 0) > 0
        assert never_went_down(node)
        assert node.beats[0]["available_disk"] > 0


async def test_orders_of_step_one(controller: ScriptedController, service: NatsBus, tmp_path: Path) -> None:
    async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        await worker.ready()
        node = controller.named("w1").id
        listed = await service.call(LIST_BACKENDS, ListBackends(), timeout_s=20, node=node)
        assert (listed.backends, listed.error) == ((), "")
        running = await service.call(LIST_RUNNING_MODELS, ListRunningModels(), timeout_s=20, node=node)
        assert (running.models, running.error) == ((), "")
        await service.publish(STOP_BACKEND, Anything(backend=["not", "a", "name"]), node=node)
        await service.publish(STOP_BACKEND, Anything(), node=node)
        await service.call(LIST_BACKENDS, ListBackends(), timeout_s=20, node=node)
        assert not worker.stopped.is_set()


async def test_a_stop_over_the_bus_is_an_orderly_leave(
    controller: ScriptedController, service: NatsBus, tmp_path: Path
) -> None:
    async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        await worker.ready()
        controller.named("w1").in_flight = 1  # so that it takes a moment
        node = controller.named("w1").id
        await service.publish(STOP, Anything(backend={"any": "payload"}), node=node)
        await until(lambda: "POST drain" in controller.calls)
        await service.publish(STOP, Anything(), node=node)  # a second one is ignored
        await until(lambda: controller.calls.count("GET models") >= 1)
        controller.named("w1").in_flight = 0
        await worker.ended()
    assert controller.named("w1").status == "offline"
    assert controller.calls.count("POST drain") == 1
    assert controller.calls.count("POST deregister") == 1


async def test_a_bus_that_is_away_at_the_start(tmp_path: Path) -> None:
    controller = ScriptedController()
    port = free_port()
    controller.bus_url = f"nats://127.0.0.1:{port}"
    async with controller, running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        await until(lambda: controller.knows("w1") and len(controller.named("w1").beats) >= 3)
        assert all(beat["bus"] == "down" for beat in controller.named("w1").beats)
        assert await worker.get("/readyz") == (503, "not ready: the bus is down")
        assert await worker.get("/healthz") == (200, "ok")
        async with running_server(tmp_path / "nats") as server:
            controller.bus, controller.bus_url = server, server.url  # and it came up elsewhere than was said
            await worker.ready()
            node = controller.named("w1")
            await until(lambda: "bus" not in node.beats[-1])


async def test_a_bus_that_goes_for_a_while(
    controller: ScriptedController, nats_server: NatsServer, tmp_path: Path
) -> None:
    async with Cable(int(nats_server.url.rpartition(":")[2])) as cable:
        controller.bus_url = cable.url
        async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
            await worker.ready()
            node = controller.named("w1")
            await cable.cut()
            await until(lambda: node.beats and node.beats[-1].get("bus") == "down")
            await worker.ready(503)
            await cable.heal()
            await worker.ready()
            await until(lambda: "bus" not in node.beats[-1])
            assert controller.calls.count("POST register") == 1


async def test_credentials_are_renewed_before_they_end_and_nobody_notices(
    controller: ScriptedController, service: NatsBus, tmp_path: Path
) -> None:
    controller.credential_life_s = 8.0  # renewed after six: a worker that stands still for a second is still in time
    async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        await worker.ready()
        node = controller.named("w1").id
        async with asyncio.timeout(60):
            while controller.credentials_given < 3:  # the first two pairs have ended by then
                await service.call(LIST_BACKENDS, ListBackends(), timeout_s=20, node=node)
                await asyncio.sleep(CALL_EVERY_S)
        assert (await worker.get("/readyz"))[0] == 200
        assert controller.calls.count("POST register") == 1
        assert never_went_down(controller.named("w1"))


async def test_a_fleet_that_signs_with_another_key_is_trusted_again(
    controller: ScriptedController, tmp_path: Path
) -> None:
    """A fleet that was restored without its secrets: the worker learns the new key when it renews its credentials."""
    controller.credential_life_s = 4.0
    async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        await worker.ready()
        node = controller.named("w1").id
        old = controller.ingress_token(aud=node, scope="probe")
        controller.signer = Signer(Signer.new_private_key())

        async def accepted() -> bool:
            return (await worker.get("/corral/hello", controller.ingress_token(aud=node, scope="probe")))[0] == 200

        await until(accepted, "an ingress that trusts the new key")
        assert (await worker.get("/corral/hello", old))[0] == 401
        assert [each.id for each in controller.nodes.values()] == [node]
        assert controller.calls.count("POST register") == 2


async def test_credentials_outlive_a_controller_that_is_away(
    controller: ScriptedController, service: NatsBus, tmp_path: Path
) -> None:
    controller.credential_life_s = 3.0
    async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        await worker.ready()
        node = controller.named("w1").id
        await controller.stop()
        await worker.ready(503)  # its credentials ended, and nobody renews them
        controller.credential_life_s = 3600.0
        await controller.start()
        await worker.ready()
        await service.call(LIST_BACKENDS, ListBackends(), timeout_s=20, node=node)


async def test_a_controller_that_goes_for_a_while(
    controller: ScriptedController, service: NatsBus, tmp_path: Path
) -> None:
    beats = await heard(service)
    async with running_worker(
        controller.url, tmp_path / "w", token=controller.token(), http_heartbeat_every="1"
    ) as worker:
        await worker.ready()
        await controller.stop()
        count = len(beats)
        await until(lambda: len(beats) > count + 5)  # its HTTP heartbeats fail meanwhile, and it goes on
        assert await worker.get("/readyz") == (200, "ok")
        node = controller.named("w1")
        received = len(node.beats)
        await controller.start()
        await until(lambda: len(node.beats) > received)
        assert len(node.registrations) == 1


@pytest.mark.parametrize(
    ("status", "body"), [(200, b"{half"), (200, b"[]"), (200, b""), (500, b"<html>"), (503, b""), (400, b"{}")]
)
async def test_nonsense_in_answer_to_a_heartbeat(
    controller: ScriptedController, tmp_path: Path, status: int, body: bytes
) -> None:
    async with running_worker(
        controller.url, tmp_path / "w", token=controller.token(), http_heartbeat_every="1"
    ) as worker:
        await worker.ready()
        node = controller.named("w1")
        for _ in range(3):
            controller.answer_next("heartbeat", status, body)
        received = len(node.beats)
        await until(lambda: len(node.beats) > received + 1)
        assert await worker.get("/readyz") == (200, "ok")
        assert len(node.registrations) == 1


async def test_a_revoked_node_is_told_by_http(
    controller: ScriptedController, nats_server: NatsServer, tmp_path: Path
) -> None:
    async with running_worker(controller.url, tmp_path / "w", token=controller.token(uses=2)) as worker:
        await worker.ready()
        old = controller.named("w1")
        controller.delete("w1")
        await nats_server.revoke(node_user_key(nats_server.keys.account_seed, old.id))
        await until(lambda: controller.knows("w1"))
        await worker.ready()
        assert controller.named("w1").id != old.id


async def test_a_localai_controller(nats_server: NatsServer, service: NatsBus, tmp_path: Path) -> None:
    async with (
        Cable(int(nats_server.url.rpartition(":")[2])) as cable,
        ScriptedController(nats_server, localai=True) as controller,
    ):
        controller.auto_approve = False
        beats = await heard(service)
        async with running_worker(
            controller.url, tmp_path / "w", token="s3cret", bus_urls=cable.url, bus_require_auth="true"
        ) as worker:
            await until(lambda: controller.knows("w1", "pending"))
            controller.approve("w1")
            await worker.ready()
            node = controller.named("w1")
            await service.call(LIST_BACKENDS, ListBackends(), timeout_s=20, node=node.id)
            assert node.registrations[0]["address"].endswith(f":{(worker.settings.ingress.port or 0) + 1}")
            assert node.registrations[0]["http_address"].endswith(f":{worker.settings.ingress.port}")
            await until(lambda: len(node.beats) >= 3)
            assert beats == []  # nothing of ours on its bus
            await cable.cut()
            await worker.ready(503)
            count = len(node.beats)
            await asyncio.sleep(0.5)  # five heartbeats' time: none may come while the bus is down
            assert len(node.beats) <= count + 1
            await cable.heal()
            await until(lambda: len(node.beats) > count + 2)
            await worker.leave()
        assert controller.named("w1").status == "offline"
        assert "POST credentials" not in controller.calls
