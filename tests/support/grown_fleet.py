"""A fleet of several machines from outside: `corral up` and more workers, all healthy; its bus and its ingresses as a
controller uses them, for what no command asks for yet.

with grown_fleet(tmp_path, "barn", "byre") as fleet:
    assert order(fleet, "barn", "backend.list", {})["backends"] is None
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client, RawCredentials
from nats.errors import NoRespondersError

from corral.bus.auth import mint_service_credentials
from corral.bus.keys import load_or_create_keys
from corral.kit.signing import Signer
from tests.support.fleet import Answer, Fleet, http
from tests.support.waiting import until


@contextlib.contextmanager
def grown_fleet(
    root: Path, *names: str, options: tuple[str, ...] = (), env: Mapping[str, str] | None = None
) -> Iterator[Fleet]:
    """`up`'s own node and one worker per name, healthy; everything is gone afterwards."""
    fleet = Fleet(root, *options, **(env or {}))
    try:
        fleet.start()
        own = fleet.own_node()
        if names:
            token = fleet.token("--pre-approved", "--uses", str(len(names)))
            for name in names:
                fleet.join(name, token=token)
        for name in (own, *names):
            fleet.wait_status(name, "healthy", 60)
        yield fleet
    finally:
        fleet.close()


def order(fleet: Fleet, node: str, order: str, body: object, *, timeout_s: float = 30.0) -> dict[str, Any]:
    """The answer of a node to nodes.<id>.<order>, asked with the controllers' own rights."""
    subject = f"nodes.{fleet.nodes()[node]['id']}.{order}"
    return asyncio.run(_request(fleet, subject, json.dumps(body).encode(), timeout_s))


async def _request(fleet: Fleet, subject: str, payload: bytes, timeout_s: float) -> dict[str, Any]:
    async def ask() -> Any:
        try:
            return await bus.request(subject, payload, timeout=timeout_s)
        except NoRespondersError:  # known to the fleet, and not yet on the bus
            return None

    async with bus_of(fleet) as bus:
        answer = await until(ask, f"somebody who listens on {subject}")
    told: dict[str, Any] = json.loads(answer.data)
    return told


@contextlib.asynccontextmanager
async def bus_of(fleet: Fleet) -> AsyncIterator[Client]:
    """The fleet's bus, with the controllers' own rights."""
    keys = load_or_create_keys(fleet.data / "secrets" / "bus", datetime.now(UTC))
    seeds = keys.account_seed, keys.service_user_seed
    user = mint_service_credentials(*seeds, now=datetime.now(UTC), ttl_s=None, reply_ttl_s=60.0)
    text = f"-----BEGIN NATS USER JWT-----\n{user.jwt}\n------END NATS USER JWT------\n\n"
    text += f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    client = await nats.connect(
        f"nats://127.0.0.1:{fleet.bus_port}",
        user_credentials=RawCredentials(text),
        inbox_prefix=(user.inbox or "_INBOX").encode(),
    )
    try:
        yield client
    finally:
        await client.close()


def ingress_token(fleet: Fleet, node: str = "*", *scopes: str) -> str:
    """Signed by the controllers' key, which only their database has."""
    with contextlib.closing(sqlite3.connect(f"file:{fleet.data}/controller/corral.db?mode=ro", uri=True)) as database:
        (key,) = database.execute("SELECT value FROM cluster_secrets WHERE name = 'signing_key'").fetchone()
    claims = {"sub": "gateway", "aud": node, "scope": list(scopes or ("replicas",)), "exp": int(time.time() + 600)}
    return Signer(key).sign(json.dumps(claims).encode())


def ask_ingress(
    fleet: Fleet, node: str, method: str, path: str, body: object = None, *, scope: str = "replicas"
) -> Answer:
    """One request at the node's own door."""
    known = fleet.nodes()[node]
    token = ingress_token(fleet, known["id"], scope)
    return http(method, known["ingress_url"] + path, key=token, body=body, trust=fleet.trust)
