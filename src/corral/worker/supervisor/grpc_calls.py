"""The calls that the worker itself makes to a `grpc` backend: Health, LoadModel, Free
(docs/reference/wire/grpc.md#starting-a-process).

Each call has its own channel: a channel opened before the port listened can stay unusable for a minute.
Importing gRPC costs as much memory as a quarter of the worker, so only a worker with such a backend loads this module.
"""

from __future__ import annotations

import grpc.aio

from corral.contract import backend_pb2 as pb
from corral.inference.grpc import process_calls
from corral.inference.grpc.process_calls import bearer_metadata, open_stub
from corral.kit.errors import Failed, OutcomeUnknown, Unreachable


async def ask_health(address: str, token: str, timeout_s: float) -> str | None:
    """None when the backend is ready, else the reason why it is not."""
    try:
        async with open_stub(address) as backend:
            reply = await backend.Health(pb.HealthMessage(), timeout=timeout_s, metadata=bearer_metadata(token))
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return None if reply.message == b"OK" else f"Health answered {reply.message[:80]!r}"


class BrokeOff(Failed):
    """The connection broke before the backend answered."""


async def load_model(address: str, token: str, options: str, timeout_s: float) -> None:
    """Raises Failed with the backend's own message, BrokeOff without one, Invalid for options that cannot be parsed."""
    try:
        await process_calls.load_model(address, token, options, timeout_s)
    except Unreachable as error:
        raise BrokeOff(error.message) from error
    except OutcomeUnknown as error:  # a process that has not loaded its model in time is stopped
        raise Failed(error.message) from error


async def free(address: str, token: str, timeout_s: float) -> str | None:
    """None when the backend freed its memory, else the reason why not. A backend without Free counts as failed."""
    try:
        async with open_stub(address) as backend:
            result = await backend.Free(pb.HealthMessage(), timeout=timeout_s, metadata=bearer_metadata(token))
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return None if result.success else result.message or "it said no"
