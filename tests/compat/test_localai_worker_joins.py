"""A LocalAI worker, exact to the contract, at a Corral controller under `--compat-localai`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest

from corral.bus.api import FixedCredentials
from corral.bus.auth import mint_service_credentials
from corral.bus.nats import NatsBus
from corral.contract.messages.backends import LIST_BACKENDS, ListBackends
from tests.compat.localai_backends import Build
from tests.compat.localai_worker import LocalAIWorker
from tests.support.cluster import Cluster
from tests.support.fleet import PATIENT
from tests.support.waiting import DEADLINE_S, until

SHARED = "the-shared-registration-token"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Each test has workers of its own names."""
    root = tmp_path_factory.mktemp("joins")
    cluster = Cluster(
        root,
        f"sqlite:///{root}/corral.db",
        members=1,
        CORRAL_COMPAT_LOCALAI="true",
        CORRAL_REGISTRATION_TOKEN=SHARED,
        CORRAL_BUS_CREDENTIAL_TTL="60s",
        **PATIENT,
    )
    try:
        yield cluster.start()
    finally:
        cluster.close()


@contextlib.asynccontextmanager
async def controllers_bus(cluster: Cluster) -> AsyncIterator[NatsBus]:
    from datetime import UTC, datetime

    keys = cluster.keys
    minted = mint_service_credentials(
        keys.account_seed, keys.service_user_seed, now=datetime.now(UTC), ttl_s=60, reply_ttl_s=60
    )
    bus = NatsBus([cluster.bus_url], FixedCredentials(minted.credentials()), inbox_prefix=minted.inbox)
    async with bus:
        await bus.wait_connected(DEADLINE_S)
        yield bus


async def test_it_registers_is_approved_heartbeats_refreshes_and_answers_on_the_bus(cluster: Cluster) -> None:
    member = cluster.members[0]
    worker = LocalAIWorker(member.url, cluster.bus_url, SHARED, "old-hand")
    first = await worker.register()
    assert first["status"] == "pending"
    assert "nats_jwt" not in first
    assert "protocol" not in first, "a LocalAI worker gets the contract's answer and no more"

    acquiring = asyncio.create_task(worker.acquire())
    approved = await asyncio.to_thread(cluster.api, member, "POST", "/api/nodes/old-hand/approve")
    assert approved.status == 200
    assert approved.json()["status"] == "healthy"
    await acquiring
    await worker.connect()
    beating = asyncio.create_task(worker.run_heartbeats())
    try:
        await until(lambda: _async(lambda: len(worker.heartbeats) >= 3), "heartbeats")
        assert set(worker.heartbeats) == {200}
        node = (await asyncio.to_thread(cluster.nodes, member))["old-hand"]
        assert node["status"] == "healthy"
        assert node["compat"] is True
        assert node["labels"]["tier"] == "fast"
        assert node["labels"]["gpu.vram"] == "24GB"

        async with controllers_bus(cluster) as bus:
            reply = await bus.call(LIST_BACKENDS, ListBackends(), timeout_s=DEADLINE_S, node=worker.node_id)
            assert reply.backends == ()
            worker.backends.folders["vllm"] = Build("vllm", version="1")
            reply = await bus.call(LIST_BACKENDS, ListBackends(), timeout_s=DEADLINE_S, node=worker.node_id)
            assert [backend.name for backend in reply.backends] == ["vllm"]

        before = worker.node_id
        again = await worker.register()  # its way to refresh credentials
        assert again["id"] == before
        assert again["status"] == "healthy"
        assert again["nats_jwt"]
        assert worker.errors == []

        assert await worker.shut_down() == [200, 200, 200]
        assert (await asyncio.to_thread(cluster.nodes, member))["old-hand"]["status"] == "offline"
    finally:
        beating.cancel()
        await worker.close()


async def test_refreshing_by_registering_again_does_not_undo_a_drain(cluster: Cluster) -> None:
    member = cluster.members[0]
    worker = LocalAIWorker(member.url, cluster.bus_url, SHARED, "drained-hand")
    await worker.register()
    for order in ("approve", "drain"):
        answer = await asyncio.to_thread(cluster.api, member, "POST", f"/api/nodes/drained-hand/{order}")
        assert answer.status == 200
    assert (await worker.register())["status"] == "draining"


async def test_the_shared_token_opens_only_what_registered_with_it(cluster: Cluster) -> None:
    member = cluster.members[0]
    own = await asyncio.to_thread(cluster.token, member, pre_approved=True)
    await asyncio.to_thread(cluster.join, member, "ours", own)
    node = await asyncio.to_thread(cluster.wait_status, member, "ours", "healthy")
    intruder = LocalAIWorker(member.url, cluster.bus_url, SHARED, "ours")
    for call in ("heartbeat", "drain", "resume", "deregister"):
        status, _ = await intruder.post(f"/api/node/{node['id']}/{call}", {})
        assert status == 401, call
    status, _ = await intruder.post("/api/node/register", {"name": "ours", "address": "x:1", "token": SHARED})
    assert status == 401
    assert (await asyncio.to_thread(cluster.nodes, member))["ours"]["status"] == "healthy"


async def test_a_pending_node_cannot_let_itself_in(cluster: Cluster) -> None:
    member = cluster.members[0]
    worker = LocalAIWorker(member.url, cluster.bus_url, SHARED, "eager")
    await worker.register()
    await worker.post(f"/api/node/{worker.node_id}/resume")
    await worker.post(f"/api/node/{worker.node_id}/deregister")
    assert (await worker.register())["status"] == "pending"
    assert (await asyncio.to_thread(cluster.nodes, member))["eager"]["status"] == "pending"


async def _async(look: object) -> object:
    assert callable(look)
    return look()
