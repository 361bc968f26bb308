"""Traces from the gateway through a real ingress to real backend processes, as a collector gets them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from corral.gateway.main import Gateway
from corral.gateway.receipts.metrics import RouteClass, render
from corral.kit.clock import SystemClock
from corral.kit.tasks import background
from corral.kit.tracing.settings import TraceSettings
from corral.kit.tracing.tracer import open_tracer
from corral.worker.supervisor.spec import ProcessSpec
from tests.integration.gateway.conftest import USER, OpenGateway, bearer
from tests.integration.gateway.scripted_controller import ScriptedController
from tests.support.ingress_with_backends import Worksite, open_site
from tests.support.supervising import mock_grpc, mock_openai, tiny
from tests.support.trace_collector import CollectedSpan, TraceCollector, running_collector
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SERVER, CLIENT = 2, 3


@dataclass
class TracedFleet:
    collector: TraceCollector
    site: Worksite
    controller: ScriptedController
    http: aiohttp.ClientSession
    open_one: OpenGateway
    exits: AsyncExitStack

    async def serve(self, spec: ProcessSpec) -> str:
        """A process that serves the model `small`; returns its id."""
        running = await self.site.supervisor.start(spec)
        node = {
            "id": "node-1",
            "name": "w1",
            "status": "healthy",
            "ingress_url": self.site.url,
            "ingress_token": self.site.token(),
        }
        replica = {"process_id": running.process_id, "node_id": "node-1", "model": "small", "revision": "r1"}
        self.controller.change(nodes=[node], models=[{"id": "small", "revision": "r1"}], replicas=[replica])
        return running.process_id

    async def gateway(self, **more: Any) -> Gateway:
        traced = {"traces_endpoint": self.collector.url, "traces_interval_s": 0.02, "traces_sample": 1.0}
        gateway = await self.exits.enter_async_context(self.open_one(**{**traced, **more}))
        await gateway.views.run_once()
        return gateway

    async def ask(self, gateway: Gateway, *, headers: dict[str, str] | None = None, **body: Any) -> Any:
        asked = {"model": "small", "messages": [{"role": "user", "content": "hi"}], **body}
        async with self.http.post(
            gateway.url + CHAT, headers={**bearer(USER), **(headers or {})}, json=asked
        ) as answer:
            text = await answer.text()
            assert answer.status == 200, text
            return json.loads(text) if text.startswith("{") else text

    async def spans(self, count: int) -> list[CollectedSpan]:
        await until(lambda: len(self.collector.spans) >= count, f"{count} spans")
        assert len(self.collector.spans) == count
        return self.collector.spans


@pytest.fixture
async def fleet(
    tmp_path: Path, controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession
) -> AsyncIterator[TracedFleet]:
    async with running_collector() as collector, AsyncExitStack() as exits:
        settings = TraceSettings(traces_endpoint=collector.url, traces_interval_s=0.02)  # type: ignore[arg-type]
        clock = SystemClock()
        tracer = open_tracer(settings, "corral-worker", lambda: clock.now().timestamp())
        assert tracer is not None
        async with background(tracer.exporter.run()), open_site(tmp_path, tracer) as site:
            yield TracedFleet(collector, site, controller, http, open_one, exits)
            await exits.aclose()


def check_chain(chain: list[CollectedSpan]) -> None:
    """Each span is the parent of the next one, and contains it."""
    for above, below in itertools.pairwise(chain):
        assert below.trace_id == above.trace_id
        assert below.parent_id == above.span_id
        # Their processes are one here, and so are their clocks; times are rounded to microseconds.
        assert above.started_at - 2e-3 <= below.started_at <= below.ended_at <= above.ended_at + 2e-3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_for_a_grpc_backend_is_one_trace(fleet: TracedFleet, stream: bool) -> None:
    process_id = await fleet.serve(mock_grpc(load='{"Model": "m"}'))
    gateway = await fleet.gateway()
    await fleet.ask(gateway, stream=stream)
    await fleet.spans(4)
    rpc = "backend.Backend/PredictStream" if stream else "backend.Backend/Predict"
    (ingress,) = [each for each in fleet.collector.spans if each.service == "corral-worker" and each.kind == SERVER]
    (request,) = [each for each in fleet.collector.spans if each.service == "corral-gateway" and each.kind == SERVER]
    call, bridge = fleet.collector.named("chat small"), fleet.collector.named(rpc)
    assert request.parent_id == ""
    assert (request.name, ingress.name) == (f"POST {CHAT}", f"POST {CHAT}")
    check_chain([request, call, ingress, bridge])
    assert [each.kind for each in (request, call, ingress, bridge)] == [SERVER, CLIENT, SERVER, CLIENT]
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["corral.request.id"] == ingress.attributes["corral.request.id"]
    assert call.attributes["gen_ai.operation.name"] == "chat"
    assert call.attributes["gen_ai.request.model"] == "small"
    assert call.attributes["gen_ai.usage.output_tokens"] > 0
    assert call.attributes["corral.process.id"] == ingress.attributes["corral.process.id"] == process_id
    assert ("first token" in call.events) is stream
    assert ("first reply" in bridge.events) is stream


async def test_requests_on_the_fast_path_are_traced_as_the_others(fleet: TracedFleet) -> None:
    await fleet.serve(mock_openai())
    gateway = await fleet.gateway()
    for _ in range(5):
        await fleet.ask(gateway)
    spans = await fleet.spans(15)
    traces: dict[str, list[CollectedSpan]] = {}
    for each in spans:
        traces.setdefault(each.trace_id, []).append(each)
    assert len(traces) == 5
    for found in traces.values():
        by_parent = {each.parent_id: each for each in found}
        request = by_parent[""]
        call = by_parent[request.span_id]
        check_chain([request, call, by_parent[call.span_id]])
        assert call.attributes["gen_ai.usage.input_tokens"] > 0
    counts = gateway.metrics.routes[RouteClass.INFERENCE]
    assert counts.by_status == {200: 5}
    assert gateway.metrics.relay.requests == 5
    # The first request is read as a whole, the second opens no connection: from then on gateway and ingress know it.
    assert fleet.site.routes.fast_path.ended[200] >= 3


@pytest.mark.parametrize("flags", ["01", "00"])
async def test_requests_with_traces_of_their_clients_take_the_fast_path(
    fleet: TracedFleet, tmp_path: Path, flags: str
) -> None:
    await fleet.serve(tiny(tmp_path / "tiny"))
    gateway = await fleet.gateway(traces_sample=1.0)
    for number in range(1, 7):
        trace_id = f"{number:032x}"
        seen = await fleet.ask(gateway, headers={"traceparent": f"00-{trace_id}-{SPAN}-{flags}"})
        if flags == "00":
            assert seen["traceparent"] == f"00-{trace_id}-{SPAN}-00"
            continue
        spans = (await fleet.spans(3 * number))[-3:]
        assert {each.trace_id for each in spans} == {trace_id}
        (request,) = [each for each in spans if each.parent_id == SPAN]
        (call,) = [each for each in spans if each.parent_id == request.span_id]
        (ingress,) = [each for each in spans if each.parent_id == call.span_id]
        check_chain([request, call, ingress])
        assert ingress.attributes["http.response.status_code"] == 200
        assert ingress.attributes["corral.request.id"] == request.attributes["corral.request.id"]
        assert seen["traceparent"] == f"00-{trace_id}-{ingress.span_id}-01"
    assert len(fleet.collector.spans) == (0 if flags == "00" else 18)
    assert fleet.site.routes.fast_path.ended[200] >= 4


async def test_the_trace_of_a_client_goes_on_to_the_backend(fleet: TracedFleet, tmp_path: Path) -> None:
    await fleet.serve(tiny(tmp_path / "tiny"))
    gateway = await fleet.gateway(traces_sample=0.0)
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
    for number in range(3):  # equal heads too
        seen = await fleet.ask(gateway, headers=headers)
        spans = (await fleet.spans(3 * (number + 1)))[-3:]
        (ingress,) = [each for each in spans if each.service == "corral-worker"]
        assert seen["traceparent"] == f"00-{TRACE}-{ingress.span_id}-01"
        assert seen["tracestate"] == "vendor=1"
        (request,) = [each for each in spans if each.parent_id == SPAN]
        assert request.trace_id == TRACE
    unsampled = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
    assert (await fleet.ask(gateway, headers=unsampled))["traceparent"] == unsampled["traceparent"]
    assert "traceparent" not in await fleet.ask(gateway)


async def test_a_gateway_that_does_not_follow_its_clients_says_so_to_workers(
    fleet: TracedFleet, tmp_path: Path
) -> None:
    """On the general path, which the first requests take, and on the fast path."""
    await fleet.serve(tiny(tmp_path / "tiny"))
    gateway = await fleet.gateway(traces_follow_clients=False)
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
    for _ in range(5):
        seen = await fleet.ask(gateway, headers=headers)
        version, trace_id, span_id, flags = seen["traceparent"].split("-")
        assert (version, trace_id, flags) == ("00", TRACE, "00")
        assert span_id != SPAN, "a changed flag needs a new id"
        assert seen["tracestate"] == "vendor=1"
    assert fleet.site.routes.fast_path.ended[200] >= 3
    await fleet.ask(gateway)  # traced, after the others
    assert {each.trace_id for each in await fleet.spans(3)} != {TRACE}


async def test_the_state_of_another_trace_is_not_passed_on_with_ours(fleet: TracedFleet, tmp_path: Path) -> None:
    await fleet.serve(tiny(tmp_path / "tiny"))
    gateway = await fleet.gateway()
    for number in range(5):
        seen = await fleet.ask(gateway, headers={"tracestate": "vendor=1"})
        spans = (await fleet.spans(3 * (number + 1)))[-3:]
        assert seen["traceparent"].split("-")[1] in {each.trace_id for each in spans}
        assert "tracestate" not in seen
    assert fleet.site.routes.fast_path.ended[200] >= 3


async def test_without_traces_the_header_of_a_client_is_passed_on(fleet: TracedFleet, tmp_path: Path) -> None:
    await fleet.serve(tiny(tmp_path / "tiny"))
    gateway = await fleet.gateway(traces_endpoint="")
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
    assert (await fleet.ask(gateway, headers=headers))["traceparent"] == headers["traceparent"]
    assert not any(task.get_name() == "traces" for task in asyncio.all_tasks())


async def test_a_failed_request_is_a_failed_span(fleet: TracedFleet) -> None:
    process_id = await fleet.serve(mock_openai())
    gateway = await fleet.gateway()
    await fleet.site.supervisor.stop(process_id)
    asked = {"model": "small", "messages": []}
    async with fleet.http.post(gateway.url + CHAT, headers=bearer(USER), json=asked) as answer:
        assert answer.status >= 500
    await until(lambda: bool(fleet.collector.spans), "a span")
    request = fleet.collector.named(f"POST {CHAT}")
    assert request.error == f"status {answer.status}"
    assert request.attributes["error.type"] == str(answer.status)


def metric(gateway: Gateway, name: str) -> float:
    lines = render(gateway.metrics, now=0.0).decode().splitlines()
    (found,) = [line for line in lines if line.startswith(f"corral_gateway_{name}_total ")]
    return float(found.rpartition(" ")[2])


async def test_a_collector_that_is_away_costs_traces_and_nothing_else(fleet: TracedFleet) -> None:
    await fleet.serve(mock_openai())
    gateway = await fleet.gateway(traces_limit=2, traces_headers=("x-key=secret",))
    fleet.collector.status = 503
    for _ in range(5):
        await fleet.ask(gateway)
    await until(lambda: fleet.collector.refused >= 2, "it was tried again")
    await until(lambda: metric(gateway, "traces_dropped") == 3, "three of five traces were dropped")
    assert "secret" in [each.get("x-key") for each in fleet.collector.headers]
    fleet.collector.status = 200
    await until(lambda: metric(gateway, "spans_sent") == 4, "the spans of two requests")


async def test_what_a_collector_refuses_is_not_sent_again(fleet: TracedFleet) -> None:
    await fleet.serve(mock_openai())
    gateway = await fleet.gateway()
    fleet.collector.status = 400
    await fleet.ask(gateway)
    await until(lambda: metric(gateway, "traces_dropped") == 1, "the trace was dropped")
    assert metric(gateway, "spans_sent") == 0
