"""OpenAI's HTTP for one gRPC process: which path is which RPC. A `Handler` of contract/http.py.

Whoever mounts it has checked the caller and counts the request. A path without an RPC is refused by the name of the
RPC it would be.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from corral.contract.codec import encode
from corral.contract.http import BodyTooLarge, ClientGone, Request, Responder
from corral.inference.api_errors import JSON, Refused, not_bridged
from corral.inference.backend_process import Served
from corral.inference.grpc.client import Caller
from corral.inference.openai.json_body import Asked
from corral.inference.request_files import Files
from corral.inference.routes import completions, embeddings, speech, transcription, utilities

LARGEST_BODY = 64 * 1024 * 1024
LONGEST_SHOWN = 100

# A JSON object in, an answer out.
_ASKED: dict[bytes, Callable[[Caller, Asked, Responder], Awaitable[int]]] = {
    b"/v1/chat/completions": completions.chat,
    b"/v1/completions": completions.complete,
    b"/v1/embeddings": embeddings.embed,
    b"/v1/rerank": embeddings.rerank,
    b"/v1/tokenize": utilities.tokenize,
    b"/tokenize": utilities.tokenize,
    b"/v1/detokenize": utilities.detokenize,
    b"/detokenize": utilities.detokenize,
    b"/v1/vad": utilities.find_speech,
    b"/vad": utilities.find_speech,
}
# A form with a file in it.
_FORMS: dict[bytes, Callable[[Caller, Request, Responder, Files], Awaitable[int]]] = {
    b"/v1/audio/transcriptions": transcription.transcribe,
    b"/v1/audio/translations": transcription.translate,
    b"/v1/audio/diarization": transcription.diarize,
}
_LOOKS: dict[bytes, Callable[[Caller, Responder], Awaitable[int]]] = {
    b"/health": utilities.health,
    b"/status": utilities.status,
}
_SPEECH = b"/v1/audio/speech"
# What is not translated, by the RPC it would be (docs/reference/wire/grpc.md#rpcs). LocalAI's own paths.
_NOT_BRIDGED = {
    b"/v1/images/generations": "GenerateImage",
    b"/v1/images/edits": "GenerateImage",
    b"/v1/images/variations": "GenerateImage",
    b"/v1/images/inpainting": "GenerateImage",
    b"/v1/images/upscale": "UpscaleImage",
    b"/v1/videos": "GenerateVideo",
    b"/v1/videos/generations": "GenerateVideo",
    b"/v1/3d/generations": "Generate3D",
    b"/v1/sound-generation": "SoundGeneration",
    b"/v1/audio/transform": "AudioTransform",
    b"/v1/audio/classification": "SoundDetection",
    b"/v1/realtime": "AudioTranscriptionLive",
    b"/v1/detection": "Detect",
    b"/v1/depth": "Depth",
    b"/v1/score": "Score",
    b"/v1/token-classification": "TokenClassify",
    b"/v1/face/verify": "FaceVerify",
    b"/v1/face/analyze": "FaceAnalyze",
    b"/v1/voice/verify": "VoiceVerify",
    b"/v1/voice/analyze": "VoiceAnalyze",
    b"/v1/voice/embed": "VoiceEmbed",
    b"/stores/set": "StoresSet",
    b"/stores/delete": "StoresDelete",
    b"/stores/get": "StoresGet",
    b"/stores/find": "StoresFind",
    b"/metrics": "GetMetrics",
}


class Bridge:
    """Of one process. `close` it when that process is gone: the last request under way closes it in truth."""

    def __init__(self, served: Served, files: Files) -> None:
        """`files`: where the process can read and write them."""
        self.served = served
        self._files = files
        self._caller = Caller(served)
        self._open = 0
        self._closing = False

    async def handle(self, request: Request, responder: Responder) -> int:
        """Answers, and tells the status for the count. Raises UpstreamFailed, before anything was answered, when the
        process could not be reached or broke off."""
        self._open += 1
        try:
            return await self._handle(request, responder)
        finally:
            self._open -= 1
            if self._closing and not self._open:
                await self._caller.close()

    async def close(self) -> None:
        self._closing = True
        if not self._open:
            await self._caller.close()

    async def _handle(self, request: Request, responder: Responder) -> int:
        try:
            return await self._route(request, responder)
        except ClientGone:
            return 499
        except BaseExceptionGroup as group:  # of several choices asked for at once, the first that failed
            failure = _first(group)
            if not isinstance(failure, Refused):
                raise failure from group
            refused = failure
        except Refused as failure:
            refused = failure
        await responder.send(refused.status, refused.headers, refused.body)
        return refused.status

    async def _route(self, request: Request, responder: Responder) -> int:
        route, caller = request.route, self._caller
        if (ask := _ASKED.get(route)) is not None:
            return await ask(caller, await self._asked(request), responder)
        if (fill := _FORMS.get(route)) is not None:
            _check_method(request, b"POST")
            return await fill(caller, request, responder, self._files)
        if route == _SPEECH:
            return await speech.speak(caller, await self._asked(request), responder, self._files)
        if (look := _LOOKS.get(route)) is not None:
            _check_method(request, b"GET")
            return await look(caller, responder)
        if route == b"/v1/models":
            _check_method(request, b"GET")
            return await self._models(responder)
        raise not_bridged(_NOT_BRIDGED.get(route, ""), route[:LONGEST_SHOWN].decode("latin-1"))

    async def _asked(self, request: Request) -> Asked:
        _check_method(request, b"POST")
        try:
            return Asked.read(await request.body.read(LARGEST_BODY))
        except BodyTooLarge as error:
            words = f"The body is larger than {LARGEST_BODY} bytes."
            raise Refused(413, words, code="request_too_large") from error

    async def _models(self, responder: Responder) -> int:
        rows = [{"id": self.served.model, "object": "model", "created": 0, "owned_by": self.served.backend}]
        await responder.send(200, (JSON,), encode({"object": "list", "data": rows}))
        return 200


def _check_method(request: Request, method: bytes) -> None:
    if request.method != method:
        raise Refused(405, f"Only {method.decode()} is served here.", code="method_not_allowed")


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found
