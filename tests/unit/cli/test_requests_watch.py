"""Which receipts `corral requests --watch` prints, and how."""

from __future__ import annotations

from typing import Any

import msgspec

from corral.cli.fleet.request_text import WATCH_HEADER, watch_line
from corral.cli.fleet.requests import NewRequests
from corral.contract.receipts import RequestView


def request(id: str, **more: Any) -> RequestView:
    kinds = {each.name: 0 if each.type in (int, float) else "" for each in msgspec.structs.fields(RequestView)}
    words = {"id": id, "at": "2026-11-19T12:00:00Z", "estimated": False, "streamed": True, "tries": 1, "status": 200}
    return msgspec.convert({**kinds, **words, **more}, RequestView)


def test_each_request_is_new_once_also_if_it_came_late() -> None:
    new = NewRequests()
    assert new.of([request("b"), request("a")]) == [], "what was there before"
    assert [each.id for each in new.of([request("d"), request("c"), request("b"), request("a")])] == ["c", "d"]
    assert new.of([request("d"), request("c"), request("b")]) == []
    assert [each.id for each in new.of([request("d"), request("late"), request("c")])] == ["late"]
    assert not new.may_have_missed
    new.of([request(str(number)) for number in range(200)])
    assert new.may_have_missed


def test_a_fleet_without_requests_has_new_ones_too() -> None:
    new = NewRequests()
    assert new.of([]) == []
    assert [each.id for each in new.of([request("a")])] == ["a"]


def test_columns_stand_below_their_titles() -> None:
    line = watch_line(
        request("a", model="tiny", key="notebook", node="attic", first_byte_ms=120, total_ms=900, completion_tokens=60)
    )
    for title, cell in (("MODEL", "tiny"), ("KEY", "notebook"), ("NODE", "attic")):
        assert line.index(cell) == WATCH_HEADER.index(title)
    assert line.endswith("120 ms    900 ms              60")
