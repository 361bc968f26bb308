"""The routes under `/v1/…`: checks the key, reads the model, and gives authorized requests to `forward.py`.

This module knows the OpenAI API; a `Router` knows replicas (`routing/router.py`).
"""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qs, unquote_to_bytes

import msgspec

from corral.contract.http import BodyBroken, BodyTooLarge, Request, Responder
from corral.gateway import responses
from corral.gateway.http.auth import authenticate_fresh
from corral.gateway.http.bodies import BodyBudgets, BudgetExceeded, Reservation, read_whole
from corral.gateway.http.cors import Cors
from corral.gateway.http.forward import Forwarder, InferenceRequest
from corral.gateway.http.model_field import BadBody, FieldReader
from corral.gateway.http.multipart import SpooledBody, boundary_of, read_model, spool
from corral.gateway.http.rate_limits import KeyLimiter, Limiters
from corral.gateway.responses import Response
from corral.gateway.routing.request import WaitTimes
from corral.gateway.routing.suggestions import ModelSuggestions
from corral.gateway.view.fleet import Client, Fleet, FleetSource
from corral.kit.clock import Clock
from corral.kit.log import get_log

log = get_log(__name__)

MODELS_PATH = b"/v1/models"
SOUND_GENERATION_PATH = b"/v1/sound-generation"  # its clients name the model in `model_id`, as ElevenLabs' do
INFERENCE_PATHS = frozenset(
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
        b"audio/diarization",
        b"audio/classification",
        b"audio/transformations",
        b"audio/transform",
        b"sound-generation",
        b"images/generations",
        b"images/edits",
        b"images/variations",
        b"images/inpainting",
        b"images/upscale",
        b"videos",
        b"videos/generations",
        b"3d/generations",
        b"detection",
        b"depth",
        b"face/verify",
        b"face/analyze",
        b"face/embed",
        b"voice/verify",
        b"voice/analyze",
        b"voice/embed",
    )
)


def suggest_path(route: bytes) -> bytes:
    """The path that a client meant whose base URL lacks `/v1`, has it twice, or has a slash too many; empty: none."""
    path = b"/v1/" + b"/".join(word for word in route.split(b"/") if word not in (b"", b"v1"))
    return path if path != route and (path in INFERENCE_PATHS or path == MODELS_PATH) else b""


