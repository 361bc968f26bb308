"""What translating gRPC costs: streamed tokens through the bridge beside a bare gRPC client on the same backend.

    scripts/bench bridge [--rounds N] [--tokens N] [--streams N]

The backend sends tokens as fast as it can, each with its text and its delta as LocalAI's do. The bare client reads them
and throws them away: what any translation costs at least in this language. The bridge is the worker's own, relay
included, read over HTTP. CPU is that of the client's or the bridge's process, per token. Target: the bridge takes at
most twice the CPU of the bare client. The median of the rounds counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import uvloop

from bench.support.systems import free_port
from corral.contract import backend_pb2 as pb
from corral.contract.backend_pb2_grpc import BackendServicer, BackendStub, add_BackendServicer_to_server
from corral.contract.http import Request, Responder
from corral.inference.backend_process import BackendProcess
from corral.inference.bridge import Bridge
from corral.inference.request_files import LocalFiles
from corral.relay import RelayServer

TARGET = 2.0
CHAT = {"model": "bench", "stream": True, "messages": [{"role": "user", "content": "Tell me about corrals."}]}


class Backend(BackendServicer):
    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    async def PredictStream(self, request: pb.PredictOptions, context: Any) -> AsyncIterator[pb.Reply]:
        token = pb.Reply(message=b" token", chat_deltas=[pb.ChatDelta(content=" token")])
        for _ in range(self._tokens):
            yield token
        yield pb.Reply(tokens=self._tokens, prompt_tokens=5)


async def serve_backend(port: int, tokens: int) -> None:
    server = grpc.aio.server()
    add_BackendServicer_to_server(Backend(tokens), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


async def serve_bridge(port: int, backend: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bridge = Bridge(
            BackendProcess(f"127.0.0.1:{backend}", "bench", load='{"Model": "bench"}'), LocalFiles(Path(folder))
        )

        class Mounted:
            async def handle(self, request: Request, responder: Responder) -> None:
                await bridge.handle(request, responder)

        await RelayServer(Mounted()).listen("127.0.0.1", port)
        print("ready", flush=True)
        await asyncio.Event().wait()


async def read_bare(backend: int, streams: int) -> None:
    """Tells tokens, seconds and CPU seconds, as its own process spent them."""

    async def one(stub: BackendStub) -> int:
        call = stub.PredictStream(pb.PredictOptions(Prompt="x"))
        count = 0
        while await call.read() is not grpc.aio.EOF:
            count += 1
        return count

    async with grpc.aio.insecure_channel(f"127.0.0.1:{backend}") as channel:
        stub = BackendStub(channel)
        began, spent = time.monotonic(), time.process_time()
        count = sum(await asyncio.gather(*(one(stub) for _ in range(streams))))
        print(json.dumps([count, time.monotonic() - began, time.process_time() - spent]))


async def read_http(port: int, streams: int) -> int:
    body = json.dumps(CHAT).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        count = 0
        while data := await reader.read(1 << 16):
            count += data.count(b"data: ")
        writer.close()
        return count

    return sum(await asyncio.gather(*(one() for _ in range(streams))))


@contextlib.contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.terminate()
        process.wait()


def measure(rounds: int, tokens: int, streams: int) -> None:
    backend, port = free_port(), free_port()
    figures: dict[str, list[tuple[float, float]]] = {"bare gRPC client": [], "bridge": []}
    with running("backend", str(backend), str(tokens)), running("bridge", str(port), str(backend)) as bridge:
        watched = psutil.Process(bridge.pid)
        for _ in range(rounds):
            words = [sys.executable, __file__, "bare", str(backend), str(streams)]
            count, seconds, cpu_s = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
            figures["bare gRPC client"].append((count / seconds, cpu_s / count * 1e6))
            before, began = watched.cpu_times(), time.monotonic()
            count = uvloop.run(read_http(port, streams))
            seconds, after = time.monotonic() - began, watched.cpu_times()
            cpu_s = after.user + after.system - before.user - before.system
            figures["bridge"].append((count / seconds, cpu_s / count * 1e6))
    medians = {
        name: tuple(statistics.median(column) for column in zip(*rows, strict=True)) for name, rows in figures.items()
    }
    print(f"{streams} streams of {tokens} tokens, unpaced, {rounds} rounds")
    print(f"{'':20}{'tokens/s':>12}{'CPU µs/token':>16}")
    for name, (rate, cpu_us) in medians.items():
        print(f"{name:20}{rate:12,.0f}{cpu_us:16.1f}")
    ratio = medians["bridge"][1] / medians["bare gRPC client"][1]
    print(f"CPU of the bridge: {ratio:.2f} × the bare client's (target ≤ {TARGET:g})")


def main() -> None:
    match sys.argv[1:]:
        case ["backend", port, tokens]:
            uvloop.run(serve_backend(int(port), int(tokens)))
        case ["bridge", port, backend]:
            uvloop.run(serve_bridge(int(port), int(backend)))
        case ["bare", backend, streams]:
            uvloop.run(read_bare(int(backend), int(streams)))
        case _:
            parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
            parser.add_argument("--rounds", type=int, default=5)
            parser.add_argument("--tokens", type=int, default=2000)
            parser.add_argument("--streams", type=int, default=16)
            options = parser.parse_args()
            measure(options.rounds, options.tokens, options.streams)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
