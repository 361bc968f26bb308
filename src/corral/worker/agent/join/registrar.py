"""Registers this worker as a node: retries until the controller responds, then waits until a person approves
(docs/reference/wire/nodes.md#identity). Returns a node that may work, or raises `FatalError` with a line for a
person."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable, Sequence
from typing import assert_never

from msgspec.structs import replace

from corral.contract.messages.artifacts import ArtifactOffer, ArtifactRequest
from corral.contract.messages.nodes import NodeRegistered, NodeStatus, RegisterNode
from corral.kit.clock import Clock
from corral.kit.errors import Denied, NotFound, Unreachable
from corral.kit.log import get_log
from corral.kit.retry import Backoff
from corral.worker.agent.controller import ControllerApi, ControllerUnreachable, ErrorResponse
from corral.worker.agent.join.identity import IdentityFile, another_name
from corral.worker.agent.join.responses import (
    ChooseAnotherName,
    Credential,
    Deleted,
    GiveUp,
    RegisterAgain,
    TryLater,
    UseJoinToken,
    read_call,
    read_registration,
)
from corral.worker.agent.server_clock import ServerClock
from corral.worker.metrics import WorkerMetrics
from corral.worker.settings.node import RegistrationSettings
from corral.worker.status import FatalError, WorkerStatus

log = get_log(__name__)


class Registrar:
    def __init__(
        self,
        api: ControllerApi,
        identity: IdentityFile,
        status: WorkerStatus,
        metrics: WorkerMetrics,
        settings: RegistrationSettings,
        *,
        join_token: str,
        describe: Callable[[], RegisterNode],
        require_jwt: bool,
        server_clock: ServerClock,
        on_deleted: Callable[[], Awaitable[None]],
        on_release_key: Callable[[str, Sequence[str]], None] = lambda _key, _changes: None,
        clock: Clock,
    ) -> None:
        """`describe` returns the registration for the machine as it is now; the registrar adds name, token and
        enrolment. `require_jwt`: do not work for a LocalAI controller that gives no bus credential. `on_deleted` stops
        the backends of a deleted node before this worker becomes a new node. `on_release_key` gets the key that the
        controller signs releases with, and how it followed earlier ones; it may block."""
        self._api = api
        self._identity = identity
        self._status = status
        self._metrics = metrics
        self._join_token = join_token
        self._describe = describe
        self._backoff = Backoff(settings.retry_first_s, settings.retry_cap_s)
        self._approval = Backoff(settings.approval_poll_s, settings.approval_poll_s)
        self._require_jwt = require_jwt
        self._server_clock = server_clock
        self._on_deleted = on_deleted
        self._on_release_key = on_release_key
        self._clock = clock
        self._node_token_refused = False
        self._was_deleted = False  # and is not a new node yet

    async def join(self) -> NodeRegistered:
        """Register and wait until the node may work. Safe to call again at any time: the node stays the same."""
        self._backoff.reset()
        self._approval.reset()
        logged = ""
        reply = await self._register()
        while why := self._waiting_reason(reply):
            if why != logged:
                logged = why
                log.info(why)  # for a person at a terminal: the sentence is the message, not a set of fields
            await self._clock.sleep(self._approval.next_s())
            reply = await self._poll(reply)
        log.info("joined", node=self._name, node_id=reply.id, status=reply.status)
        return reply

    def _waiting_reason(self, reply: NodeRegistered) -> str:
        if reply.status == NodeStatus.PENDING and not reply.protocol:
            return (
                f"waiting for approval: approve {self._name} on the Nodes page of LocalAI, or start LocalAI with "
                "LOCALAI_AUTO_APPROVE_NODES=true"
            )
        if reply.status == NodeStatus.PENDING:
            command = f"corral nodes approve {shlex.quote(self._name)}"
            return f"waiting for approval: run `{command}`, or approve it on the cluster's page"
        if self._require_jwt and not reply.nats_jwt and not reply.protocol:
            return "waiting for a bus credential: the controller gave none, and one is required"
        return ""

    async def become_new_node(self) -> None:
        """The controller deleted this node: register as a new node next, or end if there is no join token."""
        if not self._join_token:
            raise FatalError(
                "this node was deleted from the cluster: to come back, make a new token with `corral token create` "
                "and join again with it"
            )
        log.warning(
            "this node was deleted from the cluster, joining as a new one", node_id=self._identity.current.node_id
        )
        self._identity.store(self._identity.current.renewed())
        self._was_deleted = True
        await self._on_deleted()

    @property
    def api_token(self) -> str:
        """The token of a registered node. LocalAI has one token for all nodes."""
        return self._identity.current.node_token or self._join_token

    @property
    def known_node_id(self) -> str:
        """Of a node with a token of its own; empty before the first registration."""
        known = self._identity.current
        return known.node_id if known.node_token else ""

    async def renew(self, *, csr: str = "") -> NodeRegistered:
        """Fetch fresh credentials. LocalAI has no such call: there it takes a registration. Raises
        `ControllerUnreachable` or `ErrorResponse`."""
        known = self._identity.current
        if known.node_token:
            reply = await self._api.credentials(known.node_id, known.node_token, csr=csr)
        else:
            reply = await self._api.register(self._body(self._join_token))
        await self._remember(reply)
        return reply

    async def ask_artifacts(self, request: ArtifactRequest) -> ArtifactOffer:
        """The blobs of a source of an order. Raises NotFound (the controller does not know the source, or has no such
        call), Unreachable, Denied."""
        known = self._identity.current
        if not known.node_token:
            raise NotFound("a LocalAI controller provides no artifacts")
        try:
            return await self._api.artifacts(known.node_id, known.node_token, request)
        except ControllerUnreachable as away:
            raise Unreachable(away.message) from away
        except ErrorResponse as answer:
            if answer.status >= 500 or answer.status in (408, 425, 429):
                raise Unreachable(answer.message) from answer
            raise (Denied if answer.status in (401, 403) else NotFound)(answer.message) from answer

    @property
    def _name(self) -> str:
        return self._identity.current.name

    async def _register(self) -> NodeRegistered:
        deleted_before = False
        while True:
            credential, token = self._credential()
            try:
                reply = await self._api.register(self._body(token))
            except ControllerUnreachable as away:
                self._count("away")
                await self._wait("registration will be tried again", away.message)
                continue
            except ErrorResponse as answer:
                self._count("refused")
                meaning = read_registration(
                    answer.status,
                    answer.message,
                    credential=credential,
                    has_join_token=bool(self._join_token),
                    name=self._name,
                    name_was_chosen=self._identity.current.name_was_chosen,
                )
            else:
                self._count("accepted")
                self._was_deleted = False
                await self._remember(reply)
                return reply
            match meaning:
                case TryLater(why):
                    await self._wait("registration will be tried again", why)
                case UseJoinToken(why):
                    log.warning("the controller refuses this node's credential, trying the join token", reason=why)
                    self._node_token_refused = True
                case Deleted(why):
                    if deleted_before:
                        raise FatalError(f"the controller keeps saying that this new node was deleted: {why}")
                    deleted_before = True
                    await self.become_new_node()
                case ChooseAnotherName():
                    self._choose_another_name()
                case GiveUp(line):
                    raise FatalError(
                        f"this node was deleted from the cluster, and {line}" if self._was_deleted else line
                    )
                case _:
                    assert_never(meaning)

    def _choose_another_name(self) -> None:
        known = self._identity.current
        name = another_name(known.name, known.enrolment)
        log.warning("the name is taken, joining under another", taken=known.name, name=name)
        self._identity.store(replace(known, name=name, name_was_chosen=True))
        self._status.name = name

    async def _poll(self, before: NodeRegistered) -> NodeRegistered:
        """The node's registration as it is now, or as before when the controller cannot be reached."""
        try:
            return await self.renew(csr=self._csr())
        except ControllerUnreachable as away:
            why = away.message
        except ErrorResponse as answer:
            match read_call(answer.status, answer.message):
                case TryLater(reason):
                    why = reason
                case RegisterAgain():
                    return await self._register()
                case Deleted():
                    await self.become_new_node()
                    return await self._register()
        log.warning("the controller will be called again", reason=why)
        return before

    def _credential(self) -> tuple[Credential, str]:
        known = self._identity.current
        if known.node_token and not self._node_token_refused:
            return Credential.NODE_TOKEN, known.node_token
        if self._join_token:
            return Credential.JOIN_TOKEN, self._join_token
        if self._identity.found:
            # An earlier start may have registered and ended before the reply: its enrolment proves the identity.
            return Credential.ENROLMENT, known.enrolment
        raise FatalError(
            "a join token is needed: make one with `corral token create`, then give it with --token (or CORRAL_TOKEN)"
        )

    def _body(self, token: str) -> RegisterNode:
        known = self._identity.current
        return replace(
            self._describe(), name=known.name, token=token, enrolment=known.enrolment, boot_id=self._status.boot_id
        )

    def _csr(self) -> str:
        offer = self._describe().ingress
        return offer.csr if offer is not None else ""

    async def _remember(self, reply: NodeRegistered) -> None:
        """Store the reply before it is used: a worker that restarts now is this node."""
        known = self._identity.current
        learnt = replace(
            known,
            node_id=reply.id or known.node_id,
            node_token=reply.node_token or ("" if self._node_token_refused else known.node_token),
            signing_key=reply.signing_key or known.signing_key,
        )
        if learnt != known:
            await asyncio.to_thread(self._identity.store, learnt)  # it syncs the disk, which may be slow
        if reply.release_key:
            await asyncio.to_thread(self._on_release_key, reply.release_key, reply.release_key_changes)
        self._node_token_refused = False
        self._server_clock.learn(reply.server_time)
        self._status.node_id = self._identity.current.node_id
        self._status.status = reply.status

    def _count(self, outcome: str) -> None:
        self._metrics.registrations.labels(outcome=outcome).inc()

    async def _wait(self, what: str, why: str) -> None:
        wait_s = self._backoff.next_s()
        log.warning(what, reason=why, wait_s=round(wait_s, 1))
        await self._clock.sleep(wait_s)
