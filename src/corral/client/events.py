"""Server-sent events: the parser, and the events of `GET /api/events`. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from corral.contract.admin import NodeView, OperationView
from corral.contract.codec import Message, Undecodable, always, decode

_MAX_EVENT_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Raw:
    name: str
    data: str


@dataclass(frozen=True)
class Restarted:
    """A stream begins (again): every node follows, then `StateComplete`. Nodes that are not named until then are
    gone."""


@dataclass(frozen=True)
class NodeSeen:
    node: NodeView


@dataclass(frozen=True)
class NodeRemoved:
    id: str


@dataclass(frozen=True)
class Changed:
    """Something else of this kind has changed: read it again."""

    kind: str


@dataclass(frozen=True)
class StateComplete:
    """The initial state is complete; only changes follow."""


@dataclass(frozen=True)
class OperationSeen:
    operation: OperationView


@dataclass(frozen=True)
class OperationRemoved:
    """No longer reported: it ended a while ago, or was dismissed."""

    id: str


@dataclass(frozen=True)
class Lost:
    """The stream broke and is being opened again. Only `Client.follow` yields it."""

    reason: str


FleetEvent = Restarted | NodeSeen | NodeRemoved | OperationSeen | OperationRemoved | Changed | StateComplete | Lost


class _Removed(Message, frozen=True):
    id: str = always(str)


class _Kind(Message, frozen=True):
    kind: str = always(str)


class EventParser:
    """Parses bytes, in pieces of any size, into events. Drops comments (pings) and unused fields."""

    def __init__(self) -> None:
        self._rest = b""
        self._name = ""
        self._data: list[str] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[Raw]:
        # A CR at the end may be the first half of a CRLF: it waits for the next byte.
        whole = self._rest + chunk
        held = b"\r" if whole.endswith(b"\r") else b""
        lines = whole.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + held
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise Undecodable("an event has no end")
        for line in lines:
            yield from self._take(line.decode("utf-8", errors="replace"))

    def _take(self, line: str) -> Iterator[Raw]:
        if not line:
            if self._data:
                yield Raw(self._name or "message", "\n".join(self._data))
            self._name, self._data, self._size = "", [], 0
            return
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._name = value
        elif name == "data":
            self._size += len(value)
            if self._size > _MAX_EVENT_BYTES:
                raise Undecodable("an event is too large")
            self._data.append(value)


def read_event(raw: Raw) -> FleetEvent | None:
    """None for an unknown kind of event: newer controllers may send more."""
    payload = raw.data.encode()
    match raw.name:
        case "node":
            return NodeSeen(decode(NodeView, payload))
        case "node-removed":
            return NodeRemoved(decode(_Removed, payload).id)
        case "operation":
            return OperationSeen(decode(OperationView, payload))
        case "operation-removed":
            return OperationRemoved(decode(_Removed, payload).id)
        case "changed":
            return Changed(decode(_Kind, payload).kind)
        case "ready":
            return StateComplete()
        case _:
            return None
