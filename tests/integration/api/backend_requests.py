"""What the tests of the doors to backends have in common."""

from __future__ import annotations

import json
from typing import Any

from corral.contract.messages.backends import UpgradeInfo
from corral.store.tables import backend_rules, operations
from tests.support.backend_api import Answer, Api

NEWER = UpgradeInfo("vllm", "1.0", "2.0", "sha256:old", "sha256:new")


async def nothing_stored(api: Api) -> bool:
    async with api.fleet.store.read() as tx:
        return await operations.list_(tx, limit=9) == [] and await backend_rules.list_live(tx, "vllm") == []


async def checked(api: Api, **newer: UpgradeInfo) -> None:
    api.fleet.catalogue.newer = dict(newer)
    answer = await api.post("/api/backends/upgrades/check?wait=true")
    assert sorted(answer.json) == sorted(newer)


def sentence(answer: Answer) -> str:
    error = answer.json["error"]
    return str(error if isinstance(error, str) else error["message"])


async def has(api: Api, node: str, backend: str) -> bool:
    return backend in await api.fleet.inventory(node)


async def installed_vllm(api: Api) -> Any:
    worker = await api.fleet.corral("barn")
    await api.fleet.until(await api.install("vllm"), "done")
    assert json.loads(json.dumps(worker.installed))["vllm"]["digest"] == "sha256:cpu-vllm-1"
    return worker
