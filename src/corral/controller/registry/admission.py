"""What workers ask for themselves: joining, credentials, heartbeats, leaving (docs/reference/wire/nodes.md).

Deciding is done by `identity`, `offers` and `transitions`; this part reads, claims and writes.
"""

from __future__ import annotations

import shlex
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from corral.contract.codec import PROTOCOL
from corral.contract.messages.nodes import (
    HeartbeatReceived,
    HttpHeartbeat,
    IngressGrant,
    IngressOffer,
    NodeRegistered,
    NodeType,
    RegisterNode,
)
from corral.controller.access.active_nodes import credential_of
from corral.controller.access.bus_issuer import BusIssuer, with_host
from corral.controller.access.join_tokens import check_join_token, claim_join_token
from corral.controller.access.release_keys import ReleaseKeys
from corral.controller.access.revocations import Revocations
from corral.controller.access.signing import IngressTokens
from corral.controller.registry.addresses import place_of
from corral.controller.registry.changes import NodeChanges, Overtaken
from corral.controller.registry.heartbeats import Heartbeats
from corral.controller.registry.identity import (
    ByJoinToken,
    BySharedToken,
    DeletedNode,
    Identity,
    KnownNode,
    NameTaken,
    PresentedCredentials,
    SameNode,
    WasDeleted,
    identify,
)
from corral.controller.registry.registration import (
    AdminChoices,
    check_offer,
    labels_we_add,
    node_columns,
    worker_labels,
)
from corral.controller.registry.transitions import NodeEvent, new_node
from corral.controller.runtime.database import hide_database_errors
from corral.controller.runtime.node_views import rfc3339
from corral.kit.certificates import BadCertificateRequest, Ca
from corral.kit.clock import Clock
from corral.kit.errors import Conflict, Gone, Invalid, NoCapacity, NotFound, Unauthenticated, Unavailable
from corral.kit.log import get_log
from corral.kit.secrets import NODE_TOKEN, digest, matches, new_secret
from corral.store.engine.transactions import Store, Transaction
from corral.store.tables import node_labels, node_tombstones, nodes, revisions
from corral.store.tables.join_tokens import JoinToken
from corral.store.tables.node_tombstones import NodeTombstone
from corral.store.tables.nodes import Node

log = get_log(__name__)

_CERTIFICATE_LIFE = timedelta(days=30)
_TRIES = 3
_COME_BACK_S = 60.0


@dataclass(frozen=True)
class NodeCaller:
    bearer: str
    seen_from: str  # address the request came from; empty when unknown
    reached_us_at: str  # host[:port] under which the caller reached us


@dataclass(frozen=True)
class AdmissionRules:
    auto_approve: bool
    shared_token: str  # of LocalAI workers; empty = they are not let in
    most_pending: int = 1000  # one token without a limit of uses must not fill the database


