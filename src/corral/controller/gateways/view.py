"""The fleet as gateways need it: keys, models, the processes that may answer, and their nodes, each with what opens its
ingress."""

from __future__ import annotations

import asyncio

import msgspec

from corral.contract.access import Scope
from corral.contract.playground import session_id
from corral.contract.view import FleetView, GatewayBus, ViewKey, ViewModel, ViewNode, ViewSession
from corral.controller.access.bus_issuer import BusIssuer
from corral.controller.access.principal import Role
from corral.controller.access.signing import IngressTokens
from corral.controller.inventory.routing import read_routing
from corral.controller.models.views import view_models
from corral.controller.rollouts.trial import share_of
from corral.controller.runtime.change_feed import WORK
from corral.kit.clock import Clock
from corral.store.engine.transactions import Store
from corral.store.records import Rollout
from corral.store.tables import api_keys, model_schedules, models, nodes, revisions, rollouts, web_sessions
from corral.store.tables.api_keys import ApiKey
from corral.store.tables.nodes import Node

_TOKEN_ROLLS_S = 900.0  # ingress tokens live an hour; every quarter the view counts as changed because of them
_SIGNED_AT_ONCE = 256  # some milliseconds' worth


class FleetViews:
    def __init__(self, store: Store, issuer: BusIssuer, tokens: IngressTokens, clock: Clock) -> None:
        self._store = store
        self._issuer = issuer
        self._tokens = tokens
        self._clock = clock
        self._signed: dict[str, str] = {}  # node id → token, of this quarter
        self._signed_in = 0

    async def tag(self) -> str:
        async with self._store.read() as tx:
            return self._tag(_sum(await revisions.read_all(tx)))

    async def build(self) -> FleetView:
        async with self._store.read() as tx:
            # The counters are read first: a change between the reads makes the view look older than it is, never newer.
            revision = _sum(await revisions.read_all(tx))
            keys = await api_keys.list_(tx)
            sessions = await web_sessions.list_open(tx)
            rows = await nodes.list_(tx)
            defined = await models.list_(tx)
            schedules = {row.model: row for row in await model_schedules.list_(tx)}
            replicas, answering = await read_routing(tx)
            trials = {rollout.subject: rollout for rollout in await rollouts.list_trials(tx)}
        # After an edit the former revision answers until the present one can: to gateways it is the model's until then.
        found = [
            _with_trial(
                msgspec.structs.replace(model, revision=answering.get(model.id, model.revision)), trials.get(model.id)
            )
            for model in view_models(defined, schedules)
        ]
        return FleetView(
            revision=revision,
            keys=tuple(_view_key(key) for key in keys if key.revoked_at is None and key.role != Role.GATEWAY),
            nodes=await self._nodes([row for row in rows if row.approved]),
            models=tuple(found),
            replicas=replicas,
            server_time=self._clock.now().timestamp(),
            sessions=tuple(ViewSession(id=session_id(id_hash), key_id=key_id) for id_hash, key_id in sessions),
            signing_key=self._tokens.public_key,
        )

    async def _nodes(self, rows: list[Node]) -> tuple[ViewNode, ...]:
        """Each with a token of its own. One for all would be seen by every node that is sent a request, and would open
        all the others to it."""
        if self._quarter() != self._signed_in:
            self._signed, self._signed_in = {}, self._quarter()
        found = []
        for row in rows:
            if row.id not in self._signed:
                self._signed[row.id] = self._tokens.sign("gateway", [Scope.REPLICAS], aud=row.id)
                if len(self._signed) % _SIGNED_AT_ONCE == 0:
                    await asyncio.sleep(0)
            found.append(
                ViewNode(
                    id=row.id,
                    name=row.name,
                    status=row.status,
                    # A LocalAI worker's is a file server.
                    ingress_url=row.ingress_url if row.protocol else "",
                    via_controller=row.protocol == 0,
                    ingress_token=self._signed[row.id],
                )
            )
        return tuple(found)

    def gateway_bus(self, name: str, reached_us_at: str) -> GatewayBus:
        minted = self._issuer.for_gateway(name)
        return GatewayBus(
            bus=self._issuer.access(minted, reached_us_at),
            nats_jwt=minted.jwt if minted else "",
            nats_user_seed=minted.seed if minted else "",
            expires_in_s=(minted.expires_in_s or 0.0) if minted else 0.0,
        )

    def _tag(self, revision: int) -> str:
        return f"{revision}-{self._quarter()}"

    def _quarter(self) -> int:
        return int(self._clock.now().timestamp() // _TOKEN_ROLLS_S)


def _with_trial(model: ViewModel, rollout: Rollout | None) -> ViewModel:
    """With the share of the revision on trial, which has replicas of its own."""
    if rollout is None or rollout.trial is None or rollout.trial.in_place or not (share := share_of(rollout)):
        return model
    return msgspec.structs.replace(model, trial_revision=rollout.trial.revision, trial_percent=share)


def _sum(counters: dict[str, int]) -> int:
    """Of what gateways see: rules and operations change all the time without changing the view."""
    return sum(value for kind, value in counters.items() if kind not in WORK)


def _view_key(key: ApiKey) -> ViewKey:
    return ViewKey(
        id=key.id,
        secret_hash=key.secret_hash,
        role=key.role,
        name=key.name,
        models=key.models,
        limits=key.limits,
        expires_at=key.expires_at.timestamp() if key.expires_at else None,
    )
