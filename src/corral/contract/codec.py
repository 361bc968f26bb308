"""JSON on the wire, as the contract has it: unknown fields are ignored, absent ones take their zero value, and empty
payload, `null` and `{}` mean the same."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

# The number that two Corral peers compare. Types only grow; a changed meaning is a new subject.
PROTOCOL = 1  # 2026-11: registration, heartbeats on the bus, signed ingress tokens, the gateway's view

T = TypeVar("T")


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of what crosses a process boundary. A field with a plain default is left out when it has that value
    (the contract's `?`); a field made with `always(...)` is written even when zero."""


def always(zero: type[Any]) -> Any:
    """A field that is on the wire even when zero, yet may be absent in what an older peer sends."""
    # Wrapped, because msgspec knows the empty containers by their type and would leave them out.
    return msgspec.field(default_factory=lambda: zero())


class Undecodable(ValueError):
    """The payload is not what the subject or route says; the text names the place."""


_encoder = msgspec.json.Encoder()


def encode(message: object) -> bytes:
    return _encoder.encode(message)


def decode(kind: type[T], payload: bytes) -> T:
    """Decode a message. A null where a value is expected counts as absent, as upstream's zero values do."""
    if not payload or payload == b"null":
        payload = b"{}"
    try:
        return msgspec.json.decode(payload, type=kind)
    except msgspec.ValidationError:
        pass  # The strict pass is the fast one; only a peer that writes nulls pays for the second.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Undecodable(f"not JSON: {error}") from error
    return _decode_without_nulls(kind, payload)


def _decode_without_nulls(kind: type[T], payload: bytes) -> T:
    try:
        return msgspec.convert(_drop_nulls(msgspec.json.decode(payload)), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Undecodable(str(error)) from error


def _drop_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_drop_nulls(item) for item in value]
    return value
