"""What `corral top` keeps of the event stream, and the rates it computes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from corral.cli.top.overview import bar, overview_lines
from corral.cli.top.state import FleetState, request_rates
from corral.client.events import Lost, NodeRemoved, NodeSeen, OperationRemoved, OperationSeen, Restarted, StateComplete
from corral.contract.admin import NodeView, OperationView
from corral.contract.receipts import RequestView

NOW = datetime(2026, 11, 19, 12, 0, tzinfo=UTC)


def node(name: str, **more: Any) -> NodeView:
    return msgspec.convert({"id": name, "name": name, "status": "healthy", **more}, NodeView)


def operation(id: str) -> OperationView:
    return msgspec.convert({"jobID": id, "kind": "install", "backend": "vllm", "scope": "all"}, OperationView)


def request(age_s: float, **more: Any) -> RequestView:
    kinds = {each.name: 0 if each.type in (int, float) else "" for each in msgspec.structs.fields(RequestView)}
    at = (NOW - timedelta(seconds=age_s)).isoformat()
    words = {"at": at, "status": 200, "estimated": False, "streamed": True, "completion_tokens": 30, "model": "tiny"}
    return msgspec.convert({**kinds, **words, **more}, RequestView)


def test_after_a_reconnect_what_is_not_reported_again_is_gone() -> None:
    fleet = FleetState()
    for event in (
        Restarted(),
        NodeSeen(node("a")),
        NodeSeen(node("b")),
        OperationSeen(operation("1")),
        StateComplete(),
    ):
        fleet.apply(event)
    fleet.apply(Lost("gone"))
    assert "gone" in fleet.problem
    assert [each.name for each in fleet.nodes] == ["a", "b"], "the last known state stays"
    for event in (Restarted(), NodeSeen(node("b")), StateComplete()):
        fleet.apply(event)
    assert fleet.problem == ""
    assert [each.name for each in fleet.nodes] == ["b"]
    assert len(fleet.operations) == 0


def test_removed_views_are_gone() -> None:
    fleet = FleetState()
    for event in (NodeSeen(node("a")), OperationSeen(operation("1")), NodeRemoved("a"), OperationRemoved("1")):
        fleet.apply(event)
    assert (len(fleet.nodes), len(fleet.operations)) == (0, 0)


def test_rates_are_of_the_last_minute() -> None:
    requests = [request(1, first_byte_ms=100), request(2, first_byte_ms=300), request(59, status=500), request(61)]
    rates = request_rates(requests, NOW, is_whole=False)
    assert (rates.requests, rates.failed, rates.window_s) == (3, 1, 60)
    assert rates.requests_per_s == pytest.approx(3 / 60)
    assert rates.tokens_per_s == pytest.approx(90 / 60)
    assert rates.first_token_ms == 300


@pytest.mark.parametrize(("is_whole", "window_s"), [(True, 60), (False, 20)])
def test_receipts_that_cover_less_than_a_minute_give_the_rate_of_their_time(is_whole: bool, window_s: float) -> None:
    rates = request_rates([request(1), request(20)], NOW, is_whole=is_whole)
    assert rates.window_s == pytest.approx(window_s)


def test_no_requests_are_no_rate() -> None:
    assert request_rates([], NOW, is_whole=True).requests_per_s == 0


@pytest.mark.parametrize(
    ("share", "shown"), [(0, "[....]"), (0.5, "[##..]"), (1, "[####]"), (3, "[####]"), (-1, "[....]")]
)
def test_a_bar(share: float, shown: str) -> None:
    assert bar(share, 4) == shown


def test_the_overview_never_is_longer_than_the_screen() -> None:
    fleet = FleetState(attention=[f"problem {at}" for at in range(20)], requests=[request(at) for at in range(100)])
    for at in range(30):
        fleet.operations.put(str(at), operation(str(at)))
        fleet.nodes.put(str(at), node(str(at), total_vram=2**34, available_vram=2**33))
    for height in (6, 20, 56):
        lines = overview_lines(fleet, NOW, height)
        assert len(lines) <= height
    assert "  ! problem 0" in lines
    assert "    and 15 more" in lines
    assert lines[1] == "VRAM        [##########..........] 240.0 GiB of 480.0 GiB used"
    assert any(line.startswith("requests    1.0/s, 0 failed in the last minute; 30") for line in lines), lines[:6]
