"""Single calls to a gRPC process: its health, its model, loading a model
(docs/reference/wire/grpc.md#starting-a-process).

Each call uses a channel of its own: a channel that was opened before the port listened can stay unusable for a minute.
gRPC errors are translated here.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from google.protobuf import json_format

from corral.contract import backend_pb2 as pb
from corral.contract.backend_pb2_grpc import BackendStub
from corral.inference.backend_process import ProcessHealth
from corral.inference.grpc.client import MAX_MESSAGE_BYTES, MISMATCH
from corral.kit.errors import Failed, Invalid, OutcomeUnknown, Unreachable

_OPTIONS = (
    (
        "grpc.use_local_subchannel_pool",
        1,
    ),  # otherwise a new channel would share the connection and the backoff of an old one
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)


@contextlib.asynccontextmanager
async def open_stub(address: str) -> AsyncIterator[BackendStub]:
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        yield BackendStub(channel)


def bearer_metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),) if token else ()


async def check_health(address: str, token: str, timeout_s: float) -> ProcessHealth:
    try:
        async with open_stub(address) as backend:
            reply = await backend.Health(pb.HealthMessage(), timeout=timeout_s, metadata=bearer_metadata(token))
    except grpc.aio.AioRpcError as error:
        return ProcessHealth.UNREACHABLE if error.code() is grpc.StatusCode.UNAVAILABLE else ProcessHealth.BUSY
    return ProcessHealth.ALIVE if reply.message == b"OK" else ProcessHealth.BUSY


async def serves_other_model(address: str, token: str, identity: str, timeout_s: float) -> bool:
    """Whether the process reports that it serves another model. It checks the model's identity before anything else, so
    an empty request is enough, even for a backend that does not implement the RPC."""
    request = pb.PredictOptions(ModelIdentity=identity)
    try:
        async with open_stub(address) as backend:
            await backend.TokenizeString(request, timeout=timeout_s, metadata=bearer_metadata(token))
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.NOT_FOUND and MISMATCH in (error.details() or "").lower()
    return False


async def load_model(address: str, token: str, options: str, timeout_s: float) -> None:
    """Raises Failed with the backend's message, Unreachable if the process cannot be reached, OutcomeUnknown after the
    timeout, Invalid for malformed options."""
    try:
        request = json_format.Parse(options, pb.ModelOptions())
    except json_format.ParseError as error:
        raise Invalid(f"the options are not valid ModelOptions: {error}") from error
    try:
        async with open_stub(address) as backend:
            result = await backend.LoadModel(request, timeout=timeout_s, metadata=bearer_metadata(token))
    except grpc.aio.AioRpcError as error:
        raise _translate(error, timeout_s) from error
    if not result.success:
        # An asyncio backend answers a wrong token with an empty message as well
        # (docs/reference/wire/grpc.md#authentication).
        raise Failed(f"LoadModel was refused: {result.message or 'no reason given'}")


def _translate(error: grpc.aio.AioRpcError, timeout_s: float) -> Exception:
    words = f"LoadModel: {error.code().name}: {error.details()}"
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return Unreachable(words)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return OutcomeUnknown(f"LoadModel took longer than {timeout_s:g} s")
    return Failed(words)
