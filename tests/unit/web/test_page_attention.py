from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from corral.contract.admin import Cluster, ControllerView, NodeView
from corral.controller.web.attention import attention_of, facts_of

NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)


def node(name: str, status: str = "healthy", **more: Any) -> NodeView:
    return NodeView(id=name, name=name, status=status, **more)


def line(*nodes: NodeView, notices: tuple[str, ...] = ()) -> str:
    return attention_of(nodes, notices, NOON).line


def test_calm_words() -> None:
    assert line() == "No machines yet."
    assert line(node("a")) == "The node is healthy."
    assert line(node("a"), node("b")) == "All 2 nodes are healthy."
    left = node("b", "offline", status_reason="left: the worker said goodbye")
    assert line(node("a"), left, node("c", "draining")) == "No problems: 1 healthy, 1 draining and 1 offline."
    assert attention_of([node("a"), left], (), NOON).calm


def test_everything_at_once_most_urgent_first() -> None:
    found = attention_of(
        [
            node("a", "pending", ingress_error="not tried", bus_down=True),  # one thing at a time: first approve it
            node("b", ingress_error="http://b does not answer"),
            node("c", bus_down=True),
            node("d", "unhealthy", status_reason="no heartbeat, but too many fell silent at once: held"),
            node("e", "offline", status_reason="no heartbeat", last_heartbeat="2026-05-04T11:58:00Z"),
        ],
        ["The bus cannot be reached."],
        NOON,
    )
    assert found.line == (
        "1 node waits for approval, 1 node cannot be reached, 1 node is cut off from the bus, 1 node is unhealthy, "
        "1 node is silent and 1 notice about the fleet."
    )
    assert [one.row.name for one in found.pending] == ["a"]
    assert [(group.title, [trouble.name for trouble in group.troubles]) for group in found.groups] == [
        ("Cannot be reached", ["b"]),
        ("Cannot reach the bus", ["c"]),
        ("Unhealthy", ["d"]),
        ("Silent", ["e"]),
    ]
    assert found.groups[2].troubles[0].words.endswith("held")
    assert found.groups[3].troubles[0].words == "no heartbeat, last seen 2 min ago"
    assert found.notices == ("The bus cannot be reached.",)
    assert not found.calm


def test_a_node_put_aside_for_its_successor_is_not_silent() -> None:
    assert attention_of([node("a", "offline", status_reason="waits for the machine that replaces it")], (), NOON).calm


def test_four_hundred_silent_nodes_are_one_line_and_five_names() -> None:
    found = attention_of([node(f"n{i}", "offline") for i in range(400)], (), NOON)
    assert found.line == "400 nodes are silent."
    assert len(found.groups[0].troubles) == 5
    assert found.groups[0].more == 395


def controller(live: bool = True) -> ControllerView:
    return ControllerView(id="1", host="barn", version="0.1.0", live=live)


def test_the_fleet_in_words() -> None:
    good = Cluster(version="0.1.0", protocol=1, controllers=(controller(),), bus={"connected": True}, store="sqlite")
    assert [fact.words for fact in facts_of(good)] == ["0.1.0", "1 controller", "bus connected", "SQLite"]
    assert not any(fact.bad for fact in facts_of(good))


def test_what_is_wrong_with_the_fleet_is_marked() -> None:
    bad = Cluster(controllers=(controller(), controller(live=False)), store="postgresql", compat_localai=True)
    facts = {fact.words: fact.bad for fact in facts_of(bad)}
    assert facts == {
        "": False,
        "1 controller, 1 silent": True,
        "bus not reachable": True,
        "PostgreSQL": False,
        "LocalAI workers may join": False,
    }
