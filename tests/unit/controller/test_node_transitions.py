"""Every cell of the status table: for each state a node can be in, what each event makes of it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.contract.messages.nodes import NodeStatus
from corral.controller.registry.transitions import (
    Moved,
    NodeEvent,
    NodeState,
    Stays,
    TransitionRefused,
    new_node,
    next_state,
)

PENDING = NodeState(NodeStatus.PENDING, approved=False)
HEALTHY = NodeState(NodeStatus.HEALTHY, approved=True)
UNHEALTHY = NodeState(NodeStatus.UNHEALTHY, approved=True)
SILENT = NodeState(NodeStatus.OFFLINE, approved=True)
LEFT = NodeState(NodeStatus.OFFLINE, approved=True, left=True)
DRAINED = NodeState(NodeStatus.DRAINING, approved=True, drained=True)
LEAVING = NodeState(NodeStatus.DRAINING, approved=True)
DRAINED_SILENT = NodeState(NodeStatus.OFFLINE, approved=True, drained=True)
DRAINED_LEFT = NodeState(NodeStatus.OFFLINE, approved=True, drained=True, left=True)

STATES = {
    "pending": PENDING,
    "healthy": HEALTHY,
    "unhealthy": UNHEALTHY,
    "silent": SILENT,
    "left": LEFT,
    "drained": DRAINED,
    "leaving": LEAVING,
    "drained, silent": DRAINED_SILENT,
    "drained, left": DRAINED_LEFT,
}
STAY = "stays"
NO = "refused"

# One row per event, one column per state above, in that order. The words are those of STATES.
TABLE = {
    "registered": [STAY, STAY, "healthy", "healthy", "healthy", STAY, "healthy", "drained", "drained"],
    "approved": ["healthy", NO, NO, NO, NO, NO, NO, NO, NO],
    "drain_asked": [
        NO,
        "drained",
        "drained",
        "drained, silent",
        "drained, left",
        STAY,
        "drained",
        STAY,
        STAY,
    ],
    "resume_asked": [NO, STAY, STAY, STAY, STAY, "healthy", "healthy", "silent", "left"],
    "self_drained": [STAY, "leaving", "leaving", STAY, STAY, STAY, STAY, STAY, STAY],
    "self_resumed": [NO, STAY, STAY, STAY, STAY, NO, "healthy", NO, NO],
    "left": [STAY, "left", "left", "left", STAY, "drained, left", "left", "drained, left", STAY],
    "went_silent": [STAY, "silent", "silent", STAY, STAY, "drained, silent", "silent", STAY, STAY],
    "silent_but_held": [STAY, "unhealthy", STAY, STAY, STAY, STAY, STAY, STAY, STAY],
    "came_back": [STAY, STAY, "healthy", "healthy", STAY, STAY, STAY, "drained", STAY],
    "did_not_answer": [STAY, "unhealthy", STAY, STAY, STAY, STAY, STAY, STAY, STAY],
    "worker_missing": [STAY, "unhealthy", "unhealthy", STAY, STAY, STAY, STAY, STAY, STAY],
}

CELLS = [
    pytest.param(state, event, TABLE[event][column], id=f"{name}-{event}")
    for (column, (name, state)), event in itertools.product(enumerate(STATES.items()), TABLE)
]


def test_the_table_has_every_event() -> None:
    assert set(TABLE) == {str(event.value) for event in NodeEvent}
    assert all(len(row) == len(STATES) for row in TABLE.values())


@pytest.mark.parametrize(("state", "event", "expected"), CELLS)
def test_each_cell(state: NodeState, event: str, expected: str) -> None:
    outcome = next_state(state, NodeEvent(event))
    match outcome:
        case Moved(after, reason):
            assert STATES[expected] == after
            assert reason
        case Stays():
            assert expected == STAY
        case TransitionRefused(why):
            assert expected == NO
            assert why


def test_a_new_node_waits_unless_it_was_approved_before() -> None:
    assert new_node(approved=False) == PENDING
    assert new_node(approved=True) == HEALTHY


@given(st.lists(st.sampled_from([event for event in NodeEvent if event is not NodeEvent.APPROVED])))
def test_nothing_but_approval_gets_a_node_past_the_door(events: list[NodeEvent]) -> None:
    state = new_node(approved=False)
    for event in events:
        outcome = next_state(state, event)
        state = outcome.state if isinstance(outcome, Moved) else state
    assert state.status == "pending"
    assert not state.approved


@given(st.lists(st.sampled_from([event for event in NodeEvent if event is not NodeEvent.RESUME_REQUESTED])))
def test_only_a_person_takes_a_drain_back(events: list[NodeEvent]) -> None:
    state = DRAINED
    for event in events:
        outcome = next_state(state, event)
        state = outcome.state if isinstance(outcome, Moved) else state
    assert state.status in ("draining", "offline")


@given(st.lists(st.sampled_from([event for event in NodeEvent if event is not NodeEvent.REGISTERED])))
def test_a_clean_goodbye_stays_offline_until_the_next_registration(events: list[NodeEvent]) -> None:
    state = LEFT
    for event in events:
        outcome = next_state(state, event)
        state = outcome.state if isinstance(outcome, Moved) else state
    assert state.status == "offline"
