"""Receipts of the fast path, which are formatted without an object, decode to the same receipts; batches are
bounded."""

from __future__ import annotations

import json

from corral.contract.codec import decode
from corral.contract.http import Target
from corral.contract.receipts import Receipt, Receipts
from corral.contract.view import ViewNode, ViewReplica
from corral.gateway.receipts.buffer import ReceiptBuffer, ReceiptTemplate, write_receipt
from corral.gateway.receipts.metrics import RouteCounts
from corral.gateway.receipts.sender import ReceiptSender
from corral.gateway.routing.in_flight import SlotCounter
from corral.gateway.routing.replicas import ReplicaTarget
from corral.gateway.view.fleet import Client
from corral.kit.clock import SystemClock
from corral.kit.errors import Failed
from tests.support.scripted_controller_link import ScriptedControllerLink


def test_receipts_of_the_fast_path_decode_to_receipts() -> None:
    seen = ViewReplica('p"1', "n1", "small", replica=2, revision="r", digest="sha256:d")
    replica = ReplicaTarget(seen, ViewNode("n1", "node"), Target("h", 1), SlotCounter())
    client = Client("k", "inference", True, True, False, 0.0, None, b"")
    template = ReceiptTemplate(client, replica.route(b"/v1/x?y", "small"), b"/v1/x")
    answer = json.dumps({"usage": {"prompt_tokens": 8, "completion_tokens": 9}}).encode()
    receipt = decode(Receipt, write_receipt((template, b"id-1", 200, 5.0, 5.25, answer), 1000.0))
    assert receipt == Receipt(
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
    buffer = ReceiptBuffer(2)
    buffer.add_finished([(template, b"id-1", 200, 5.0, 5.25, answer)] * 3)
    assert (len(buffer.take()), buffer.dropped) == (2, 1)


class LimitedController(ScriptedControllerLink):
    """Accepts no body over a megabyte, like the controller."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    async def send_receipts(self, batch: bytes) -> None:
        if len(batch) > 1024 * 1024:
            raise Failed("the controller answered 413 on /internal/receipts")
        self.taken += [receipt.id for receipt in decode(Receipts, batch).receipts]


async def test_receipts_that_waited_for_the_controller_are_sent_in_batches_it_accepts() -> None:
    buffer, controller, clock = ReceiptBuffer(10_000), LimitedController(), SystemClock()
    sender = ReceiptSender(buffer, RouteCounts(), controller, clock, lambda: 0.0, dict, interval_s=1.0)
    for number in range(5000):
        buffer.add(Receipt(id=str(number), model="\0" * 200, revision="r" * 64, digest="d" * 71))
    await sender.run_once()
    assert controller.taken == [str(number) for number in range(5000)]
    assert buffer.take() == []
