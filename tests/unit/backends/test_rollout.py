"""Intents and steps of the nodes under one rule, as the rollout planner sees them, and its decisions as holds."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from corral.contract.messages.replicas import ReplicaProcess
from corral.controller.backends.plan import HoldCause
from corral.controller.backends.rollout import Peer, advance
from corral.controller.orders.order import Build, Send
from corral.controller.rollouts.options import allowed_at_once
from corral.store.records import (
    BackendIntent,
    IntentStage,
    OrderKind,
    Rollout,
    RolloutPhase,
    RolloutSettings,
)

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def send(**more: Any) -> Send:
    order = Send("vllm", OrderKind.UPGRADE, Build("cpu", "sha256:new"), 7, "op7", 1, max_parallel="25%")
    return replace(order, **more)


def peer(node: str, stage: str = "", hardware: str = "cpu", **more: Any) -> Peer:
    intent = BackendIntent(
        node_id=node,
        backend="vllm",
        kind=OrderKind.UPGRADE,
        stage=IntentStage(stage or "waiting"),
        generation=7,
        operation_id="op7",
        attempt=1,
        updated_at=NOON,
        digest="sha256:new",
    )
    processes = more.pop("processes", ())
    changed = structs.replace(intent, **more) if stage else None
    return Peer(node, f"name of {node}", hardware, changed, processes=processes)


def held(sends: dict[str, Send], *peers: Peer) -> dict[str, str]:
    own = {each.node_id: each for each in peers}
    everybody = [*peers, *(peer(name) for name in sends if name not in own)]
    gated = advance(None, sends, (), everybody, {}, NOON, "25%")
    return {node: hold.reason for node, hold in gated.held.items()}


def test_one_node_per_class_goes_first() -> None:
    peers = [peer("a"), peer("b"), peer("c", hardware="gpu"), peer("d", hardware="gpu")]
    found = held({name: send() for name in "abcd"}, *peers, *(peer(f"x{n}", "done", "tpu") for n in range(4)))
    assert found == {
        "b": "waits for the first node with cpu to switch",
        "d": "waits for the first node with gpu to switch",
    }


def test_a_node_does_not_wait_for_its_own_last_try() -> None:
    """A LocalAI worker whose answer went down with a controller is asked anew (simulation, seed 6)."""
    assert held({"a": send(attempt=2)}, peer("a", "sent")) == {}
    assert set(held({"a": send(attempt=2), "b": send()}, peer("a", "sent"))) == {"b"}
    assert set(held({"a": send(again=True), "b": send()}, peer("a", "sent"))) == {"b"}


def test_then_a_share_at_a_time() -> None:
    others = [peer("a", "done"), peer("g", "waiting"), peer("h", "waiting")]
    sends = {node: send() for node in "bcdef"}
    assert set(held(sends, *others)) == {"d", "e", "f"}
    busy = [peer("a", "done"), peer("g", "sent"), peer("h", "waiting")]
    assert set(held(sends, *busy)) == {"c", "d", "e", "f"}


def test_a_failed_switch_stops_the_rest_until_it_succeeds() -> None:
    broken = peer("b", "waiting", failures=1, switch_failed=True, reason="exit 1")
    sends = {"b": send(attempt=2), "c": send()}
    assert held(sends, peer("a", "done"), broken) == {"c": "stopped: name of b failed to switch: exit 1"}
    assert held({"c": send()}, peer("a", "done"), peer("b", "done", failures=0)) == {}
    gated = advance(None, {"c": send()}, (), [peer("a", "done"), broken, peer("c")], {}, NOON, "25%")
    assert gated.held["c"].why is HoldCause.STOPPED


@pytest.mark.parametrize("failures", [0, 1])
def test_the_rest_waits_also_while_the_failed_node_is_retried(failures: int) -> None:
    retried = peer("b", "sent", failures=failures, switch_failed=True)
    assert held({"c": send()}, peer("a", "done"), retried, peer("c", hardware="gpu")) == {
        "c": "stopped: name of b failed to switch: it is being retried"
    }


def test_a_failed_download_stops_nobody() -> None:
    slow = peer("b", "waiting", failures=9, switch_failed=False)
    assert held({"c": send()}, peer("a", "done"), slow) == {}


@pytest.mark.parametrize("order", [send(kind=OrderKind.INSTALL), send(again=True), send(max_parallel="")])
def test_installs_and_orders_sent_before_are_not_held(order: Send) -> None:
    assert held({"b": order}, peer("a", "sent")) == {}


def test_who_fetches_is_in_nobodys_way() -> None:
    fetching = [peer("a", "sent", kind=OrderKind.FETCH), peer("b", "sent", kind=OrderKind.FETCH, failures=2)]
    assert held({"c": send()}, *fetching) == {}


def test_a_rule_without_a_stored_rollout_reverts_nothing() -> None:
    """Of the release before, or of an install with --max-parallel."""
    broken = peer("b", "parked", failures=9, switch_failed=True, reason="exit 1")
    gated = advance(None, {"c": send()}, (), [peer("a", "done"), broken, peer("c")], {}, NOON, "25%")
    assert gated.step is None
    assert set(gated.held) == {"c"}


def test_the_processes_of_the_new_build_are_those_that_are_watched() -> None:
    def process(name: str, digest: str, **more: Any) -> ReplicaProcess:
        return ReplicaProcess(name, "smol", 0, "vllm", more.pop("state", "ready"), "openai", digest=digest, **more)

    own = (
        process("old", "sha256:old", restarts=9),
        process("p1", "sha256:new", restarts=1),
        process("p2", "sha256:new", state="failed"),
    )
    rollout = Rollout("op7", 7, "vllm", RolloutPhase.FETCHING, RolloutSettings(soak_s=60), NOON)
    gated = advance(rollout, {}, (), [peer("a", "done", processes=own)], {}, NOON, "25%")
    assert gated.step is not None
    state = gated.step.rollout.classes[0]
    assert (state.canary, state.processes, state.restarts) == ("a", ("p1", "p2"), 2)
    assert gated.step.soaking["a"].reason == "soaks: 0s of 1m, 0 requests"


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(["cpu", "cuda"]), min_size=1),
    st.dictionaries(st.sampled_from("ijklmn"), st.sampled_from(["sent", "done", "waiting"])),
)
def test_never_more_at_once_than_said_and_never_none(waiting: dict[str, str], others: dict[str, str]) -> None:
    peers = [peer(node, stage) for node, stage in others.items()]
    peers += [peer(node, hardware=hardware) for node, hardware in waiting.items()]
    stopped = advance(None, {node: send() for node in waiting}, (), peers, {}, NOON, "25%").held
    going = len(waiting) - len(stopped)
    busy = sum(stage == "sent" for stage in others.values())
    assert going == 0 or busy + going <= allowed_at_once("25%", len(peers))
    assert going > 0 or busy > 0, "nothing moves and nothing is under way"
