"""Addresses a LocalAI worker tells, and what is believed of its processes."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from corral.contract.messages.models import RunningModel
from corral.controller.localai.process_state import (
    Judgement,
    ProcessGone,
    ProcessStays,
    ProcessUseless,
    classify_process,
)
from corral.controller.localai.processes import port_of, process_key, reachable_address
from corral.inference.backend_process import ProcessHealth
from corral.kit.errors import Failed
from corral.store.tables.peer_processes import PeerProcess

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
PROCESS = PeerProcess(
    process_id="p1",
    node_id="n1",
    model="m",
    replica=1,
    revision="r1",
    backend="engine",
    address="w1:50052",
    state="ready",
    load="{}",
    definition={},
    started_at=NOON,
    ready_at=NOON,
)
LISTED = {("m", 1): RunningModel("m", 1, "127.0.0.1:50052")}


@pytest.mark.parametrize(
    ("told", "node_address", "found"),
    [
        ("w1:50052", "w1:50051", "w1:50052"),
        ("10.0.0.7:50052", "w1:50051", "10.0.0.7:50052"),
        ("", "w1:50051", "w1:50051"),
        ("127.0.0.1:50053", "w1:50051", "w1:50053"),
        ("127.0.0.1:50053", "127.0.0.1:50051", "127.0.0.1:50053"),
        (":50053", "w1:50051", "w1:50053"),
        ("[fd00::1]:50053", "w1:50051", "[fd00::1]:50053"),
    ],
)
def test_where_a_process_is(told: str, node_address: str, found: str) -> None:
    assert reachable_address(told, node_address) == found


@pytest.mark.parametrize("told", ["w1", "w1:", "w1:x", "w1:99999", "http://w1:5", "user@w1:5", "w1:5/x", "w1:5\n"])
def test_what_is_no_address(told: str) -> None:
    with pytest.raises(Failed, match="no host:port"):
        reachable_address(told, "w1:50051")


def test_keys_and_ports() -> None:
    assert process_key("org/m#1", 2) == "org/m#1#2"
    assert port_of("127.0.0.1:50052") == 50052
    assert port_of("nonsense:") is None


@pytest.mark.parametrize(
    ("running", "pulse", "misses", "judged"),
    [
        (LISTED, ProcessHealth.ALIVE, 2, ProcessStays(0)),
        (LISTED, ProcessHealth.BUSY, 2, ProcessStays(0)),  # for as long as it likes
        (LISTED, ProcessHealth.UNREACHABLE, 0, ProcessStays(1)),
        (LISTED, ProcessHealth.UNREACHABLE, 2, ProcessUseless("…")),
        ({}, ProcessHealth.ALIVE, 0, ProcessGone("…")),  # its worker has the last word
        ({("m", 0): RunningModel("m", 0)}, ProcessHealth.BUSY, 0, ProcessGone("…")),
        ({("m", 1): RunningModel("m", 1, "127.0.0.1:50099")}, ProcessHealth.ALIVE, 0, ProcessGone("…")),
        ({("m", 1): RunningModel("m", 1)}, ProcessHealth.ALIVE, 0, ProcessStays(0)),  # older workers tell no address
        (None, ProcessHealth.BUSY, 2, ProcessStays(0)),
        (None, ProcessHealth.UNREACHABLE, 1, ProcessStays(2)),
        (None, ProcessHealth.UNREACHABLE, 2, ProcessGone("…")),
    ],
)
def test_a_process_is_gone_when_its_worker_says_so_and_never_for_being_busy(
    running: dict[tuple[str, int], RunningModel] | None, pulse: ProcessHealth, misses: int, judged: Judgement
) -> None:
    assert isinstance(classify_process(PROCESS, running, pulse, misses, is_another=True), ProcessGone | ProcessUseless)
    found = classify_process(PROCESS, running, pulse, misses)
    assert type(found) is type(judged)
    if isinstance(judged, ProcessStays):
        assert found == judged
