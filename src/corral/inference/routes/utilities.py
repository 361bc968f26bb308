"""Tokenize and detokenize, voice activity detection, health and status."""

from __future__ import annotations

from corral.contract import backend_pb2 as pb
from corral.contract.codec import encode
from corral.contract.http import Responder
from corral.inference.api_errors import JSON, invalid_field
from corral.inference.grpc.client import BackendClient
from corral.inference.grpc.predict_options import text_options
from corral.inference.openai.json_body import JsonBody


async def tokenize(client: BackendClient, body: JsonBody, responder: Responder) -> int:
    key = next((key for key in ("content", "prompt", "text") if key in body), "content")
    options = text_options(client.process)
    options.Prompt = body.text(key)
    answer = await client.call("TokenizeString", options, pb.TokenizationResponse)
    await responder.send(200, (JSON,), encode({"tokens": list(answer.tokens), "count": len(answer.tokens)}))
    return 200


async def detokenize(client: BackendClient, body: JsonBody, responder: Responder) -> int:
    given = body.get("tokens")
    if not isinstance(given, list) or not all(type(item) is int and 0 <= item < 2**31 for item in given):
        raise invalid_field("tokens", "tokens must be a list of token ids.")
    answer = await client.call("Detokenize", pb.DetokenizeRequest(tokens=given), pb.DetokenizeResponse)
    await responder.send(200, (JSON,), encode({"content": answer.content}))
    return 200


async def detect_voice_activity(client: BackendClient, body: JsonBody, responder: Responder) -> int:
    given = body.get("audio")
    if not isinstance(given, list) or not all(type(item) in (int, float) for item in given):
        raise invalid_field("audio", "audio must be a list of samples, mono, -1 to 1.")
    request = pb.VADRequest(audio=given, ModelIdentity=client.process.identity)
    answer = await client.call("VAD", request, pb.VADResponse)
    segments = [{"start": each.start, "end": each.end} for each in answer.segments]
    await responder.send(200, (JSON,), encode({"segments": segments}))
    return 200


async def status(client: BackendClient, responder: Responder) -> int:
    answer = await client.call("Status", pb.HealthMessage(), pb.StatusResponse)
    memory = {"total": answer.memory.total, "breakdown": dict(answer.memory.breakdown)}
    state = pb.StatusResponse.State.Name(answer.state).lower()
    await responder.send(200, (JSON,), encode({"state": state, "memory": memory}))
    return 200


async def health(client: BackendClient, responder: Responder) -> int:
    answer = await client.call("Health", pb.HealthMessage(), pb.Reply)
    good = answer.message == b"OK"
    await responder.send(200 if good else 503, (JSON,), encode({"status": "ok" if good else "not ready"}))
    return 200 if good else 503
