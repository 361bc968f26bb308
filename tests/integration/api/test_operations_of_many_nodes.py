"""The list of operations, and the page with them, of a fleet of a thousand nodes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from litestar.testing import AsyncTestClient

from corral.store.records import BackendRequest, OperationNode, OperationNodeStatus
from corral.store.tables import operation_nodes, operations
from corral.store.tables.operations import Operation, StoredRequest
from tests.support.page import PageApp, open_page_app

NODES = 1000
ROUNDS = 50
MAX_CPU_S = 0.1  # of the slowest of them: of this process, since the wall clock says how busy the machine is


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[PageApp]:
    async with open_page_app(tmp_path) as page:
        now = datetime.now(UTC)
        request = StoredRequest(BackendRequest(backend="vllm"))
        async with page.store.write() as tx:
            await operations.insert(tx, Operation("op-1", "install", "vllm", "all", "", 0, now, request))
            await operation_nodes.put(tx, [made_row(number, now) for number in range(NODES)])
        yield page


def made_row(number: int, now: datetime) -> OperationNode:
    """A third is done, the others are under way."""
    done = OperationNode(
        "op-1",
        f"id-{number}",
        f"node-{number:04}",
        OperationNodeStatus.SUCCESS,
        now,
        version="1.2",
        digest=f"sha256:{number:064}",
    )
    if number % 3 == 0:
        return done
    return msgspec.structs.replace(
        done,
        status=OperationNodeStatus.DOWNLOADING,
        phase="downloading",
        file_name="layer.tar",
        percentage=number % 100,
        current_bytes=number * 1000,
        total_bytes=10_000_000,
        rate=1e6,
        sources={"barn": 100},
    )


async def test_a_list_of_a_thousand_nodes_takes_little_cpu(page: PageApp) -> None:
    headers = {"Authorization": f"Bearer {await page.key()}"}
    async with AsyncTestClient(page.app, base_url="http://corral.local") as client:
        took = []
        for _ in range(ROUNDS):
            began = time.process_time()
            answer = await client.get("/api/operations", headers=headers)
            took.append(time.process_time() - began)
        (shown,) = answer.json()["operations"]
        assert (len(shown["nodes"]), shown["counts"]) == (NODES, {"success": 334, "downloading": 666})
    assert max(took) < MAX_CPU_S, f"the slowest of {ROUNDS} lists took {max(took):.3f} s of CPU"
