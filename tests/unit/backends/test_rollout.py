"""An upgrade goes from node to node: one per variant first, then a share, and a failed switch stops it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from corral.controller.backends.rollout import Peer, allowed_at_once, gate, parse_max_parallel
from corral.controller.orders.order import Build, Send
from corral.kit.errors import Invalid
from corral.store.records import BackendIntent, IntentStage, OrderKind

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def send(variant: str = "cpu", **more: Any) -> Send:
    order = Send("vllm", OrderKind.UPGRADE, Build(variant, "sha256:new"), 7, "op7", 1, max_parallel="25%")
    return replace(order, **more)


def peer(node: str, stage: str, variant: str = "cpu", **more: Any) -> Peer:
    intent = BackendIntent(
        node_id=node,
        backend="vllm",
        kind=OrderKind.UPGRADE,
        stage=IntentStage(stage),
        generation=7,
        operation_id="op7",
        attempt=1,
        updated_at=NOON,
        variant=variant,
    )
    return Peer(node, f"name of {node}", structs.replace(intent, **more))


def held(sends: dict[str, Send], *peers: Peer, nodes: int = 8) -> dict[str, str]:
    return {node: hold.reason for node, hold in gate(sends, peers, nodes).items()}


@pytest.mark.parametrize(("text", "stored"), [("25%", "25%"), (" 3 ", "3"), ("100%", "100%"), ("007", "7")])
def test_a_share_or_a_number(text: str, stored: str) -> None:
    assert parse_max_parallel(text) == stored


@pytest.mark.parametrize("text", ["", "0", "0%", "101%", "-1", "many", "2.5", "%", "٣"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="is not a number of nodes"):
        parse_max_parallel(text)


@pytest.mark.parametrize(("text", "nodes", "count"), [("25%", 8, 2), ("25%", 3, 1), ("100%", 3, 3), ("5", 3, 5)])
def test_at_least_one_moves(text: str, nodes: int, count: int) -> None:
    assert allowed_at_once(text, nodes) == count


def test_one_node_per_variant_goes_first() -> None:
    sends = {"a": send(), "b": send(), "c": send("cuda"), "d": send("cuda")}
    assert held(sends) == {
        "b": "waits for the first node with cpu to switch",
        "d": "waits for the first node with cuda to switch",
    }
    assert set(held({"b": send(), "d": send("cuda")}, peer("a", "sent"), peer("c", "sent", "cuda"))) == {"b", "d"}


def test_a_node_does_not_wait_for_its_own_last_try() -> None:
    """A LocalAI worker whose answer went down with a controller is asked anew (simulation, seed 6)."""
    assert held({"a": send(attempt=2)}, peer("a", "sent"), nodes=4) == {}
    assert set(held({"a": send(attempt=2), "b": send()}, peer("a", "sent"), nodes=4)) == {"b"}
    assert set(held({"a": send(again=True), "b": send()}, peer("a", "sent"), nodes=4)) == {"b"}


def test_then_a_share_at_a_time() -> None:
    sends = {node: send() for node in "bcdef"}
    proven = peer("a", "done")
    assert set(held(sends, proven)) == {"d", "e", "f"}
    assert set(held(sends, proven, peer("g", "sent"))) == {"c", "d", "e", "f"}
    assert "25% of the nodes" in held(sends, proven)["f"]


def test_a_failed_switch_stops_the_rest_until_it_succeeds() -> None:
    broken = peer("b", "waiting", failures=1, switch_failed=True, reason="exit 1")
    sends = {"b": send(attempt=2), "c": send()}
    assert held(sends, peer("a", "done"), broken) == {"c": "stopped: name of b failed to switch: exit 1"}
    assert held({"c": send()}, peer("a", "done"), peer("b", "done", failures=0)) == {}
    parked = peer("b", "parked", failures=1, switch_failed=True)
    assert set(held({"c": send()}, peer("a", "done"), parked)) == {"c"}


@pytest.mark.parametrize("failures", [0, 1])
def test_the_rest_waits_also_while_the_failed_node_is_retried(failures: int) -> None:
    retried = peer("b", "sent", failures=failures, switch_failed=True)
    assert held({"c": send("cuda")}, peer("a", "done"), retried, nodes=8) == {
        "c": "stopped: name of b failed to switch: it is being retried"
    }


def test_a_failed_download_stops_nobody() -> None:
    slow = peer("b", "waiting", failures=9, switch_failed=False)
    assert held({"c": send()}, peer("a", "done"), slow) == {}


@pytest.mark.parametrize("order", [send(kind=OrderKind.INSTALL), send(again=True), send(max_parallel="")])
def test_installs_and_orders_sent_before_are_not_held(order: Send) -> None:
    assert held({"b": order}, peer("a", "sent")) == {}


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(["cpu", "cuda"]), min_size=1),
    st.dictionaries(st.sampled_from("ijklmn"), st.sampled_from(["sent", "done", "waiting"])),
    st.integers(1, 20),
)
def test_never_more_at_once_than_said_and_never_none(
    waiting: dict[str, str], others: dict[str, str], nodes: int
) -> None:
    peers = [peer(node, stage) for node, stage in others.items()]
    stopped = gate({node: send(variant) for node, variant in waiting.items()}, peers, nodes)
    going = len(waiting) - len(stopped)
    busy = sum(stage == "sent" for stage in others.values())
    assert going == 0 or busy + going <= allowed_at_once("25%", nodes)
    assert going > 0 or busy > 0, "nothing moves and nothing is under way"


def test_who_fetches_is_in_nobodys_way() -> None:
    fetching = [peer("a", "sent", kind=OrderKind.FETCH), peer("b", "sent", kind=OrderKind.FETCH, failures=2)]
    assert gate({"c": send()}, fetching, 8) == {}
