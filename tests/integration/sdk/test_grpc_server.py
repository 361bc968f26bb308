"""The mock over gRPC, as LocalAI's controllers and our worker call it."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from corral.contract import backend_pb2 as pb
from corral.contract.backend_pb2_grpc import BackendStub
from tests.integration.sdk.conftest import TOKEN, Run
from tests.support.processes import Process, alive, clean_env, free_port
from tests.support.supervising import MOCK
from tests.support.waiting import until, wait_for

AUTHORIZED = (("authorization", f"Bearer {TOKEN}"),)
HELLO = pb.PredictOptions(Prompt="hello there", ModelIdentity="m")


@asynccontextmanager
async def calling(port: int) -> AsyncIterator[BackendStub]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(20):
        yield BackendStub(channel)


@asynccontextmanager
async def loaded(run: Run, *options: str, **env: str) -> AsyncIterator[BackendStub]:
    _, port = await asyncio.to_thread(run, "--addr", **env)
    async with calling(port) as backend:
        result = await backend.LoadModel(pb.ModelOptions(Model="m", Options=options), metadata=AUTHORIZED)
        assert result.success, result.message
        yield backend


async def test_every_rpc_it_has(run: Run) -> None:
    async with loaded(run) as backend:
        assert (await backend.Health(pb.HealthMessage(), metadata=AUTHORIZED)).message == b"OK"
        reply = await backend.Predict(HELLO, metadata=AUTHORIZED)
        assert (reply.message, reply.tokens, reply.prompt_tokens) == (b"mock 1: hello there", 3, 2)
        stream = [reply async for reply in backend.PredictStream(HELLO, metadata=AUTHORIZED)]
        assert [reply.message for reply in stream] == [b"mock 1:", b" hello", b" there", b""]
        assert [reply.tokens for reply in stream] == [0, 0, 0, 3]
        assert stream[1].chat_deltas[0].content == " hello"
        vector = await backend.Embedding(pb.PredictOptions(Embeddings="x"), metadata=AUTHORIZED)
        assert len(vector.embeddings) == 8
        assert vector.layout == 1
        tokens = await backend.TokenizeString(pb.PredictOptions(Prompt="a bc def"), metadata=AUTHORIZED)
        assert (tokens.length, list(tokens.tokens)) == (3, [1, 2, 3])
        status = await backend.Status(pb.HealthMessage(), metadata=AUTHORIZED)
        assert status.state == pb.StatusResponse.READY
        assert status.memory.total > 1_000_000
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await backend.TokenClassify(pb.TokenClassifyRequest(), metadata=AUTHORIZED)
        assert missing.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert (await backend.Free(pb.HealthMessage(), metadata=AUTHORIZED)).success
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await backend.Predict(HELLO, metadata=AUTHORIZED)
        assert (gone.value.code(), gone.value.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "model not loaded")


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ((), "missing authorization header"),
        ((("authorization", "Basic x"),), "authorization must use Bearer scheme"),
        ((("authorization", "Bearer wrong"),), "invalid token"),
    ],
)
async def test_without_the_token_nothing_is_answered(
    run: Run, metadata: tuple[tuple[str, str], ...], words: str
) -> None:
    """LoadModel and the streams too: upstream's Python backends answer those with an empty success."""
    _, port = await asyncio.to_thread(run, "--addr")
    async with calling(port) as backend:
        calls: list[Awaitable[object]] = [
            backend.Health(pb.HealthMessage(), metadata=metadata),
            backend.LoadModel(pb.ModelOptions(Model="m"), metadata=metadata),
            backend.Predict(HELLO, metadata=metadata),
            anext(aiter(backend.PredictStream(HELLO, metadata=metadata))),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.UNAUTHENTICATED, words)
        status = await backend.Status(pb.HealthMessage(), metadata=AUTHORIZED)
        assert status.state == pb.StatusResponse.UNINITIALIZED, "no model was loaded by any of these"


