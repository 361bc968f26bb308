"""A follower gets each operation's latest, all together, a few times a second at most; nothing else waits."""

from __future__ import annotations

import pytest

from corral.contract.admin import OperationView
from corral.controller.api.events import StreamPace
from corral.controller.runtime.change_feed import Change


def operation(job: str, progress: int) -> Change:
    return Change("operation", OperationView(job_id=job, progress=progress))


def told(changes: list[Change]) -> list[tuple[str, int]]:
    return [(each.data.job_id, each.data.progress) for each in changes if isinstance(each.data, OperationView)]


def test_the_first_is_told_at_once_and_the_rest_wait_for_their_turn() -> None:
    pace = StreamPace(0.25)
    assert told(pace.put(operation("a", 1), 10.0)) == [("a", 1)]
    assert pace.put(operation("a", 2), 10.01) == []
    assert pace.put(operation("b", 1), 10.02) == []
    assert pace.put(operation("a", 3), 10.1) == []
    assert pace.due_in(10.1) == pytest.approx(0.15)
    assert pace.take(10.2) == []
    assert told(pace.take(10.25)) == [("a", 3), ("b", 1)], "of each the latest, all together"
    assert pace.due_in(10.25) is None
    assert told(pace.put(operation("a", 4), 11.0)) == [("a", 4)], "after a pause nobody waits"


def test_what_happens_between_two_turns_is_told_when_something_else_arrives_too() -> None:
    pace = StreamPace(0.25)
    pace.put(operation("a", 1), 0.0)
    pace.put(operation("a", 2), 0.1)
    assert told(pace.put(operation("b", 1), 0.3)) == [("a", 2), ("b", 1)]


def test_nodes_never_wait_and_the_present_state_is_whole_before_ready() -> None:
    pace = StreamPace(0.25)
    node, ready = Change("node", {"id": "n"}), Change("ready", {"nodes": 1})
    pace.put(operation("a", 1), 0.0)
    assert pace.put(operation("b", 1), 0.0) == []
    assert pace.put(node, 0.01) == [node]
    *operations, last = pace.put(ready, 0.02)
    assert told(operations) == [("b", 1)]
    assert last is ready


def test_one_that_is_gone_is_not_told_afterwards() -> None:
    pace = StreamPace(0.25)
    pace.put(operation("a", 1), 0.0)
    pace.put(operation("a", 2), 0.1)
    removed = Change("operation-removed", {"id": "a"})
    assert pace.put(removed, 0.15) == [removed]
    assert pace.take(1.0) == []
