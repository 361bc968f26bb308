"""Heads recognised without reading them again: how one looks around the digits of its Content-Length. Pure.

A peer says the same head again and again, only its length differs; and the request's id, which we write behind the
length, so that the next hop knows where to look for it. What a head means is decided by `head.py` alone;
here is remembered what that said, and bytes that look the same mean the same. A message is recognised only if all of
it is there and nothing else is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeAlias

from corral.relay.fields import MOST_LENGTH_DIGITS, Malformed
from corral.relay.head import END_OF_HEAD, ID_LINE, AnswerHead, H, HeadMemo, is_sane_request_id, take_out_id

_LENGTH_LINES = (b"\r\nContent-Length: ", b"\r\ncontent-length: ")  # as `HeadMemo` takes them out, in this order
# Together these bound the memory, whatever strangers send: longer heads are read every time.
_MOST_SHAPES = 1024
_MOST_TAILS = 8192
_LONGEST_HEAD = 2048
_MOST_SEEN_ONCE = 8192
_LONGEST_ID = 128 + len(END_OF_HEAD)  # with what follows it


# What follows the start of a head in a message of one size: the digits; the head from there to its end, or to the
# request's id; where the body begins; that id. A bare tuple, because one is made for every message that has an id.
Tail: TypeAlias = tuple[bytes, bytes, int, bytes]


class Shape(Generic[H]):
    """One head but for its length, and its request's id where that follows. `before` ends where the digits begin, at
    `at`."""

    __slots__ = ("_after", "_id_size", "_kept", "at", "before", "head", "is_ours", "tails", "with_id")

    def __init__(self, head: H, before: bytes, after: bytes, kept: Kept) -> None:
        self.with_id = after is ID_LINE
        # An answer from a relay like this one: with its id in it, it is what we would write.
        self.is_ours = self.with_id and isinstance(head, AnswerHead) and head.start == before
        self._id_size = 0  # of the last one: a peer's are nearly always as long
        self.head = head
        self.before = before
        self.at = len(before)
        self.tails: dict[int, Tail] = {}  # by the size of the whole message less the id; some of those seen before
        self._after = after
        self._kept = kept

    def expect(self, data: bytes) -> Tail | None:
        """How `data` goes on after `before` if it is one whole message with a body. For a size not known yet."""
        if self.with_id:
            return self.expect_with_id(data)
        size = len(data)
        tail = fit_tail(size - self.at - len(self._after), self._after, size)
        if tail is None or not data.startswith(tail[1], self.at):
            return None
        self._keep(size, tail)
        return tail

    def expect_with_id(self, data: bytes) -> Tail | None:
        """The same where a request's id follows the length. No two messages are alike, but what stands around their ids
        is remembered as elsewhere."""
        id_size = self._id_size
        known = self.tails.get(len(data) - id_size)
        if known is not None and data.startswith(known[1], self.at):
            digits, mark, body_at, _ = known
            body_at += id_size
            request_id = data[self.at + len(mark) : body_at - 4]
            if data.startswith(END_OF_HEAD, body_at - 4) and is_sane_request_id(request_id):
                return digits, mark, body_at, request_id
        tail = fit_tail_with_id(data, self.at)
        if tail is not None:
            digits, mark, body_at, request_id = tail
            self._id_size = id_size = len(request_id)
            self._keep(len(data) - id_size, (digits, mark, body_at - id_size, b""))
        return tail

    def _keep(self, size: int, tail: Tail) -> None:
        self.tails[size] = tail
        self._kept.append((self.tails, size))
        if len(self._kept) > _MOST_TAILS:
            tails, oldest = self._kept.popleft()
            tails.pop(oldest, None)


Kept: TypeAlias = deque[tuple[dict[int, Tail], int]]  # every tail of one `Shapes`, the oldest first


def fit_tail(left: int, after: bytes, size: int) -> Tail | None:
    """`left` bytes are for the digits and the body: at most one length fits, and none is written with a leading 0."""
    for count in (len(str(left)), len(str(left)) - 1):
        length = left - count
        if length > 0 and len(str(length)) == count:
            digits = b"%d" % length
            return digits, digits + after, size - length, b""
    return None


def fit_tail_with_id(data: bytes, at: int) -> Tail | None:
    """Digits, a request's id, the end of the head and exactly so many bytes."""
    id_at = data.find(ID_LINE, at, at + MOST_LENGTH_DIGITS + len(ID_LINE))
    end = data.find(END_OF_HEAD, id_at + len(ID_LINE), id_at + len(ID_LINE) + _LONGEST_ID)
    if id_at < 0 or end < 0:
        return None
    digits, request_id, body_at = data[at:id_at], data[id_at + len(ID_LINE) : end], end + len(END_OF_HEAD)
    if body_at == len(data) or digits != b"%d" % (len(data) - body_at) or not is_sane_request_id(request_id):
        return None
    return digits, digits + ID_LINE, body_at, request_id


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
        if not found or len(raw) > self._most_bytes:
            return None
        raw, request_id = take_out_id(raw)
        parts = split_head(raw)
        if parts is None:
            return None
        if request_id:
            if parts[1] != END_OF_HEAD:
                return None  # other lines stand between the two
            parts = parts[0], ID_LINE
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
