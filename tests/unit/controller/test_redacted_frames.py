"""Streams that people follow, cut anywhere: WebSocket frames and lines are redacted when they are whole."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.controller.api import redacted_frames
from corral.controller.api.redacted_frames import pass_redacted
from corral.controller.api.redaction import LineRedactor
from corral.kit.errors import Failed

SECRET = b'{"text":"see https://me:s3cret@host/x"}'
SHOWN = b'{"text":"see https://***@host/x"}'


class Written:
    def __init__(self) -> None:
        self.content = b""

    def write(self, piece: bytes) -> None:
        self.content += piece

    async def drain(self) -> None:
        pass


async def passed_on(content: bytes) -> bytes:
    reader, writer = asyncio.StreamReader(), Written()
    reader.feed_data(content)
    reader.feed_eof()
    await pass_redacted(reader, cast(Any, writer))
    return writer.content


def text(payload: bytes) -> bytes:
    """As a server sends it: short, longer than 125 bytes, longer than 65535."""
    if len(payload) < 126:
        return bytes((0x81, len(payload))) + payload
    if len(payload) < 65536:
        return b"\x81\x7e" + len(payload).to_bytes(2, "big") + payload
    return b"\x81\x7f" + len(payload).to_bytes(8, "big") + payload


@pytest.mark.parametrize("more", [0, 100, 86, 87, 65_490, 65_500, 70_000])
async def test_messages_of_every_length(more: int) -> None:
    assert await passed_on(text(SECRET + b" " * more) + text(b"next")) == text(SHOWN + b" " * more) + text(b"next")


async def test_a_url_that_a_frame_cuts_and_a_ping_between() -> None:
    ping = b"\x89\x02hi"
    parts = bytes((0x01, 20)) + SECRET[:20] + ping + bytes((0x80, len(SECRET) - 20)) + SECRET[20:]
    assert await passed_on(parts) == ping + text(SHOWN)


async def test_a_close_frame_and_half_a_frame_at_the_end() -> None:
    close = b"\x88\x02\x03\xe8"
    assert await passed_on(close) == close
    assert await passed_on(text(b"whole") + text(SECRET)[:-1]) == text(b"whole")


@pytest.mark.parametrize(
    "frame",
    [b"\xc1\x01x", b"\x81\x81mask" + b"x", b"\x81\x7f" + (1 << 40).to_bytes(8, "big")],
    ids=["compressed", "masked", "huge"],
)
async def test_what_cannot_be_redacted_is_not_passed_on(frame: bytes) -> None:
    with pytest.raises(Failed, match="no WebSocket that can be passed on"):
        await passed_on(frame)


async def test_parts_of_one_message_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redacted_frames, "MAX_MESSAGE_BYTES", 10)
    with pytest.raises(Failed):
        await passed_on(b"\x01\x06123456" + b"\x00\x05abcde")


@given(st.lists(st.integers(0, 3 * len(SECRET) + 2)))
def test_lines_cut_anywhere(cuts: list[int]) -> None:
    lines, shown = b"\n".join([SECRET] * 3), b"\n".join([SHOWN] * 3)
    ends = [0, *sorted(cuts), len(lines)]
    redact = LineRedactor()
    given_out = [redact(lines[first:last], True) for first, last in itertools.pairwise(ends)]
    assert b"".join([*given_out, redact(b"", False)]) == shown


def test_a_line_without_end_is_not_kept_for_ever() -> None:
    redact = LineRedactor()
    assert redact(b"x" * 1024 * 1024, True) == b""
    assert redact(b"y", True).endswith(b"xy")
    assert redact(b"a\nb", True) == b"a\n"
