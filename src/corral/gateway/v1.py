"""`/v1/…`: the key is checked, the model read, and a `Router` asked where the request goes.

The router knows replicas (`NoReplicas` as long as there are none); this module knows OpenAI's manners. A benchmark
hands in a router that always names one target and measures the same path.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol
from urllib.parse import unquote_to_bytes

import msgspec

from corral.contract.http import (
    BodyBroken,
    BodyTooLarge,
    Errand,
    Headers,
    KnownHead,
    Patience,
    Request,
    Responder,
    Target,
    UpstreamFailed,
)
from corral.gateway import answers
from corral.gateway.admission import FleetSource, admit
from corral.gateway.answers import Answer
from corral.gateway.cors import Cors
from corral.gateway.fields import BadBody, FieldReader, Fields
from corral.gateway.heads import HIDDEN_FROM_REPLICA, for_replica
from corral.gateway.metrics import RouteCounts
from corral.gateway.relaying import send, settle, status_of
from corral.gateway.view import Client, Fleet

MODELS = b"/v1/models"
INFERENCE = frozenset(
    b"/v1/" + path
    for path in (
        b"chat/completions",
        b"completions",
        b"responses",
        b"messages",
        b"embeddings",
        b"rerank",
        b"moderations",
        b"audio/speech",
        b"audio/transcriptions",
        b"audio/translations",
        b"images/generations",
        b"images/edits",
        b"images/variations",
    )
)


class Ask(msgspec.Struct, frozen=True, gc=False):  # made per request: a frozen dataclass costs ten times as much
    """A request that may be served, as far as the door can tell."""

    request: Request | KnownHead  # its method, path and headers
    fleet: Fleet
    client: Client
    fields: Fields
    body: bytes


class Route(NamedTuple):
    """Where a request goes: which worker's ingress, under which path there, and what opens it."""

    target: Target
    path: bytes
    ingress_token: bytes


class Router(Protocol):
    async def route(self, ask: Ask) -> Route | Answer:
        """Choose a replica, waiting for one within the request's budget, or say why there is none."""


class NoReplicas:
    """The router of a fleet that serves no model yet."""

    async def route(self, ask: Ask) -> Route | Answer:
        return answers.unknown_model(ask.fields.model, installed=len(ask.fleet.models))


class V1:
    def __init__(
        self,
        fleets: FleetSource,
        router: Router,
        counts: RouteCounts,
        *,
        cors: Cors,
        patience: Patience,
        body_limit_bytes: int,
        retry_after_s: float,
    ) -> None:
        self._fleets = fleets
        self._router = router
        self._counts = counts
        self._cors = cors
        self._patience = patience
        self._body_limit_bytes = body_limit_bytes
        self._retry_after_s = retry_after_s
        self._reader = FieldReader()

    async def inference(self, request: Request, responder: Responder) -> int:
        chosen = self._cors.preflight(request) or await self._choose(request)
        if isinstance(chosen, Answer):
            return await self._send(request, responder, chosen)
        return await self._relay(request, responder, chosen.target, chosen.path, for_replica(chosen.ingress_token))

    async def carry_on(self, errand: Errand, request: Request, responder: Responder) -> int:
        """`inference` for a request that was decided on the short way."""
        return await self._relay(request, responder, errand.target, errand.path, errand.add)

    async def _relay(self, request: Request, responder: Responder, target: Target, path: bytes, add: Headers) -> int:
        try:
            result = await responder.relay(
                target,
                path=path,
                strip=HIDDEN_FROM_REPLICA,
                add=add,
                response_headers=self._cors.headers(request),
                patience=self._patience,
            )
        except UpstreamFailed as failure:
            request.extra["error"] = str(failure)  # for the line in the log; the client gets the general sentence
            return await self._send(request, responder, self._replica_failed(failure))
        return settle(self._counts, result)

    async def models(self, request: Request, responder: Responder) -> int:
        """`GET /v1/models` and `GET /v1/models/{id}`."""
        answer = self._cors.preflight(request) or self._models(request)
        return await self._send(request, responder, answer)

    async def other(self, request: Request, responder: Responder) -> int:
        """Paths under `/v1/` that are nothing: only who may be here at all is told so."""
        answer = self._cors.preflight(request)
        if answer is None:
            admitted = self._admit(request)
            unknown = answers.unknown_route(request.method, request.route)
            answer = admitted if isinstance(admitted, Answer) else unknown
        return await self._send(request, responder, answer)

    async def _choose(self, request: Request) -> Route | Answer:
        admitted = self._admit(request)
        if isinstance(admitted, Answer):
            return admitted
        fleet, client = admitted
        if request.method != b"POST":
            return answers.wrong_method(request.method, b"POST")
        if not client.may_infer:
            return answers.forbidden(client.role, "use models")
        if (request.header(b"content-type") or b"").lower().startswith(b"multipart/"):
            return answers.openai_error(
                415, "Multipart bodies are not taken here; send JSON.", code="unsupported_media_type"
            )
        try:
            body = await request.body.read(self._body_limit_bytes)
            fields = self._reader.read(body)
        except BodyTooLarge:
            return answers.too_large(self._body_limit_bytes)
        except BodyBroken as error:
            return answers.openai_error(error.status, f"The body could not be read: {error}.")
        except BadBody as error:
            return answers.openai_error(400, error.message, param=error.param)
        if not client.may_use(fields.model):
            return answers.unknown_model(fields.model, installed=len(fleet.models))
        return await self._router.route(Ask(request, fleet, client, fields, body))

    def _models(self, request: Request) -> Answer:
        admitted = self._admit(request)
        if isinstance(admitted, Answer):
            return admitted
        fleet, client = admitted
        if request.method not in (b"GET", b"HEAD"):
            return answers.wrong_method(request.method, b"GET")
        if not client.may_list:
            return answers.forbidden(client.role, "list models")
        if request.route == MODELS:
            return Answer(200, client.listing)
        name = unquote_to_bytes(request.route[len(MODELS) + 1 :]).decode(errors="replace")
        model = fleet.models.get(name) if client.may_use(name) else None
        return answers.unknown_model(name, installed=len(fleet.models)) if model is None else Answer(200, model)

    def _admit(self, request: Request) -> tuple[Fleet, Client] | Answer:
        fleet = self._fleets.fleet
        if fleet is None:
            return answers.not_ready(self._retry_after_s)
        client = admit(fleet, request.headers, self._fleets.server_now)
        if isinstance(client, Answer):
            return client
        request.extra["key"] = client.key_id  # for the line in the log
        return fleet, client

    def _replica_failed(self, failure: UpstreamFailed) -> Answer:
        status = status_of(failure)
        words = {
            503: "No replica of the model could be reached. Try again shortly.",
            504: "The replica did not begin to answer in time.",
            502: "The replica broke off before it answered.",
        }
        headers = (answers.retry_after(self._retry_after_s),) if status == 503 else ()
        return answers.openai_error(status, words[status], kind=answers.SERVER, code="upstream_failed", headers=headers)

    async def _send(self, request: Request, responder: Responder, answer: Answer) -> int:
        return await send(responder, answer, self._cors.headers(request))
