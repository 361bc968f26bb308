"""Recognises a repeated head without parsing it: by the bytes before and after the digits of its Content-Length. Pure.

A peer repeats the same head with other lengths, and with other request ids, which the relay writes behind the length so
that the next hop finds them there. Only `head.py` parses heads; a template keeps its result, and equal bytes have an
equal meaning. A message is recognised only if it is complete and no other bytes follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeAlias

from corral.relay.http1.fields import MAX_LENGTH_DIGITS, Malformed
from corral.relay.http1.head import END_OF_HEAD, ID_LINE, H, HeadCache, ResponseHead, is_valid_request_id, remove_id

_LENGTH_LINES = (b"\r\nContent-Length: ", b"\r\ncontent-length: ")  # as `HeadCache` removes them, in this order
# Together these bound the memory, whatever clients send; longer heads are parsed every time.
MAX_TEMPLATES = 1024
MAX_TAILS = 8192
MAX_HEAD_BYTES = 2048
MAX_SEEN = 8192
_MAX_ID_BYTES = 128 + len(END_OF_HEAD)  # with what follows it


# The rest of a message of one size behind `HeadTemplate.before`: the digits; the head from the digits to its end, or to
# the request id; the start of the body; the id. A bare tuple, because one is made for every message that has an id.
Tail: TypeAlias = tuple[bytes, bytes, int, bytes]


class HeadTemplate(Generic[H]):
    """One head without its length, and without its request id where that follows. `before` ends at `at`, where the
    digits begin."""

    __slots__ = ("_after", "_id_size", "_kept", "at", "before", "head", "is_ours", "tails", "with_id")

    def __init__(self, head: H, before: bytes, after: bytes, kept: Kept) -> None:
        self.with_id = after is ID_LINE
        # A response of another Corral relay: with the request's id in it, it can be passed on unchanged.
        self.is_ours = self.with_id and isinstance(head, ResponseHead) and head.start == before
        self._id_size = 0  # of the last id: a peer's ids nearly always have one length
        self.head = head
        self.before = before
        self.at = len(before)
        self.tails: dict[int, Tail] = {}  # by the size of the message without the id; a bounded cache
        self._after = after
        self._kept = kept

    def expect(self, data: bytes) -> Tail | None:
        """The tail of `data`, which starts with `before`, if it is one complete message with a body. For a new size."""
        if self.with_id:
            return self.expect_with_id(data)
        size = len(data)
        tail = fit_tail(size - self.at - len(self._after), self._after, size)
        if tail is None or not data.startswith(tail[1], self.at):
            return None
        self._keep(size, tail)
        return tail

    def expect_with_id(self, data: bytes) -> Tail | None:
        """`expect` where a request id follows the length. No two messages are equal, but the bytes around their ids are
        cached as for other heads."""
        id_size = self._id_size
        known = self.tails.get(len(data) - id_size)
        if known is not None and data.startswith(known[1], self.at):
            digits, mark, body_at, _ = known
            body_at += id_size
            request_id = data[self.at + len(mark) : body_at - 4]
            if data.startswith(END_OF_HEAD, body_at - 4) and is_valid_request_id(request_id):
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
        if len(self._kept) > MAX_TAILS:
            tails, oldest = self._kept.popleft()
            tails.pop(oldest, None)


Kept: TypeAlias = deque[tuple[dict[int, Tail], int]]  # every cached tail of one `HeadTemplates`, the oldest first


def fit_tail(left: int, after: bytes, size: int) -> Tail | None:
    """Digits and body take `left` bytes together: at most one length fits, and none has a leading 0."""
    for count in (len(str(left)), len(str(left)) - 1):
        length = left - count
        if length > 0 and len(str(length)) == count:
            digits = b"%d" % length
            return digits, digits + after, size - length, b""
    return None


def fit_tail_with_id(data: bytes, at: int) -> Tail | None:
    """Digits, a request id, the end of the head and exactly that many bytes."""
    id_at = data.find(ID_LINE, at, at + MAX_LENGTH_DIGITS + len(ID_LINE))
    end = data.find(END_OF_HEAD, id_at + len(ID_LINE), id_at + len(ID_LINE) + _MAX_ID_BYTES)
    if id_at < 0 or end < 0:
        return None
    digits, request_id, body_at = data[at:id_at], data[id_at + len(ID_LINE) : end], end + len(END_OF_HEAD)
    if body_at == len(data) or digits != b"%d" % (len(data) - body_at) or not is_valid_request_id(request_id):
        return None
    return digits, digits + ID_LINE, body_at, request_id


class SeenBefore:
    """Keys seen lately. Approximate: it forgets everything when full, and equal hashes count as one key."""

    __slots__ = ("_hashes",)

    def __init__(self) -> None:
        self._hashes: set[int] = set()

    def check_and_add(self, thing: Hashable) -> bool:
        """Whether `thing` was seen before this call."""
        key = hash(thing)
        if key in self._hashes:
            return True
        if len(self._hashes) >= MAX_SEEN:
            self._hashes.clear()
        self._hashes.add(key)
        return False


class HeadTemplates(Generic[H]):
    """The templates of one server's requests, or of one pool's responses; only of heads that `fits` accepts.

    `twice`: keep a head from its second occurrence on, so that heads that never repeat do not displace the others.
    """

    __slots__ = ("_fits", "_heads", "_kept", "_max_bytes", "_once", "_templates")

    def __init__(self, heads: HeadCache[H], fits: Callable[[H], bool], *, head_bytes: int, twice: bool) -> None:
        self._heads = heads
        self._fits = fits
        self._max_bytes = min(head_bytes, MAX_HEAD_BYTES)
        self._templates: dict[tuple[bytes, bytes], HeadTemplate[H]] = {}
        self._kept: Kept = deque()
        self._once = SeenBefore() if twice else None

    def recognise(self, data: bytes, likely: HeadTemplate[H] | None) -> tuple[HeadTemplate[H] | None, Tail | None]:
        """The template of `data`, and its tail if it is one complete message. `likely` is tried first."""
        if likely is not None and data.startswith(likely.before):
            tail = likely.expect(data)
            if tail is not None:
                return likely, tail
        template = self.find(data)
        return template, None if template is None else template.expect(data)

    def find(self, data: bytes) -> HeadTemplate[H] | None:
        """The template of the head that `data` begins with, if it is cached."""
        raw, found, _ = data.partition(END_OF_HEAD)
        if not found or len(raw) > self._max_bytes:
            return None
        raw, request_id = remove_id(raw)
        parts = split_head(raw)
        if parts is None:
            return None
        if request_id:
            if parts[1] != END_OF_HEAD:
                return None  # other lines follow the length
            parts = parts[0], ID_LINE
        template = self._templates.get(parts)
        if template is None:
            if self._once is not None and not self._once.check_and_add(parts):
                return None  # it may never repeat
            try:
                head, _ = self._heads.parse(raw)
            except Malformed:
                return None  # the general path reports what is wrong
            if head.length is not None or not self._fits(head):
                return None
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            template = self._templates[parts] = HeadTemplate(head, *parts, self._kept)
        return template


def split_head(raw: bytes) -> tuple[bytes, bytes] | None:
    """The head before and after its length, with its end. None where `HeadCache` would not remove the length either."""
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
    if not digits.isdigit() or len(digits) > MAX_LENGTH_DIGITS:
        return None
    return raw[:at], raw[end:] + END_OF_HEAD
