"""Serves OpenAI's HTTP routes for one gRPC process: maps paths to RPCs. A `Handler` of contract/http.py.

The code that mounts the bridge authorizes and counts requests. A path that is not translated is refused with the name
of its RPC.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from corral.contract.codec import encode
from corral.contract.http import ClientGone, Request, Responder
from corral.inference.api_errors import JSON, ApiError, not_bridged
from corral.inference.backend_process import BackendProcess
from corral.inference.grpc.client import BackendClient
from corral.inference.openai.json_body import JsonBody
from corral.inference.openai.media_body import read_json
from corral.inference.request_files import RequestFiles
from corral.inference.routes import (
    completions,
    embeddings,
    images,
    recognition,
    sounds,
    speech,
    transcription,
    utilities,
    videos,
)

MAX_SHOWN_CHARS = 100

# Routes with a JSON body.
_JSON_ROUTES: dict[bytes, Callable[[BackendClient, JsonBody, Responder], Awaitable[int]]] = {
    b"/v1/chat/completions": completions.chat,
    b"/v1/completions": completions.complete,
    b"/v1/embeddings": embeddings.embed,
    b"/v1/rerank": embeddings.rerank,
    b"/v1/tokenize": utilities.tokenize,
    b"/tokenize": utilities.tokenize,
    b"/v1/detokenize": utilities.detokenize,
    b"/detokenize": utilities.detokenize,
    b"/v1/vad": utilities.detect_voice_activity,
    b"/vad": utilities.detect_voice_activity,
}
# Routes whose requests or answers have files.
_FILE_ROUTES: dict[bytes, Callable[[BackendClient, Request, Responder, RequestFiles], Awaitable[int]]] = {
    b"/v1/audio/transcriptions": transcription.transcribe,
    b"/v1/audio/translations": transcription.translate,
    b"/v1/audio/diarization": transcription.diarize,
    b"/v1/audio/speech": speech.create_speech,
    b"/v1/audio/transformations": sounds.transform,
    b"/v1/audio/transform": sounds.transform,
    b"/v1/audio/classification": sounds.classify,
    b"/v1/sound-generation": sounds.generate_sound,
    b"/v1/images/generations": images.generate,
    b"/v1/images/edits": images.edit,
    b"/v1/images/variations": images.vary,
    b"/v1/images/inpainting": images.inpaint,
    b"/v1/images/upscale": images.upscale,
    b"/v1/videos": videos.generate_video,
    b"/v1/videos/generations": videos.generate_video,
    b"/v1/3d/generations": videos.generate_3d,
    b"/v1/detection": recognition.detect,
    b"/v1/depth": recognition.estimate_depth,
    b"/v1/face/verify": recognition.verify_faces,
    b"/v1/face/analyze": recognition.analyze_faces,
    b"/v1/face/embed": recognition.embed_face,
    b"/v1/voice/verify": recognition.verify_voices,
    b"/v1/voice/analyze": recognition.analyze_voice,
    b"/v1/voice/embed": recognition.embed_voice,
}
_GET_ROUTES: dict[bytes, Callable[[BackendClient, Responder], Awaitable[int]]] = {
    b"/health": utilities.health,
    b"/status": utilities.status,
}
# LocalAI's paths that are not translated, with their RPC (docs/reference/wire/grpc.md#rpcs).
_NOT_BRIDGED = {
    b"/v1/realtime": "AudioTranscriptionLive",
    b"/v1/score": "Score",
    b"/v1/token-classification": "TokenClassify",
    b"/stores/set": "StoresSet",
    b"/stores/delete": "StoresDelete",
    b"/stores/get": "StoresGet",
    b"/stores/find": "StoresFind",
    b"/metrics": "GetMetrics",
}


class Bridge:
    """The bridge to one process. `close` it when that process is gone: the channel is closed after the last active
    request."""

    def __init__(self, process: BackendProcess, files: RequestFiles) -> None:
        """`files`: creates files that the process can read and write."""
        self.process = process
        self._files = files
        self._client = BackendClient(process)
        self._open = 0
        self._closing = False

    async def handle(self, request: Request, responder: Responder) -> int:
        """Answer the request; returns the status for the metrics. Raises UpstreamFailed, before anything was sent, if
        the process cannot be reached or breaks the connection."""
        self._open += 1
        try:
            return await self._handle(request, responder)
        finally:
            self._open -= 1
            if self._closing and not self._open:
                await self._client.close()

    async def close(self) -> None:
        self._closing = True
        if not self._open:
            await self._client.close()

    async def _handle(self, request: Request, responder: Responder) -> int:
        try:
            return await self._route(request, responder)
        except ClientGone:
            return 499
        except BaseExceptionGroup as group:  # of several concurrent choices, the first that failed
            failure = _first(group)
            if not isinstance(failure, ApiError):
                raise failure from group
            refused = failure
        except ApiError as failure:
            refused = failure
        await responder.send(refused.status, refused.headers, refused.body)
        return refused.status

    async def _route(self, request: Request, responder: Responder) -> int:
        route, client = request.route, self._client
        if (handler := _JSON_ROUTES.get(route)) is not None:
            return await handler(client, await self._read_json(request), responder)
        if (file_handler := _FILE_ROUTES.get(route)) is not None:
            _check_method(request, b"POST")
            return await file_handler(client, request, responder, self._files)
        if (get_handler := _GET_ROUTES.get(route)) is not None:
            _check_method(request, b"GET")
            return await get_handler(client, responder)
        if route == b"/v1/models":
            _check_method(request, b"GET")
            return await self._models(responder)
        raise not_bridged(_NOT_BRIDGED.get(route, ""), route[:MAX_SHOWN_CHARS].decode("latin-1"))

    async def _read_json(self, request: Request) -> JsonBody:
        _check_method(request, b"POST")
        return await read_json(request)

    async def _models(self, responder: Responder) -> int:
        rows = [{"id": self.process.model, "object": "model", "created": 0, "owned_by": self.process.backend}]
        await responder.send(200, (JSON,), encode({"object": "list", "data": rows}))
        return 200


def _check_method(request: Request, method: bytes) -> None:
    if request.method != method:
        raise ApiError(405, f"Only {method.decode()} is allowed here.", code="method_not_allowed")


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found
