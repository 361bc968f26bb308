"""What gateways are told may answer."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from corral.contract.messages.replicas import ReplicaProcess
from corral.controller.inventory.routable import Listing, Served, routable, routing_facts
from corral.store.tables.node_backends import Inventory
from tests.support.invariants import misrouted


def a_process(process_id: str, model: str = "m", revision: str = "new", state: str = "ready", **known: Any) -> Any:
    return ReplicaProcess(process_id, model, known.pop("replica", 0), "b", state, "openai", revision=revision, **known)


MODELS = {"m": Served("new", ("old", "older"))}


def shown(*listings: Listing, leaving: set[tuple[str, str, int]] | None = None) -> list[str]:
    return [each.process_id for each in routable(listings, MODELS, leaving or set())[0]]


@pytest.mark.parametrize("state", ["starting", "stopping", "restarting", "failed"])
def test_only_what_is_ready(state: str) -> None:
    assert shown(Listing("n", "healthy", (a_process("p", state=state), a_process("q", replica=1)))) == ["q"]


def test_the_former_revision_answers_until_the_present_can_and_never_after() -> None:
    old, new = a_process("p-old", revision="old"), a_process("p-new", replica=1)
    older, other = a_process("p-older", revision="older"), a_process("p-x", revision="x")
    found, answering = routable([Listing("n", "healthy", (old, older, other))], MODELS, set())
    assert [each.process_id for each in found] == ["p-old"]
    assert answering == {"m": "old"}
    found, answering = routable([Listing("n", "healthy", (old, new, other))], MODELS, set())
    assert [each.process_id for each in found] == ["p-new"]
    assert answering == {}
    assert shown(Listing("n", "healthy", (other,))) == []


def test_what_leaves_or_is_of_no_model_is_not_shown() -> None:
    listing = Listing("n", "healthy", (a_process("p"), a_process("q", replica=1), a_process("z", model="gone")))
    assert shown(listing, leaving={("n", "m", 0)}) == ["q"]


def test_one_process_per_replica_also_while_one_takes_the_place_of_another() -> None:
    assert shown(Listing("n", "healthy", (a_process("old"), a_process("successor")))) == ["successor"]
    both = (a_process("old", revision="old"), a_process("new"))
    assert shown(Listing("n", "healthy", both)) == ["new"]


@pytest.mark.parametrize(
    ("status", "current", "expected"),
    [
        ("healthy", True, [False]),
        ("healthy", False, [True]),
        ("unhealthy", True, [True]),
        ("draining", True, [True]),
        ("offline", True, []),
        ("pending", True, []),
    ],
)
def test_a_node_in_doubt_is_the_last_resort(status: str, current: bool, expected: list[bool]) -> None:
    found, _ = routable([Listing("n", status, (a_process("p"),), current)], MODELS, set())
    assert [each.last_resort for each in found] == expected


def test_only_what_gateways_would_notice_is_news() -> None:
    before = routing_facts([a_process("p", memory_bytes=1), a_process("q", state="starting")])
    assert before == routing_facts([a_process("p", memory_bytes=2, restarts=3)])
    assert before != routing_facts([a_process("p"), a_process("q")])
    assert before != routing_facts([a_process("p", slots=4)])


def test_what_would_be_a_breach_is_told() -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    listed = {
        "n": Inventory(
            node_id="n",
            boot_id="boot",
            seq=1,
            seen_at=moment,
            backends=(),
            processes=(a_process("p"), a_process("q", state="starting")),
        )
    }
    found, _ = routable([Listing("n", "healthy", (a_process("p"),))], MODELS, set())
    assert misrouted(found, {"m": ("new", "old")}, listed) == []
    twice = (*found, *(msgspec.structs.replace(each, process_id="q", revision="old") for each in found))
    said = "\n".join(misrouted(twice, {"m": ("new",)}, listed))
    for breach in ("as one replica", "may not answer", "does not list it", "two revisions"):
        assert breach in said
