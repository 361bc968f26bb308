"""`serve`: parses the command line, runs a server, and stops it on SIGTERM.

backend.py --addr 127.0.0.1:50051      speaks gRPC; the model comes with LoadModel
backend.py --http 127.0.0.1:8000 --model NAME [--model-file FILE]      speaks OpenAI's HTTP
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from corral.sdk.backend import Backend, Model

if TYPE_CHECKING:
    from corral.sdk.grpc_server import GrpcService
    from corral.sdk.http_server import HttpService

TOKEN = "LOCALAI_GRPC_AUTH_TOKEN"
PARENT_WATCH = "LOCALAI_BACKEND_PARENT_WATCH"
_OFF = ("false", "0", "no", "off")
_PARENT_S = 2.0
Loader = Callable[[], Coroutine[Any, Any, None]]


def serve(
    backend: Backend, argv: Sequence[str] | None = None, *, service: Callable[[Backend], GrpcService] | None = None
) -> None:
    """Run until SIGTERM or SIGINT. Exits with 0, or with 1 and a line on stderr if it cannot serve."""
    options = _parse(argv)
    try:
        asyncio.run(_run(backend, options, service))
    except (OSError, LoadFailed) as error:
        sys.exit(f"{error}")


class LoadFailed(Exception):
    pass


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--addr", metavar="HOST:PORT", help="serve gRPC on this address")
    where.add_argument("--http", metavar="HOST:PORT", help="serve OpenAI's HTTP on this address")
    parser.add_argument("--model", default="", help="name of the model (HTTP)")
    parser.add_argument("--model-file", default="")
    parser.add_argument("--model-dir", default="")
    parser.add_argument("--context-size", type=int, default=0)
    return parser.parse_args(argv)


async def _run(backend: Backend, options: argparse.Namespace, service: Callable[[Backend], GrpcService] | None) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    token = os.environ.get(TOKEN, "")
    opened = _grpc(backend, options, token, service) if options.addr else _http(backend, options, token)
    async with opened as load, _watched_parent(stopped):
        print(f"Server started. Listening on: {options.addr or options.http}", file=sys.stderr, flush=True)
        loading, leaving = asyncio.create_task(load()), asyncio.create_task(stopped.wait())
        await asyncio.wait((loading, leaving), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            await leaving
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)


@contextlib.asynccontextmanager
async def _grpc(
    backend: Backend, options: argparse.Namespace, token: str, service: Callable[[Backend], GrpcService] | None
) -> AsyncIterator[Loader]:
    from corral.sdk import grpc_server  # an HTTP backend needs no gRPC, and the other way round

    made = (service or grpc_server.GrpcService)(backend)
    server = await grpc_server.start(made, options.addr, token)
    try:
        yield _nothing_yet
    finally:
        await server.stop(grpc_server.STOP_GRACE_S)


@contextlib.asynccontextmanager
async def _http(backend: Backend, options: argparse.Namespace, token: str) -> AsyncIterator[Loader]:
    from corral.sdk import http_server

    host, _, port = options.http.rpartition(":")
    service = http_server.HttpService(backend, options.model)
    runner = await http_server.start(service, host, int(port), token)
    try:
        yield lambda: _load(service, options)
    finally:
        await runner.cleanup()


async def _nothing_yet() -> None:
    """Nothing to load: LoadModel loads the model later."""


async def _load(service: HttpService, options: argparse.Namespace) -> None:
    model = Model(options.model, options.model_file, options.model_dir, options.context_size)
    try:
        await service.backend.load(model)
    except Exception as error:
        raise LoadFailed(f"cannot load {options.model or 'the model'}: {error}") from error
    service.loaded = True


@contextlib.asynccontextmanager
async def _watched_parent(stopped: asyncio.Event) -> AsyncIterator[None]:
    """Stop the backend when its parent process ends: no other process would stop it
    (docs/reference/wire/grpc.md#starting-a-process)."""
    parent = os.getppid()
    if parent == 1 or os.environ.get(PARENT_WATCH, "").lower() in _OFF:
        yield
        return

    async def watch() -> None:
        while os.getppid() == parent:  # noqa: ASYNC110 - there is no event for an orphaned process
            await asyncio.sleep(_PARENT_S)
        stopped.set()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