async def test_another_model_than_the_loaded_one_is_refused(run: Run) -> None:
    async with loaded(run) as backend:
        other = pb.PredictOptions(Prompt="x", ModelIdentity="other")
        for call in (backend.Predict(other, metadata=AUTHORIZED), backend.Embedding(other, metadata=AUTHORIZED)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
            assert refused.value.details() == "model identity mismatch: loaded 'm', requested 'other'"
        assert (await backend.Predict(pb.PredictOptions(Prompt="x"), metadata=AUTHORIZED)).message


async def test_a_lie_about_its_identity(run: Run) -> None:
    async with loaded(run, "identity:impostor") as backend:
        with pytest.raises(grpc.aio.AioRpcError, match="model identity mismatch: loaded 'impostor'"):
            await backend.Predict(HELLO, metadata=AUTHORIZED)


async def test_a_refused_load_says_why(run: Run) -> None:
    _, port = await asyncio.to_thread(run, "--addr", MOCK_LOAD_FAILS="the weights are broken")
    async with calling(port) as backend:
        result = await backend.LoadModel(pb.ModelOptions(Model="m"), metadata=AUTHORIZED)
        assert (result.success, result.message) == (False, "the weights are broken")


async def test_busy_is_a_status_of_its_own(run: Run) -> None:
    async with loaded(run, "busy:1") as backend:
        with pytest.raises(grpc.aio.AioRpcError) as busy:
            await backend.Predict(HELLO, metadata=AUTHORIZED)
        assert busy.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_caller_who_leaves_stops_the_generation(run: Run) -> None:
    async with loaded(run, "hang_after:1") as backend:
        call = backend.PredictStream(HELLO, metadata=AUTHORIZED)
        assert (await anext(aiter(call))).message == b"mock 1:"
        busy = await backend.Status(pb.HealthMessage(), metadata=AUTHORIZED)
        assert busy.state == pb.StatusResponse.BUSY
        call.cancel()

        async def is_idle() -> bool:
            return (await backend.Status(pb.HealthMessage(), metadata=AUTHORIZED)).state == pb.StatusResponse.READY

        await until(is_idle, "end of the abandoned answer")


async def test_a_crash_in_mid_stream(run: Run) -> None:
    process, port = await asyncio.to_thread(run, "--addr")
    async with calling(port) as backend:
        await backend.LoadModel(pb.ModelOptions(Model="m"), metadata=AUTHORIZED)
        stream = backend.PredictStream(pb.PredictOptions(Prompt="[[crash_after=2]] a b c"), metadata=AUTHORIZED)

        async def listen() -> None:
            async for reply in stream:
                assert reply.message in (b"mock 1:", b" a")

        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await listen()
        assert gone.value.code() is grpc.StatusCode.UNAVAILABLE
    assert await asyncio.to_thread(process.wait) == 3


async def test_sigterm_ends_it_in_order(run: Run) -> None:
    process, port = await asyncio.to_thread(run, "--addr")
    async with calling(port) as backend:
        await backend.LoadModel(pb.ModelOptions(Model="m", Options=["piece_delay_s:0.2"]), metadata=AUTHORIZED)
        replies = aiter(backend.PredictStream(HELLO, metadata=AUTHORIZED))
        heard = [await anext(replies)]
        process.signal(15)
        heard += [reply async for reply in replies]
        assert b"".join(reply.message for reply in heard) == b"mock 1: hello there", "what runs is answered first"
    assert await asyncio.to_thread(process.wait) == 0


async def test_memory_leaks_on_request(run: Run) -> None:
    async with loaded(run) as backend:

        async def used() -> int:
            return (await backend.Status(pb.HealthMessage(), metadata=AUTHORIZED)).memory.total

        before = await used()
        await backend.Predict(pb.PredictOptions(Prompt="[[leak_mb=30]] x"), metadata=AUTHORIZED)
        assert await used() - before > 25_000_000


def test_a_second_on_the_same_port_is_refused(run: Run) -> None:
    _, port = run("--addr")
    second, _ = run("--addr", "--addr", f"127.0.0.1:{port}", wait=False)
    assert second.wait() == 1
    assert f"127.0.0.1:{port}" in second.output()


def test_an_orphan_leaves_by_itself(tmp_path: Path) -> None:
    """Nobody else would ever end it, where there is no shim to do so."""
    code = f"""
import subprocess, sys, time
mock = subprocess.Popen([sys.executable, "-B", {str(MOCK / "mock.py")!r}, "--addr", "127.0.0.1:{free_port()}"])
print(mock.pid, flush=True)
time.sleep(3600)
"""
    parent = Process([sys.executable, "-c", code], clean_env(tmp_path), tmp_path / "parent.log")
    wait_for(lambda: "Listening" in parent.output(), "backend that listens")
    told = wait_for(lambda: re.findall(r"^\d+$", parent.output(), re.MULTILINE), "its pid")  # in either order
    orphan = int(told[0])
    parent.kill()
    wait_for(lambda: not alive(orphan), "its end")
