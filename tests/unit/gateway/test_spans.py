"""Spans of requests that ended on the fast path: written from a template, they are those of their receipts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.contract.codec import decode
from corral.contract.http import Target
from corral.contract.receipts import Receipt
from corral.contract.view import ViewNode, ViewReplica
from corral.gateway.http.forward import ForwardTag, TracedTag
from corral.gateway.receipts.buffer import write_receipt
from corral.gateway.receipts.spans import RequestTrace, build_spans, write_spans
from corral.gateway.receipts.usage import StreamSummary, Usage
from corral.gateway.routing.in_flight import SlotCounter
from corral.gateway.routing.replicas import ReplicaTarget
from corral.gateway.view.fleet import Client
from corral.kit.tracing.context import TraceContext
from corral.kit.tracing.otlp import Resource, encode_request, encode_span

SERVER = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "")
BELOW = TraceContext(SERVER.trace_id, "53995c3f42cd8ad8", "a3ce929d0e0e4736")


def tag(model: str, key: str, path: str) -> ForwardTag:
    seen = ViewReplica('p"1', "n1", model, replica=2, revision="r", digest="sha256:d")
    replica = ReplicaTarget(seen, ViewNode("n1", "node"), Target("h", 1), SlotCounter())
    client = Client(key, "inference", True, True, False, 0.0, None, b"")
    return ForwardTag(client, replica.route(b"/v1/x", model), path.encode("latin-1"), None)


NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
SUMMARIES = st.builds(
    StreamSummary, st.builds(Usage, st.integers(0, 10**9), st.integers(0, 10**9)), st.sampled_from([None, 0.125])
)


@given(NAMES, NAMES, st.sampled_from(["/v1/chat/completions", "/v1/x%sé", "/v1/embeddings"]), SUMMARIES)
def test_they_are_those_of_the_receipt(model: str, key: str, path: str, summary: StreamSummary) -> None:
    shared = tag(model, key, path)
    for server in (SERVER, BELOW, SERVER):
        trace = RequestTrace(server, server.child())
        traced = TracedTag(shared, trace)
        receipt = decode(Receipt, write_receipt((traced, b"id-1", 200, 5.0, 5.25, summary), 1000.0))
        written = [json.loads(each) for each in write_spans(traced, b"id-1", 200, (1005.0, 1005.25), summary)]
        built = [json.loads(encode_span(each)) for each in build_spans(trace, receipt)]
        for each in (*written, *built):
            each["attributes"] = {one["key"]: one["value"] for one in each["attributes"]}
        assert written == built
        assert len(written) == 2


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_request_to_the_collector_has_all_spans(count: int) -> None:
    summary = StreamSummary(Usage(3, 4), None)
    traced = TracedTag(tag("m", "k", "/v1/x"), RequestTrace(SERVER, SERVER.child()))
    spans = [span for _ in range(count) for span in write_spans(traced, b"id", 200, (1.0, 2.0), summary)]
    (process,) = json.loads(encode_request(Resource({"service.name": 'a"b'}, "1"), spans))["resourceSpans"]
    assert process["resource"]["attributes"] == [{"key": "service.name", "value": {"stringValue": 'a"b'}}]
    (scope,) = process["scopeSpans"]
    assert scope["scope"] == {"name": "corral", "version": "1"}
    assert len(scope["spans"]) == 2 * count
