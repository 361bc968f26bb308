"""The W3C trace context, and which requests are traced."""

from __future__ import annotations

from typing import Any

import pytest

from corral.gateway.http.headers import HIDDEN_WITH_PARENT, HIDDEN_WITHOUT_PARENT, hidden_from_replica
from corral.kit.settings import BadSettings, read_settings
from corral.kit.tracing.context import Parent, TraceContext, parse_traceparent
from corral.kit.tracing.settings import TraceSettings
from corral.kit.tracing.tracer import Tracer, open_tracer

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "parent"),
    [
        (f"00-{TRACE}-{SPAN}-01", Parent(TRACE, SPAN, True)),
        (f"00-{TRACE}-{SPAN}-00", Parent(TRACE, SPAN, False)),
        (f"00-{TRACE}-{SPAN}-03", Parent(TRACE, SPAN, True)),
        (f" 00-{TRACE}-{SPAN}-02 ", Parent(TRACE, SPAN, False)),
        (f"cc-{TRACE}-{SPAN}-01-what-comes-later", Parent(TRACE, SPAN, True)),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE}-{SPAN}", None),
        (f"00-{TRACE[1:]}-{SPAN}-01", None),
        ("", None),
    ],
)
def test_a_traceparent_is_read_as_the_specification_says(header: str, parent: Parent | None) -> None:
    assert parse_traceparent(header.encode()) == parent


def test_a_child_names_its_parent() -> None:
    first = TraceContext.first()
    child = first.child()
    assert (child.trace_id, child.parent_id) == (first.trace_id, first.span_id)
    assert parse_traceparent(child.traceparent()) == Parent(first.trace_id, child.span_id, True)
    below = TraceContext.below(Parent(TRACE, SPAN, True))
    assert (below.trace_id, below.parent_id) == (TRACE, SPAN)


def tracer(**more: Any) -> Tracer:
    settings = TraceSettings(traces_endpoint="http://127.0.0.1:9", **more)
    found = open_tracer(settings, "corral-gateway", lambda: 0.0)
    assert found is not None
    return found


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (1.0, 10_000, 10_000), (0.1, 800, 1200)])
def test_the_share_of_requests_is_traced(share: float, least: int, most: int) -> None:
    """10 %: 1,000 of 10,000; the bounds are six standard deviations away."""
    made = tracer(traces_sample=share)
    assert least <= sum(made.is_sampled() for _ in range(10_000)) <= most


def test_the_client_decides_for_requests_with_a_traceparent() -> None:
    sampled = [(b"traceparent", f"00-{TRACE}-{SPAN}-01".encode())]
    not_sampled = [(b"traceparent", f"00-{TRACE}-{SPAN}-00".encode())]
    never, always = tracer(traces_sample=0.0), tracer(traces_sample=1.0)
    found = never.start(sampled)
    assert found is not None
    assert (found.trace_id, found.parent_id) == (TRACE, SPAN)
    assert always.start(not_sampled) is None
    assert tracer(traces_sample=1.0, traces_follow_clients=False).start(sampled) is None
    assert always.decline(Parent(TRACE, SPAN, sampled=True)) == b"", "it is passed on as it came"
    deaf = tracer(traces_follow_clients=False)
    assert deaf.decline(None) == deaf.decline(Parent(TRACE, SPAN, sampled=False)) == b""
    declined = parse_traceparent(deaf.decline(Parent(TRACE, SPAN, sampled=True)))
    assert declined is not None
    assert (declined.trace_id, declined.sampled) == (TRACE, False)
    assert declined.span_id != SPAN
    broken = always.start([(b"traceparent", b"00-broken")])
    assert broken is not None, "as without one"
    assert broken.parent_id == ""
    assert always.start(sampled * 2) not in (None, found), "two of them are as none"


def test_a_worker_traces_only_what_its_gateway_traces() -> None:
    always = tracer(traces_sample=1.0)
    assert always.join([]) is None
    assert always.join([(b"traceparent", f"00-{TRACE}-{SPAN}-00".encode())]) is None
    found = always.join([(b"traceparent", f"00-{TRACE}-{SPAN}-01".encode())])
    assert found is not None
    assert found.parent_id == SPAN


def test_the_state_of_a_trace_goes_on_only_with_its_trace() -> None:
    state = (b"tracestate", b"vendor=1")
    assert hidden_from_replica([(b"traceparent", f"00-{TRACE}-{SPAN}-01".encode()), state]) is HIDDEN_WITH_PARENT
    assert hidden_from_replica([(b"traceparent", b"broken"), state]) is HIDDEN_WITHOUT_PARENT
    assert not HIDDEN_WITH_PARENT.drops(b"tracestate")
    assert HIDDEN_WITHOUT_PARENT.drops(b"tracestate")
    assert HIDDEN_WITH_PARENT.drops(b"authorization")


@pytest.mark.parametrize(
    ("variable", "value", "fault"),
    [
        ("CORRAL_TRACES_ENDPOINT", "collector:4318", "is not a URL"),
        ("CORRAL_TRACES_ENDPOINT", "http://me:secret@collector", "carries a password"),
        ("CORRAL_TRACES_SAMPLE", "2", "between 0 and 1"),
        ("CORRAL_TRACES_SAMPLE", "some", "is no share"),
        ("CORRAL_TRACES_HEADERS", "Authorization", "NAME=VALUE"),
    ],
)
def test_bad_settings_are_refused(variable: str, value: str, fault: str) -> None:
    with pytest.raises(BadSettings, match=fault):
        read_settings(TraceSettings, flags={}, env={variable: value})


def test_settings_are_read() -> None:
    env = {"CORRAL_TRACES_ENDPOINT": "http://collector:4318/v1/traces", "CORRAL_TRACES_SAMPLE": "5%"}
    settings = read_settings(TraceSettings, flags={}, env=env)
    assert (settings.traces_endpoint, settings.traces_sample) == ("http://collector:4318", 0.05)
    assert open_tracer(TraceSettings(), "corral-gateway", lambda: 0.0) is None, "off by default"
