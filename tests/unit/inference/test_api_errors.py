"""What an answer that refuses says of itself in its head."""

from __future__ import annotations

from corral.inference.api_errors import ApiError


def test_only_a_process_that_is_another_has_not_acted() -> None:
    assert (b"x-corral-not-reached", b"1") in ApiError(410, "This process serves another model").headers
    for status in (400, 404, 500, 503):
        assert all(name != b"x-corral-not-reached" for name, _ in ApiError(status, "no").headers)


def test_when_to_come_again() -> None:
    assert (b"retry-after", b"3") in ApiError(503, "busy", retry_after_s=3).headers
