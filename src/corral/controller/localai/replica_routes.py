"""`/replicas/<process_id>/…` on the controller: the ingress of nodes that have none. As at any other
(docs/reference/wire/files.md#access-tokens), who comes in shows a token of the cluster's for that node; what is asked
goes through `inference` to exactly that process, or is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from corral.contract.access import AccessClaims
from corral.contract.access import Scope as Permission
from corral.contract.access import refusal as refusal_of
from corral.contract.codec import Undecodable, decode, encode
from corral.contract.http import NOT_REACHED, Headers, RelayError, Request, UpstreamFailed
from corral.contract.messages.replicas import ReplicaState
from corral.controller.localai.asgi import AsgiResponder, Receive, Scope, Send, answer, raw_path
from corral.controller.localai.bridges import Bridges
from corral.controller.localai.load import PeerLoads
from corral.controller.localai.table import PeerTable
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.signing import BadSignature, Verifier
from corral.store.tables.peer_processes import PeerProcess

log = get_log(__name__)

PREFIX = b"/replicas/"
_JSON = (b"content-type", b"application/json")
# Said of answers that are ours and not a process's: none has seen the request, so a gateway may ask another one.
_NOT_REACHED = (NOT_REACHED, b"1")
_REMEMBERED = 1024
_LONGEST_TOKEN = 4096


class ReplicaRoutes:
    """An ASGI application around another: what is for replicas is served here, the rest there."""

    def __init__(
        self,
        table: PeerTable,
        bridges: Bridges,
        loads: PeerLoads,
        clock: Clock,
        public_key: str,
        *,
        doubt: Callable[[str], None],
    ) -> None:
        """`doubt` is told when a process did not answer as it should: somebody is to look at it."""
        self._table = table
        self._bridges = bridges
        self._loads = loads
        self._tokens = _Tokens(public_key, clock)
        self._doubt = doubt

    def around(self, app: Any) -> Any:
        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            path = raw_path(scope) if scope["type"] == "http" else b""
            if path.startswith(PREFIX):
                await answer(scope, receive, send, path, self._handle)
            else:
                await app(scope, receive, send)

        return serve

    async def _handle(self, request: Request, responder: AsgiResponder) -> None:
        named, slash, rest = request.path[len(PREFIX) :].partition(b"/")
        process_id = named.partition(b"?")[0].decode(errors="replace")
        claims = self._tokens.read(request.header(b"authorization"))
        if claims is None:
            await _say(responder, 401, "a token of this cluster is needed: Authorization: Bearer …", "denied")
            return
        try:
            process = await self._table.find(process_id)
        except CorralError as error:
            await _say(responder, 503, f"the process cannot be looked up: {error.message}", "unavailable", _NOT_REACHED)
            return
        why = self._tokens.refuses(claims, process.node_id if process is not None else "")
        if why is not None:
            await _say(responder, 403, why, "denied")
        elif process is None or process.state != ReplicaState.READY:
            await _gone(responder, process_id)
        else:
            await self._serve(process, replace(request, path=slash + rest or b"/"), responder)

    async def _serve(self, process: PeerProcess, request: Request, responder: AsgiResponder) -> None:
        self._loads.begin(process.process_id)
        try:
            try:
                bridge = await self._bridges.of(process)
            except CorralError as error:
                await _say(
                    responder, 503, f"its node cannot be looked up: {error.message}", "unavailable", _NOT_REACHED
                )
                return
            status = await bridge.handle(request, responder)
            if status == 410:  # it holds another model
                self._doubt(process.process_id)
        except UpstreamFailed as failure:
            self._doubt(process.process_id)
            await _failed(responder, failure)
        except RelayError as error:
            if not responder.begun:
                await _say(responder, 400, str(error), "invalid_request_error")
            log.info("an answer broke off", model=process.model, error=str(error))
        except asyncio.CancelledError:
            log.debug("a client left", model=process.model)
            raise
        finally:
            self._loads.end(process.process_id)


class _Tokens:
    """Tokens that were verified once cost a lookup from then on."""

    def __init__(self, public_key: str, clock: Clock) -> None:
        self._verifier = Verifier(public_key)
        self._clock = clock
        self._verified: dict[bytes, AccessClaims] = {}

    def read(self, authorization: bytes | None) -> AccessClaims | None:
        scheme, _, token = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not 0 < len(token) <= _LONGEST_TOKEN:
            return None
        if (known := self._verified.get(token)) is not None:
            return known
        try:
            claims = decode(AccessClaims, self._verifier.verify(token.decode("ascii", "replace")))
        except (BadSignature, Undecodable):
            return None
        if len(self._verified) >= _REMEMBERED:
            self._verified.clear()
        self._verified[token] = claims
        return claims

    def refuses(self, claims: AccessClaims, node_id: str) -> str | None:
        """Of a process nobody knows, nobody knows the node either: then any will do to be told that it is gone."""
        now = self._clock.now().timestamp()
        return refusal_of(claims, node=node_id or claims.aud, scope=Permission.REPLICAS, now=now)


async def _gone(responder: AsgiResponder, process_id: str) -> None:
    words = f"no process {process_id[:128]!r} serves here any more; pick another"
    await _say(responder, 410, words, "gone", _NOT_REACHED)


async def _failed(responder: AsgiResponder, failure: UpstreamFailed) -> None:
    """503: nothing happened, another may be asked. 504 and 502: it was asked, and may have acted."""
    status = 503 if failure.refused else 504 if failure.timed_out else 502
    words = "the process cannot be reached" if failure.refused else "the process broke off before it answered"
    more = (_NOT_REACHED,) if failure.refused else ()
    # As the gateway would say it: whoever asked the model reads it.
    error = {"message": f"{words}: {failure}", "type": "server_error", "param": None, "code": "upstream_failed"}
    await responder.send(status, (_JSON, *more), encode({"error": error}))


async def _say(responder: AsgiResponder, status: int, message: str, code: str, *more: tuple[bytes, bytes]) -> None:
    body = encode({"error": {"code": status, "message": message, "type": code}})
    headers: Headers = (_JSON, *more)
    await responder.send(status, headers, body)
