"""Server-sent events, however the bytes are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.client.events import EventParser, Raw, read_event
from corral.contract.codec import Undecodable

STREAM = (
    b"retry: 2000\n\n"
    b": a comment\n\n"
    b'event: node\ndata: {"id":"1","name":"\xc3\xa9"}\n\n'
    b"data: first\r\ndata:second\r\n\r\n"
    b"event: empty\n\n"
    b"id: 7\nevent: ready\ndata: {}\n\n"
    b"event: cut off\ndata: x"
)
EVENTS = [Raw("node", '{"id":"1","name":"é"}'), Raw("message", "first\nsecond"), Raw("ready", "{}")]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_cuts_do_not_matter(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    parser = EventParser()
    found = [raw for start, end in pairwise(places) for raw in parser.feed(STREAM[start:end])]
    assert found == EVENTS


def test_lone_carriage_returns_end_lines_too() -> None:
    assert list(EventParser().feed(b"event: a\rdata: b\r\rx")) == [Raw("a", "b")]


@given(st.binary(max_size=300))
def test_any_bytes_are_survived(noise: bytes) -> None:
    list(EventParser().feed(noise))


def test_an_event_without_end_is_refused() -> None:
    for endless in (b"x" * 100_000, b"data: " + b"x" * 100_000 + b"\n"):
        parser = EventParser()
        with pytest.raises(Undecodable):
            any(list(parser.feed(endless)) for _ in range(100))


def test_kinds_of_a_newer_controller_are_skipped() -> None:
    assert read_event(Raw("model", "{}")) is None


def test_nonsense_in_a_known_kind_is_an_error() -> None:
    with pytest.raises(Undecodable):
        read_event(Raw("node", "["))
