"""Files of ours on a LocalAI worker that nobody needs any more are removed, and nothing else is."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from corral.bus.local import LocalHub
from corral.contract.messages.models import DELETE_MODEL, DeleteModel, DoneReply
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.models import Definition
from corral.controller.localai.calls import PeerCalls, PeerTimes
from corral.controller.localai.cleanup import PeerCleanup, unwanted_sets
from corral.controller.localai.file_server import FileServerAddress, FileServers
from corral.controller.localai.request_files import RequestFiles
from corral.controller.localai.table import PeerTable
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.kit.clock import SystemClock
from corral.store import Store, open_store
from corral.store.tables import models, nodes, peer_processes
from tests.compat.localai_files import LocalAIFiles
from tests.integration.store.rows import a_model, a_node, a_peer_process
from tests.support.scripted_catalogue import no_galleries
from tests.support.sqlite import sqlite_url
from tests.support.waiting import until

CLOCK = SystemClock()
NEW, OLD, GONE, RUNS = "smol/aaaaaaaaaaaa", "smol/bbbbbbbbbbbb", "org/gone/cccccccccccc", "runs/dddddddddddd"


class Files:
    """What models need, as the controller knows it."""

    async def known(self, definition: Definition) -> tuple[ReplicaFile, ...] | None:
        return (ReplicaFile(f"{NEW}/w.bin", "sha256:a", 1),) if definition.name == "smol" else None


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        ([f"{OLD}/w.bin", f"{OLD}/w.bin.sha256"], {OLD}),
        ([f"{OLD}/sub/w.bin", f"{OLD}/sub/w.bin.sha256.target"], {OLD}),
        ([f"{OLD}/w.bin", f"{OLD}/w.bin.sha256", f"{OLD}/not-ours"], set()),
        ([f"{NEW}/w.bin", f"{NEW}/w.bin.sha256"], set()),
        (["unsure/eeeeeeeeeeee/w", "unsure/eeeeeeeeeeee/w.sha256"], set()),
        (["smol/w.bin", "smol/w.bin.sha256", "aaaaaaaaaaab/w", "smol/notahexdigit/w", "w.sha256"], set()),
    ],
)
def test_what_is_ours_and_unwanted(listed: Sequence[str], found: set[str]) -> None:
    assert unwanted_sets(listed, {NEW}, {"unsure"}) == found


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(sqlite_url(tmp_path)) as opened:
        yield opened


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[LocalAIFiles]:
    files = LocalAIFiles(tmp_path / "worker", "shared")
    await files.start()
    yield files
    await files.close()


async def test_two_looks_and_it_is_gone(store: Store, worker: LocalAIFiles, tmp_path: Path) -> None:
    where = f"http://127.0.0.1:{worker.port}"
    node = a_node(protocol=0, auth="shared", approved=True, status="healthy", ingress_url=where)
    async with store.write() as tx:
        await nodes.insert(tx, node)
        await models.put(tx, a_model("smol", definition={"name": "smol"}))
        await peer_processes.put(tx, [a_peer_process(node.id, model="runs")])
    deleted: list[str] = []

    async def delete(asked: DeleteModel, _tokens: object) -> DoneReply:
        deleted.append(asked.model_name)
        return DoneReply(success=True)

    file = tmp_path / "file"
    file.write_bytes(b"x")
    digest = hashlib.sha256(b"x").hexdigest()
    hub = LocalHub(CLOCK)
    async with hub.join("worker") as theirs, hub.join("c") as bus, FileServers("shared", CLOCK) as servers:
        await theirs.serve(DELETE_MODEL, delete, node=node.id)
        place = FileServerAddress(node.name, node.ingress_url)
        for folder in (NEW, OLD, GONE, RUNS, ".corral-requests/1000-ffff"):
            await servers.put(place, f"models/{folder}/w.bin", file, digest, 1)
        calls = PeerCalls(bus, CLOCK, PeerTimes(), galleries_with=no_galleries)
        leadership = Leadership(store, "c", ttl_s=10)
        table = PeerTable(store, leadership, ChangeFeed(store, bus, CLOCK, interval_s=1), CLOCK, lease="replicas")
        async with RequestFiles(servers, calls, CLOCK, tmp_path / "requests") as requests:
            sweeping = PeerCleanup(store, calls, servers, Files(), requests, table, CLOCK)
            await sweeping.run_once()
            assert deleted == [], "another controller leads"
            assert await leadership.lead("replicas")
            await sweeping.run_once()
            await until(lambda: deleted == [".corral-requests/1000-ffff"], "end of an old request's files")
            await sweeping.run_once()
            assert sorted(set(deleted)) == [".corral-requests/1000-ffff", GONE, OLD]
