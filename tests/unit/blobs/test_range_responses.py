"""What a server's answer to "these bytes, from here on" means, case by case."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.blobs.transfer.range_responses import (
    AlreadyComplete,
    Append,
    RangeResponse,
    ServerBusy,
    ServerRefused,
    StartOver,
    WholeBody,
    interpret_response,
)
from corral.kit.errors import Denied, Failed, NotFound


@pytest.mark.parametrize(
    ("status", "headers", "have", "meaning"),
    [
        (200, {"content-length": "10"}, 0, WholeBody(10)),
        (200, {"content-length": "10"}, 5, WholeBody(10)),  # it ignored the range: all of it comes again
        (200, {}, 0, WholeBody(0)),
        (200, {"content-length": "-4"}, 0, WholeBody(0)),
        (200, {"content-length": "9" * 30}, 0, WholeBody(0)),
        (206, {"content-range": "bytes 5-9/10"}, 5, Append(10)),
        (206, {"content-range": "bytes 5-9/*"}, 5, Append(0)),
        (206, {"content-range": "bytes 4-9/10"}, 5, StartOver()),  # another part than asked: never glued on
        (416, {"content-range": "bytes */10"}, 10, AlreadyComplete()),
        (416, {"content-range": "bytes */8"}, 10, StartOver()),  # what it has now is shorter than what we have
        (416, {}, 10, StartOver()),
        (503, {"retry-after": "7"}, 0, ServerBusy("x answered 503", 7.0)),
        (429, {"retry-after": "86400"}, 0, ServerBusy("x answered 429", 60.0)),
        (503, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, 0, ServerBusy("x answered 503", None)),
        (500, {}, 0, ServerBusy("x answered 500", None)),
    ],
)
def test_what_to_do_next(status: int, headers: dict[str, str], have: int, meaning: object) -> None:
    assert interpret_response(status, headers, have_bytes=have, what="x") == meaning


@pytest.mark.parametrize(
    ("status", "headers", "have", "error"),
    [
        (401, {}, 0, Denied),
        (403, {}, 0, Denied),
        (404, {}, 0, NotFound),
        (410, {}, 0, NotFound),
        (416, {}, 0, Failed),
        (400, {}, 0, Failed),
        (302, {}, 0, Failed),  # redirects were followed: one that is left leads nowhere
        (206, {}, 0, Failed),
        (206, {"content-range": "bytes 5-9/10"}, 0, Failed),
        (206, {"content-range": "lines 0-9/10"}, 0, Failed),
    ],
)
def test_refusals_have_a_kind(status: int, headers: dict[str, str], have: int, error: type[Exception]) -> None:
    answer = interpret_response(status, headers, have_bytes=have, what="x")
    assert isinstance(answer, ServerRefused)
    assert type(answer.error) is error


NUMBERS = st.one_of(st.integers(0, 10**20).map(str), st.sampled_from(["*", "", "-1", "9" * 5000, "٣"]))
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "content-range": st.one_of(
            st.builds("bytes {}-{}/{}".format, NUMBERS, NUMBERS, NUMBERS),
            st.builds("bytes */{}".format, NUMBERS),
            st.text(max_size=30),
        ),
        "content-length": NUMBERS,
        "retry-after": NUMBERS,
    },
)


@given(st.integers(100, 599), HEADERS, st.integers(0, 10**6))
def test_no_answer_of_a_server_breaks_the_reader(status: int, headers: dict[str, str], have: int) -> None:
    """A peer may send anything: what is not understood is a refusal of that peer, never an error of the download."""
    answer = interpret_response(status, headers, have_bytes=have, what="x")
    assert isinstance(answer, RangeResponse)
    if isinstance(answer, Append | WholeBody):
        assert answer.total >= 0
