"""`/v1/…`: the key is checked, the model read, and what may be served handed to `serving.py`.

This module knows OpenAI's manners; a `Router` knows replicas (`router.py`). A benchmark hands in a router that always
names one target and measures the same path.
"""

from __future__ import annotations

import asyncio
from typing import Protocol
from urllib.parse import parse_qs, unquote_to_bytes

import msgspec

from corral.contract.http import BodyBroken, BodyTooLarge, Errand, KnownHead, Request, Responder
from corral.gateway import answers
from corral.gateway.admission import FleetSource, admit_lately
from corral.gateway.answers import Answer
from corral.gateway.bodies import NoRoom, Rooms, Share, read_whole
from corral.gateway.cors import Cors
from corral.gateway.fields import BadBody, FieldReader, Fields
from corral.gateway.limits import KeyLimiter, Limiters
from corral.gateway.multipart import Spooled, boundary_of, read_model, spool
from corral.gateway.near import NearNames
from corral.gateway.relaying import send
from corral.gateway.replicas import Route
from corral.gateway.view import Client, Fleet
from corral.kit.clock import Clock
from corral.kit.log import get_log

log = get_log(__name__)

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


def meant_by(route: bytes) -> bytes:
    """The path of somebody whose base URL lacks its `/v1`, has it twice, or a slash too many; empty: nobody knows."""
    path = b"/v1/" + b"/".join(word for word in route.split(b"/") if word not in (b"", b"v1"))
    return path if path != route and (path in INFERENCE or path == MODELS) else b""


class Waited:
    """How long a request waited before it was sent, told by the router."""

    __slots__ = ("load_s", "queue_s")

    def __init__(self) -> None:
        self.load_s = 0.0  # for a cold model
        self.queue_s = 0.0  # for a slot


class Ask(msgspec.Struct, frozen=True, gc=False):  # made per request: a frozen dataclass costs ten times as much
    """A request that may be served, as far as the door can tell."""

    request: Request | KnownHead  # its method, path and headers
    fleet: Fleet
    client: Client
    fields: Fields
    body: bytes
    waited: Waited | None = None
    spooled: Spooled | None = None  # the body, where it is kept on disk
    limiter: KeyLimiter | None = None  # it has begun there: whoever serves it ends it


class Router(Protocol):
    async def route(self, ask: Ask) -> Route | Answer:
        """Choose a replica, waiting for one within the request's budget, or say why there is none."""


class NoReplicas:
    """The router of a fleet that serves no model yet."""

    async def route(self, ask: Ask) -> Route | Answer:
        return answers.unknown_model(ask.fields.model, installed=len(ask.fleet.models))


class Server(Protocol):
    """Whoever serves what may be served."""

    async def serve(self, request: Request, responder: Responder, ask: Ask) -> int: ...

    async def carry_on(self, errand: Errand, request: Request, responder: Responder, waited_s: float) -> int: ...


