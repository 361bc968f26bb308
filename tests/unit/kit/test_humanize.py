"""Values as people read them."""

from __future__ import annotations

import pytest

from corral.kit.humanize import first_and_last_line, format_bytes, parse_byte_count


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


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("1000", 1000),
        ("20MB", 20e6),
        ("512 KiB/s", 512 * 1024),
        ("1.5g", 1.5e9),
        ("3b", 3),
        ("2TiB", 2 << 40),
    ],
)
def test_parse_byte_count(text: str, count: float) -> None:
    assert parse_byte_count(text) == count


@pytest.mark.parametrize("text", ["", "fast", "-1", "1 bit", "20 MB per second", "1e9", "∞"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="20MB"):
        parse_byte_count(text)
