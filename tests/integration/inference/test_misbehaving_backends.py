"""The mock slow, busy, crashing, hanging, leaking, lying: the same is seen through the ingress on both protocols."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from corral.worker.supervisor.spec import ProcessSpec
from tests.integration.inference.conftest import Bridged, Serve
from tests.support.ingress_with_backends import Worksite, open_site
from tests.support.supervising import mock_grpc, mock_openai
from tests.support.waiting import until

CHAT = "/v1/chat/completions"


def chat(prompt: str, *, stream: bool = False) -> dict[str, object]:
    return {"model": "m", "stream": stream, "messages": [{"role": "user", "content": prompt}]}


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Worksite]:
    async with open_site(tmp_path) as opened:
        yield opened


def spec(protocol: str, **env: str) -> ProcessSpec:
    told = {f"MOCK_{name.upper()}": value for name, value in env.items()}
    return mock_openai(env=told) if protocol == "openai" else mock_grpc(env=told, load='{"Model": "weights"}')


async def started(site: Worksite, protocol: str, **env: str) -> Bridged:
    running = await site.supervisor.start(spec(protocol, **env))
    return Bridged(site, running.process_id)


@pytest.mark.parametrize("protocol", ["openai", "grpc"])
async def test_on_both_protocols(site: Worksite, protocol: str) -> None:
    mock = await started(site, protocol, leak_mb="8")
    busy, answer = await mock.ask(CHAT, chat("[[busy]] x"))
    assert (busy, answer["error"]["message"]) == (503, "all slots are taken")
    assert (await mock.ask(CHAT, chat("[[busy]] x", stream=True)))[0] == 503
    slow = asyncio.ensure_future(mock.ask(CHAT, chat("[[first_delay_s=2]] late")))  # long enough to be seen
    await until(lambda: mock.in_flight == 1)
    assert (await slow)[1]["choices"][0]["message"]["content"] == "mock 1: late"
    running = site.supervisor.find(mock.process_id)
    assert running is not None
    before = _resident(running.pid)
    await mock.ask(CHAT, chat("x"))
    assert _resident(running.pid) - before > 6_000_000  # it leaks, and serves on

    crashed, answer = await mock.ask(CHAT, chat("[[crash_after=1]] a b"))
    assert answer["error"]["code"] == "upstream_failed", answer
    assert crashed in (502, 503), answer  # 503: a kept connection closed, and a fresh one was refused
    await until(lambda: site.supervisor.find(mock.process_id) is None)
    assert (await mock.ask(CHAT, chat("x")))[0] == 410


@pytest.mark.parametrize("protocol", ["openai", "grpc"])
async def test_gone_in_mid_stream(site: Worksite, protocol: str) -> None:
    mock = await started(site, protocol)
    body = chat("[[crash_after=2]] [[piece_delay_s=0.1]] a b c", stream=True)
    async with (
        aiohttp.ClientSession(headers=site.headers()) as session,
        session.post(mock.url + CHAT, json=body) as answer,
    ):
        text = await _all_of(answer)
        assert answer.status == 200, text
    assert '"content":"mock 1:"' in text
    assert "[DONE]" not in text, "nobody takes a part for the whole"
    assert ('"code":"upstream_failed"' in text) == (protocol == "grpc")


@pytest.mark.parametrize("protocol", ["openai", "grpc"])
@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_a_hanging_one_sets_it_free(site: Worksite, protocol: str, stream: bool) -> None:
    mock = await started(site, protocol)
    fault = "[[hang_after=1]] a b" if stream else "[[hang]] a"
    async with aiohttp.ClientSession(headers=site.headers()) as session:
        asking = asyncio.ensure_future(session.post(mock.url + CHAT, json=chat(fault, stream=stream)))
        await until(lambda: mock.in_flight == 1)
        if stream:
            answer = await asking
            await answer.content.readline()
            answer.close()
        else:
            asking.cancel()
        await until(lambda: mock.in_flight == 0)
    if protocol == "grpc":

        async def idle() -> bool:
            return bool((await mock.ask("/status", method="GET"))[1]["state"] == "ready")

        await until(idle, "end of the abandoned generation")
    assert (await mock.ask(CHAT, chat("still there?")))[0] == 200


async def test_a_client_that_leaves_cancels_the_call(serve: Serve) -> None:
    """The backend itself says that it stopped: nothing generates for nobody."""
    mock = await serve()

    async def state() -> str:
        return str((await mock.ask("/status", method="GET"))[1]["state"])

    async with aiohttp.ClientSession(headers=mock.site.headers()) as session:
        answers = [
            await session.post(mock.url + CHAT, json=chat("[[piece_delay_s=0.01]] " + "word " * 5000, stream=True))
            for _ in range(5)
        ]
        for answer in answers:
            await answer.content.readline()
        assert await state() == "busy"
        for answer in answers:
            answer.close()

        async def stopped() -> bool:
            return await state() == "ready"

        await until(stopped, "backend that stopped generating")
        await until(lambda: mock.in_flight == 0)


async def test_a_lie_about_identity_is_never_used(serve: Serve) -> None:
    mock = await serve("identity:impostor")
    for path, body in (
        (CHAT, chat("x")),
        (CHAT, chat("x", stream=True)),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
        ("/v1/audio/speech", {"input": "x"}),
        ("/v1/tokenize", {"content": "x"}),
    ):
        status, answer = await mock.ask(path, body)
        assert (status, answer["error"]["code"]) == (410, "gone"), path
        assert "impostor" in answer["error"]["message"]


async def test_a_lie_over_http_shows_in_the_answer(site: Worksite) -> None:
    mock = await started(site, "openai", identity="impostor")
    status, answer = await mock.ask(CHAT, chat("x"))
    assert (status, answer["model"]) == (200, "impostor")


async def test_a_freed_model_is_loaded_again(serve: Serve) -> None:
    """As `model.unload` leaves it: the process stays, its memory is given back."""
    from corral.worker.supervisor.grpc_calls import free

    mock = await serve()
    running = mock.site.supervisor.find(mock.process_id)
    assert running is not None
    assert await free(running.address, running.token, 5.0) is None
    assert (await mock.ask("/status", method="GET"))[1]["state"] == "uninitialized"
    assert (await mock.ask(CHAT, chat("hello")))[1]["choices"][0]["message"]["content"] == "mock 1: hello"


async def _all_of(answer: aiohttp.ClientResponse) -> str:
    said: list[bytes] = []
    try:
        async for piece in answer.content.iter_any():
            said.append(piece)
    except aiohttp.ClientPayloadError:
        pass  # cut off
    return b"".join(said).decode()


def _resident(pid: int) -> int:
    return psutil.Process(pid).memory_info().rss
