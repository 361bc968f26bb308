"""Workers that send each other chunks: most bytes come from peers, whatever some of the peers do."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from corral.blobs.swarm.planner import PlanLimits
from corral.blobs.swarm.rate_limit import RateLimit
from corral.contract.access import Scope
from corral.contract.messages.blobs import AnnounceBlobs
from corral.kit.clock import SystemClock
from corral.kit.errors import Invalid
from tests.support.swarm_fleet import Swarm, SwarmNode, make_test_ca, open_swarm
from tests.support.waiting import until

MIB = 1 << 20
CONTENT = os.urandom(22 * MIB + 9)
DIGEST = "sha256:" + hashlib.sha256(CONTENT).hexdigest()
QUICK = PlanLimits(fallback_s=1.0, min_overtake_s=0.5, first_pause_s=0.05)


@pytest.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[Swarm]:
    async with open_swarm(tmp_path) as opened:
        yield opened


def is_right(node: SwarmNode) -> bool:
    return node.store.get(DIGEST).path.read_bytes() == CONTENT


async def ask(
    swarm: Swarm, node: SwarmNode, token: str, digest: str = DIGEST, span: str = "0-9", method: str = "GET"
) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {token}", "Range": f"bytes={span}"}
    try:
        async with swarm.session.request(method, f"{node.url}/blobs/{digest}", headers=headers) as answer:
            return answer.status, await answer.read()
    except aiohttp.ClientPayloadError:  # cut off in the middle
        return 0, b""


def token_for(swarm: Swarm, node: SwarmNode, *, sub: str = "id-x", digest: str = DIGEST, life_s: float = 300) -> str:
    return swarm.tokens.sign(sub, [Scope.BLOBS], aud=node.node_id, life_s=life_s, digests=(digest,))


async def test_a_second_worker_fetches_from_the_first(swarm: Swarm) -> None:
    file = swarm.source.add("w", CONTENT)
    first, second = await swarm.join("a"), await swarm.join("b")
    await first.obtain(file)
    assert first.received == {"controller": len(CONTENT)}
    await until(lambda: DIGEST in swarm.peers._tracker._blobs, "the first has announced the blob")
    before = swarm.source.listener.sent_bytes
    await second.obtain(file)
    assert is_right(second)
    assert second.received["peer"] > second.received["controller"]
    assert second.seen[-1].sources["a"] == second.received["peer"]
    assert sum(first.sent) >= second.received["peer"]
    assert swarm.source.listener.sent_bytes - before == second.received["controller"]


async def test_workers_that_start_together_share_the_file(swarm: Swarm) -> None:
    file = swarm.source.add("w", CONTENT)
    nodes = [await swarm.join(name, max_download=30 * MIB) for name in "abcd"]
    await asyncio.gather(*(node.obtain(file) for node in nodes))
    assert all(map(is_right, nodes))
    assert swarm.source.listener.sent_bytes <= 1.85 * len(CONTENT)  # six chunks: one repeated chunk is 0.18
    assert sum(node.received["peer"] for node in nodes) >= 2 * len(CONTENT)
    assert all(sum(node.received.values()) == len(CONTENT) for node in nodes)


async def test_certificates_of_peers_are_verified(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, ca=make_test_ca()) as swarm:
        file = swarm.source.add("w", CONTENT)
        first, second = await swarm.join("a"), await swarm.join("b")
        await first.obtain(file)
        await until(lambda: DIGEST in swarm.peers._tracker._blobs, "the first has announced the blob")
        await second.obtain(file)
        assert second.received["peer"] > 0
        # The same machine under another node's name is not trusted.
        third = await swarm.join("c", limits=QUICK)
        swarm.peers._tracker._nodes["id-a"].address = swarm.peers._tracker._nodes["id-b"].address
        await swarm.peers.run_once()
        await third.obtain(file)
        assert is_right(third)
        assert "a" not in third.seen[-1].sources


async def test_a_peer_that_sends_wrong_chunks_is_banned_and_named(swarm: Swarm) -> None:
    file = swarm.source.add("w", CONTENT)
    liar, honest, asker = await swarm.join("liar"), await swarm.join("honest"), await swarm.join("asker", limits=QUICK)
    await liar.obtain(file)
    await honest.obtain(file)
    await until(lambda: len(swarm.peers._tracker._blobs[DIGEST].holdings) == 2, "both have announced the blob")
    swarm.spoilers["liar"].spoils = True
    await asker.obtain(file)
    assert is_right(asker)
    assert asker.seen[-1].banned == ("liar",)
    assert "liar" not in asker.seen[-1].sources
    assert asker.seen[-1].sources["honest"] > 0


async def test_a_peer_that_dies_or_stalls_costs_time_only(swarm: Swarm) -> None:
    file = swarm.source.add("w", CONTENT)
    dead, silent, asker = await swarm.join("dead"), await swarm.join("silent"), await swarm.join("asker", limits=QUICK)
    await dead.obtain(file)
    await silent.obtain(file)
    await until(lambda: len(swarm.peers._tracker._blobs[DIGEST].holdings) == 2, "both have announced the blob")
    await dead.server.drain(0.0)
    swarm.spoilers["silent"].stalls = True
    async with asyncio.timeout(30):
        await asker.obtain(file)
    assert is_right(asker)
    assert asker.received["controller"] == len(CONTENT)


async def test_peers_behind_one_slow_link_leave_the_work_to_the_controller(swarm: Swarm) -> None:
    file = swarm.source.add("w", CONTENT)
    link = RateLimit(MIB / 16, SystemClock())  # of the site where both of them are: the file alone takes six minutes
    peers = [await swarm.join(name, upload=link) for name in ("a", "b")]
    asker = await swarm.join("asker", limits=QUICK)
    for peer in peers:
        await peer.obtain(file)
    await until(lambda: len(swarm.peers._tracker._blobs[DIGEST].holdings) == 2, "both have announced the blob")
    async with asyncio.timeout(90):
        await asker.obtain(file)
    assert is_right(asker)
    assert asker.received["controller"] > asker.received["peer"]


async def test_without_the_controllers_answer_its_listener_is_enough(swarm: Swarm) -> None:
    file, node = swarm.source.add("w", CONTENT), await swarm.join("a")
    swarm.is_away = True
    async with asyncio.timeout(20):
        await node.obtain(file)
    assert is_right(node)


async def test_a_worker_that_is_still_downloading_serves_its_verified_chunks(swarm: Swarm) -> None:
    file = swarm.source.add("w", CONTENT)
    slow = await swarm.join("slow", max_download=4 * MIB)
    running = asyncio.create_task(slow.obtain(file))
    await until(lambda: DIGEST in slow.served.downloads and len(slow.served.downloads[DIGEST].have), "a first chunk")
    have = slow.served.downloads[DIGEST].have
    here, absent = next(iter(have)), next(index for index in range(6) if index not in have)
    token = token_for(swarm, slow)
    start = here * 4 * MIB
    assert await ask(swarm, slow, token, span=f"{start}-{start + 99}") == (206, CONTENT[start : start + 100])
    assert (await ask(swarm, slow, token, span=f"{absent * 4 * MIB}-{absent * 4 * MIB + 9}"))[0] == 404
    assert (await ask(swarm, slow, token, span=f"0-{len(CONTENT)}"))[0] == 404  # not all of it is verified
    running.cancel()
    await asyncio.wait([running])
    assert (await ask(swarm, slow, token, span=f"{start}-{start + 99}"))[0] == 404


async def test_tokens_open_the_named_blobs_of_the_named_node_only(swarm: Swarm) -> None:
    file, other = swarm.source.add("w", CONTENT), swarm.source.add("v", CONTENT[: 5 * MIB])
    node, foreign = await swarm.join("a"), await swarm.join("b")
    await node.obtain(file)
    await node.obtain(other)
    good = token_for(swarm, node)
    assert await ask(swarm, node, good) == (206, CONTENT[:10])
    assert (await ask(swarm, node, good, method="HEAD"))[0] == 206
    assert (await ask(swarm, node, good, digest=other.digest))[0] == 403
    assert (await ask(swarm, node, good, span=f"{len(CONTENT)}-"))[0] == 416
    assert (await ask(swarm, node, good, digest="../../etc/passwd"))[0] in (400, 404)
    assert (await ask(swarm, node, good, method="PUT"))[0] == 405
    assert (await ask(swarm, node, token_for(swarm, foreign)))[0] == 403
    assert (await ask(swarm, node, token_for(swarm, node, life_s=-1)))[0] == 401
    assert (await ask(swarm, node, "x" + good))[0] == 401
    unnamed = swarm.tokens.sign("gateway", [Scope.BLOBS], aud=node.node_id)
    assert (await ask(swarm, node, unnamed))[0] == 403
    wrong_scope = swarm.tokens.sign("gateway", [Scope.REPLICAS], aud=node.node_id, digests=(DIGEST,))
    assert (await ask(swarm, node, wrong_scope))[0] == 403
    absent = "sha256:" + "0" * 64
    assert (await ask(swarm, node, token_for(swarm, node, digest=absent), digest=absent))[0] == 404


async def test_a_deleted_node_is_refused_by_its_peers(swarm: Swarm) -> None:
    file = swarm.source.add("w", CONTENT)
    server, asker = await swarm.join("server"), await swarm.join("asker", max_download=4 * MIB)
    await server.obtain(file)
    await until(lambda: DIGEST in swarm.peers._tracker._blobs, "the server has announced the blob")
    running = asyncio.create_task(asker.obtain(file))
    await until(lambda: ("id-server", DIGEST) in asker.exchange._tokens, "a token for the peer")
    token = asker.exchange._tokens["id-server", DIGEST].token
    assert (await ask(swarm, server, token))[0] == 206
    running.cancel()
    await asyncio.wait([running])
    del swarm.members.credentials["id-asker"]

    async def is_refused() -> bool:
        return (await ask(swarm, server, token))[0] == 403

    await until(is_refused, "the peer refuses the token", timeout_s=5)
    # A node that comes back under the same id gets tokens that count.
    again = token_for(swarm, server, sub="id-asker", life_s=303)
    assert (await ask(swarm, server, again))[0] == 206


@pytest.mark.parametrize(
    "announced",
    [
        AnnounceBlobs(want={DIGEST: 1 << 40}),
        AnnounceBlobs(want={DIGEST: -1}),
        AnnounceBlobs(want={DIGEST: 0}),
        AnnounceBlobs(want={"sha256:../../etc/passwd": 4}),
        AnnounceBlobs(have={"": "all"}),
        AnnounceBlobs(want={f"sha256:{number:064}": 1 for number in range(201)}),
    ],
)
async def test_an_announcement_that_cannot_be_is_refused(swarm: Swarm, announced: AnnounceBlobs) -> None:
    with pytest.raises(Invalid):
        swarm.peers.exchange("id-a", "a", "http://a", announced)
    assert swarm.peers._tracker._blobs == {}


async def test_uploads_at_a_time_are_bounded(swarm: Swarm) -> None:
    file, node = swarm.source.add("w", CONTENT), await swarm.join("a")
    await node.obtain(file)
    node.served._used = node.served._slots
    assert (await ask(swarm, node, token_for(swarm, node)))[0] == 503
    node.served._used = 0
    assert (await ask(swarm, node, token_for(swarm, node)))[0] == 206
    # The reader has all bytes a moment before the worker counts the slot as free.
    await until(lambda: node.served.free_slots == node.served._slots, "the slot is free again")


async def test_a_file_is_open_until_the_last_read_of_it_has_ended(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, node = swarm.source.add("w", CONTENT), await swarm.join("a")
    await node.obtain(file)
    is_reading, may_end, read_from, read = threading.Event(), threading.Event(), list[bool](), os.pread
    (blob,) = (node.store.folder / "sha256").iterdir()

    def slow_read(descriptor: int, count: int, start: int) -> bytes:
        if start:
            is_reading.set()
            may_end.wait(20)
        read_from.append(Path(f"/proc/self/fd/{descriptor}").exists() and os.path.sameopenfile(descriptor, opened))
        return read(descriptor, count, start)

    opened = os.open(blob, os.O_RDONLY)

    monkeypatch.setattr(os, "pread", slow_read)
    asking = asyncio.create_task(ask(swarm, node, token_for(swarm, node), span="0-"))
    await until(is_reading.is_set, "the second piece is read")
    asking.cancel()  # the client leaves,
    await asyncio.wait([asking])
    draining = asyncio.create_task(node.server.drain(0.0))  # and the worker ends at the same moment
    await asyncio.wait([draining], timeout=0.3)
    may_end.set()
    await draining
    await until(lambda: node.served.free_slots == node.served._slots, "the upload has ended")
    os.close(opened)
    assert len(read_from) >= 2
    assert all(read_from), "another file had taken the number of the descriptor, or none"


async def test_uploads_keep_to_the_limit(swarm: Swarm) -> None:
    file = swarm.source.add("w", CONTENT[: 9 * MIB])
    node = await swarm.join("a", max_upload=6 * MIB)
    await node.obtain(file)
    loop = asyncio.get_running_loop()
    began = loop.time()
    status, body = await ask(swarm, node, token_for(swarm, node, digest=file.digest), file.digest, span="0-")
    assert (status, body) == (206, CONTENT[: 9 * MIB])
    assert loop.time() - began > 1.0
