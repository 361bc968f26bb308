"""Heads recognised without reading them again: how one looks around the digits of its Content-Length. Pure.

A peer says the same head again and again, only its length differs. What a head means is decided by `head.py` alone;
here is remembered what that said, and bytes that look the same mean the same. A message is recognised only if all of
it is there and nothing else is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeAlias

from corral.relay.fields import MOST_LENGTH_DIGITS, Malformed
from corral.relay.head import END_OF_HEAD, H, HeadMemo

_LENGTH_LINES = (b"\r\nContent-Length: ", b"\r\ncontent-length: ")  # as `HeadMemo` takes them out, in this order
# Together these bound the memory, whatever strangers send: longer heads are read every time.
_MOST_SHAPES = 1024
_MOST_TAILS = 8192
_LONGEST_HEAD = 2048
_MOST_SEEN_ONCE = 8192


class Tail(NamedTuple):
    """What follows the start of a head in a message of one size."""

    digits: bytes
    rest: bytes  # of the head: digits, other lines, end
    body_at: int


class Shape(Generic[H]):
    """One head but for its length. `before` ends where the digits begin, at `at`."""

    __slots__ = ("_after", "_kept", "at", "before", "head", "tails")

    def __init__(self, head: H, before: bytes, after: bytes, kept: Kept) -> None:
        self.head = head
        self.before = before
        self.at = len(before)
        self.tails: dict[int, Tail] = {}  # by the size of the whole message; some of those seen before
        self._after = after
        self._kept = kept

    def expect(self, data: bytes) -> Tail | None:
        """How `data` goes on after `before` if it is one whole message with a body. For a size not known yet."""
        size = len(data)
        tail = fit_tail(size - self.at - len(self._after), self._after, size)
        if tail is None or not data.startswith(tail.rest, self.at):
            return None
        self.tails[size] = tail
        self._kept.append((self.tails, size))
        if len(self._kept) > _MOST_TAILS:
            tails, oldest = self._kept.popleft()
            tails.pop(oldest, None)
        return tail


Kept: TypeAlias = deque[tuple[dict[int, Tail], int]]  # every tail of one `Shapes`, the oldest first


def fit_tail(left: int, after: bytes, size: int) -> Tail | None:
    """`left` bytes are for the digits and the body: at most one length fits, and none is written with a leading 0."""
    for count in (len(str(left)), len(str(left)) - 1):
        length = left - count
        if length > 0 and len(str(length)) == count:
            digits = b"%d" % length
            return Tail(digits, digits + after, size - length)
    return None


class Once:
    """What has been seen at least once, lately; now and then it forgets, or takes one thing for another."""

    __slots__ = ("_hashes",)

    def __init__(self) -> None:
        self._hashes: set[int] = set()

    def saw(self, thing: Hashable) -> bool:
        """Before this; from now on it has."""
        key = hash(thing)
        if key in self._hashes:
            return True
        if len(self._hashes) >= _MOST_SEEN_ONCE:
            self._hashes.clear()
        self._hashes.add(key)
        return False


class Shapes(Generic[H]):
    """The shapes of one server's requests, or of one pool's answers; only of heads that `fits` accepts.

    `twice`: keep what has come before, so that heads which are never the same do not push the others out.
    """

    __slots__ = ("_fits", "_heads", "_kept", "_most_bytes", "_once", "_shapes")

    def __init__(self, heads: HeadMemo[H], fits: Callable[[H], bool], *, head_bytes: int, twice: bool) -> None:
        self._heads = heads
        self._fits = fits
        self._most_bytes = min(head_bytes, _LONGEST_HEAD)
        self._shapes: dict[tuple[bytes, bytes], Shape[H]] = {}
        self._kept: Kept = deque()
        self._once = Once() if twice else None

    def recognise(self, data: bytes, likely: Shape[H] | None) -> tuple[Shape[H] | None, Tail | None]:
        """The shape of `data`, and how it goes on if it is one whole message. `likely` is tried first."""
        if likely is not None and data.startswith(likely.before):
            tail = likely.expect(data)
            if tail is not None:
                return likely, tail
        shape = self.find(data)
        return shape, None if shape is None else shape.expect(data)

    def find(self, data: bytes) -> Shape[H] | None:
        """The shape of the head that `data` begins with, if that came before."""
        raw, found, _ = data.partition(END_OF_HEAD)
        parts = split_head(raw) if found and len(raw) <= self._most_bytes else None
        if parts is None:
            return None
        shape = self._shapes.get(parts)
        if shape is None:
            if self._once is not None and not self._once.saw(parts):
                return None  # and perhaps never again
            try:
                head, _ = self._heads.parse(raw)
            except Malformed:
                return None  # whoever reads it in earnest says what is wrong
            if head.length is not None or not self._fits(head):
                return None
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            shape = self._shapes[parts] = Shape(head, *parts, self._kept)
        return shape


def split_head(raw: bytes) -> tuple[bytes, bytes] | None:
    """A head before and after its length, with its end. None where `HeadMemo` would not take the length out either."""
    for mark in _LENGTH_LINES:
        at = raw.find(mark)
        if at >= 0:
            break
    else:
        return None
    at += len(mark)
    end = raw.find(b"\r\n", at)
    if end < 0:
        end = len(raw)
    digits = raw[at:end]
    if not digits.isdigit() or len(digits) > MOST_LENGTH_DIGITS:
        return None
    return raw[:at], raw[end:] + END_OF_HEAD