class NodeApi:
    def __init__(
        self,
        store: Store,
        changes: NodeChanges,
        heartbeats: Heartbeats,
        issuer: BusIssuer,
        revoked: Revocations,
        tokens: IngressTokens,
        ca: Ca | None,
        clock: Clock,
        rules: AdmissionRules,
        *,
        blob_url: str = "",
        release_keys: ReleaseKeys | None = None,
    ) -> None:
        """`blob_url`: where model files are served; `{host}` in it is filled in for each caller."""
        self._release_keys = release_keys
        self._store = store
        self._changes = changes
        self._heartbeats = heartbeats
        self._issuer = issuer
        self._revocations = revoked
        self._tokens = tokens
        self._ca = ca
        self._clock = clock
        self._rules = rules
        self._blob_url = blob_url

    async def register(self, offer: RegisterNode, caller: NodeCaller) -> NodeRegistered:
        if offer.token != caller.bearer:
            raise Unauthenticated("registration token required")
        for _ in range(_TRIES):
            await self._turn_strangers_away(offer, caller)
            check_offer(offer)
            try:
                node, node_token = await self._register(offer, caller)
            except Overtaken:
                continue  # most likely the same worker, twice at once: the second finds what the first made
            self._changes.notify(node.id)
            self._revocations.push_soon()
            log.info("node registered", node=node.name, node_id=node.id, status=node.status, seen_from=caller.seen_from)
            return self._answer(node, caller, offer.ingress, node_token=node_token)
        raise Unavailable(f"{offer.name} registers too often at once; try again")

    async def _turn_strangers_away(self, offer: RegisterNode, caller: NodeCaller) -> None:
        """Reads only: a caller without any credential of ours must not occupy the database's one writer, nor lock the
        row of a node."""
        with hide_database_errors():
            async with self._store.read() as tx:
                _, knock = await self._who(tx, offer, caller)
                if isinstance(knock, ByJoinToken | NameTaken):
                    await check_join_token(tx, caller.bearer)

    async def _register(self, offer: RegisterNode, caller: NodeCaller) -> tuple[Node, str]:
        labels = worker_labels(offer)
        async with self._store.write() as tx:
            node, node_token = await self._admit(tx, offer, caller)
            await node_labels.merge(tx, node.id, labels, origin="worker")
            await node_labels.merge(tx, node.id, labels_we_add(offer, node.max_replicas_per_model), origin="auto")
            await revisions.bump(tx, "nodes")
        return node, node_token

    async def refresh(self, node_id: str, csr: str, caller: NodeCaller) -> NodeRegistered:
        """Credentials and certificate. Reads only: a refresh must never un-drain, un-approve or forget anything."""
        node = await self._authenticated(node_id, caller)
        return self._answer(node, caller, IngressOffer(csr=csr) if csr else None)

    async def heartbeat(self, node_id: str, beat: HttpHeartbeat, caller: NodeCaller) -> HeartbeatReceived:
        node = await self._authenticated(node_id, caller)
        self._heartbeats.receive_http(node.id, beat)
        return HeartbeatReceived(
            message="heartbeat received",
            status=node.status,
            server_time=self._clock.now().timestamp(),
            ingress_url=node.ingress_url,
            ingress_ok=node.ingress_ok,
            ingress_error=node.ingress_error,
        )

    async def drain(self, node_id: str, caller: NodeCaller) -> None:
        await self._authenticated(node_id, caller)
        await self._changes.apply(node_id, NodeEvent.SELF_DRAINED)

    async def resume(self, node_id: str, caller: NodeCaller) -> None:
        await self._authenticated(node_id, caller)
        await self._changes.apply(node_id, NodeEvent.SELF_RESUMED)

    async def deregister(self, node_id: str, caller: NodeCaller) -> None:
        await self._authenticated(node_id, caller)
        self._heartbeats.forget(node_id)
        await self._changes.apply(node_id, NodeEvent.LEFT)

    async def authenticate(self, node_id: str, caller: NodeCaller) -> Node:
        """The calling node. Raises unless the caller is this very node."""
        return await self._authenticated(node_id, caller)

    async def _authenticated(self, node_id: str, caller: NodeCaller) -> Node:
        """The node whose own token this is. One node's token opens nothing of another's."""
        with hide_database_errors():
            async with self._store.read() as tx:
                node = await nodes.find(tx, node_id)
                grave = None if node else await node_tombstones.find(tx, node_id)
        if grave is not None and (matches(caller.bearer, grave.token_hash) or self._shows_shared(caller)):
            raise Gone(f"node {grave.name} was deleted; join again with a new token (`corral token create`)")
        if node is None:
            if self._shows_shared(caller):
                raise NotFound(f"there is no node {node_id}")
            # Whoever shows nothing that could be a node's token learns nothing, not even which ids exist.
            if not caller.bearer.startswith(NODE_TOKEN):
                raise Unauthenticated("this needs the node's own token")
            raise NotFound(f"there is no node {node_id}")
        if node.auth == "shared" and self._shows_shared(caller):
            return node
        if node.auth == "token" and node.token_hash and matches(caller.bearer, node.token_hash):
            return node
        raise Unauthenticated(f"this token does not belong to node {node_id}")

    def _shows_shared(self, caller: NodeCaller) -> bool:
        return bool(self._rules.shared_token) and matches(caller.bearer, digest(self._rules.shared_token))

    async def _who(self, tx: Transaction, offer: RegisterNode, caller: NodeCaller) -> tuple[Node | None, Identity]:
        known = await nodes.find_by_name(tx, offer.name)
        graves: list[NodeTombstone | None] = [*await node_tombstones.list_by_name(tx, offer.name)]
        presented = PresentedCredentials(caller.bearer, offer.enrolment, offer.protocol)
        knocks = [
            identify(
                presented,
                KnownNode(known.auth, known.token_hash, known.enrolment_hash) if known else None,
                DeletedNode(grave.token_hash, grave.enrolment_hash) if grave else None,
                self._rules.shared_token,
            )
            for grave in graves or [None]
        ]
        return known, next((found for found in knocks if isinstance(found, WasDeleted)), knocks[0])

    async def _admit(self, tx: Transaction, offer: RegisterNode, caller: NodeCaller) -> tuple[Node, str]:
        known, knock = await self._who(tx, offer, caller)
        match knock:
            case WasDeleted():
                raise Gone(f"node {offer.name} was deleted; join again with a new token (`corral token create`)")
            case NameTaken():
                await self._claim(tx, caller)  # rolled back by the error below; tells a bad token apart
                raise Conflict(
                    f"another machine is already called {offer.name}: choose another name with --name, "
                    f"or run `corral nodes replace {shlex.quote(offer.name)}` to let this machine take its place"
                )
            case SameNode(needs_token):
                assert known is not None
                return await self._comes_back(tx, known, offer, caller, new_token=needs_token)
            case BySharedToken():
                if known is not None:
                    return await self._comes_back(tx, known, offer, caller, new_token=False)
                return await self._is_new(tx, offer, caller, approved=self._rules.auto_approve, shared=True)
            case ByJoinToken(replaces):
                token = await self._claim(tx, caller)
                approved = token.pre_approved or self._rules.auto_approve
                if replaces:
                    assert known is not None
                    return await self._takes_over(tx, known, offer, caller, approved=approved)
                return await self._is_new(tx, offer, caller, approved=approved, shared=False)

    async def _claim(self, tx: Transaction, caller: NodeCaller) -> JoinToken:
        try:
            return await claim_join_token(tx, caller.bearer)
        except Unauthenticated as error:
            # It was good when we looked a moment ago: spent meanwhile, perhaps by this very worker's first try.
            raise Overtaken("the join token has just been used") from error

    async def _is_new(
        self, tx: Transaction, offer: RegisterNode, caller: NodeCaller, *, approved: bool, shared: bool
    ) -> tuple[Node, str]:
        if not approved and await nodes.count_unapproved(tx) >= self._rules.most_pending:
            raise NoCapacity(
                "too many nodes wait for approval already: approve or delete some", retry_after_s=_COME_BACK_S
            )
        node_token = "" if shared else new_secret(NODE_TOKEN)
        state = new_node(approved=approved)
        now = await tx.now()
        columns = node_columns(offer, known=False, chosen=AdminChoices()) | self._place(offer, caller)
        node = Node(
            id=str(uuid.uuid4()),
            name=offer.name,
            status=state.status,
            status_reason="approved" if approved else "waits for approval",
            status_changed_at=now,
            approved=approved,
            auth="shared" if shared else "token",
            token_hash=digest(node_token) if node_token else "",
            enrolment_hash=digest(offer.enrolment) if offer.enrolment else "",
            last_heartbeat=now,
            created_at=now,
            updated_at=now,
            **columns,
        )
        try:
            await nodes.insert(tx, node)
        except Conflict as error:
            raise Overtaken(f"{offer.name} has just been registered") from error
        return node, node_token

    async def _comes_back(
        self, tx: Transaction, known: Node, offer: RegisterNode, caller: NodeCaller, *, new_token: bool
    ) -> tuple[Node, str]:
        node_token = new_secret(NODE_TOKEN) if new_token else ""
        chosen = AdminChoices(
            known.max_replicas_per_model if known.max_replicas_per_model_manually_set else None,
            known.vram_budget if known.vram_budget_manually_set else None,
        )
        columns = node_columns(offer, known=True, chosen=chosen) | self._place(offer, caller)
        if node_token:
            await self._end_bus_credentials(tx, known)
            columns["token_hash"] = digest(node_token)
        if offer.enrolment:
            columns["enrolment_hash"] = digest(offer.enrolment)
        columns |= {"last_heartbeat": await tx.now(), "bus_down": False}
        event = NodeEvent.REGISTERED
        if not known.approved and self._rules.auto_approve:
            event = NodeEvent.APPROVED
        return await self._changes.apply_in(tx, known, event, columns), node_token

    async def _takes_over(
        self, tx: Transaction, known: Node, offer: RegisterNode, caller: NodeCaller, *, approved: bool
    ) -> tuple[Node, str]:
        """Another machine under the same name and id, as a person allowed. It waits for approval like any other."""
        node_token = new_secret(NODE_TOKEN)
        state = new_node(approved=approved)
        chosen = AdminChoices(
            known.max_replicas_per_model if known.max_replicas_per_model_manually_set else None,
            known.vram_budget if known.vram_budget_manually_set else None,
        )
        now = await tx.now()
        columns: dict[str, Any] = node_columns(offer, known=False, chosen=chosen) | self._place(offer, caller)
        columns |= {
            "token_hash": digest(node_token),
            "enrolment_hash": digest(offer.enrolment) if offer.enrolment else "",
            "status": state.status,
            "status_reason": "took the name over; " + ("approved" if approved else "waits for approval"),
            "status_changed_at": now,
            "approved": approved,
            "drained": False,  # what a person asked of the old machine
            "left": False,
            "last_heartbeat": now,
            "bus_down": False,
        }
        await node_labels.delete_reported(tx, known.id)
        return await self._changes.write(tx, known, columns), node_token

    async def _end_bus_credentials(self, tx: Transaction, node: Node) -> None:
        """Those that went with its node token so far."""
        await self._revocations.add(tx, self._issuer.user_key(node.id, node.token_hash), node.id)

    def _place(self, offer: RegisterNode, caller: NodeCaller) -> dict[str, Any]:
        return place_of(offer, caller.seen_from, has_ca=self._ca is not None)

    def _answer(
        self, node: Node, caller: NodeCaller, ingress: IngressOffer | None, *, node_token: str = ""
    ) -> NodeRegistered:
        """Everything a node may know about itself. While it is pending it gets no credential for anything."""
        localai = node.protocol == 0
        minted = self._issuer.for_node(node.id, node.token_hash, localai=localai) if node.approved else None
        return NodeRegistered(
            id=node.id,
            name=node.name,
            node_type=node.node_type or NodeType.BACKEND.value,
            status=node.status,
            created_at=rfc3339(node.created_at),
            nats_jwt=minted.jwt if minted else "",
            nats_user_seed=minted.seed if minted else "",
            node_token=node_token,
            protocol=0 if localai else PROTOCOL,
            bus=self._issuer.access(minted, caller.reached_us_at) if node.approved and not localai else None,
            expires_in_s=(minted.expires_in_s or 0.0) if minted and not localai else 0.0,
            signing_key="" if localai else self._tokens.public_key,
            blob_url="" if localai else with_host(self._blob_url, caller.reached_us_at),
            blob_token=self._blob_token(node) if node.approved and not localai else "",
            ingress=None if localai else self._grant(node, ingress),
            server_time=0.0 if localai else self._clock.now().timestamp(),
            release_key=self._release_keys.public_key if self._release_keys is not None and not localai else "",
            release_key_changes=self._release_keys.changes if self._release_keys is not None and not localai else (),
        )

    def _blob_token(self, node: Node) -> str:
        return self._tokens.sign_for_node(node.id, credential_of(node.token_hash))

    def _grant(self, node: Node, ingress: IngressOffer | None) -> IngressGrant:
        """The certificate is for the node's id and nothing else. Host names and addresses are the node's own word: one
        that advertised the gateway's, or another node's, could stand in for it before everybody who trusts our CA."""
        if self._ca is None or ingress is None or not ingress.csr or not node.approved:
            return IngressGrant(url=node.ingress_url)
        try:
            certificate = self._ca.sign_request(
                ingress.csr, node.id, [node.id], self._clock.now(), life=_CERTIFICATE_LIFE
            )
        except BadCertificateRequest as error:
            raise Invalid(str(error)) from error
        return IngressGrant(url=node.ingress_url, certificate=certificate, ca=self._ca.certificate_pem)
