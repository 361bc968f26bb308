"""The controller's registry in this process, on a real database and the bus's twin: for what is awkward from outside.

async with open_registry(sqlite_url(tmp_path)) as registry:
    told = await registry.join("barn", pre_approved=True)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from corral.bus.auth import BusKeys
from corral.bus.local import LocalBus, LocalHub
from corral.contract.admin import CreateJoinToken
from corral.contract.messages.nodes import IngressOffer, NodeRegistered, RegisterNode
from corral.controller.access.bus_issuer import BusEndpoint, BusIssuer
from corral.controller.access.gateway_trust import GatewayTrust
from corral.controller.access.join_tokens import JoinTokens
from corral.controller.access.revocations import Revocations
from corral.controller.access.signing import IngressTokens, open_ingress_tokens
from corral.controller.registry.admission import AdmissionRules, NodeApi, NodeCaller
from corral.controller.registry.changes import NodeChanges
from corral.controller.registry.heartbeats import Heartbeats
from corral.controller.registry.nodes import NodeAdmin
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.kit.certificates import Ca
from corral.kit.clock import Clock, SystemClock
from corral.store import Store, open_store

SEEN_FROM = "192.0.2.7"


@dataclass
class Registry:
    store: Store
    bus: LocalBus
    clock: Clock
    feed: ChangeFeed
    changes: NodeChanges
    heartbeats: Heartbeats
    issuer: BusIssuer
    revocations: Revocations
    ingress_tokens: IngressTokens
    leadership: Leadership
    join_tokens: JoinTokens
    node_api: NodeApi
    admin: NodeAdmin
    recordings: list[str] = field(default_factory=list)

    async def token(self, *, pre_approved: bool = False, uses: int | None = 1) -> str:
        asked = CreateJoinToken(pre_approved=pre_approved, uses=uses)
        return (await self.join_tokens.create(asked, created_by="test")).secret

    async def register(
        self, name: str, token: str, *, enrolment: str = "", seen_from: str = SEEN_FROM, **more: Any
    ) -> NodeRegistered:
        usual: dict[str, Any] = {"protocol": 1, "ingress": IngressOffer(port=50050)}
        offer = RegisterNode(name=name, token=token, enrolment=enrolment or f"enrolment of {name}", **(usual | more))
        return await self.node_api.register(offer, caller(token, seen_from))

    async def join(self, name: str, *, pre_approved: bool = False, **more: Any) -> NodeRegistered:
        return await self.register(name, await self.token(pre_approved=pre_approved), **more)


def caller(bearer: str, seen_from: str = SEEN_FROM) -> NodeCaller:
    return NodeCaller(bearer=bearer, seen_from=seen_from, reached_us_at="fleet:8080")


@contextlib.asynccontextmanager
async def open_registry(
    url: str,
    *,
    clock: Clock | None = None,
    hub: LocalHub | None = None,
    name: str = "controller",
    ca: Ca | None = None,
    keys: BusKeys | None = None,
    rules: AdmissionRules | None = None,
) -> AsyncIterator[Registry]:
    clock = clock or SystemClock()
    keys = keys or BusKeys.generate(os.urandom, datetime.now(UTC))
    recordings: list[str] = []
    async with open_store(url) as store, (hub or LocalHub(clock)).join(name) as bus:
        feed = ChangeFeed(store, bus, clock, interval_s=0.05)
        changes = NodeChanges(store, feed)
        issuer = BusIssuer(
            BusEndpoint(("nats://bus:4222",)), clock, account_seed=keys.account_seed, ttl_s=3600, install_timeout_s=900
        )
        revocations = Revocations(store, bus, clock, keys=keys, urls=("nats://bus:4222",), tls=None, ttl_s=3600)
        heartbeats = Heartbeats(
            store,
            bus,
            clock,
            flush_s=0.05,
            on_recorded=lambda *_: recordings.append("recorded"),
            on_not_recorded=lambda: recordings.append("not recorded"),
            on_return=lambda: recordings.append("back"),
        )
        tokens = await open_ingress_tokens(store, clock)
        yield Registry(
            store=store,
            bus=bus,
            clock=clock,
            feed=feed,
            changes=changes,
            heartbeats=heartbeats,
            issuer=issuer,
            revocations=revocations,
            ingress_tokens=tokens,
            leadership=Leadership(store, name, ttl_s=15),
            join_tokens=JoinTokens(store, feed, public_url="https://fleet:8080", trust=GatewayTrust(ca)),
            node_api=NodeApi(
                store,
                changes,
                heartbeats,
                issuer,
                revocations,
                tokens,
                ca,
                clock,
                rules or AdmissionRules(auto_approve=False, shared_token=""),
            ),
            admin=NodeAdmin(store, changes, issuer, revocations),
            recordings=recordings,
        )
