"""What pages of large fleets read: views of nodes that did not change are kept, rows are read of the shown operations
alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from corral.controller.operations.progress import ProgressCollector
from corral.controller.runtime.node_views import NodeViewCache, read_node_views
from corral.store import open_store
from corral.store.records import BackendRequest, OperationNode, OperationNodeStatus
from corral.store.tables import node_labels, nodes, operation_nodes, operations
from corral.store.tables.nodes import Heartbeat, record_heartbeats
from corral.store.tables.operations import Operation, StoredRequest
from tests.support.page import made_node, open_page_app
from tests.support.sqlite import sqlite_url


async def test_only_views_of_nodes_that_changed_are_made_anew(tmp_path: Path) -> None:
    cache = NodeViewCache()
    beats, labelled, still, gone = (made_node(name) for name in ("beats", "labelled", "still", "gone"))
    async with open_store(sqlite_url(tmp_path)) as store:
        async with store.write() as tx:
            for node in (beats, labelled, still, gone):
                await nodes.insert(tx, node)
        async with store.read() as tx:
            before = await cache.read(tx)
        async with store.write() as tx:
            await record_heartbeats(tx, [Heartbeat(node_id=beats.id, available_vram=7)])
            await node_labels.replace_all(tx, labelled.id, {"zone": "attic"}, origin="admin")
            await nodes.delete(tx, gone.id)
        async with store.read() as tx:
            after, anew = await cache.read(tx), await read_node_views(tx)
    assert after == anew
    assert [view.name for view in after.values()] == ["beats", "labelled", "still"]
    assert {id for id in after if after[id] is before[id]} == {still.id}
    assert (after[beats.id].available_vram, after[labelled.id].labels) == (7, {"zone": "attic"})
    assert cache._kept.keys() == after.keys(), "deleted nodes are not kept"


async def test_rows_are_read_of_the_operations_that_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = ProgressCollector.read_rows

    async def counted(self: ProgressCollector, tx: object, chosen: list[Operation]) -> object:
        read.extend(each.id for each in chosen)
        return await original(self, tx, chosen)  # type: ignore[arg-type]

    monkeypatch.setattr(ProgressCollector, "read_rows", counted)
    async with open_page_app(tmp_path) as page:
        node = made_node("attic")
        await page.put(node)
        async with page.store.write() as tx:
            now = await tx.now()
            for number in range(4):
                await operations.insert(
                    tx,
                    Operation(
                        id=f"op-{number}",
                        kind="install",
                        backend="demo",
                        scope_kind="all",
                        scope_value="",
                        generation=number,
                        created_at=now.replace(microsecond=number),
                        request=StoredRequest(BackendRequest("demo")),
                        finished_at=now if number == 3 else None,
                        outcome="completed" if number == 3 else "",
                    ),
                )
                row = OperationNode(f"op-{number}", node.id, "attic", OperationNodeStatus.DOWNLOADING, now)
                await operation_nodes.put(tx, [row])
        views, total = await page.operations.list_running(2)
        assert ([view.job_id for view in views], total, read) == (["op-2", "op-1"], 3, ["op-2", "op-1"])
        assert [(view.nodes, view.counts, view.message) for view in views] == [
            ((), {"downloading": 1}, "0 of 1 nodes done")
        ] * 2
        listed = await page.operations.list_views(rows=False)
        assert {view.job_id: view.nodes for view in listed} == {f"op-{number}": () for number in range(3)}
