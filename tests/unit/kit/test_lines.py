from __future__ import annotations

import pytest

from corral.kit.lines import in_short


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("", ""),
        ("out of memory", "out of memory"),
        ("it ended with code 2:\n\nusage: x\n  error: no --model\n", "it ended with code 2: … error: no --model"),
    ],
)
def test_what_happened_and_what_was_said_in_the_end(text: str, short: str) -> None:
    assert in_short(text) == short
