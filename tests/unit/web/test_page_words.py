from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from corral.controller.web.words import ago, counted, listed, parse_moment, size, took, until, used_of

GIB = 1024**3
NOON = datetime(2026, 5, 4, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("used", "total", "words"),
    [
        (0, 24 * GIB, "0 / 24 GiB"),
        (4 * GIB, 24 * GIB, "4 / 24 GiB"),
        (int(3.25 * GIB), 24 * GIB, "3.3 / 24 GiB"),  # half up, as the browser does it
        (int(12.5 * GIB), 24 * GIB, "13 / 24 GiB"),
        (1200 * GIB, 2048 * GIB, "1.2 / 2 TiB"),
        (512, 1023, "512 / 1023 B"),
        (0, 0, "0 / 0 B"),
        (1, 1024**6, "0 / 1024 PiB"),
    ],
)
def test_used_and_whole_share_the_unit_of_the_whole(used: int, total: int, words: str) -> None:
    assert used_of(used, total) == words


def test_a_size_alone() -> None:
    assert size(0) == "0 B"
    assert size(1536) == "1.5 KiB"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "0 s ago"),  # the database's clock is a little ahead of ours
        (0.9, "0 s ago"),
        (59.9, "59 s ago"),
        (60, "1 min ago"),
        (7199, "119 min ago"),
        (7200, "2 h ago"),
        (172799, "47 h ago"),
        (172800, "2 d ago"),
    ],
)
def test_ages(seconds: float, words: str) -> None:
    assert ago(NOON - timedelta(seconds=seconds), NOON) == words


def test_never() -> None:
    assert ago(None, NOON) == "never"
    for stamp in ("", "soon", "0001-01-01T00:00:00Z"):
        assert parse_moment(stamp) is None
    assert parse_moment("2026-05-04T12:00:00Z") == NOON
    assert parse_moment("2026-05-04T12:00:00") == NOON


def test_lists_of_words() -> None:
    assert listed([]) == ""
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert counted(1, "node waits", "nodes wait") == "1 node waits"
    assert counted(0, "node waits", "nodes wait") == "0 nodes wait"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-5, "now"), (0, "now"), (0.2, "in 1 s"), (119, "in 119 s"), (120, "in 2 min"), (7200, "in 2 h")],
)
def test_when_the_next_try_is(seconds: float, words: str) -> None:
    assert until(NOON + timedelta(seconds=seconds), NOON) == words
    assert until(None, NOON) == "now"


@pytest.mark.parametrize(("seconds", "words"), [(0, "0 s"), (119, "119 s"), (120, "2 min"), (200_000, "2 d")])
def test_how_long_it_took(seconds: int, words: str) -> None:
    assert took(NOON, NOON + timedelta(seconds=seconds)) == words
    assert took(NOON, None) == ""
