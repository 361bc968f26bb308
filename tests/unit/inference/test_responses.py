"""What the events of a stream of `/v1/responses` lack is added; what they have is left as it is."""

from __future__ import annotations

import json
from typing import Any

from corral.inference.responses import StreamRepair

# As llama.cpp writes them.
EVENTS: list[dict[str, Any]] = [
    {"type": "response.created", "response": {"id": "resp_1", "object": "response", "status": "in_progress"}},
    {"type": "response.output_item.added", "item": {"id": "rs_1", "type": "reasoning", "content": []}},
    {"type": "response.reasoning_text.delta", "item_id": "rs_1", "delta": "so"},
    {"type": "response.output_item.added", "item": {"id": "msg_1", "type": "message", "content": []}},
    {"type": "response.content_part.added", "item_id": "msg_1", "part": {"type": "output_text", "text": ""}},
    {"type": "response.output_text.delta", "item_id": "msg_1", "delta": "Hello"},
    {"type": "response.output_item.added", "item": {"call_id": "fc_1", "type": "function_call", "arguments": ""}},
    {"type": "response.function_call_arguments.delta", "item_id": "fc_1", "delta": "{}"},
    {"type": "response.completed", "response": {"id": "resp_1", "output": [{"id": "msg_1"}]}},
]


def repaired(*lines: bytes) -> list[bytes]:
    repair = StreamRepair()
    return [repair.line(line) for line in lines]


def written(*events: dict[str, Any]) -> list[bytes]:
    return [b"data: " + json.dumps(event).encode() for event in events]


def test_events_say_where_they_belong() -> None:
    events = [json.loads(line.removeprefix(b"data: ")) for line in repaired(*written(*EVENTS))]
    assert [event["sequence_number"] for event in events] == list(range(len(EVENTS)))
    assert events[0]["response"] == {**EVENTS[0]["response"], "output": []}
    assert events[-1]["response"] == EVENTS[-1]["response"]
    assert [event.get("output_index") for event in events] == [None, 0, 0, 1, 1, 1, 2, 2, None]
    assert [event.get("content_index") for event in events] == [None, None, 0, None, 0, 0, None, None, None]
    for before, after in zip(EVENTS[1:], events[1:], strict=True):
        assert before.items() <= after.items()


def test_events_that_lack_nothing_are_left_as_they_are() -> None:
    whole = [
        b'data: {"type": "response.created",  "sequence_number": 0, "response": {"output": []}}',
        b'data:{"type":"response.output_text.delta","sequence_number":1,"item_id":"m","output_index":4,'
        b'"content_index":2,"delta":"a"}',
        b"event: response.created",
        b"",
        b": ping",
        b"data: [DONE]",
        b'data: {"error": {"message": "no"}}',
        b"data: 7",
        b"data: {",
    ]
    assert repaired(*whole) == whole
