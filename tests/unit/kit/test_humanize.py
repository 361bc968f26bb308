"""Values as people read them."""

from __future__ import annotations

import pytest

from corral.kit.humanize import first_and_last_line, format_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (17, "17 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (412 * 2**20, "412.0 MiB"),
        (2254857830, "2.1 GiB"),
        (2**20 - 1, "1.0 MiB"),  # never "1024.0 KiB"
        (5 * 2**40, "5.0 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("", ""),
        ("out of memory", "out of memory"),
        ("it ended with code 2:\n\nusage: x\n  error: no --model\n", "it ended with code 2: … error: no --model"),
    ],
)
def test_first_and_last_line(text: str, short: str) -> None:
    assert first_and_last_line(text) == short
