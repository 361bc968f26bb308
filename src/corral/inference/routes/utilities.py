"""The small ones: tokens and back, where somebody speaks, how the process is."""

from __future__ import annotations

from corral.contract import backend_pb2 as pb
from corral.contract.codec import encode
from corral.contract.http import Responder
from corral.inference.api_errors import JSON, bad
from corral.inference.grpc.client import Caller
from corral.inference.grpc.predict_options import text_options
from corral.inference.openai.json_body import Asked


async def tokenize(caller: Caller, asked: Asked, responder: Responder) -> int:
    key = next((key for key in ("content", "prompt", "text") if key in asked), "content")
    options = text_options(caller.served)
    options.Prompt = asked.text(key)
    answer = await caller.ask("TokenizeString", options, pb.TokenizationResponse)
    await responder.send(200, (JSON,), encode({"tokens": list(answer.tokens), "count": len(answer.tokens)}))
    return 200


async def detokenize(caller: Caller, asked: Asked, responder: Responder) -> int:
    told = asked.get("tokens")
    if not isinstance(told, list) or not all(type(item) is int and 0 <= item < 2**31 for item in told):
        raise bad("tokens", "tokens must be a list of token ids.")
    answer = await caller.ask("Detokenize", pb.DetokenizeRequest(tokens=told), pb.DetokenizeResponse)
    await responder.send(200, (JSON,), encode({"content": answer.content}))
    return 200


async def find_speech(caller: Caller, asked: Asked, responder: Responder) -> int:
    told = asked.get("audio")
    if not isinstance(told, list) or not all(type(item) in (int, float) for item in told):
        raise bad("audio", "audio must be a list of samples, mono, -1 to 1.")
    request = pb.VADRequest(audio=told, ModelIdentity=caller.served.identity)
    answer = await caller.ask("VAD", request, pb.VADResponse)
    segments = [{"start": each.start, "end": each.end} for each in answer.segments]
    await responder.send(200, (JSON,), encode({"segments": segments}))
    return 200


async def status(caller: Caller, responder: Responder) -> int:
    answer = await caller.ask("Status", pb.HealthMessage(), pb.StatusResponse)
    memory = {"total": answer.memory.total, "breakdown": dict(answer.memory.breakdown)}
    state = pb.StatusResponse.State.Name(answer.state).lower()
    await responder.send(200, (JSON,), encode({"state": state, "memory": memory}))
    return 200


async def health(caller: Caller, responder: Responder) -> int:
    answer = await caller.ask("Health", pb.HealthMessage(), pb.Reply)
    good = answer.message == b"OK"
    await responder.send(200 if good else 503, (JSON,), encode({"status": "ok" if good else "not ready"}))
    return 200 if good else 503