class V1:
    def __init__(
        self,
        fleets: FleetSource,
        server: Server,
        limiters: Limiters,
        rooms: Rooms,
        clock: Clock,
        *,
        cors: Cors,
        body_limit_bytes: int,
        retry_after_s: float,
        multipart_limit_bytes: int = 256 * 1024 * 1024,
        spool_folder: str | None = None,
    ) -> None:
        self._fleets = fleets
        self._server = server
        self._limiters = limiters
        self._rooms = rooms
        self._clock = clock
        self._cors = cors
        self._body_limit_bytes = body_limit_bytes
        self._multipart_limit_bytes = multipart_limit_bytes
        self._spool_folder = spool_folder
        self._retry_after_s = retry_after_s
        self._reader = FieldReader()
        self._near: tuple[Fleet | None, NearNames] = (None, NearNames())  # the fleet they are of, and they

    async def inference(self, request: Request, responder: Responder) -> int:
        return await self._infer(request, responder, named=True)

    async def _infer(self, request: Request, responder: Responder, *, named: bool) -> int:
        entered = self._cors.preflight(request) or await self._enter(request)
        if isinstance(entered, Answer):
            return await self._send(request, responder, entered)
        fleet, client, limiter = entered
        share, ask = self._rooms.memory.share(), None
        try:
            read = await self._read(request, fleet, client, share, named=named)
            if isinstance(read, Answer):
                return await self._send(request, responder, read)
            ask = msgspec.structs.replace(read, limiter=limiter)
            return await self._server.serve(request, responder, ask)
        finally:
            share.close()
            if ask is None and limiter is not None:
                limiter.end(0)
            if ask is not None and ask.spooled is not None:
                ask.spooled.close()

    async def carry_on(self, errand: Errand, request: Request, responder: Responder, waited_s: float) -> int:
        """`inference` for a request that was decided on the short way."""
        return await self._server.carry_on(errand, request, responder, waited_s)

    async def models(self, request: Request, responder: Responder) -> int:
        """`GET /v1/models` and `GET /v1/models/{id}`."""
        answer = self._cors.preflight(request) or await self._models(request)
        return await self._send(request, responder, answer)

    async def misplaced(self, request: Request, responder: Responder) -> int:
        """A path that is one of ours but for how it is written (`meant_by`). Engines would say that there is no such
        file."""
        answer: Answer | tuple[Fleet, Client] | None = self._cors.preflight(request) or await self._admit(request)
        if not isinstance(answer, Answer):
            answer = answers.unknown_route(request.method, request.route, meant_by(request.route))
        return await self._send(request, responder, answer)

    async def other(self, request: Request, responder: Responder) -> int:
        """Paths under `/v1/` that we have no name for: an engine may have one. What names a model, in its body or as
        `?model=`, goes to it; of the rest, only who may be here at all is told that it is nothing."""
        model = _asked_in_query(request.path)
        if request.method == b"POST" and not model:
            return await self._infer(request, responder, named=False)
        ask = self._cors.preflight(request) or await self._ask_by_query(request, model)
        if isinstance(ask, Answer):
            return await self._send(request, responder, ask)
        limiter = self._begin(ask.client)
        if isinstance(limiter, Answer):
            return await self._send(request, responder, limiter)
        return await self._server.serve(request, responder, msgspec.structs.replace(ask, limiter=limiter))

    async def _ask_by_query(self, request: Request, model: str) -> Ask | Answer:
        """The body, if there is one, is passed on as it comes: it need not be one we can read."""
        admitted = await self._admit(request)
        if isinstance(admitted, Answer):
            return admitted
        fleet, client = admitted
        if not model:
            return answers.unknown_route(request.method, request.route)
        if not client.may_infer:
            return answers.forbidden(client.role, "use models")
        if not client.may_use(model):
            return self._unknown(model, fleet, client)
        return Ask(request, fleet, client, Fields(model), b"", Waited())

    async def _enter(self, request: Request) -> tuple[Fleet, Client, KeyLimiter | None] | Answer:
        """Everything that can be said before a body is read. Who has had enough gets none of ours read."""
        admitted = await self._admit(request)
        if isinstance(admitted, Answer):
            return admitted
        fleet, client = admitted
        if request.method != b"POST":
            return answers.wrong_method(request.method, b"POST")
        if not client.may_infer:
            return answers.forbidden(client.role, "use models")
        limiter = self._begin(client)
        return limiter if isinstance(limiter, Answer) else (fleet, client, limiter)

    def _begin(self, client: Client) -> KeyLimiter | Answer | None:
        """With one request more under way there; None: nothing limits this key."""
        now = self._clock.monotonic()
        limiter = self._limiters.of(client.key_id, client.limits, now)
        if limiter is None:
            return None
        while (refusal := limiter.refuses(now)) is None:
            if limiter.begin():
                return limiter
        return answers.rate_limited(*refusal)

    async def _read(self, request: Request, fleet: Fleet, client: Client, share: Share, *, named: bool) -> Ask | Answer:
        """`named`: it is a path of which we know that a model belongs to it."""
        kind = request.header(b"content-type") or b""
        in_parts = kind[:10].lower() == b"multipart/"
        limit_bytes = self._multipart_limit_bytes if in_parts else self._body_limit_bytes
        spooled = None
        try:
            if in_parts:
                spooled, fields = await self._spool(request, kind)
                body = b""
            else:
                body = await read_whole(request.body, limit_bytes, share)
                fields = self._reader.read(body)
        except BodyTooLarge:
            return answers.too_large(limit_bytes)
        except BodyBroken as error:
            return answers.openai_error(error.status, f"The body could not be read: {error}.")
        except BadBody as error:
            encoding = request.header(b"content-encoding")
            if encoding is not None and encoding.lower() != b"identity":
                return answers.compressed(encoding)
            if not named:
                return answers.unknown_route(request.method, request.route)
            return answers.openai_error(400, error.message, param=error.param)
        except NoRoom:
            return answers.no_room("on its disk" if in_parts else "in its memory", self._retry_after_s)
        except OSError as error:
            log.error("a body could not be kept on disk", reason=str(error))
            return answers.no_room("on its disk", self._retry_after_s)
        if not client.may_use(fields.model):
            if spooled is not None:
                spooled.close()
            return self._unknown(fields.model, fleet, client)
        return Ask(request, fleet, client, fields, body, Waited(), spooled)

    async def _spool(self, request: Request, kind: bytes) -> tuple[Spooled, Fields]:
        boundary = boundary_of(kind)
        share = self._rooms.disk.share()
        spooled = await spool(request.body, self._multipart_limit_bytes, share, self._spool_folder)
        try:
            spooled.named = await asyncio.to_thread(read_model, spooled.data, boundary)
            return spooled, Fields(spooled.named.model)
        except BaseException:
            spooled.close()
            raise

    async def _models(self, request: Request) -> Answer:
        admitted = await self._admit(request)
        if isinstance(admitted, Answer):
            return admitted
        fleet, client = admitted
        if request.method not in (b"GET", b"HEAD"):
            return answers.wrong_method(request.method, b"GET")
        if not client.may_list:
            return answers.forbidden(client.role, "list models")
        if request.route in (MODELS, MODELS + b"/"):
            return Answer(200, client.listing)
        name = unquote_to_bytes(request.route[len(MODELS) + 1 :]).decode(errors="replace")
        model = fleet.models.get(name) if client.may_use(name) else None
        return self._unknown(name, fleet, client) if model is None else Answer(200, model)

    def _unknown(self, model: str, fleet: Fleet, client: Client) -> Answer:
        if self._near[0] is not fleet:
            self._near = (fleet, NearNames(fleet.models))
        return answers.unknown_model(model, installed=len(fleet.models), near=self._near[1].find(model, client))

    async def _admit(self, request: Request) -> tuple[Fleet, Client] | Answer:
        fleet = self._fleets.fleet
        if fleet is None:
            return answers.not_ready(self._retry_after_s)
        fleet, client = await admit_lately(self._fleets, fleet, request.headers)
        if isinstance(client, Answer):
            return client
        request.extra["key"] = client.key_id  # for the line in the log
        return fleet, client

    async def _send(self, request: Request, responder: Responder, answer: Answer) -> int:
        return await send(responder, answer, self._cors.headers(request))


def _asked_in_query(path: bytes) -> str:
    """`/v1/realtime?model=…`; empty where it is not said, or said twice."""
    _, mark, query = path.partition(b"?")
    if not mark:
        return ""
    try:
        found = parse_qs(query.decode("latin-1"), max_num_fields=32).get("model", [])
    except ValueError:
        return ""
    return found[0] if len(found) == 1 else ""
