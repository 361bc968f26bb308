"""The W3C trace context: the header `traceparent`, and which span a request belongs to."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

TRACEPARENT = b"traceparent"
TRACESTATE = b"tracestate"
_SAMPLED = 1
_VALID = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_TRACE, _NO_SPAN = b"0" * 32, b"0" * 16


class Parent(NamedTuple):
    """The span of a caller, as its `traceparent` names it."""

    trace_id: str
    span_id: str
    sampled: bool


class TraceContext(NamedTuple):
    """The ids of one span, in hexadecimal."""

    trace_id: str
    span_id: str
    parent_id: str  # empty: the first span of its trace

    @classmethod
    def first(cls) -> TraceContext:
        """Of a new trace."""
        ids = f"{random.getrandbits(192):048x}"  # an id of zeros is invalid, and as unlikely as an id given twice
        return cls(ids[16:], ids[:16], "")

    @classmethod
    def below(cls, parent: Parent) -> TraceContext:
        return cls(parent.trace_id, new_span_id(), parent.span_id)

    def child(self) -> TraceContext:
        return TraceContext(self.trace_id, new_span_id(), self.span_id)

    def traceparent(self) -> bytes:
        """The header for a request that this span makes."""
        return f"00-{self.trace_id}-{self.span_id}-01".encode()


def not_sampled(parent: Parent) -> bytes:
    """The `traceparent` of a request in this trace that is not traced. A changed flag needs a new id, says W3C."""
    return f"00-{parent.trace_id}-{new_span_id()}-00".encode()


def new_span_id() -> str:
    return f"{random.getrandbits(64) or 1:016x}"


def find_parent(headers: Sequence[tuple[bytes, bytes]]) -> Parent | None:
    """The caller's span; None without a valid `traceparent`. Two of them are invalid, as the specification says."""
    values = [value for name, value in headers if name == TRACEPARENT]
    return parse_traceparent(values[0]) if len(values) == 1 else None


def parse_traceparent(value: bytes) -> Parent | None:
    match = _VALID.fullmatch(value.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    # A later version may append fields; ours must not have any.
    if version == b"ff" or (version == b"00" and rest) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return Parent(trace_id.decode(), span_id.decode(), bool(int(flags, 16) & _SAMPLED))
