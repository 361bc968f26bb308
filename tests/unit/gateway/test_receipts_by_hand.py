"""Receipts of the short way, which are written without an object: they read as if they were."""

from __future__ import annotations

import json

from corral.contract.codec import decode
from corral.contract.http import Target
from corral.contract.receipts import Receipt, Receipts
from corral.contract.view import ViewNode, ViewReplica
from corral.gateway.inflight import Load
from corral.gateway.metrics import RouteCounts
from corral.gateway.receipts import ReceiptRing, ReceiptSender, Tag, receipt_of
from corral.gateway.replicas import Replica
from corral.gateway.view import Client
from corral.kit.clock import SystemClock
from corral.kit.errors import Failed


def test_receipts_written_by_hand_are_receipts() -> None:
    seen = ViewReplica('p"1', "n1", "small", replica=2, revision="r", digest="sha256:d")
    replica = Replica(seen, ViewNode("n1", "node"), Target("h", 1), Load())
    client = Client("k", "inference", True, True, False, 0.0, None, b"")
    tag = Tag(client, replica.route(b"/v1/x?y", "small"), b"/v1/x", None)
    answer = json.dumps({"usage": {"prompt_tokens": 8, "completion_tokens": 9}}).encode()
    told = decode(Receipt, receipt_of((tag, b"id-1", 200, 5.0, 5.25, answer), 1000.0))
    assert told == Receipt(
        id="id-1",
        at=1005.0,
        key_id="k",
        model="small",
        path="/v1/x",
        status=200,
        node_id="n1",
        process_id='p"1',
        replica=2,
        revision="r",
        digest="sha256:d",
        total_ms=250.0,
        prompt_tokens=8,
        completion_tokens=9,
    )
    ring = ReceiptRing(2)
    ring.keep([(tag, b"id-1", 200, 5.0, 5.25, answer)] * 3)
    assert (len(ring.take()), ring.dropped) == (2, 1)


class Desk:
    """Takes no body over a megabyte, as the controller."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    async def send_receipts(self, batch: bytes) -> None:
        if len(batch) > 1024 * 1024:
            raise Failed("the controller answered 413 on /internal/receipts")
        self.taken += [receipt.id for receipt in decode(Receipts, batch).receipts]


async def test_what_gathered_while_the_controller_was_away_goes_in_batches_it_takes() -> None:
    ring, desk, clock = ReceiptRing(10_000), Desk(), SystemClock()
    sender = ReceiptSender(ring, RouteCounts(), desk, clock, lambda: 0.0, dict, interval_s=1.0)
    for number in range(5000):
        ring.note(Receipt(id=str(number), model="\0" * 200, revision="r" * 64, digest="d" * 71))
    await sender.send()
    assert desk.taken == [str(number) for number in range(5000)]
    assert ring.take() == []