class InferenceApi:
    def __init__(
        self,
        fleets: FleetSource,
        forwarder: Forwarder,
        limiters: Limiters,
        budgets: BodyBudgets,
        clock: Clock,
        *,
        cors: Cors,
        body_limit_bytes: int,
        retry_after_s: float,
        multipart_limit_bytes: int = 256 * 1024 * 1024,
        spool_folder: str | None = None,
    ) -> None:
        self._fleets = fleets
        self._forwarder = forwarder
        self._limiters = limiters
        self._budgets = budgets
        self._clock = clock
        self._cors = cors
        self._body_limit_bytes = body_limit_bytes
        self._multipart_limit_bytes = multipart_limit_bytes
        self._spool_folder = spool_folder
        self._retry_after_s = retry_after_s
        self._reader = FieldReader()
        self._suggestions: tuple[Fleet | None, ModelSuggestions] = (None, ModelSuggestions())  # for this fleet

    # Routes. Each sends a response and returns its status.

    async def inference(self, request: Request, responder: Responder) -> int:
        return await self._infer(request, responder, is_known_path=True)

    async def models(self, request: Request, responder: Responder) -> int:
        """`GET /v1/models` and `GET /v1/models/{id}`."""
        response = self._cors.preflight(request) or await self._models(request)
        return await self._send(request, responder, response)

    async def misspelt_path(self, request: Request, responder: Responder) -> int:
        """A misspelt path of ours (`suggest_path`). An engine would respond that there is no such file."""
        response: Response | tuple[Fleet, Client] | None
        response = self._cors.preflight(request) or await self._authenticate(request)
        if not isinstance(response, Response):
            response = responses.unknown_route(request.method, request.route, suggest_path(request.route))
        return await self._send(request, responder, response)

    async def other_path(self, request: Request, responder: Responder) -> int:
        """Any other path under `/v1/`: an engine may serve it. A request that names a model, in its body or as
        `?model=`, goes to that model. Other requests get a 404, but only with a valid key."""
        model = _model_in_query(request.path)
        if request.method == b"POST" and not model:
            return await self._infer(request, responder, is_known_path=False)
        inference = self._cors.preflight(request) or await self._from_query(request, model)
        if isinstance(inference, Response):
            return await self._send(request, responder, inference)
        limiter = self._start_limited(inference.client)
        if isinstance(limiter, Response):
            return await self._send(request, responder, limiter)
        return await self._forwarder.forward(request, responder, msgspec.structs.replace(inference, limiter=limiter))

    # Inference.

    async def _infer(self, request: Request, responder: Responder, *, is_known_path: bool) -> int:
        admitted = self._cors.preflight(request) or await self._admit(request)
        if isinstance(admitted, Response):
            return await self._send(request, responder, admitted)
        fleet, client, limiter = admitted
        reservation, inference = self._budgets.memory.reserve(), None
        try:
            read = await self._read(request, fleet, client, reservation, is_known_path=is_known_path)
            if isinstance(read, Response):
                return await self._send(request, responder, read)
            inference = msgspec.structs.replace(read, limiter=limiter)
            return await self._forwarder.forward(request, responder, inference)
        finally:
            reservation.close()
            if inference is None and limiter is not None:
                limiter.end(0)
            if inference is not None and inference.spooled is not None:
                inference.spooled.close()

    async def _admit(self, request: Request) -> tuple[Fleet, Client, KeyLimiter | None] | Response:
        """All checks before the body is read: a client over its limits gets no body read."""
        authenticated = await self._authenticate(request)
        if isinstance(authenticated, Response):
            return authenticated
        fleet, client = authenticated
        if request.method != b"POST":
            return responses.wrong_method(request.method, b"POST")
        if not client.may_infer:
            return responses.forbidden(client.role, "use models")
        limiter = self._start_limited(client)
        return limiter if isinstance(limiter, Response) else (fleet, client, limiter)

    def _start_limited(self, client: Client) -> KeyLimiter | Response | None:
        """Count one more request of this key; None: the key has no limits."""
        now = self._clock.monotonic()
        limiter = self._limiters.of(client.key_id, client.limits, now)
        if limiter is None:
            return None
        while (refusal := limiter.check(now)) is None:
            if limiter.begin():
                return limiter
        return responses.rate_limited(*refusal)

    async def _read(
        self, request: Request, fleet: Fleet, client: Client, reservation: Reservation, *, is_known_path: bool
    ) -> InferenceRequest | Response:
        """Read the body and the model's name. `is_known_path`: the path needs a model for certain."""
        kind = request.header(b"content-type") or b""
        is_multipart = kind[:10].lower() == b"multipart/"
        limit_bytes = self._multipart_limit_bytes if is_multipart else self._body_limit_bytes
        spooled = None
        try:
            if is_multipart:
                spooled, model = await self._spool(request, kind)
                body = b""
            else:
                body = await read_whole(request.body, limit_bytes, reservation)
                model = self._reader.read(body, or_model_id=request.route == SOUND_GENERATION_PATH)
        except BodyTooLarge:
            return responses.too_large(limit_bytes)
        except BodyBroken as error:
            return responses.openai_error(error.status, f"The body could not be read: {error}.")
        except BadBody as error:
            return self._bad_body(request, error, is_known_path=is_known_path)
        except BudgetExceeded:
            return responses.no_space("disk" if is_multipart else "memory", self._retry_after_s)
        except OSError as error:
            log.error("a request body could not be written to disk", reason=str(error))
            return responses.no_space("disk", self._retry_after_s)
        if not client.may_use(model):
            if spooled is not None:
                spooled.close()
            return self._unknown_model(model, fleet, client)
        return InferenceRequest(request, fleet, client, model, body, WaitTimes(), spooled)

    def _bad_body(self, request: Request, error: BadBody, *, is_known_path: bool) -> Response:
        encoding = request.header(b"content-encoding")
        if encoding is not None and encoding.lower() != b"identity":
            return responses.compressed(encoding)
        if not is_known_path:
            return responses.unknown_route(request.method, request.route)
        return responses.openai_error(400, error.message, param=error.param)

    async def _spool(self, request: Request, kind: bytes) -> tuple[SpooledBody, str]:
        boundary = boundary_of(kind)
        reservation = self._budgets.disk.reserve()
        spooled = await spool(request.body, self._multipart_limit_bytes, reservation, self._spool_folder)
        try:
            spooled.model_field = await asyncio.to_thread(read_model, spooled.data, boundary)
            return spooled, spooled.model_field.model
        except BaseException:
            spooled.close()
            raise

    async def _from_query(self, request: Request, model: str) -> InferenceRequest | Response:
        """A request that names its model as `?model=`. Its body is passed on as it arrives, in any format."""
        authenticated = await self._authenticate(request)
        if isinstance(authenticated, Response):
            return authenticated
        fleet, client = authenticated
        if not model:
            return responses.unknown_route(request.method, request.route)
        if not client.may_infer:
            return responses.forbidden(client.role, "use models")
        if not client.may_use(model):
            return self._unknown_model(model, fleet, client)
        return InferenceRequest(request, fleet, client, model, b"", WaitTimes())

    # Models.

    async def _models(self, request: Request) -> Response:
        authenticated = await self._authenticate(request)
        if isinstance(authenticated, Response):
            return authenticated
        fleet, client = authenticated
        if request.method not in (b"GET", b"HEAD"):
            return responses.wrong_method(request.method, b"GET")
        if not client.may_list:
            return responses.forbidden(client.role, "list models")
        if request.route in (MODELS_PATH, MODELS_PATH + b"/"):
            return Response(200, client.model_list)
        name = unquote_to_bytes(request.route[len(MODELS_PATH) + 1 :]).decode(errors="replace")
        model = fleet.models.get(name) if client.may_use(name) else None
        return self._unknown_model(name, fleet, client) if model is None else Response(200, model)

    def _unknown_model(self, model: str, fleet: Fleet, client: Client) -> Response:
        if self._suggestions[0] is not fleet:
            self._suggestions = (fleet, ModelSuggestions(fleet.models))
        suggestions = self._suggestions[1].find(model, client)
        return responses.unknown_model(model, installed=len(fleet.models), suggestions=suggestions)

    async def _authenticate(self, request: Request) -> tuple[Fleet, Client] | Response:
        found = await authenticate_fresh(self._fleets, request.headers, retry_after_s=self._retry_after_s)
        if not isinstance(found, Response):
            request.extra["key"] = found[1].key_id  # for the log line
        return found

    async def _send(self, request: Request, responder: Responder, response: Response) -> int:
        return await responses.send(responder, response, self._cors.headers(request))


def _model_in_query(path: bytes) -> str:
    """`/v1/realtime?model=…`; empty where the query has no model, or two."""
    _, mark, query = path.partition(b"?")
    if not mark:
        return ""
    try:
        found = parse_qs(query.decode("latin-1"), max_num_fields=32).get("model", [])
    except ValueError:
        return ""
    return found[0] if len(found) == 1 else ""
