"""Loads and replicas by HTTP, as gateways and people ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import aiohttp
import pytest

from corral.contract.admin import CreateKey
from corral.controller.access.keys import Access
from corral.controller.access.principal import Role
from tests.support.backend_api import Api
from tests.support.replica_fleet import ReplicaFleet
from tests.support.waiting import until

GATEWAY = "ck_" + "g" * 52


@pytest.fixture
async def api(local: ReplicaFleet) -> AsyncIterator[Api]:
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        made = Api(local.fleet, session, stack)
        controller, parts = local.fleet.first, local.replicas["c1"]
        await made.serve(controller, loads=parts.loads, replica_rows=parts.rows)
        access = Access(controller.store, controller.feed, local.fleet.clock, session_ttl_s=600)
        await access.ensure(GATEWAY, "gateway", Role.GATEWAY)
        yield made


async def test_a_gateway_asks_waits_and_hears_of_the_end(local: ReplicaFleet, api: Api) -> None:
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("org/m")
    barn.starts.hold = asyncio.Event()
    asked = await api.post("/internal/loads", {"model": "org/m"}, key=GATEWAY)
    assert asked.status == 202
    assert asked.json["state"] == "pending"
    await until(lambda: barn.processes)
    shown = await api.get("/api/models/org%2Fm/load-status")
    assert shown.status == 200
    assert shown.json["node"] == "barn"
    barn.starts.hold.set()
    await local.until_ready("org/m")
    await local.until_settled()
    loaded = await api.get("/internal/loads/org%2Fm?since=1&wait_s=5", key=GATEWAY)
    assert (loaded.status, loaded.json["state"]) == (200, "loaded")
    assert (await api.get("/api/models/org%2Fm/load-status")).status == 404


async def test_only_gateways_and_admins_may_and_unknown_models_are_404(local: ReplicaFleet, api: Api) -> None:
    await local.define("m")
    assert (await api.post("/internal/loads", {"model": "m"})).status == 403
    assert (await api.post("/api/models/m/load", key=api.viewer)).status == 403
    unknown = await api.post("/internal/loads", {"model": "n"}, key=GATEWAY)
    assert unknown.status == 404
    assert (await api.post("/internal/loads", {}, key=GATEWAY)).status == 400
    assert (await api.get("/internal/loads/m", key=GATEWAY)).status == 404


async def test_a_load_is_told_by_every_name_and_only_to_keys_that_may_use_it(local: ReplicaFleet, api: Api) -> None:
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("m")
    await local.define("gpt", backend="", alias="m")
    access = Access(local.fleet.first.store, local.fleet.first.feed, local.fleet.clock, session_ttl_s=600)
    keys = {
        name: (await access.create(CreateKey(name=name, role="inference", models=models))).secret
        for name, models in (("all", None), ("other", ("other",)), ("gpt", ("gpt",)))
    }
    barn.starts.hold = asyncio.Event()
    assert (await api.post("/api/models/gpt/load")).status == 202
    seen = {
        (name, model): (await api.get(f"/api/models/{model}/load-status", key=secret)).status
        for name, secret in keys.items()
        for model in ("m", "gpt")
    }
    assert [pair for pair, status in seen.items() if status == 200] == [("all", "m"), ("all", "gpt"), ("gpt", "gpt")]
    assert set(seen.values()) == {200, 404}
    barn.starts.hold.set()
    await local.until_ready("m")
    [row] = (await api.get("/api/models/gpt/replicas")).json
    assert row["model_name"] == "m"
    assert (await api.post("/api/models/gpt/unload")).json["replicas"] == 1


async def test_people_load_look_and_unload(local: ReplicaFleet, api: Api) -> None:
    barn = await local.worker("barn", has="llama-cpp")
    await local.define("m")
    assert (await api.post("/api/models/m/load")).status == 202
    await local.until_ready("m")
    [row] = (await api.get("/api/models/m/replicas", key=api.viewer)).json
    [process_id] = barn.processes
    assert (row["node_name"], row["state"], row["process_id"]) == ("barn", "loaded", process_id)
    assert row["address"] == f"http://barn.test:50050/replicas/{process_id}"
    assert [each["model_name"] for each in (await api.get("/api/nodes/models")).json] == ["m"]
    assert [each["model_name"] for each in (await api.get("/api/nodes/barn/models")).json] == ["m"]
    assert (await api.post("/api/nodes/barn/models/unload", {})).status == 400
    ended = await api.post("/api/nodes/barn/models/unload", {"model_name": "m"})
    assert (ended.status, ended.json) == (200, {"message": "model unloaded"})
    await until(lambda: not barn.processes)
    await local.until_gone("m")
    again = await api.post("/api/models/m/unload")
    assert again.status == 404
