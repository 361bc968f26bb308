"""Requests for models: the replica that should answer does, others take over, cold models are waited for."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import openai
import pytest

from corral.gateway.main import Gateway
from corral.gateway.receipts.metrics import render
from corral.kit.certificates import Ca, make_ca
from tests.integration.gateway.conftest import KEYS, USER, OpenGateway, bearer
from tests.integration.gateway.fleet import CHAT, SMALL, GatewayFleet, open_fleet
from tests.integration.gateway.scripted_controller import ScriptedController, key
from tests.integration.gateway.scripted_ingress import running_ingress, server_tls
from tests.support.processes import free_port
from tests.support.waiting import until


@pytest.fixture
async def fleet(
    controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession
) -> AsyncIterator[GatewayFleet]:
    async with open_fleet(controller, open_one, http) as fleet:
        yield fleet


def waiting(gateway: Gateway) -> float:
    return gateway.metrics.gauges["waiting"][1]()


async def test_requests_are_spread_over_replicas_and_receipted(fleet: GatewayFleet) -> None:
    fleet.both(slots=4, replica=1, digest="sha256:b")
    gateway = await fleet.gateway()
    assert {await fleet.who(gateway) for _ in range(6)} == {"p1", "p2"}
    assert abs(len(fleet.one.came) - len(fleet.two.came)) <= 1
    assert fleet.one.came[0].path == CHAT
    receipts = await fleet.receipts(6)
    first = receipts[0]
    assert {receipt["node_id"] for receipt in receipts} == {"n1", "n2"}
    assert (first["key_id"], first["model"], first["path"], first["status"]) == (f"id-{USER}", "small", CHAT, 200)
    assert (first["revision"], first["replica"], first["digest"]) == ("r1", 1, "sha256:b")
    assert {(row["prompt_tokens"], row["completion_tokens"]) for row in receipts} == {(7, 5)}
    assert all(row["total_ms"] > 0 and not row.get("first_byte_ms") for row in receipts)
    assert len({row["id"] for row in receipts}) == 6


async def test_replicas_of_another_revision_are_never_asked(fleet: GatewayFleet) -> None:
    fleet.controller.change(
        replicas=[fleet.one.replica("p1", revision="r0"), fleet.two.replica("p2"), fleet.one.replica("p3", "other")]
    )
    gateway = await fleet.gateway()
    assert {await fleet.who(gateway) for _ in range(3)} == {"p2"}


async def test_a_last_resort_is_used_when_there_is_no_other(fleet: GatewayFleet) -> None:
    fleet.controller.change(replicas=[fleet.one.replica("p1", last_resort=True), fleet.two.replica("p2")])
    gateway = await fleet.gateway()
    assert {await fleet.who(gateway) for _ in range(3)} == {"p2"}
    fleet.controller.change(replicas=[fleet.one.replica("p1", last_resort=True)])
    await gateway.views.run_once()
    assert await fleet.who(gateway) == "p1"


@pytest.mark.parametrize("trouble", ["gone", "unreachable", "unconvinced", "no ingress"])
async def test_another_replica_answers_where_one_cannot_be_reached(fleet: GatewayFleet, trouble: str) -> None:
    fleet.both(slots=4)
    gateway = await fleet.gateway(eject_s=30.0)
    assert {await fleet.who(gateway) for _ in range(4)} == {"p1", "p2"}  # both have connections that are kept
    if trouble == "no ingress":
        await fleet.one.stop()
    else:
        getattr(fleet.one, trouble).add("p1")
    assert {await fleet.who(gateway) for _ in range(4)} == {"p2"}
    receipts = await fleet.receipts(8)
    assert [row.get("tries", 1) for row in receipts].count(2) == 1  # after that it is left alone
    assert {row["status"] for row in receipts} == {200}
    lines = render(gateway.metrics, now=0.0).decode().splitlines()
    assert "corral_gateway_replica_retries_total 1.0" in lines
    assert "corral_gateway_ejections_total 1.0" in lines
    assert "corral_gateway_waiting 0.0" in lines


async def test_a_client_learns_nothing_of_the_gateways_own_token(fleet: GatewayFleet) -> None:
    fleet.controller.change(replicas=[fleet.one.replica("p1")])
    fleet.one.unconvinced.add("p1")
    gateway = await fleet.gateway(eject_s=0.05)
    status, answer, headers = await fleet.ask(gateway)
    assert (status, answer["error"]["code"]) == (503, "upstream_failed")
    assert "WWW-Authenticate" not in headers
    assert "Retry-After" in headers


async def test_an_only_replica_that_is_away_for_a_moment_is_waited_for(fleet: GatewayFleet) -> None:
    await fleet.one.stop()
    fleet.one.port = free_port()  # one that nobody else takes while it is away
    await fleet.one.start()
    fleet.controller.change(nodes=[fleet.one.view], replicas=[fleet.one.replica("p1")])
    gateway = await fleet.gateway()
    await fleet.who(gateway)
    await fleet.one.stop()
    asking = asyncio.create_task(fleet.who(gateway))
    await until(lambda: gateway.metrics.relay.upstream_connect_failures > 0, "the first try")
    await fleet.one.start()
    assert await asking == "p1"


async def test_a_lone_replica_that_dies_before_it_answers_is_waited_for(fleet: GatewayFleet) -> None:
    fleet.controller.change(replicas=[fleet.one.replica("p1")])
    fleet.one.ended.add("p1")
    fleet.controller.load("small", state="pending")
    gateway = await fleet.gateway(eject_s=30.0)
    asking = asyncio.create_task(fleet.who(gateway))
    await until(lambda: fleet.one.came, "the first try")
    fleet.controller.change(replicas=[])
    await until(lambda: fleet.controller.asked_loads, "it is loaded again")
    fleet.controller.change(replicas=[fleet.two.replica("p2")])
    assert await asking == "p2"
    [receipt] = await fleet.receipts(1)
    assert (receipt["status"], receipt["tries"]) == (200, 2)
    assert receipt["queue_ms"] > 0


async def test_a_request_that_ends_processes_ends_two_at_most(fleet: GatewayFleet) -> None:
    fleet.both()
    fleet.one.ended.add("p1")
    fleet.two.ended.add("p2")
    gateway = await fleet.gateway()
    status, answer, headers = await fleet.ask(gateway)
    assert (status, answer["error"]["code"]) == (502, "upstream_failed")
    assert not [name for name in headers if name.lower().startswith("x-corral")]
    assert len(fleet.one.came) + len(fleet.two.came) == 2
    [receipt] = await fleet.receipts(1)
    assert receipt["error"] == "upstream_failed"
    assert receipt["error_text"] == "The replica broke off before it answered. (it answered 502)"


async def test_nobody_gets_more_requests_than_it_has_slots(fleet: GatewayFleet) -> None:
    fleet.both(slots=2)
    gateway = await fleet.gateway()
    fleet.one.held = fleet.two.held = asyncio.Event()
    asking = [asyncio.create_task(fleet.who(gateway, user=str(number))) for number in range(12)]
    await until(lambda: len(fleet.one.came) == len(fleet.two.came) == 2, "four under way")
    fleet.one.held.set()
    await asyncio.gather(*asking)
    assert (fleet.one.most, fleet.two.most) == (2, 2)
    assert len(fleet.one.came) + len(fleet.two.came) == 12
    assert max(row["queue_ms"] for row in await fleet.receipts(12)) > 0


async def test_a_busy_model_is_waited_for_only_so_long(fleet: GatewayFleet) -> None:
    fleet.controller.change(replicas=[fleet.one.replica("p1")])
    gateway = await fleet.gateway(queue_wait_s=0.3)
    fleet.one.held = asyncio.Event()
    first = asyncio.create_task(fleet.who(gateway))
    await until(lambda: len(fleet.one.came) == 1, "one under way")
    status, answer, headers = await fleet.ask(gateway)
    assert (status, answer["error"]["code"]) == (503, "model_busy")
    assert "Retry-After" in headers
    fleet.one.held.set()
    assert await first == "p1"


async def test_a_busy_model_is_waited_for_by_only_so_many(fleet: GatewayFleet) -> None:
    fleet.controller.change(replicas=[fleet.one.replica("p1")])
    gateway = await fleet.gateway(queue_wait_s=30.0, queue_limit=1)
    fleet.one.held = asyncio.Event()
    first = asyncio.create_task(fleet.who(gateway))
    await until(lambda: len(fleet.one.came) == 1, "one under way")
    second = asyncio.create_task(fleet.who(gateway))
    await until(
        lambda: len(fleet.controller.batches) > 0 and fleet.controller.batches[-1]["waiting"] == {"small": 1},
        "it waits",
    )
    status, answer, headers = await fleet.ask(gateway)
    assert (status, answer["error"]["code"]) == (503, "queue_full")
    assert "Retry-After" in headers
    fleet.one.held.set()
    assert [await first, await second] == ["p1", "p1"]


async def test_a_model_at_its_limit_says_when_to_come_again(fleet: GatewayFleet) -> None:
    """`limits` of the definition: what is under way and what waits count together, whatever the slots."""
    limited = {**SMALL, "max_concurrent": 2, "retry_after_s": 7}
    fleet.controller.change(replicas=[fleet.one.replica("p1", slots=8)], models=[limited])
    gateway = await fleet.gateway()
    fleet.one.held = asyncio.Event()
    running = [asyncio.create_task(fleet.who(gateway)) for _ in range(2)]
    await until(lambda: len(fleet.one.came) == 2, "two under way")
    status, answer, headers = await fleet.ask(gateway)
    assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "model_busy", "7")
    # After an edit another process answers; what the old one still does counts until it ends.
    fleet.controller.change(replicas=[fleet.two.replica("p2")], models=[{**limited, "retry_after_s": 0}])
    await gateway.views.run_once()
    status, answer, headers = await fleet.ask(gateway)
    assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "model_busy", "1")
    fleet.one.held.set()
    assert await asyncio.gather(*running) == ["p1", "p1"]
    assert await fleet.who(gateway) == "p2"


async def test_a_client_that_leaves_the_queue_leaves_its_place(fleet: GatewayFleet) -> None:
    fleet.controller.change(replicas=[fleet.one.replica("p1")])
    gateway = await fleet.gateway()
    fleet.one.held = asyncio.Event()
    first = asyncio.create_task(fleet.who(gateway))
    await until(lambda: len(fleet.one.came) == 1, "one under way")
    leaving = asyncio.create_task(fleet.who(gateway))
    await until(
        lambda: bool(fleet.controller.batches) and fleet.controller.batches[-1]["waiting"] == {"small": 1}, "it waits"
    )
    leaving.cancel()
    await until(lambda: fleet.controller.batches[-1]["waiting"] == {}, "nobody waits")
    fleet.one.held.set()
    assert [await first, await fleet.who(gateway)] == ["p1", "p1"]
    assert [row["ending"] for row in await fleet.receipts(3) if "ending" in row] == ["client_left"]


async def test_a_client_that_leaves_stops_what_is_done_for_it(fleet: GatewayFleet) -> None:
    fleet.controller.change(replicas=[fleet.one.replica("p1")])
    gateway = await fleet.gateway()
    fleet.one.held = asyncio.Event()
    for warm in (False, True):
        leaving = asyncio.create_task(fleet.who(gateway))
        await until(lambda: fleet.one.running.get("p1") == 1, "it is under way")
        leaving.cancel()
        await until(lambda: fleet.one.running["p1"] == 0, "the replica stops")
        if not warm:  # afterwards there is an idle connection, and the next request takes the fast path
            held, fleet.one.held = fleet.one.held, None
            assert await fleet.who(gateway) == "p1"
            fleet.one.held = held
    fleet.one.held = None
    assert await fleet.who(gateway) == "p1", "its slot is free"
    receipts = await fleet.receipts(4)
    assert sorted(row["status"] for row in receipts) == [200, 200, 499, 499]


async def test_workers_are_known_by_their_certificates(fleet: GatewayFleet, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    ca, other = (Ca(made.certificate_pem, made.key_pem) for made in (make_ca("fleet", now), make_ca("stranger", now)))
    (tmp_path / "ca.pem").write_text(ca.certificate_pem)
    for signer, served in ((ca, True), (other, False)):
        issued = signer.issue_server(["n3"], now, life=timedelta(hours=1))
        async with running_ingress("n3", tls=server_tls(issued.certificate_pem, issued.key_pem, tmp_path)) as third:
            fleet.controller.change(nodes=[third.view], replicas=[third.replica("p3")])
            gateway = await fleet.gateway(ingress_ca=tmp_path / "ca.pem", queue_wait_s=0.5)
            status, _, _ = await fleet.ask(gateway)
            assert status == (200 if served else 503)
            assert len(third.came) == served


async def test_a_cold_model_is_loaded_once_and_all_who_wait_are_served(fleet: GatewayFleet) -> None:
    fleet.controller.load("small", state="staging", node="name-n1")
    gateway = await fleet.gateway()
    asking = [asyncio.create_task(fleet.who(gateway, user=str(number))) for number in range(50)]
    await until(lambda: waiting(gateway) == 50, "all of them wait")
    await until(lambda: fleet.controller.asked_loads == ["small"], "the load is asked for")
    fleet.controller.change(replicas=[fleet.one.replica("p1", slots=4)])
    fleet.controller.load("small", state="loaded")
    assert set(await asyncio.gather(*asking)) == {"p1"}
    assert fleet.controller.asked_loads == ["small"]
    assert fleet.one.most <= 4
    receipts = await fleet.receipts(50)
    assert min(row["load_ms"] for row in receipts) > 0


async def test_a_load_that_takes_longer_than_a_request_may_wait(fleet: GatewayFleet) -> None:
    fleet.controller.load(
        "small", state="staging", node="gpu-1", progress=41.0, bytes_sent=41, total_bytes=100, eta_seconds=6.2
    )
    gateway = await fleet.gateway(load_wait_s=2.0)  # in which even a slow machine has heard of the load
    status, answer, headers = await fleet.ask(gateway)
    assert (status, headers["Retry-After"]) == (503, "7")
    assert (answer["error"]["type"], answer["error"]["code"]) == ("model_loading", "model_loading")
    assert answer["loading"] == {
        "model": "small",
        "state": "staging",
        "node": "gpu-1",
        "progress": 41.0,
        "bytes_sent": 41,
        "total_bytes": 100,
        "file_index": 0,
        "total_files": 0,
        "eta_seconds": 6.2,
    }


@pytest.mark.parametrize("state", ["pending", "installing", "staging", "loading"])
async def test_a_load_that_waits_tells_after_its_budget_what_for(fleet: GatewayFleet, state: str) -> None:
    fleet.controller.load("small", state="pending", message="looking for a place")
    gateway = await fleet.gateway(load_wait_s=2.0)
    started = time.monotonic()
    asking = asyncio.create_task(fleet.ask(gateway))
    await until(lambda: fleet.controller.asked_loads == ["small"], "the load is asked for")
    cause = "llama-cpp could not be resolved for gpu-1: registry.example.org could not be reached: no route to host"
    fleet.controller.load("small", state=state, message=cause)  # found out while the request waits
    status, answer, headers = await asking
    assert time.monotonic() - started >= 2.0
    assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "model_loading", "5")
    assert answer["error"]["message"] == f"The model `small` is being loaded: {cause}. Try again shortly."
    assert answer["loading"]["state"] == state


async def test_a_load_that_fails_tells_why(fleet: GatewayFleet) -> None:
    fleet.controller.load("small", state="loading")
    gateway = await fleet.gateway()
    asking = [asyncio.create_task(fleet.ask(gateway)) for _ in range(3)]
    await until(lambda: waiting(gateway) == 3, "all of them wait")
    await until(lambda: fleet.controller.asked_loads == ["small"], "the load is asked for")
    fleet.controller.load("small", state="failed", error="llama.cpp: out of memory", retry_after_s=10.0)
    for status, answer, headers in await asyncio.gather(*asking):
        assert (status, answer["error"]["code"], headers["Retry-After"]) == (500, "model_load_failed", "10")
        assert "out of memory" in answer["error"]["message"]
    said = {(row["status"], row["error"], row["error_text"]) for row in await fleet.receipts(3)}
    assert said == {(500, "model_load_failed", "The model `small` could not be loaded: llama.cpp: out of memory")}
    status, answer, headers = await fleet.ask(gateway)  # and whoever comes too early for the next try
    assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "model_load_failed", "10")
    assert "out of memory" in answer["error"]["message"]


async def test_a_controller_that_is_away_while_a_model_is_cold(fleet: GatewayFleet) -> None:
    fleet.controller.load("small", state="loading")
    gateway = await fleet.gateway()
    await fleet.controller.stop()
    asking = asyncio.create_task(fleet.who(gateway))
    await until(lambda: gateway.metrics.view.failures > 0, "it is missed")
    fleet.controller.change(replicas=[fleet.one.replica("p1")])
    await fleet.controller.start()
    assert await asking == "p1"


@pytest.mark.parametrize("how", ["refuse", "use"])
async def test_what_a_request_gets_while_a_model_loads_can_be_said(fleet: GatewayFleet, how: str) -> None:
    cold = {"id": "cold", "revision": "r1", "while_loading": how, "stand_in": "small" if how == "use" else ""}
    fleet.controller.change(models=[SMALL, cold], replicas=[fleet.one.replica("p1")])
    fleet.controller.load("cold", state="installing")
    gateway = await fleet.gateway()
    status, answer, headers = await fleet.ask(gateway, model="cold")
    assert fleet.controller.asked_loads == ["cold"]
    if how == "refuse":
        assert (status, answer["loading"]["state"]) == (503, "installing")
    else:
        assert (status, headers["X-Corral-Model"]) == (200, "small")
        assert json.loads(fleet.one.came[0].body)["model"] == "small"
        assert [(row["model"], row["served_by"]) for row in await fleet.receipts(1)] == [("cold", "small")]


async def test_a_stand_in_may_be_named_by_an_alias(fleet: GatewayFleet) -> None:
    cold = {"id": "cold", "revision": "r1", "while_loading": "use", "stand_in": "gpt"}
    alias = {"id": "gpt", "alias": "small"}
    fleet.controller.change(models=[SMALL, alias, cold], replicas=[fleet.one.replica("p1")])
    fleet.controller.load("cold", state="installing")
    gateway = await fleet.gateway()
    status, _, headers = await fleet.ask(gateway, model="cold")
    assert (status, headers["X-Corral-Model"]) == (200, "small")


async def test_an_alias_is_its_model(fleet: GatewayFleet) -> None:
    fleet.controller.change(models=[SMALL, {"id": "gpt", "alias": "small"}], replicas=[fleet.one.replica("p1")])
    gateway = await fleet.gateway(expose_node_header=True)
    status, _, headers = await fleet.ask(gateway, model="gpt", temperature=0.5)
    assert (status, headers["X-Corral-Node"], headers["X-LocalAI-Node"]) == (200, "name-n1", "name-n1")
    assert json.loads(fleet.one.came[0].body) == {
        "model": "small",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.5,
    }
    assert [(row["model"], row["served_by"]) for row in await fleet.receipts(1)] == [("gpt", "small")]


async def test_unknown_and_disabled_models_are_named_with_what_may_have_been_meant(fleet: GatewayFleet) -> None:
    fleet.controller.change(models=[SMALL, {"id": "smaller", "revision": "r", "disabled": True}])
    gateway = await fleet.gateway()
    for name in ("smal", "smaller"):
        status, answer, _ = await fleet.ask(gateway, model=name)
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert "Did you mean `small`?" in answer["error"]["message"]
    async with fleet.http.get(f"{gateway.url}/v1/models", headers=bearer(USER)) as listed:
        assert [row["id"] for row in (await listed.json())["data"]] == ["small"]


async def test_the_openai_client_streams_and_tokens_are_counted(fleet: GatewayFleet) -> None:
    fleet.controller.change(replicas=[fleet.one.replica("p1")])
    gateway = await fleet.gateway()
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=USER, max_retries=0) as client:
        for extra in ({}, {"stream_options": {"include_usage": True}}):
            stream = await client.chat.completions.create(
                model="small", messages=[{"role": "user", "content": "hi"}], stream=True, extra_body=extra
            )
            said = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
            assert said == ["0", "1", "2", "3"]
    guessed, told = await fleet.receipts(2)
    assert (guessed["completion_tokens"], guessed["estimated"], guessed["streamed"]) == (4, True, True)
    assert (told["completion_tokens"], told["prompt_tokens"], "estimated" in told) == (5, 7, False)


async def test_prompts_that_begin_alike_go_where_their_beginning_is_known(fleet: GatewayFleet) -> None:
    fleet.both(slots=8)
    gateway = await fleet.gateway()
    talks = [[{"role": "user", "content": f"{number} " * 600}] for number in range(8)]
    first = [await fleet.who(gateway, messages=talk) for talk in talks]
    assert set(first) == {"p1", "p2"}
    longer = [await fleet.who(gateway, messages=[*talk, {"role": "user", "content": "go on"}]) for talk in talks]
    assert longer == first


async def test_prompts_that_had_to_go_elsewhere_are_told(fleet: GatewayFleet) -> None:
    fleet.both(slots=8)
    gateway = await fleet.gateway()
    fleet.one.held = fleet.two.held = asyncio.Event()
    talk = [{"role": "user", "content": "once upon a time " * 40}]
    asking = [asyncio.create_task(fleet.who(gateway, messages=talk)) for _ in range(4)]
    await until(lambda: len(fleet.one.came) + len(fleet.two.came) == 4, "all are under way")
    disturbed = gateway.metrics.totals["prefix_disturbed"][1]()
    assert disturbed > 0

    def told() -> Counter[str]:
        return sum((Counter(batch["pressure"]) for batch in fleet.controller.batches), Counter())

    await until(lambda: told() == {"small": disturbed}, "each of them is told")
    fleet.one.held.set()
    await asyncio.gather(*asking)
    await fleet.receipts(4)
    assert told() == {"small": disturbed}, "once"


async def test_files_are_passed_on_as_they_came(fleet: GatewayFleet) -> None:
    fleet.controller.change(replicas=[fleet.one.replica("p1")])
    gateway = await fleet.gateway(multipart_limit_bytes=8 * 1024 * 1024)
    sound = bytes(range(256)) * 12_000  # 3 MB: more than is written at once
    for order in (("file", "model"), ("model", "file")):
        form = aiohttp.FormData()
        for name in order:
            if name == "file":
                form.add_field("file", io.BytesIO(sound), filename="a.wav", content_type="audio/wav")
            else:
                form.add_field("model", "small")
        url = f"{gateway.url}/v1/audio/transcriptions"
        async with fleet.http.post(url, headers=bearer(USER), data=form) as answer:
            assert answer.status == 200, await answer.text()
        assert sound in fleet.one.came[-1].body
        assert fleet.one.came[-1].headers["Content-Type"].startswith("multipart/form-data")
    form = aiohttp.FormData({"model": "small"}, default_to_multipart=True)
    form.add_field("file", io.BytesIO(b"x" * 9_000_000), filename="b")
    async with fleet.http.post(url, headers=bearer(USER), data=form) as answer:
        assert answer.status == 413


async def test_other_paths_go_to_the_model_they_name(fleet: GatewayFleet) -> None:
    fleet.controller.change(replicas=[fleet.one.replica("p1")])
    gateway = await fleet.gateway()
    status, _, _ = await fleet.ask(gateway, path="/v1/tokenize")
    assert (status, fleet.one.came[0].path) == (200, "/v1/tokenize")
    for method, body in (("GET", None), ("DELETE", None), ("POST", b"no json")):
        url = f"{gateway.url}/v1/things/7?model=small&x=1"
        async with fleet.http.request(method, url, headers=bearer(USER), data=body) as answer:
            assert answer.status == 200
        came = fleet.one.came[-1]
        assert (came.method, came.path, came.body) == (method, "/v1/things/7", body or b"")
    for query in ("", "?model=", "?model=a&model=b"):
        async with fleet.http.get(f"{gateway.url}/v1/things/7{query}", headers=bearer(USER)) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "unknown_url")
    async with fleet.http.ws_connect(f"{gateway.url}/v1/realtime?model=small", headers=bearer(USER)) as socket:
        await socket.send_str("hello")
        assert await socket.receive_str() == "echo hello"
        await until(lambda: fleet.one.running["p1"] == 1, "it holds a slot")
    await until(lambda: fleet.one.running["p1"] == 0, "it gives it back")


async def test_what_a_key_may_use_is_limited(fleet: GatewayFleet) -> None:
    keys = [
        *KEYS,
        key("ck_few", "inference", limits={"requests_per_min": 2}),
        key("ck_words", "inference", limits={"tokens_per_min": 20}),
        key("ck_one", "inference", limits={"concurrent": 1}),
    ]
    fleet.controller.change(keys=keys, replicas=[fleet.one.replica("p1", slots=8)])
    gateway = await fleet.gateway()
    for secret, served, kind in (("ck_few", 2, "requests"), ("ck_words", 2, "tokens")):
        for _ in range(served):
            assert (await fleet.ask(gateway, secret=secret))[0] == 200
        status, answer, headers = await fleet.ask(gateway, secret=secret)
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (429, kind, "rate_limit_exceeded")
        assert int(headers["Retry-After"]) >= 1
    fleet.one.held = asyncio.Event()
    first = asyncio.create_task(fleet.ask(gateway, secret="ck_one"))
    await until(lambda: len(fleet.one.came) == 5, "it runs")
    assert (await fleet.ask(gateway, secret="ck_one"))[1]["error"]["type"] == "concurrent"
    fleet.one.held.set()
    assert (await first)[0] == 200
    assert (await fleet.ask(gateway, secret="ck_one"))[0] == 200


async def test_receipts_wait_for_a_controller_that_is_away(fleet: GatewayFleet) -> None:
    fleet.controller.change(replicas=[fleet.one.replica("p1")])
    fleet.controller.takes_receipts = False
    gateway = await fleet.gateway(receipts_limit=3)
    for _ in range(5):
        await fleet.who(gateway)
    await until(lambda: gateway.metrics.totals["receipts_lost"][1]() == 2, "two found no room")
    fleet.controller.takes_receipts = True
    await until(lambda: sum(batch.get("dropped", 0) for batch in fleet.controller.batches) == 2, "two are missed")
    assert len(fleet.controller.receipts) == 3
