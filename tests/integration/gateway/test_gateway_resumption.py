"""Streams of a model with `resume_streams`: a replica breaks them off, and what the client reads is whole."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from corral.gateway.main import Gateway
from corral.gateway.receipts.metrics import render
from tests.integration.gateway.conftest import USER, OpenGateway, bearer
from tests.integration.gateway.fleet import CHAT, SMALL, GatewayFleet, open_fleet
from tests.integration.gateway.scripted_controller import ScriptedController
from tests.integration.gateway.scripted_ingress import Came
from tests.support.waiting import until
from tests.unit.gateway.test_resumption import PROMPT_TOKENS, WORDS, Seen, response

TEXT = "".join(WORDS)
CONTINUES = {"chat": "prefill", "completions": "prompt"}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
TOKENS = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 5, "total_tokens": PROMPT_TOKENS + 5}


class Engine:
    """Says `WORDS`, or the rest of them after the text that it is given; breaks off as the test wants."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.breaks: list[bytes] = []  # each request breaks off before the first of these bytes, then the next
        self.refuses = False  # to continue

    def __call__(self, came: Came) -> tuple[int, bytes, bool]:
        body = json.loads(came.body)
        chat = came.path.endswith("chat/completions")
        text = body["prompt"].removeprefix("hi") if not chat else ""
        if chat and body["messages"][-1]["role"] == "assistant":
            text = body["messages"][-1]["content"]
        words = list(WORDS)
        while text:
            assert text.startswith(words[0])
            text = text.removeprefix(words.pop(0))
        usage = bool(body.get("stream_options", {}).get("include_usage"))
        whole = response(self.name, words[: body.get("max_tokens")], before=5 - len(words), usage=usage, chat=chat)
        if not self.breaks:
            return 400 if self.refuses and len(words) < 5 else 200, whole, True
        mark = self.breaks.pop(0)
        at = whole.index(mark.removeprefix(START))
        return 200, whole[: whole.rindex(b"data: ", 0, at) if mark.startswith(START) else at], False


@pytest.fixture
async def fleet(
    controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession
) -> AsyncIterator[GatewayFleet]:
    async with open_fleet(controller, open_one, http) as fleet:
        controller.change(models=[{**SMALL, "resume_streams": True}])
        fleet.both(slots=8, continues=CONTINUES)
        fleet.one.script, fleet.two.script = Engine("one"), Engine("two")
        yield fleet


def engines(fleet: GatewayFleet) -> list[Engine]:
    return [each.script for each in (fleet.one, fleet.two) if isinstance(each.script, Engine)]


async def stream(fleet: GatewayFleet, gateway: Gateway, path: str = CHAT, **body: Any) -> bytes:
    asked = {"model": "small", "stream": True, "messages": [{"role": "user", "content": "hi"}], **body}
    async with fleet.http.post(f"{gateway.url}{path}", headers=bearer(USER), json=asked) as answer:
        assert answer.status == 200
        return await answer.read()


def asked(fleet: GatewayFleet) -> int:
    return len(fleet.one.came) + len(fleet.two.came)


START = b"\0"  # of the event that has the next bytes
PLACES = {
    "before the first event": START + b"assistant",
    "before the first text": START + "Grüße".encode(),
    "inside a character": "ße".encode()[1:],
    "inside an event": b'"content": " an"',
    "between events": START + b" alle",
    "before the reason": START + b'"stop"',
    "before the usage": START + b'"usage"',
    "inside the usage": b'"completion_tokens"',
    "before the end marker": b"data: [DONE]",
    "inside the end marker": b"ONE]",
}


@pytest.mark.parametrize("place", PLACES)
async def test_a_stream_that_breaks_off_is_completed_by_the_other_replica(fleet: GatewayFleet, place: str) -> None:
    gateway = await fleet.gateway()
    engines(fleet)[0].breaks = engines(fleet)[1].breaks = [PLACES[place]]  # whichever is asked first
    seen = Seen(await stream(fleet, gateway, **USAGE))
    assert (seen.text, seen.done, seen.reasons, seen.roles) == (TEXT, 1, ["stop"], ["assistant"])
    assert (seen.usages, len(seen.same)) == ([TOKENS], 1)
    [receipt] = await fleet.receipts(1)
    only_the_end = "end marker" in place
    assert (receipt["status"], receipt["resumed"], receipt.get("ending", "")) == (200, 1, "")
    assert receipt.get("tries", 1) == asked(fleet) == (1 if only_the_end else 2)
    assert (receipt["prompt_tokens"], receipt["completion_tokens"], receipt["streamed"]) == (PROMPT_TOKENS, 5, True)
    assert b"corral_gateway_streams_resumed_total 1.0" in render(gateway.metrics, now=0.0)
    assert not fleet.one.running.get("p1")
    assert not fleet.two.running.get("p2")


async def test_completions_are_continued_after_prompt_and_text(fleet: GatewayFleet) -> None:
    gateway = await fleet.gateway()
    fleet.controller.change(replicas=[fleet.one.replica("p1", slots=8, continues=CONTINUES)])
    await gateway.views.run_once()
    engines(fleet)[0].breaks = [b" alle"]
    seen = Seen(await stream(fleet, gateway, "/v1/completions", prompt="hi", max_tokens=5))
    assert (seen.text, seen.done, seen.usages, len(seen.same)) == (TEXT, 1, [], 1)
    assert [json.loads(came.body)["prompt"] for came in fleet.one.came] == ["hi", "hi" + "".join(WORDS[:3])]
    assert json.loads(fleet.one.came[1].body)["max_tokens"] == 2


