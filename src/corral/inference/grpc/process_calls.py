"""A gRPC process seen from outside: does it live, and does it load a model
(docs/reference/wire/grpc.md#starting-a-process).

Each question on a channel of its own: one opened before the port listened can stay unusable for a minute. Driver errors
end here.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from google.protobuf import json_format

from corral.contract import backend_pb2 as pb
from corral.contract.backend_pb2_grpc import BackendStub
from corral.inference.backend_process import Pulse
from corral.inference.grpc.client import LARGEST, MISMATCH
from corral.kit.errors import Failed, Invalid, OutcomeUnknown, Unreachable

_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # or a "new" channel would share the old one's connection and its sulking
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", LARGEST),
    ("grpc.max_receive_message_length", LARGEST),
)


@contextlib.asynccontextmanager
async def open_backend(address: str) -> AsyncIterator[BackendStub]:
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        yield BackendStub(channel)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),) if token else ()


async def take_pulse(address: str, token: str, timeout_s: float) -> Pulse:
    try:
        async with open_backend(address) as backend:
            reply = await backend.Health(pb.HealthMessage(), timeout=timeout_s, metadata=bearer(token))
    except grpc.aio.AioRpcError as error:
        return Pulse.UNREACHABLE if error.code() is grpc.StatusCode.UNAVAILABLE else Pulse.BUSY
    return Pulse.ALIVE if reply.message == b"OK" else Pulse.BUSY


async def holds_another(address: str, token: str, identity: str, timeout_s: float) -> bool:
    """Whether the process itself says that it holds another model. It looks at that before anything else, so a question
    about nothing will do, also to a backend that could not answer it."""
    asked = pb.PredictOptions(ModelIdentity=identity)
    try:
        async with open_backend(address) as backend:
            await backend.TokenizeString(asked, timeout=timeout_s, metadata=bearer(token))
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.NOT_FOUND and MISMATCH in (error.details() or "").lower()
    return False


async def load_model(address: str, token: str, options: str, timeout_s: float) -> None:
    """Raises Failed with the backend's own words, Unreachable when it is not there (any more), OutcomeUnknown when it
    took too long, Invalid for options that are none."""
    try:
        request = json_format.Parse(options, pb.ModelOptions())
    except json_format.ParseError as error:
        raise Invalid(f"these are no ModelOptions: {error}") from error
    try:
        async with open_backend(address) as backend:
            result = await backend.LoadModel(request, timeout=timeout_s, metadata=bearer(token))
    except grpc.aio.AioRpcError as error:
        raise _in_words(error, timeout_s) from error
    if not result.success:
        # Also what an asyncio backend says to a wrong token: an empty message
        # (docs/reference/wire/grpc.md#authentication).
        raise Failed(f"LoadModel was refused: {result.message or 'no reason given'}")


def _in_words(error: grpc.aio.AioRpcError, timeout_s: float) -> Exception:
    words = f"LoadModel: {error.code().name}: {error.details()}"
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return Unreachable(words)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return OutcomeUnknown(f"LoadModel took longer than {timeout_s:.0f} s")
    return Failed(words)
