"""Receipts of the fast path, which are formatted without an object, decode to the same receipts; batches are
bounded."""

from __future__ import annotations

import json

import pytest

from corral.contract.codec import decode
from corral.contract.http import Target
from corral.contract.receipts import MAX_ERROR_TEXT, Receipt, Receipts
from corral.contract.view import ViewNode, ViewReplica
from corral.gateway import responses
from corral.gateway.receipts.buffer import ReceiptBuffer, ReceiptTemplate, write_receipt
from corral.gateway.receipts.metrics import RouteCounts
from corral.gateway.receipts.sender import ReceiptSender
from corral.gateway.responses import Response, receipt_error
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


@pytest.mark.parametrize(
    ("response", "reason", "code", "text"),
    [
        (
            responses.at_limit("m", 2, 1.0),
            "",
            "model_busy",
            "2 requests for `m` are in progress, the limit of its defin",
        ),
        (responses.model_loading("m", None, 5.0), "", "model_loading", "The model `m` is being loaded (pending)."),
        (
            responses.openai_error(502, "It broke off.", code="c"),
            "reset\n by peer",
            "c",
            "It broke off. (reset by peer)",
        ),
        (responses.unreachable("m", 1.0), "refused", "upstream_failed", "wait time ended. (refused)"),
        (responses.openai_error(400, "wrong"), "", "invalid_request_error", "wrong"),
        (responses.openai_error(500, "a\x1b[31m\n\tb"), "", "invalid_request_error", "a\\x1b[31m b"),
        (responses.openai_error(500, f"with ck_{'a' * 32}"), "", "invalid_request_error", "with ck_***"),
    ],
)
def test_a_receipt_says_in_one_line_what_failed(response: Response, reason: str, code: str, text: str) -> None:
    error = receipt_error(response, reason)
    assert error.code == code
    assert text in error.text


def test_the_text_of_an_error_in_a_receipt_is_bounded() -> None:
    error = receipt_error(responses.openai_error(500, "x" * 5000, code="model_load_failed"))
    assert (len(error.text), error.text[-2:]) == (MAX_ERROR_TEXT, "x…")


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