async def test_a_stream_is_resumed_twice_and_then_cut(fleet: GatewayFleet) -> None:
    gateway = await fleet.gateway()
    fleet.controller.change(replicas=[fleet.one.replica("p1", slots=8, continues=CONTINUES)])
    await gateway.views.run_once()
    engine = engines(fleet)[0]
    engine.breaks = [b" an", b" alle"]
    assert Seen(await stream(fleet, gateway)).text == TEXT
    engine.breaks = [b" an", b" alle", b'"!"']
    with pytest.raises(aiohttp.ClientPayloadError):
        await stream(fleet, gateway)
    receipts = await fleet.receipts(2)
    assert [(row["resumed"], row.get("ending", ""), row["tries"]) for row in receipts] == [
        (2, "", 3),
        (2, "upstream_broke", 3),
    ]
    assert b"corral_gateway_streams_not_resumed_total 1.0" in render(gateway.metrics, now=0.0)


async def test_what_may_not_be_continued_is_cut_as_it_always_was(fleet: GatewayFleet) -> None:
    gateway = await fleet.gateway()
    for more in ({"tools": [{"type": "function"}]}, {"response_format": {"type": "json_object"}}, {"n": 2}):
        for engine in engines(fleet):
            engine.breaks = [b" an"]
        with pytest.raises(aiohttp.ClientPayloadError):
            await stream(fleet, gateway, **more)
    receipts = await fleet.receipts(3)
    assert [row["ending"] for row in receipts] == ["upstream_broke"] * 3
    assert all("resumed" not in row for row in receipts)
    assert asked(fleet) == 3


async def test_a_replica_whose_backend_cannot_continue_does_not(fleet: GatewayFleet) -> None:
    gateway = await fleet.gateway()
    fleet.controller.change(replicas=[fleet.one.replica("p1", slots=8), fleet.two.replica("p2", slots=8)])
    await gateway.views.run_once()
    for engine in engines(fleet):
        engine.breaks = [b" an"]
    with pytest.raises(aiohttp.ClientPayloadError):
        await stream(fleet, gateway)
    assert asked(fleet) == 1


async def test_an_engine_that_refuses_the_beginning_is_asked_once(fleet: GatewayFleet) -> None:
    gateway = await fleet.gateway()
    engines(fleet)[0].breaks = engines(fleet)[1].breaks = [b" an"]
    for engine in engines(fleet):
        engine.refuses = True
    with pytest.raises(aiohttp.ClientPayloadError):
        await stream(fleet, gateway)
    assert asked(fleet) == 2


async def test_no_replica_within_the_wait_time_cuts_the_stream(fleet: GatewayFleet) -> None:
    gateway = await fleet.gateway(queue_wait_s=0.3, eject_s=30.0)
    fleet.controller.change(replicas=[fleet.one.replica("p1", slots=8, continues=CONTINUES)])
    await gateway.views.run_once()
    engines(fleet)[0].breaks = [b" an"]
    with pytest.raises(aiohttp.ClientPayloadError):
        await stream(fleet, gateway)
    assert [row["ending"] for row in await fleet.receipts(1)] == ["upstream_broke"]


async def test_a_stream_stays_with_its_revision_while_another_is_on_trial(fleet: GatewayFleet) -> None:
    trial = {"resume_streams": True, "trial_revision": "r2", "trial_percent": 50}
    replicas = [
        fleet.one.replica("p1", slots=8, continues=CONTINUES),
        fleet.two.replica("p3", slots=8, continues=CONTINUES),
        {**fleet.two.replica("p2", slots=8, continues=CONTINUES), "revision": "r2"},
    ]
    fleet.controller.change(models=[{**SMALL, **trial}], replicas=replicas)
    gateway = await fleet.gateway()
    engines(fleet)[0].breaks = engines(fleet)[1].breaks = [b" an"]
    assert Seen(await stream(fleet, gateway)).text == TEXT  # the second turn is that of the trial
    assert {came.process for came in (*fleet.one.came, *fleet.two.came)} == {"p1", "p3"}


async def test_a_client_that_leaves_while_another_replica_is_awaited(fleet: GatewayFleet) -> None:
    gateway = await fleet.gateway(eject_s=30.0)
    fleet.controller.change(replicas=[fleet.one.replica("p1", slots=8, continues=CONTINUES)])
    await gateway.views.run_once()
    engines(fleet)[0].breaks = [b" an"]
    body = {"model": "small", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    answer = await fleet.http.post(f"{gateway.url}{CHAT}", headers=bearer(USER), json=body)
    await until(lambda: b"corral_gateway_waiting 1.0" in render(gateway.metrics, now=0.0), "a replica is awaited")
    answer.close()
    assert [row["ending"] for row in await fleet.receipts(1)] == ["client_left"]
    assert b"corral_gateway_waiting 0.0" in render(gateway.metrics, now=0.0)


async def test_without_the_option_a_stream_is_cut_as_it_always_was(fleet: GatewayFleet) -> None:
    fleet.controller.change(models=[SMALL])
    gateway = await fleet.gateway()
    for engine in engines(fleet):
        engine.breaks = [b" an"]
    with pytest.raises(aiohttp.ClientPayloadError):
        await stream(fleet, gateway)
    assert asked(fleet) == 1
