"""What strangers, other nodes and deleted nodes can do on the bus and at the doors: nothing."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import nkeys
import pytest
from nats.aio.client import Client

from tests.integration.controller.test_node_self_service import HandMadeNode
from tests.support.cluster import Cluster
from tests.support.fleet import PATIENT
from tests.support.waiting import DEADLINE_S, promised, until, wait_for


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    root = tmp_path_factory.mktemp("closed")
    cluster = Cluster(root, f"sqlite:///{root}/corral.db", members=1, **PATIENT)
    try:
        yield cluster.start()
    finally:
        cluster.close()


class Intruder:
    """A plain NATS client with a node's credentials, and a note of every complaint of the server."""

    def __init__(self, url: str, told: dict[str, Any]) -> None:
        self.url = url
        self.told = told
        self.complaints: list[str] = []
        self.closed = asyncio.Event()
        self.client: Client | None = None

    async def connect(self) -> Client:
        async def complained(error: Exception) -> None:
            self.complaints.append(str(error))

        async def ended() -> None:
            self.closed.set()

        def sign(nonce: str) -> bytes:
            return base64.b64encode(
                nkeys.from_seed(bytearray(self.told["nats_user_seed"].encode())).sign(nonce.encode())
            )

        self.client = await nats.connect(
            self.url,
            user_jwt_cb=lambda: bytearray(self.told["nats_jwt"].encode()),
            signature_cb=lambda nonce: base64.b64encode(signature(self.told, nonce)),
            error_cb=complained,
            closed_cb=ended,
            allow_reconnect=False,
            connect_timeout=30,
            inbox_prefix=self.told["bus"]["inbox"].encode(),
        )
        return self.client


def signature(told: dict[str, Any], nonce: str) -> bytes:
    signed: bytes = nkeys.from_seed(bytearray(told["nats_user_seed"].encode())).sign(nonce.encode())
    return signed


async def register(cluster: Cluster) -> dict[str, Any]:
    node = HandMadeNode(cluster, pre_approved=True)
    answer = await asyncio.to_thread(node.register)
    return dict(answer.json())


async def knock(cluster: Cluster, told: dict[str, Any] | None = None) -> str:
    """What the server answers to a bare handshake, in the protocol's own words."""
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.bus_port)
    try:
        info = json.loads((await reader.readline()).removeprefix(b"INFO "))
        connect: dict[str, object] = {"verbose": False, "lang": "test", "version": "1", "protocol": 1}
        if told:
            connect["jwt"] = told["nats_jwt"]
            connect["sig"] = base64.urlsafe_b64encode(signature(told, info["nonce"])).decode().rstrip("=")
        writer.write(b"CONNECT " + json.dumps(connect).encode() + b"\r\nPING\r\n")
        return (await asyncio.wait_for(reader.readline(), DEADLINE_S)).decode().strip()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_without_credentials_the_bus_is_closed(cluster: Cluster) -> None:
    assert await knock(cluster) == "-ERR 'Authorization Violation'"
    assert await knock(cluster, await register(cluster)) == "PONG"


@pytest.mark.parametrize(
    "subject",
    [
        "nodes.{other}.>",
        "nodes.{other}.backend.install",
        "nodes.*.heartbeat",
        "nodes.>",
        ">",
        "_INBOX.>",
        "corral.>",
        "$SYS.>",
    ],
)
async def test_one_node_cannot_listen_to_another(cluster: Cluster, subject: str) -> None:
    me, other = await register(cluster), await register(cluster)
    intruder = Intruder(cluster.bus_url, me)
    client = await intruder.connect()
    try:
        heard: list[str] = []

        async def hear(message: Any) -> None:
            heard.append(message.subject)

        await client.subscribe(subject.format(other=other["id"]), cb=hear)
        await client.flush()
        await until(lambda: intruder.complaints, "complaint of the server")
        assert "permissions violation" in intruder.complaints[0].lower()
    finally:
        await client.close()


@pytest.mark.parametrize(
    "subject",
    [
        "nodes.{other}.heartbeat",
        "nodes.{other}.load",
        "nodes.{other}.backend.install",
        "nodes.{other}.backend.install.op.progress",
        "nodes.{me}.backend.install",
        "corral.view.changed",
        "_INBOX.somebody",
        "{other_inbox}.x",
    ],
)
async def test_one_node_cannot_speak_for_another_nor_give_orders(cluster: Cluster, subject: str) -> None:
    me, other = await register(cluster), await register(cluster)
    intruder = Intruder(cluster.bus_url, me)
    client = await intruder.connect()
    try:
        await client.publish(
            subject.format(me=me["id"], other=other["id"], other_inbox=other["bus"]["inbox"]), b'{"available_ram":1}'
        )
        await client.flush()
        await until(lambda: intruder.complaints, "complaint of the server")
        assert "permissions violation" in intruder.complaints[0].lower()
    finally:
        await client.close()


async def test_a_node_can_do_its_own_work(cluster: Cluster) -> None:
    me = await register(cluster)
    intruder = Intruder(cluster.bus_url, me)
    client = await intruder.connect()
    try:
        await client.subscribe(f"nodes.{me['id']}.>")
        await client.publish(f"nodes.{me['id']}.heartbeat", b'{"available_ram":4242}')
        await client.flush()

        def stored() -> bool:
            return bool(cluster.nodes(cluster.members[0])[me["name"]]["available_ram"] == 4242)

        await asyncio.to_thread(wait_for, stored, "stored heartbeat")
        assert intruder.complaints == []
    finally:
        await client.close()


async def test_a_deleted_node_is_dropped_at_once_and_stays_out(cluster: Cluster) -> None:
    me, other = await register(cluster), await register(cluster)
    gone, stays = Intruder(cluster.bus_url, me), Intruder(cluster.bus_url, other)
    await gone.connect()
    staying = await stays.connect()
    try:
        answer = await asyncio.to_thread(cluster.api, cluster.members[0], "DELETE", f"/api/nodes/{me['id']}")
        assert answer.status == 200
        await asyncio.wait_for(gone.closed.wait(), promised(2))
        assert await knock(cluster, me) == "-ERR 'Authorization Violation'"
        await staying.flush()
        assert staying.is_connected
    finally:
        await staying.close()


def test_no_secret_stands_in_any_log(cluster: Cluster, tmp_path: Path) -> None:
    """The last test of this module: everything above has been logged at debug level by then."""
    member = cluster.members[0]
    token = cluster.token(member, pre_approved=True)
    worker = cluster.join(member, "talker", token, CORRAL_LOG_LEVEL="debug")
    cluster.wait_status(member, "talker", "healthy")
    key = cluster.api(member, "POST", "/api/keys", {"role": "viewer", "name": "k"}).json()["secret"]
    cluster.api(member, "DELETE", "/api/nodes/talker")
    wait_for(lambda: not worker.running, "end of the deleted worker")
    keys = cluster.keys
    secrets = [token, key, cluster.key, (cluster.secrets / "gateway.key").read_text().strip()]
    secrets += [keys.operator_seed, keys.account_seed, keys.system_user_seed, keys.service_user_seed, keys.operator_jwt]
    logs = {log.name: log.read_text(errors="replace") for log in cluster.root.glob("*.log")}
    assert len(logs) >= 4
    for name, text in logs.items():
        for secret in secrets:
            assert secret not in text, f"{name} holds a secret that starts with {secret[:4]}"
        for mark in ("cn_", "cs_", "eyJ0eXAi", "Bearer c"):
            assert mark + "*" in text or mark not in text.replace(mark + "***", ""), f"{name} holds {mark}…"
