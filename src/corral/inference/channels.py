"""A connection of its own to a gRPC backend, for questions that must not share the fate of others."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc.aio

from corral.contract.backend_pb2_grpc import BackendStub
from corral.inference.calling import LARGEST

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
