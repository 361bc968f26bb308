"""Who is told whom to ask, and which chunks each worker fetches from the controller."""

from __future__ import annotations

from collections import Counter

import pytest

from corral.blobs.swarm.chunk_set import ChunkSet
from corral.controller.files.swarm.blob_tracker import SAMPLE, BlobTracker, PeerAddress, TrackerHints

D = "sha256:" + "1" * 64
E = "sha256:" + "2" * 64


class Fleet:
    def __init__(self) -> None:
        self.tracker = BlobTracker(seed=7)
        self.now_s = 100.0

    def tell(
        self, node: str, have: dict[str, str] | None = None, want: dict[str, int] | None = None, *, full: bool = False
    ) -> None:
        self.tracker.announce(
            node,
            PeerAddress(node.upper(), f"http://{node}"),
            have or {},
            want or {},
            is_full=full,
            free_slots=4,
            now_s=self.now_s,
        )

    def want(self, node: str, count: int, *chunks: int) -> TrackerHints:
        self.tell(node, {D: ChunkSet.of(count, chunks).encode()}, {D: count})
        return self.tracker.hints(node, D, count, self.now_s)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_a_worker_alone_is_unrestricted_after_a_moment(fleet: Fleet) -> None:
    first = fleet.want("a", 50)
    assert not first.is_unrestricted
    assert len(first.assigned) == 1
    fleet.now_s += 0.6
    assert fleet.want("a", 50).is_unrestricted


def test_workers_that_start_together_get_different_chunks(fleet: Fleet) -> None:
    hints = {node: fleet.want(node, 50) for node in "abcdef"}
    assigned = [chunk for each in hints.values() for chunk in each.assigned]
    assert len(assigned) == len(set(assigned)) == 4
    assert all(len(each.assigned) <= 1 for each in hints.values())
    assert fleet.want("a", 50).assigned == hints["a"].assigned  # asking again changes nothing


def test_a_chunk_that_arrived_makes_place_for_the_next(fleet: Fleet) -> None:
    (first,) = fleet.want("a", 50).assigned
    (other,) = fleet.want("b", 50).assigned
    fleet.now_s += 0.2
    second = fleet.want("a", 50, first).assigned
    assert len({first, other, *second}) == 4, "two for one that arrived within a second"


def test_each_chunk_leaves_the_controller_about_once(fleet: Fleet) -> None:
    """Workers report after each chunk; peers pass on nothing, the worst case for the controller."""
    have: dict[str, set[int]] = {node: set() for node in "abcd"}
    sent: Counter[int] = Counter()
    for _ in range(200):
        for node, chunks in have.items():
            fleet.now_s += 0.1
            for chunk in fleet.want(node, 20, *chunks).assigned:
                sent[chunk] += 1
                chunks.add(chunk)
    assert set(sent) == set(range(20))
    assert sent.total() <= 1.3 * 20 + 1


def test_leases_of_a_silent_worker_end(fleet: Fleet) -> None:
    lost = fleet.want("a", 2).assigned
    rest = fleet.want("b", 2).assigned
    assert set(lost) | set(rest) == {0, 1}
    fleet.now_s += 16.0
    assert fleet.want("b", 2, *rest).assigned == lost


def test_peers_are_those_that_have_something(fleet: Fleet) -> None:
    fleet.tell("a", {D: "all"})
    fleet.tell("b", {D: ChunkSet.of(4, [1]).encode()})
    fleet.tell("c", {E: "all"})
    hints = fleet.want("x", 4, 1)
    assert [(peer.node_id, peer.address, peer.have) for peer in hints.peers] == [
        ("a", PeerAddress("A", "http://a"), "all")
    ]
    assert {peer.node_id for peer in fleet.want("y", 4).peers} == {"a", "b", "x"}


def test_a_worker_that_names_another_number_of_chunks_stands_in_nobodys_way(fleet: Fleet) -> None:
    (large,) = fleet.want("a", 5000).assigned
    assert large >= 4
    assert len(fleet.want("b", 4).assigned) == 1
    assert fleet.want("a", 4).assigned == ()


def test_with_two_complete_copies_the_controller_sends_one_chunk_at_a_time(fleet: Fleet) -> None:
    fleet.tell("a", {D: "all"})
    (chunk,) = fleet.want("x", 4).assigned
    assert len(fleet.want("x", 4, chunk).assigned) == 2
    fleet.tracker.forget("x")
    fleet.tell("b", {D: "all"})
    (first,) = fleet.want("y", 4).assigned
    assert fleet.want("y", 4).assigned == (first,)
    (second,) = fleet.want("y", 4, first).assigned
    assert second != first


def test_the_answer_is_a_bounded_sample(fleet: Fleet) -> None:
    for number in range(200):
        fleet.tell(f"n{number}", {D: "all"})
    seen: set[str] = set()
    for _ in range(30):
        peers = fleet.want("x", 4).peers
        assert len(peers) == SAMPLE
        seen |= {peer.node_id for peer in peers}
    assert len(seen) > 100


def test_what_is_gone_is_forgotten(fleet: Fleet) -> None:
    fleet.tell("a", {D: "all", E: "all"}, full=True)
    fleet.tell("a", {E: "all"}, full=True)
    assert fleet.want("x", 4).peers == ()
    fleet.tell("b", {D: "all"})
    fleet.tracker.forget("b")
    assert fleet.want("x", 4).peers == ()
    fleet.tell("c", {D: "all"})
    fleet.now_s += 181.0
    assert fleet.want("x", 4).peers == ()


def test_bitmaps_that_fit_no_blob_count_as_nothing(fleet: Fleet) -> None:
    fleet.tell("a", {D: "!!"})
    assert fleet.want("x", 4).peers == ()


def test_many_workers_announce_less_often(fleet: Fleet) -> None:
    fleet.want("a", 4)
    assert fleet.tracker.next_s() == 0.5
    for number in range(400):
        fleet.want(f"n{number}", 4)
    assert fleet.tracker.next_s() > 9.0
