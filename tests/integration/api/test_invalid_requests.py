"""Bad input at the doors of backends: a clear 400, and nothing stored. Never a 500."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from corral.store.tables import backend_rules, operations
from tests.support.backend_api import Answer, Api, open_api

DOORS = [
    "/api/operations",
    "/backends/apply",
    "/api/backends/install-external",
    "/api/nodes/barn/backends/install",
    "/api/nodes/barn/backends/upgrade",
    "/api/nodes/barn/backends/delete",
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    """Nothing here changes anything, so one will do for all; it is checked after each."""
    folder: Path = tmp_path_factory.mktemp("doors")
    async with open_api(folder) as opened:
        await opened.fleet.corral("barn")
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def api(shared: Api) -> AsyncIterator[Api]:
    yield shared
    async with shared.fleet.store.read() as tx:
        assert await operations.list_(tx, limit=1) == []
        assert await backend_rules.list_live(tx) == []


pytestmark = pytest.mark.asyncio(loop_scope="module")


def sentence(answer: Answer) -> str:
    error = answer.json["error"]
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"not json",
        b'{"backend": "vllm"',
        b"\xff\xfe\x00",
        b'"vllm"',
        b"[]",
        b"17",
        b'{"backend": 17, "uri": 17, "id": 17}',
        b'{"backend": "vllm", "id": "vllm", "uri": "oci://x/y", "force": "yes"}',
        b'{"backend": ["vllm"], "id": ["vllm"], "uri": ["x"]}',
        b"[" * 5000,
    ],
)
async def test_a_body_that_cannot_be_read_is_400(api: Api, door: str, raw: bytes) -> None:
    answer = await api.post(door, raw=raw)
    assert answer.status == 400, answer.raw
    assert sentence(answer)


@pytest.mark.parametrize("door", DOORS)
async def test_no_body_at_all_is_400(api: Api, door: str) -> None:
    answer = await api.post(door)
    assert answer.status == 400, answer.raw


async def test_a_body_larger_than_allowed_is_413(api: Api) -> None:
    answer = await api.post("/api/operations", raw=b'{"backend": "' + b"x" * 1048570 + b'"}')
    assert answer.status == 413


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "name a backend"),
        ({"backend": ""}, "name a backend"),
        ({"kind": "explode", "backend": "vllm"}, "choose among install, upgrade, delete, rollback"),
        ({"backend": "x" * 256}, "longer than 255"),
        ({"backend": "x" * 100_000}, "longer than 255"),
        ({"backend": "vl\x00lm"}, "control characters"),
        ({"backend": "vl\nlm"}, "control characters"),
        ({"backend": "vllm\x7f"}, "control characters"),
        ({"uri": "oci://registry.test/own:1\r\nX: y", "name": "own"}, "control characters"),
        ({"uri": "oci://" + "x" * 5000, "name": "own"}, "longer than 4096"),
        ({"uri": "oci://registry.test/own:1"}, "an image needs a name"),
        ({"uri": "oci://registry.test/own:1", "name": "../../etc"}, "cannot be a backend's name"),
        ({"uri": "oci://registry.test/own:1", "name": ".hidden"}, "cannot be a backend's name"),
        ({"uri": "oci://registry.test/own:1", "name": "own", "alias": "a/b"}, "cannot be an alias"),
        ({"backend": "vllm", "alias": "mine"}, "go with a uri"),
        ({"backend": "vllm", "name": "mine"}, "go with a uri"),
        ({"kind": "delete", "uri": "oci://registry.test/own:1", "name": "own"}, "a uri is for installing"),
        ({"kind": "upgrade", "backend": "vllm", "force": True}, "only an install or a delete can be forced"),
        ({"kind": "upgrade", "backend": "vllm", "max_parallel": "lots"}, "a share such as 25%"),
        ({"kind": "upgrade", "backend": "vllm", "max_parallel": "0"}, "a share such as 25%"),
        ({"kind": "upgrade", "backend": "vllm", "max_parallel": "101%"}, "a share such as 25%"),
        ({"backend": "vllm", "node": "barn", "selector": "tier=fast"}, "not both"),
        ({"backend": "vllm", "selector": "=="}, "selects nothing"),
        ({"backend": "vllm", "selector": " "}, "names no label"),
        ({"backend": "vllm", "selector": ",,"}, "names no label"),
        ({"backend": "vllm", "selector": "x" * 5000}, "longer than"),
        ({"backend": "vllm", "selector": "tier=\x00"}, "control characters"),
        ({"backend": "vllm", "node": "ba\x00rn"}, "control characters"),
        ({"backend": "vllm", "node": "x" * 5000}, "longer than 255"),
    ],
)
async def test_what_cannot_be_meant_is_400(api: Api, body: dict[str, Any], words: str) -> None:
    answer = await api.post("/api/operations", body)
    assert answer.status == 400, answer.raw
    assert words in sentence(answer)
    assert answer.json["code"] == "invalid"
    assert len(sentence(answer)) < 400, "what was sent is not sent back whole"


@pytest.mark.parametrize("node", ["bran", "x" * 255, "../barn", "%"])
async def test_a_node_that_is_not_there_is_404(api: Api, node: str) -> None:
    answer = await api.post("/api/operations", {"backend": "vllm", "node": node})
    assert answer.status == 404, answer.raw
    assert len(sentence(answer)) < 400


@pytest.mark.parametrize(
    ("id", "status"),
    [("x" * 5000, 400), ("%00", 400), ("..%2f..", 404), ("%E2%98%83", 404), ("'%20OR%201=1", 404), ("%ff", 404)],
)
async def test_an_id_nobody_gave_out(api: Api, id: str, status: int) -> None:
    for method, path in (
        ("GET", f"/api/operations/{id}"),
        ("GET", f"/backends/jobs/{id}"),
        ("POST", f"/api/operations/{id}/cancel"),
        ("POST", f"/api/operations/{id}/retry"),
    ):
        answer = await api.call(method, path)
        assert answer.status == status, (path, answer.raw)
        assert len(answer.raw) < 1000


@pytest.mark.parametrize("name", ["%00", "a%0Ab", "x" * 300, "%1b%5b31m"])
@pytest.mark.parametrize("door", ["/backends/upgrade", "/backends/delete", "/api/backends/install"])
async def test_a_name_in_the_path_is_checked_too(api: Api, door: str, name: str) -> None:
    answer = await api.post(f"{door}/{name}")
    assert answer.status == 400, answer.raw


@pytest.mark.parametrize("flag", ["plan=maybe", "force=perhaps"])
async def test_a_flag_is_yes_or_no(api: Api, flag: str) -> None:
    answer = await api.post(f"/backends/delete/vllm?{flag}")
    assert answer.status == 400
    assert flag.partition("=")[0] in sentence(answer)


async def test_galleries_that_cannot_be_read_are_ignored(api: Api) -> None:
    unreadable: list[object] = ["{", "[17]", 17, [], {"a": 1}, '[{"name": "x"}]']
    for galleries in unreadable:
        body = {"backend": "vlm", "backend_galleries": galleries}
        answer = await api.post("/api/nodes/barn/backends/install", body)
        assert answer.status == 404, "the backend is unknown; the galleries are no fault"
